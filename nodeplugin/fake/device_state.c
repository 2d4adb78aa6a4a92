#define _GNU_SOURCE
#include "device_state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Changes with the structure of the file. */
#define LAYOUT 0x51464B31
/* Bytes that are locked: far beyond the content, so that nothing else has a reason to lock them. */
#define LOCK_OF_ALL (1L << 40)
#define LOCK_OF_RECORD(number) (LOCK_OF_ALL + 1 + (off_t)(number))

static struct device_state *state;
static int file = -1, own = -1;
static ino_t inode;

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint64_t process_start_time(void) {
    char text[1024] = "";
    FILE *stream = fopen("/proc/self/stat", "re");
    if (!stream) return 0;
    size_t length = fread(text, 1, sizeof text - 1, stream);
    fclose(stream);
    text[length] = 0;
    /* The 22nd field. The second is the program's name, which may contain anything. */
    char *at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

static const char *path_of_state(void) {
    static char path[4096];
    const char *named = getenv("QUOTIENT_FAKE_STATE");
    if (named && *named) return named;
    Dl_info here;
    if (!*path && dladdr((void *)path_of_state, &here)) {
        snprintf(path, sizeof path - 32, "%s", here.dli_fname);
        char *slash = strrchr(path, '/');
        strcpy(slash ? slash + 1 : path, "fake-devices.state");
    }
    return path;
}

static int lock_byte(int command, short type, off_t byte, pid_t *holder) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int result;
    do result = fcntl(file, command, &lock);
    while (result && errno == EINTR);
    if (holder) *holder = lock.l_type == F_UNLCK ? -1 : lock.l_pid;
    return !result;
}
static void lock_all(void) { lock_byte(F_SETLKW, F_WRLCK, LOCK_OF_ALL, NULL); }
static void unlock_all(void) { lock_byte(F_SETLK, F_UNLCK, LOCK_OF_ALL, NULL); }

static int map_state(int opened, int protection) {
    void *mapped = mmap(NULL, sizeof *state, protection, MAP_SHARED, opened, 0);
    if (mapped == MAP_FAILED) return 0;
    state = mapped;
    return 1;
}

static int alive(uint64_t record) {
    pid_t holder = -1;
    return (int)record == own || (lock_byte(F_GETLK, F_WRLCK, LOCK_OF_RECORD(record), &holder) && holder >= 0);
}

static void set_owner(struct block *block) {
    for (uint32_t record = 0; record < MAX_PROCESSES; record++)
        if (block->holders[record / 64] >> record % 64 & 1) {
            block->owner = record;
            return;
        }
    block->id = 0;
}

static void forget_holder(struct block *block, uint64_t record) {
    block->holders[record / 64] &= ~(1ULL << record % 64);
    set_owner(block);
}

/* A process that was killed has no work any more. The entries after the last living one are dropped. */
static void drop_dead_work(struct device_work *work) {
    uint64_t now = now_ns();
    while (work->count) {
        struct interval *last = &work->intervals[(work->count - 1) % MAX_INTERVALS];
        if (last->end_ns <= now) break;
        if (last->generation == state->records[last->record].generation && alive(last->record)) break;
        last->end_ns = last->start_ns > now ? last->start_ns : now;
        work->free_at_ns = last->end_ns;
        if (last->start_ns <= now) break;
        work->count--;
        work->free_at_ns = last->start_ns;
    }
}

/* Forget the memory of processes that have ended. */
static void clean_up(void) {
    for (uint64_t record = 0; record < state->record_count; record++) {
        if (!state->records[record].pid || alive(record)) continue;
        for (uint64_t each = 0; each < state->block_count; each++)
            if (state->blocks[each].id) forget_holder(&state->blocks[each], record);
        memset(state->records[record].bytes, 0, sizeof state->records[record].bytes);
        state->records[record].pid = 0;
    }
}

