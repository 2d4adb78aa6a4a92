#define _GNU_SOURCE
#include "usage.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "limits.h"
#include "process.h"

#define USAGE_NAME "usage/gpu-usage"
/* Locks of an open file description, which are newer than the oldest headers. A mapping keeps the description open: so
 * a slot's lock survives a program that closes all its files, and ends with its process, however that ends. */
#define OFD_GETLK 36
#define OFD_SETLK 37
/* How long a process waits for others in the slow path, before it refuses. */
#define PATIENCE_NS 5000000000LL
#define PAUSE_NS 200000
/* Where the marks of shared files begin: beyond any offset that a driver uses, if it locks at all. */
#define MARK_BEGIN (1LL << 40)
#define MARKS_PER_SERIAL MAX_SHARED
#define MOST_MARKS_TRIED 1000

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void pause_briefly(void) {
    struct timespec pause = {0, PAUSE_NS};
    nanosleep(&pause, NULL);
}

static int lock_bytes(int file, int command, short type, int64_t start, int64_t length, struct flock *found) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    int result;
    do
        result = fcntl(file, command, &lock);
    while (result && errno == EINTR);
    if (found)
        *found = lock;
    return result;
}

static int open_usage(void) {
    char path[PATH_MAX_BYTES];
    folder_path(path, sizeof path, USAGE_NAME);
    return open(path, O_RDWR | O_CLOEXEC);
}

static void leave_entry(struct shared_memory *shared, unsigned slot) {
    uint64_t held = 0;
    atomic_fetch_and(&shared->holders[slot / 64], ~(1ULL << slot % 64));
    for (unsigned word = 0; word < MAX_SLOTS / 64; word++)
        held |= atomic_load(&shared->holders[word]);
    if (!held)
        atomic_store(&shared->bytes, 0);
}

/* Only under the gate, and by the process that holds the slot's lock. */
static void empty_slot(struct usage_file *usage, unsigned slot) {
    for (unsigned card = 0; card < MAX_CARDS; card++) {
        atomic_store(&usage->slots[slot].cards[card].granted, 0);
        atomic_store(&usage->slots[slot].cards[card].pending, 0);
    }
    for (unsigned entry = 0; entry < MAX_SHARED; entry++)
        if (atomic_load(&usage->shared[entry].bytes))
            leave_entry(&usage->shared[entry], slot);
    atomic_store(&usage->slots[slot].pid, 0);
}

/* A lock that can be had belongs to a process that has ended. */
static void reclaim_slot(struct usage_file *usage, int file, unsigned slot) {
    if (lock_bytes(file, OFD_SETLK, F_WRLCK, SLOT_BYTE(slot), 1, NULL))
        return;
    empty_slot(usage, slot);
    lock_bytes(file, OFD_SETLK, F_UNLCK, SLOT_BYTE(slot), 1, NULL);
}

static void reclaim_slots(struct usage_file *usage, int file) {
    unsigned used = atomic_load(&usage->slots_used);
    for (unsigned slot = 0; slot < used && slot < MAX_SLOTS; slot++)
        if (atomic_load(&usage->slots[slot].pid) && slot != process()->slot)
            reclaim_slot(usage, file, slot);
}

/* The gate admits one thread of one process. Waiting is bounded: a process that was forked meanwhile without an exec may
 * hold the lock of one that was killed. Returns a file, or -1. */
static int pass_gate(void) {
    acquire(&process()->gate);
    int file = open_usage();
    int64_t deadline = now_ns() + PATIENCE_NS;
    while (file >= 0 && lock_bytes(file, OFD_SETLK, F_WRLCK, GATE_BYTE, 1, NULL)) {
        if (now_ns() > deadline) {
            close(file);
            file = -1;
        } else {
            pause_briefly();
        }
    }
    if (file < 0) {
        WARN_ONCE("the container's file of GPU memory cannot be locked (%s): what needs it is refused", strerror(errno));
        let_go(&process()->gate);
    }
    return file;
}

