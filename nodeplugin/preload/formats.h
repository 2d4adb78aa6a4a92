/* The two files that the node plugin and the library in containers share. nodeplugin/share_files.py writes and reads
 * them with the same layout; a test compares the offsets.
 *
 * Limits: written by the plugin, read-only in the container, mapped by the library. Updated in place under a sequence
 * lock, because processes keep their mapping.
 *
 * Usage: one for each container, on a tmpfs of its own, writable by everything in it. The plugin reads it and never maps
 * it. What stands in it is not trusted by anybody outside the container.
 */
#ifndef QUOTIENT_FORMATS_H
#define QUOTIENT_FORMATS_H

#include <stdatomic.h>
#include <stdint.h>

#define LIMITS_MAGIC 0x4c505551u /* "QUPL" */
#define USAGE_MAGIC 0x55505551u  /* "QUPU" */
#define FORMAT_VERSION 2
#define MAX_CARDS 16
#define MAX_SLOTS 1024
#define MAX_SHARED 4096
#define UUID_BYTES 64
#define DRIVER_BYTES 256
#define KEY_BYTES 64

struct card_limits {
    char uuid[UUID_BYTES];
    uint64_t memory_bytes;
    /* Charged for each context before its creation: measured for this model and driver. */
    uint64_t context_bytes;
    /* What NVML reports for the container above what is accounted: code, heaps, and whatever no hook sees. */
    uint64_t residual_bytes;
    uint32_t cores, core_limit;
};

struct limits_file {
    uint32_t magic, version;
    _Atomic uint32_t sequence; /* odd while it is being written */
    uint32_t card_count;
    uint64_t updated_ns; /* CLOCK_MONOTONIC of the last feedback */
    char driver_version[32];
    char driver_folder[DRIVER_BYTES]; /* in the container, first; then the usual folders */
    struct card_limits cards[MAX_CARDS];
};

/* A process adds to `pending` what it is about to allocate, and only then reads the sum of all slots; what is granted
 * moves to `granted`. Two processes never both miss the other's bytes, so the sum granted never exceeds the limit. */
struct slot_card { _Atomic uint64_t granted, pending; };

/* A slot belongs to the process that holds the lock on its byte (byte 1 + index of the file). */
struct usage_slot {
    _Atomic uint32_t pid; /* in the container's PID namespace; for people */
    uint32_t unused;
    struct slot_card cards[MAX_CARDS];
};

/* Memory that several processes have open. It counts once, while any live slot holds it. Changed under the gate only. */
struct shared_memory {
    _Atomic uint64_t bytes; /* 0: the entry is free */
    _Atomic uint32_t card;
    uint32_t serial;
    uint8_t key[KEY_BYTES];
    _Atomic uint64_t holders[MAX_SLOTS / 64];
};

struct usage_file {
    uint32_t magic, version;
    _Atomic uint32_t slots_used;  /* all slots in use have a lower index */
    _Atomic uint32_t shared_used; /* the same for shared memory */
    _Atomic uint32_t serial;
    uint32_t unused[11];
    struct shared_memory shared[MAX_SHARED];
    struct usage_slot slots[MAX_SLOTS];
};

/* Byte 0 of the usage file: the gate, which the slow paths pass one at a time. */
#define GATE_BYTE 0
#define SLOT_BYTE(slot) (1 + (long)(slot))

#endif
