/* What this process has allocated, by address or handle, until it is freed. */
#ifndef QUOTIENT_RECORDS_H
#define QUOTIENT_RECORDS_H

#include <stdint.h>

enum kind {
    NO_RECORD,
    POINTER,  /* memory by its address */
    FREED,    /* the same, while the stream in whose order it is freed has not come there */
    IMPORT,   /* memory of another process, by its address */
    ARRAY,    /* and mipmapped arrays */
    EXTERNAL, /* memory of another API */
    CONTEXT,
    GREEN,    /* a green context; `object` is the primary context, which owns what is allocated with it */
    HANDLE,   /* of an object */
    MAPPING,  /* an address range of an object */
    OBJECT,   /* physical memory; lives while it has handles or mappings */
    POOL,
    GRAPH,    /* an executable graph that allocates */
    SMALLS,   /* how many small allocations are in a block, by its number; `object` is their context */
};

struct record {
    uint64_t key;
    uint64_t bytes;   /* charged; of a mapping, its length */
    uint64_t context; /* with which the driver frees it, 0 if it does not */
    uint64_t object;  /* of a handle or a mapping */
    int32_t shared;   /* the entry that is charged instead of this process, or NOT_SHARED */
    uint32_t handles, mappings;
    uint8_t kind, card;
};

/* Returns 0 if there is no memory for it. */
int put_record(struct record record);
int find_record(enum kind kind, uint64_t key, struct record *found);
int take_record(enum kind kind, uint64_t key, struct record *found);

/* Take any record of a context. */
int take_record_of_context(uint64_t context, struct record *found);
int find_containing(enum kind kind, uint64_t address, struct record *found);

/* Find the next record of a kind; *place begins with 0. What other threads put meanwhile may be found or not. */
int next_record(enum kind kind, uint64_t *place, struct record *found);
/* Change the record with this one's kind and key, if it exists. */
void change_record(const struct record *record);

/* Count one more small allocation in a block, or one less; returns how many there are then. 0 also if there is no memory
 * to count them. */
uint32_t count_in_block(uint64_t block, unsigned card, uint64_t context, int number);

/* Create physical memory with one handle, and count its handles and mappings. The second returns 1 when it has lost the
 * last of both: its record is taken then. */
uint64_t put_object(uint64_t bytes, unsigned card, int shared);
int count_object(uint64_t object, int handles, int mappings, struct record *found);

#endif
