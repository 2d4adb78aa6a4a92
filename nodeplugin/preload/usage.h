/* What the processes of this container have allocated: the sum of their slots, which is never stored.
 *
 * Reserve before the driver allocates, release after it has freed: so the sum is never below what is allocated.
 */
#ifndef QUOTIENT_USAGE_H
#define QUOTIENT_USAGE_H

#include <stddef.h>
#include <stdint.h>

#define NOT_SHARED (-1)

/* Reserve memory of a card, if the limit of the container leaves room for it. */
int reserve(unsigned card, uint64_t bytes);
void release(unsigned card, uint64_t bytes);

/* Say on stderr, once, that the limit was the reason why the program gets no memory. */
void report_refusal(unsigned card, uint64_t bytes);
/* Count memory that is there already, also beyond the limit. */
void account(unsigned card, uint64_t bytes);

/* Accounted for all processes of the container, with the residual. */
uint64_t used_bytes(unsigned card);

/* Move memory that is reserved by this process to an entry that others can join by its key; NOT_SHARED if there is no
 * room for one, and the memory stays reserved. */
int share(unsigned card, uint64_t bytes, const void *key, size_t key_size);

/* Hold shared memory as well; NOT_SHARED if no process of this container shares it. Size and card may be NULL. */
int join_by_key(const void *key, size_t key_size, uint64_t *bytes, unsigned *card);

/* The last process that leaves gives the memory back. */
void leave(int entry);

/* Mark an open file as the handle of shared memory, and find the entry by the mark: whoever gets the file has the same
 * open file description, also through a socket. */
void mark_file(int file, int entry);
int join_by_file(int file, uint64_t *bytes, unsigned *card);

#endif
