/* What happens on the simulated devices, in a file that all processes map: the fake CUDA driver writes it, the fake NVML
 * reads it. The file is $QUOTIENT_FAKE_STATE, or `fake-devices.state` beside the library.
 *
 * A process that ends in any way leaves nothing behind: its record counts only while the process holds a POSIX lock on
 * the record's byte, totals are summed and never stored, and the lock of the whole file is a POSIX lock as well. Robust
 * mutexes were rejected: they know their owner by a thread id, which processes in several PID namespaces share.
 * POSIX locks are lost when a process closes any descriptor of the file, so it is never closed.
 */
#ifndef DEVICE_STATE_H
#define DEVICE_STATE_H

#include "description.h"

#include <stdint.h>

#define MAX_PROCESSES 512
#define MAX_BLOCKS 8192
/* Of one device; covers seconds, because work that follows on work of the same process is one entry. */
#define MAX_INTERVALS 8192

struct process_record {
    /* 0: never used. Counts the processes that had this record, so that an interval names one of them. */
    uint64_t generation;
    /* In its own PID namespace, with the time when it started: by these a process knows its own record. */
    uint64_t pid, started;
    /* Device memory that is only its own. */
    uint64_t bytes[MAX_CARDS];
};

/* Device memory that several processes can hold. */
struct block {
    /* 0: unused. */
    uint64_t id, bytes;
    uint32_t card, owner;
    uint64_t holders[MAX_PROCESSES / 64];
};

/* A device works on one thing at a time. */
struct interval { uint64_t record, generation, start_ns, end_ns; };
struct device_work {
    uint64_t free_at_ns, count;
    struct interval intervals[MAX_INTERVALS];
};

struct device_state {
    uint64_t layout, last_id, record_count, block_count;
    struct process_record records[MAX_PROCESSES];
    struct block blocks[MAX_BLOCKS];
    struct device_work work[MAX_CARDS];
};

uint64_t now_ns(void);
uint64_t process_start_time(void);

/* For the fake CUDA driver. Create the file if it is missing and take a record; returns 0 if that fails. */
int join_devices(void);
/* Device memory of this process: reserve returns 0 if the card's capacity does not suffice. */
int reserve_bytes(int card, uint64_t bytes, uint64_t capacity);
void release_bytes(int card, uint64_t bytes);
/* Turn reserved bytes of this process into a block that others can hold; returns its index, or -1. */
int make_block(int card, uint64_t bytes);
/* Hold the block with this id. If it is gone, reserve its memory again: a descriptor on its way to another process
 * keeps memory alive, and no record shows it. Returns the index, or -1 if the card is full. */
int hold_block(uint64_t id, int card, uint64_t bytes, uint64_t capacity);
void drop_block(int index);
uint64_t block_id(int index);
uint64_t used_bytes(int card);
/* Add work of this process to a card's queue; returns when it will be done. */
uint64_t add_work(int card, uint64_t not_before_ns, uint64_t duration_ns);
uint64_t busy_until(int card);

/* For the fake NVML, which never creates the file. */
/* The memory of all living processes on a card, also of those that the caller's PID namespace does not show. */
uint64_t observe_bytes(int card);
struct observed_process { unsigned pid; uint64_t bytes, busy_ns; };
/* The living processes that use a card, and how long each was busy in a time; at most `limit`; returns their number. */
int observe_processes(int card, uint64_t from_ns, uint64_t to_ns, struct observed_process *found, int limit);

#endif