/* What this process has left meanwhile. */
static void settle_leaves(void) {
    struct process *own = process();
    struct usage_file *usage = own->usage;
    if (!usage || !atomic_exchange(&own->has_leaves, 0))
        return;
    for (unsigned entry = 0; entry < MAX_SHARED; entry++)
        for (uint32_t left = atomic_exchange(&own->leaves[entry], 0); left; left--)
            if (own->joins[entry] && !--own->joins[entry])
                leave_entry(&usage->shared[entry], own->slot);
}

static void leave_gate(int file) {
    settle_leaves();

    /* Unlocked, not only closed: a child of another thread may have inherited the file. */
    lock_bytes(file, OFD_SETLK, F_UNLCK, GATE_BYTE, 1, NULL);
    close(file);
    let_go(&process()->gate);
}

/* Take the first slot whose byte can be locked, through a description of its own that the mapping keeps open. */
static int take_slot(int file, struct usage_file *usage) {
    for (unsigned slot = 0; slot < MAX_SLOTS; slot++) {
        if (lock_bytes(file, OFD_SETLK, F_WRLCK, SLOT_BYTE(slot), 1, NULL))
            continue;
        if (slot >= atomic_load(&usage->slots_used))
            atomic_store(&usage->slots_used, slot + 1);
        /* It may have been that of a process that ended. */
        empty_slot(usage, slot);
        atomic_store(&usage->slots[slot].pid, (uint32_t)getpid());
        process()->slot = slot;
        return 1;
    }
    WARN_ONCE("more than %d processes of this container use GPUs: this one cannot allocate memory", MAX_SLOTS);
    return 0;
}

static struct usage_file *map_usage(int file) {
    struct stat found;
    if (fstat(file, &found) || found.st_size < (off_t)sizeof(struct usage_file))
        return NULL;
    struct usage_file *usage = mmap(NULL, sizeof *usage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (usage == MAP_FAILED)
        return NULL;
    /* A child must not keep the slot alive, nor write to it: it takes one of its own when it needs one. */
    if (usage->magic == USAGE_MAGIC && usage->version == FORMAT_VERSION && !madvise(usage, sizeof *usage, MADV_DONTFORK))
        return usage;
    munmap(usage, sizeof *usage);
    return NULL;
}

/* A child of a thread that forks meanwhile would inherit the file, and with it the lock of this process's slot. In the
 * child itself nothing is held: see process.h. */
static void before_fork(void) { acquire(&process()->opening); }
static void after_fork(void) { let_go(&process()->opening); }

/* Of the C library itself since before 2.17; pthread_atfork is in libpthread there. */
extern int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *object);
extern void *__dso_handle __attribute__((visibility("hidden")));

static void watch_forks(void) {
    static _Atomic int watches;
    if (!atomic_exchange(&watches, 1))
        __register_atfork(before_fork, after_fork, NULL, &__dso_handle);
}

static struct usage_file *open_slot(void) {
    struct process *own = process();
    watch_forks();
    acquire(&own->opening);
    if (!own->usage && !own->usage_failed) {
        int gate = pass_gate(), file = gate < 0 ? -1 : open_usage();
        struct usage_file *usage = file < 0 ? NULL : map_usage(file);
        if (usage && take_slot(file, usage))
            own->usage = usage;
        else if (usage)
            munmap(usage, sizeof *usage);
        if (file >= 0)
            close(file);
        if (gate >= 0)
            leave_gate(gate);
        if (!own->usage) {
            /* Not if files are scarce, or the gate is held, for the moment. */
            own->usage_failed = gate >= 0 && errno != EMFILE && errno != ENFILE;
            WARN_ONCE("the container's file of GPU memory cannot be used (%s): no GPU memory can be allocated", strerror(errno));
        }
    }
    let_go(&own->opening);
    return own->usage;
}

static struct usage_file *usage_file(void) {
    struct usage_file *usage = process()->usage;
    return usage ? usage : open_slot();
}

