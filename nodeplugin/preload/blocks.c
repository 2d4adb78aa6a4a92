#include "blocks.h"

#include "process.h"
#include "records.h"
#include "usage.h"

enum room find_room(unsigned card, uint64_t bytes) {
    struct process *own = process();
    if (reserve(card, BLOCK))
        return OWN_BLOCK;
    uint64_t used = atomic_load(&own->block_bytes[card]);
    return atomic_load(&own->blocks[card]) * BLOCK >= used + bytes ? KNOWN_BLOCK : NO_ROOM;
}

int place_small(unsigned card, enum room room, uint64_t address, uint64_t bytes) {
    struct process *own = process();
    /* 0: there was no memory to count it, and its block is never given back. */
    int is_known = count_in_block(address / BLOCK, 1) > 1;
    if (!is_known && room != OWN_BLOCK) {
        count_in_block(address / BLOCK, -1);
        return 0;
    }
    if (is_known && room == OWN_BLOCK)
        release(card, BLOCK);
    if (!is_known)
        atomic_fetch_add(&own->blocks[card], 1);
    atomic_fetch_add(&own->block_bytes[card], bytes);
    return 1;
}

void remove_small(unsigned card, uint64_t address, uint64_t bytes) {
    struct process *own = process();
    atomic_fetch_sub(&own->block_bytes[card], bytes);
    if (count_in_block(address / BLOCK, -1))
        return;
    atomic_fetch_sub(&own->blocks[card], 1);
    release(card, BLOCK);
}

static uint64_t blocks_of(uint64_t bytes) { return (bytes + BLOCK - 1) / BLOCK; }

int charge_small_array(unsigned card, uint64_t bytes) {
    struct process *own = process();
    acquire(&own->small_lock);
    struct small_arrays *arrays = &own->arrays[card];
    uint64_t wanted = blocks_of(arrays->bytes + bytes);
    int fits = wanted <= arrays->blocks || reserve(card, (wanted - arrays->blocks) * BLOCK);
    if (fits) {
        arrays->number++, arrays->bytes += bytes;
        arrays->blocks = wanted > arrays->blocks ? wanted : arrays->blocks;
    }
    let_go(&own->small_lock);
    return fits;
}

void uncharge_small_array(unsigned card, uint64_t bytes) {
    struct process *own = process();
    acquire(&own->small_lock);
    struct small_arrays *arrays = &own->arrays[card];
    arrays->number--, arrays->bytes -= bytes;
    if (arrays->number < arrays->blocks) {
        release(card, (arrays->blocks - arrays->number) * BLOCK);
        arrays->blocks = arrays->number;
    }
    let_go(&own->small_lock);
}
