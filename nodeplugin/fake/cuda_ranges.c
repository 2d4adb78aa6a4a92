/* Addresses of this process: what lies where. Device memory is at reserved addresses of the host, so that an address is
 * never used twice; the content exists from the first copy on, and a program that reads it directly crashes. */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* In the order of addresses; none overlaps another. */
static struct range **ranges;
static size_t count, capacity;

uint64_t reserve_addresses(uint64_t size, uint64_t alignment, int below_4_gib) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (below_4_gib ? MAP_32BIT : 0);
    uint64_t whole = size + alignment;
    char *at = mmap(NULL, whole, PROT_NONE, flags, -1, 0);
    if (at == MAP_FAILED) return 0;
    uint64_t start = (uint64_t)at, base = round_up(start, alignment);
    if (base > start) munmap(at, base - start);
    if (start + whole > base + size) munmap((void *)(base + size), start + whole - base - size);
    return base;
}

void free_addresses(uint64_t base, uint64_t size) { munmap((void *)base, size); }

/* The number of ranges that start at or below an address. */
static size_t position(uint64_t address) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle]->base <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

struct range *add_range(enum range_kind kind, uint64_t base, uint64_t size, CUdevice device) {
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 256;
        ranges = realloc(ranges, capacity * sizeof(struct range *));
        if (!ranges) abort();
    }
    struct range *range = allocate(sizeof *range);
    *range = (struct range){.base = base, .size = size, .buffer_size = size, .id = next_id(), .kind = kind, .device = device};
    range->context = owning_context();
    size_t at = position(base);
    memmove(&ranges[at + 1], &ranges[at], (count++ - at) * sizeof(struct range *));
    ranges[at] = range;
    return range;
}

void remove_range(struct range *range) {
    size_t at = position(range->base) - 1;
    memmove(&ranges[at], &ranges[at + 1], (--count - at) * sizeof(struct range *));
    free(range);
}

struct range *find_range(uint64_t address) {
    size_t at = position(address);
    struct range *range = at ? ranges[at - 1] : NULL;
    return range && address - range->base < range->size ? range : NULL;
}

struct range *range_number(size_t number) { return number < count ? ranges[number] : NULL; }

int touch(uint64_t address, uint64_t size) {
    while (size) {
        struct range *range = find_range(address);
        if (!range) return 0;
        if (!range->is_touched && range->kind != HOST_RANGE && range->kind != REGISTERED_RANGE) {
            uint64_t start = range->base / 4096 * 4096, end = round_up(range->base + range->size, 4096);
            if (mprotect((void *)start, end - start, PROT_READ | PROT_WRITE)) return 0;
            range->is_touched = 1;
        }
        uint64_t left = range->base + range->size - address, step = left < size ? left : size;
        address += step, size -= step;
    }
    return 1;
}
