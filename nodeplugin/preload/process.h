/* What this process knows of itself. A child begins with nothing: neither its parent's memory nor its locks are its own,
 * and contexts do not survive a fork. */
#ifndef QUOTIENT_PROCESS_H
#define QUOTIENT_PROCESS_H

#include <stdatomic.h>
#include <stdint.h>

#include "formats.h"

#define MAX_DEVICES 64

/* 0: free, 1: held, 2: held and waited for. The library must not need libpthread. */
typedef _Atomic uint32_t lock;
void acquire(lock *held);
void let_go(lock *held);

/* Memory that is not the program's: it may have replaced malloc. NULL if there is none. */
void *allocate_pages(uint64_t bytes);
void free_pages(void *pages, uint64_t bytes);

struct record;
struct small_arrays { uint64_t number, bytes, blocks; };

struct process {
    int32_t pid;
    lock opening, gate, records_lock, contexts_lock, pools_lock, graphs_lock, small_lock, objects_lock;
    /* The slot in the container's file, once this process has allocated something. */
    struct usage_file *_Atomic usage;
    int usage_failed;
    unsigned slot;
    /* How often this process holds each entry of shared memory; see usage.c. */
    uint32_t joins[MAX_SHARED];
    /* How often it has left each of them since it could last change the file. */
    _Atomic uint32_t leaves[MAX_SHARED];
    _Atomic int has_leaves;
    /* Whether a pool has reserved memory, or memory was freed in the order of a stream that has not come there. */
    _Atomic int has_unsettled;
    /* See records.c. */
    struct record *records;
    uint64_t record_capacity, record_count, next_object, search_start;
    /* By card; see blocks.c. */
    struct small_arrays arrays[MAX_CARDS];
    /* The card of a device, + 1; 0 is unknown. */
    _Atomic uint8_t card_of_device[MAX_DEVICES];
    /* What the executable graphs of this process have reserved, by card. */
    uint64_t graph_bytes[MAX_CARDS];
    /* Changes when graphs may have lost memory that they had reserved. */
    uint64_t graph_generation;
    /* The primary context of each device, while it is active. */
    uint64_t primary_contexts[MAX_DEVICES];
};

struct process *process(void);

#endif