int join_devices(void) {
    if (own >= 0) return 1;
    if (file < 0) {
        file = open(path_of_state(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (file < 0) return 0;
        /* Despite the umask: containers run as any user. Fails for those that did not create it. */
        if (fchmod(file, 0666)) errno = 0;
    }
    lock_all();
    struct stat found;
    int usable = !fstat(file, &found);
    if (usable && found.st_size < (off_t)sizeof *state) usable = !ftruncate(file, sizeof *state);
    usable = usable && (state || map_state(file, PROT_READ | PROT_WRITE));
    if (usable && !state->layout) state->layout = LAYOUT;
    if (usable && state->layout == LAYOUT) {
        clean_up();
        for (int record = 0; record < MAX_PROCESSES && own < 0; record++)
            if (lock_byte(F_SETLK, F_WRLCK, LOCK_OF_RECORD(record), NULL)) own = record;
    }
    if (own >= 0) {
        struct process_record *mine = &state->records[own];
        mine->generation++;
        mine->started = process_start_time();
        mine->pid = (uint64_t)getpid();
        if (state->record_count <= (uint64_t)own) state->record_count = (uint64_t)own + 1;
    }
    unlock_all();
    return own >= 0;
}

static uint64_t sum_of(int card) {
    uint64_t sum = 0;
    for (uint64_t record = 0; record < state->record_count; record++) sum += state->records[record].bytes[card];
    for (uint64_t each = 0; each < state->block_count; each++)
        if (state->blocks[each].id && state->blocks[each].card == (uint32_t)card) sum += state->blocks[each].bytes;
    return sum;
}

static int fits(int card, uint64_t bytes, uint64_t capacity) {
    uint64_t sum = sum_of(card);
    if (sum <= capacity && bytes <= capacity - sum) return 1;
    clean_up();
    sum = sum_of(card);
    return sum <= capacity && bytes <= capacity - sum;
}

int reserve_bytes(int card, uint64_t bytes, uint64_t capacity) {
    lock_all();
    int success = fits(card, bytes, capacity);
    if (success) state->records[own].bytes[card] += bytes;
    unlock_all();
    return success;
}

void release_bytes(int card, uint64_t bytes) {
    lock_all();
    state->records[own].bytes[card] -= bytes;
    unlock_all();
}

static int unused_block(void) {
    for (int each = 0; each < MAX_BLOCKS; each++)
        if (!state->blocks[each].id) {
            if (state->block_count <= (uint64_t)each) state->block_count = (uint64_t)each + 1;
            return each;
        }
    return -1;
}

static void fill_block(int index, uint64_t id, int card, uint64_t bytes) {
    struct block *block = &state->blocks[index];
    *block = (struct block){.bytes = bytes, .card = (uint32_t)card, .owner = (uint32_t)own};
    block->holders[own / 64] = 1ULL << own % 64;
    block->id = id;
}

int make_block(int card, uint64_t bytes) {
    lock_all();
    int index = unused_block();
    if (index >= 0) {
        fill_block(index, ++state->last_id, card, bytes);
        state->records[own].bytes[card] -= bytes;
    }
    unlock_all();
    return index;
}

int hold_block(uint64_t id, int card, uint64_t bytes, uint64_t capacity) {
    lock_all();
    clean_up();
    int index = -1;
    for (uint64_t each = 0; each < state->block_count; each++)
        if (state->blocks[each].id == id) index = (int)each;
    if (index >= 0) state->blocks[index].holders[own / 64] |= 1ULL << own % 64;
    else if (fits(card, bytes, capacity) && (index = unused_block()) >= 0) fill_block(index, id, card, bytes);
    unlock_all();
    return index;
}

void drop_block(int index) {
    lock_all();
    forget_holder(&state->blocks[index], (uint64_t)own);
    unlock_all();
}

uint64_t block_id(int index) { return state->blocks[index].id; }

uint64_t used_bytes(int card) {
    lock_all();
    clean_up();
    uint64_t sum = sum_of(card);
    unlock_all();
    return sum;
}

uint64_t busy_until(int card) { return __atomic_load_n(&state->work[card].free_at_ns, __ATOMIC_ACQUIRE); }

uint64_t add_work(int card, uint64_t not_before_ns, uint64_t duration_ns) {
    struct device_work *work = &state->work[card];
    lock_all();
    drop_dead_work(work);
    uint64_t start = now_ns();
    if (start < work->free_at_ns) start = work->free_at_ns;
    if (start < not_before_ns) start = not_before_ns;
    uint64_t end = start + duration_ns, generation = state->records[own].generation;
    struct interval *last = work->count ? &work->intervals[(work->count - 1) % MAX_INTERVALS] : NULL;
    if (last && last->record == (uint64_t)own && last->generation == generation && last->end_ns == start) last->end_ns = end;
    else work->intervals[work->count++ % MAX_INTERVALS] = (struct interval){(uint64_t)own, generation, start, end};
    __atomic_store_n(&work->free_at_ns, end, __ATOMIC_RELEASE);
    unlock_all();
    return end;
}

/* Open the file if it exists, again if it was replaced. The old one stays open and mapped: see device_state.h. */
static int attach(void) {
    struct stat found;
    if (stat(path_of_state(), &found) || found.st_size < (off_t)sizeof *state) return 0;
    if (state && found.st_ino == inode) return 1;
    int opened = open(path_of_state(), O_RDONLY | O_CLOEXEC);
    if (opened < 0) return 0;
    file = opened;
    inode = found.st_ino;
    return map_state(file, PROT_READ) && state->layout == LAYOUT;
}

/* The pid of a record's process in the caller's PID namespace, or 0 if there is none or it is not visible. */
static unsigned visible_pid(uint64_t record) {
    const struct process_record *found = &state->records[record];
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = LOCK_OF_RECORD(record), .l_len = 1};
    if (!found->pid || fcntl(file, F_GETLK, &lock)) return 0;
    if (lock.l_type != F_UNLCK) return lock.l_pid > 0 ? (unsigned)lock.l_pid : 0;
    /* A process does not see its own lock. */
    return found->pid == (uint64_t)getpid() && found->started == process_start_time() ? (unsigned)getpid() : 0;
}

/* The first living holder of a block, its owner before others; -1 if there is none. The NVML cannot clean up. */
static int payer_of(const struct block *block) {
    if (alive(block->owner)) return (int)block->owner;
    for (int record = 0; record < MAX_PROCESSES; record++)
        if (block->holders[record / 64] >> record % 64 & 1 && alive((uint64_t)record)) return record;
    return -1;
}

static uint64_t bytes_of(int card, uint64_t record) {
    uint64_t bytes = state->records[record].bytes[card];
    for (uint64_t each = 0; each < state->block_count; each++) {
        const struct block *block = &state->blocks[each];
        if (block->id && block->card == (uint32_t)card && payer_of(block) == (int)record) bytes += block->bytes;
    }
    return bytes;
}

uint64_t observe_bytes(int card) {
    uint64_t sum = 0;
    if (!attach()) return 0;
    for (uint64_t record = 0; record < state->record_count; record++)
        if (visible_pid(record) || alive(record)) sum += bytes_of(card, record);
    return sum;
}

static uint64_t busy_ns(int card, uint64_t record, uint64_t from_ns, uint64_t to_ns) {
    const struct device_work *work = &state->work[card];
    uint64_t count = work->count, first = count > MAX_INTERVALS ? count - MAX_INTERVALS : 0, sum = 0;
    for (uint64_t each = first; each < count; each++) {
        const struct interval *one = &work->intervals[each % MAX_INTERVALS];
        if (one->record != record || one->generation != state->records[record].generation) continue;
        uint64_t start = one->start_ns > from_ns ? one->start_ns : from_ns, end = one->end_ns < to_ns ? one->end_ns : to_ns;
        if (start < end) sum += end - start;
    }
    return sum;
}

int observe_processes(int card, uint64_t from_ns, uint64_t to_ns, struct observed_process *found, int limit) {
    int count = 0;
    if (!attach()) return 0;
    for (uint64_t record = 0; record < state->record_count && count < limit; record++) {
        unsigned pid = visible_pid(record);
        uint64_t bytes = pid ? bytes_of(card, record) : 0;
        if (bytes) found[count++] = (struct observed_process){pid, bytes, busy_ns(card, record, from_ns, to_ns)};
    }
    return count;
}
