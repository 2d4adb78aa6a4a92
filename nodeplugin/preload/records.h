/* What this process has allocated, by address or handle, until it is freed. */
#ifndef QUOTIENT_RECORDS_H
#define QUOTIENT_RECORDS_H

#include <stdint.h>

enum kind {
    NO_RECORD,
    POINTER,  /* memory by its address */
    IMPORT,   /* memory of another process, by its address */
    ARRAY,    /* and mipmapped arrays */
    EXTERNAL, /* memory of another API */
    CONTEXT,
    HANDLE,   /* of an object */
    MAPPING,  /* an address range of an object */
    OBJECT,   /* physical memory; lives while it has handles or mappings */
    POOL,
    GRAPH,    /* an executable graph that allocates */
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

/* Take any record of a context, or of a kind whose key is in a range. */
int take_record_of_context(uint64_t context, struct record *found);
int take_record_in_range(enum kind kind, uint64_t begin, uint64_t end, struct record *found);
int find_containing(enum kind kind, uint64_t address, struct record *found);

/* Call a function for each record of a kind; it must not use records itself. */
void each_record(enum kind kind, void (*act)(struct record *record, void *argument), void *argument);

/* Create physical memory with one handle, and count its handles and mappings. The second returns 1 when it has lost the
 * last of both: its record is taken then. */
uint64_t put_object(uint64_t bytes, unsigned card, int shared);
int count_object(uint64_t object, int handles, int mappings, struct record *found);

#endif