/* Per slot `pending` is read before `granted`: bytes on their way from one to the other are seen at least once. */
static uint64_t sum_of(struct usage_file *usage, unsigned card, uint64_t *pending) {
    unsigned slots = atomic_load(&usage->slots_used), entries;
    uint64_t granted = 0, waiting = 0;
    for (unsigned slot = 0; slot < slots && slot < MAX_SLOTS; slot++) {
        waiting += atomic_load(&usage->slots[slot].cards[card].pending);
        granted += atomic_load(&usage->slots[slot].cards[card].granted);
    }
    /* After the slots: memory moves from a slot to an entry, and must not be missed in both. */
    entries = atomic_load(&usage->shared_used);
    for (unsigned entry = 0; entry < entries && entry < MAX_SHARED; entry++)
        if (atomic_load(&usage->shared[entry].card) == card)
            granted += atomic_load(&usage->shared[entry].bytes);
    *pending = waiting;
    return granted;
}

static int fits(uint64_t used, uint64_t residual, uint64_t limit) {
    /* Each in turn, so that no sum of what a tenant wrote can wrap. */
    return used <= limit && residual <= limit - used;
}

static int reserve_alone(struct usage_file *usage, struct slot_card *own, unsigned card, uint64_t bytes,
                         const struct card_limits *limits) {
    int file = pass_gate();
    if (file < 0)
        return 0;
    int is_granted = 0;
    for (int64_t deadline = now_ns() + PATIENCE_NS;;) {
        uint64_t pending, granted;
        reclaim_slots(usage, file);
        atomic_fetch_add(&own->pending, bytes);
        granted = sum_of(usage, card, &pending);
        if (fits(granted + pending, limits->residual_bytes, limits->memory_bytes)) {
            atomic_fetch_add(&own->granted, bytes);
            is_granted = 1;
        }
        atomic_fetch_sub(&own->pending, bytes);
        /* Only what is granted is a reason to refuse; what others are about to reserve, they may not get. */
        if (is_granted || !fits(granted + bytes, limits->residual_bytes, limits->memory_bytes) || now_ns() > deadline)
            break;
        sched_yield();
    }
    leave_gate(file);
    return is_granted;
}

void report_refusal(unsigned card, uint64_t bytes) {
    WARN_ONCE("GPU memory limit of this container reached: %llu MiB requested, %llu of %llu MiB in use",
              (unsigned long long)bytes >> 20, (unsigned long long)used_bytes(card) >> 20,
              (unsigned long long)limits_of(card).memory_bytes >> 20);
}

int reserve(unsigned card, uint64_t bytes) {
    struct card_limits limits = limits_of(card);
    struct usage_file *usage = bytes <= limits.memory_bytes ? usage_file() : NULL;
    if (!usage)
        return !bytes;
    struct slot_card *own = &usage->slots[process()->slot].cards[card];
    uint64_t pending;
    atomic_fetch_add(&own->pending, bytes);
    uint64_t granted = sum_of(usage, card, &pending);
    int is_granted = fits(granted + pending, limits.residual_bytes, limits.memory_bytes);
    if (is_granted)
        atomic_fetch_add(&own->granted, bytes);
    atomic_fetch_sub(&own->pending, bytes);
    return is_granted || reserve_alone(usage, own, card, bytes, &limits);
}

void release(unsigned card, uint64_t bytes) {
    struct usage_file *usage = process()->usage;
    if (usage)
        atomic_fetch_sub(&usage->slots[process()->slot].cards[card].granted, bytes);
}

void account(unsigned card, uint64_t bytes) {
    struct usage_file *usage = usage_file();
    if (usage)
        atomic_fetch_add(&usage->slots[process()->slot].cards[card].granted, bytes);
}

/* Without a slot: who only asks how much is used needs none. */
static const struct usage_file *view_usage(void) {
    static const struct usage_file *_Atomic viewed;
    const struct usage_file *found = process()->usage;
    if (!found)
        found = atomic_load_explicit(&viewed, memory_order_acquire);
    int file = found ? -1 : open_usage();
    struct stat size;
    if (file >= 0 && !fstat(file, &size) && size.st_size >= (off_t)sizeof *found) {
        void *mapped = mmap(NULL, sizeof *found, PROT_READ, MAP_SHARED, file, 0);
        found = mapped == MAP_FAILED ? NULL : mapped;
        atomic_store_explicit(&viewed, found, memory_order_release);
    }
    if (file >= 0)
        close(file);
    return found;
}

/* Slots of processes that have ended count until they are reclaimed, so here their locks are looked at. Without the file
 * all count. */
static void find_live(const struct usage_file *usage, uint64_t live[MAX_SLOTS / 64]) {
    int file = open_usage();
    unsigned used = atomic_load(&usage->slots_used);
    memset(live, 0, MAX_SLOTS / 8);
    for (unsigned slot = 0; slot < used && slot < MAX_SLOTS; slot++) {
        struct flock found;
        int is_live = atomic_load(&usage->slots[slot].pid) != 0;
        if (is_live && file >= 0 && !lock_bytes(file, OFD_GETLK, F_WRLCK, SLOT_BYTE(slot), 1, &found))
            is_live = found.l_type != F_UNLCK;
        live[slot / 64] |= (uint64_t)is_live << slot % 64;
    }
    if (file >= 0)
        close(file);
}

uint64_t used_bytes(unsigned card) {
    const struct usage_file *usage = view_usage();
    uint64_t live[MAX_SLOTS / 64], used = limits_of(card).residual_bytes;
    if (!usage)
        return used;
    find_live(usage, live);
    for (unsigned slot = 0; slot < MAX_SLOTS; slot++)
        if (live[slot / 64] >> slot % 64 & 1)
            used += atomic_load(&usage->slots[slot].cards[card].granted);
    for (unsigned entry = 0; entry < atomic_load(&usage->shared_used) && entry < MAX_SHARED; entry++) {
        const struct shared_memory *shared = &usage->shared[entry];
        uint64_t held = 0;
        for (unsigned word = 0; word < MAX_SLOTS / 64; word++)
            held |= atomic_load(&shared->holders[word]) & live[word];
        if (held && atomic_load(&shared->card) == card)
            used += atomic_load(&shared->bytes);
    }
    return used;
}

/* The file says which processes hold an entry; how often one does, as by two handles, it knows itself. Under the gate. */
static void add_holder(struct usage_file *usage, int entry) {
    unsigned slot = process()->slot;
    atomic_fetch_or(&usage->shared[entry].holders[slot / 64], 1ULL << slot % 64);
    process()->joins[entry]++;
}

static int find_entry(struct usage_file *usage, const void *key, size_t key_size) {
    unsigned used = atomic_load(&usage->shared_used);
    for (unsigned entry = 0; entry < used && entry < MAX_SHARED; entry++)
        if (atomic_load(&usage->shared[entry].bytes) && !memcmp(usage->shared[entry].key, key, key_size))
            return (int)entry;
    return NOT_SHARED;
}

static int new_entry(struct usage_file *usage, unsigned card, uint64_t bytes, const void *key, size_t key_size) {
    for (unsigned entry = 0; entry < MAX_SHARED; entry++) {
        struct shared_memory *shared = &usage->shared[entry];
        if (atomic_load(&shared->bytes))
            continue;
        atomic_store(&shared->card, card);
        shared->serial = atomic_fetch_add(&usage->serial, 1);
        memset(shared->key, 0, sizeof shared->key);
        memcpy(shared->key, key, key_size);
        for (unsigned word = 0; word < MAX_SLOTS / 64; word++)
            atomic_store(&shared->holders[word], 0);
        add_holder(usage, (int)entry);
        if (entry >= atomic_load(&usage->shared_used))
            atomic_store(&usage->shared_used, entry + 1);
        /* Last: from here on the memory counts twice, until the caller's part is released. */
        atomic_store(&shared->bytes, bytes);
        return (int)entry;
    }
    WARN_ONCE("more than %d allocations are shared between processes: further ones count once in each", MAX_SHARED);
    return NOT_SHARED;
}

int share(unsigned card, uint64_t bytes, const void *key, size_t key_size) {
    struct usage_file *usage = usage_file();
    int file = usage && bytes && key_size <= KEY_BYTES ? pass_gate() : -1;
    if (file < 0)
        return NOT_SHARED;
    reclaim_slots(usage, file);
    int entry = new_entry(usage, card, bytes, key, key_size);
    if (entry != NOT_SHARED)
        release(card, bytes);
    leave_gate(file);
    return entry;
}

static int join_entry(struct usage_file *usage, int entry, uint64_t *bytes, unsigned *card) {
    struct shared_memory *shared = &usage->shared[entry];
    add_holder(usage, entry);
    if (bytes)
        *bytes = atomic_load(&shared->bytes);
    if (card)
        *card = atomic_load(&shared->card);
    return entry;
}

int join_by_key(const void *key, size_t key_size, uint64_t *bytes, unsigned *card) {
    struct usage_file *usage = usage_file();
    int file = usage && key_size <= KEY_BYTES ? pass_gate() : -1;
    if (file < 0)
        return NOT_SHARED;
    int entry = find_entry(usage, key, key_size);
    if (entry != NOT_SHARED)
        join_entry(usage, entry, bytes, card);
    leave_gate(file);
    return entry;
}

void leave(int entry) {
    struct process *own = process();
    if (!own->usage || entry < 0 || entry >= MAX_SHARED)
        return;
    /* Done at the gate, now or as soon as it can be passed. */
    atomic_fetch_add(&own->leaves[entry], 1);
    atomic_store(&own->has_leaves, 1);
    int file = pass_gate();
    if (file >= 0)
        leave_gate(file);
}

void mark_file(int file, int entry) {
    struct usage_file *usage = process()->usage;
    if (!usage || entry < 0)
        return;
    /* Another container may have marked files of the same inode, from serials of its own. */
    for (int tries = 0; tries < MOST_MARKS_TRIED; tries++) {
        int64_t serial = (int64_t)atomic_fetch_add(&usage->serial, 1);
        if (!lock_bytes(file, OFD_SETLK, F_WRLCK, MARK_BEGIN + serial * MARKS_PER_SERIAL + entry, 1, NULL))
            return;
    }
}

/* The lock that begins first at or after a byte, -1 if there is none: the kernel returns any that overlaps. */
static int64_t first_lock(int file, int64_t start) {
    int64_t found = -1, length = 0; /* 0: to the end */
    struct flock seen;
    while (!lock_bytes(file, OFD_GETLK, F_WRLCK, start, length, &seen) && seen.l_type != F_UNLCK && seen.l_start >= start) {
        found = seen.l_start;
        length = found - start;
        if (!length)
            break;
    }
    return found;
}

/* A lock that another description of the same file sees, and this one does not, is this one's. */
static int64_t find_mark(int file) {
    char path[64];
    struct flock own;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int other = open(path, O_RDWR | O_CLOEXEC);
    int64_t at = other < 0 ? -1 : first_lock(other, MARK_BEGIN);
    while (at >= 0 && (lock_bytes(file, OFD_GETLK, F_WRLCK, at, 1, &own) || own.l_type != F_UNLCK))
        at = first_lock(other, at + 1);
    if (other >= 0)
        close(other);
    return at;
}

/* The entry of a mark, if it is still the one that was marked: a file may be open for longer than its memory is held. */
static int marked_entry(const struct usage_file *usage, int64_t mark) {
    int64_t entry = (mark - MARK_BEGIN) % MARKS_PER_SERIAL;
    uint32_t serial = (uint32_t)((mark - MARK_BEGIN) / MARKS_PER_SERIAL);
    const struct shared_memory *shared = &usage->shared[entry];
    return atomic_load(&shared->bytes) && (int32_t)(serial - shared->serial) > 0 ? (int)entry : NOT_SHARED;
}

int join_by_file(int file, uint64_t *bytes, unsigned *card) {
    struct usage_file *usage = usage_file();
    int64_t mark = usage ? find_mark(file) : -1;
    int gate = mark < 0 ? -1 : pass_gate();
    if (gate < 0)
        return NOT_SHARED;
    int entry = marked_entry(usage, mark);
    if (entry != NOT_SHARED)
        join_entry(usage, entry, bytes, card);
    leave_gate(gate);
    return entry;
}
