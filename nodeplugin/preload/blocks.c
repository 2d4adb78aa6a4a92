#include "blocks.h"

#include "charging.h"
#include "process.h"
#include "records.h"
#include "usage.h"

/* How many blocks are looked through for a gap: each takes some 50 microseconds. */
#define MOST_BLOCKS 64

/* Where the limit leaves no room for a block, a gap in one will do, where the driver can be expected to use it. */
static int has_gap(unsigned card, uint64_t context, uint64_t bytes) {
    struct record block;
    uint64_t place = 0;
    for (int tried = 0; tried < MOST_BLOCKS && next_record(SMALLS, &place, &block);)
        if (block.card == card && block.object == context) {
            uint64_t begin = block.key * BLOCK, gap = 0;
            for (uint64_t at = 0; at < BLOCK && gap < bytes;) {
                struct record found;
                int is_taken = find_record(POINTER, begin + at, &found) && found.bytes;
                gap = is_taken ? 0 : gap + SMALL_UNIT;
                at += is_taken ? found.bytes : SMALL_UNIT;
            }
            if (gap >= bytes)
                return 1;
            tried++;
        }
    return 0;
}

enum room find_room(unsigned card, uint64_t context, uint64_t bytes) {
    if (reserve(card, BLOCK))
        return OWN_BLOCK;
    if (bytes && has_gap(card, context, bytes))
        return KNOWN_BLOCK;
    return reserve_room(card, BLOCK) ? OWN_BLOCK : NO_ROOM;
}

int place_small(unsigned card, uint64_t context, enum room room, uint64_t address) {
    /* 0: there was no memory to count it, and its block is never given back. */
    int is_known = count_in_block(address / BLOCK, card, context, 1) > 1;
    if (is_known && room == OWN_BLOCK)
        release(card, BLOCK);
    if (!is_known && room == KNOWN_BLOCK)
        count_in_block(address / BLOCK, card, context, -1);
    return is_known || room == OWN_BLOCK;
}

void remove_small(unsigned card, uint64_t address) {
    if (!count_in_block(address / BLOCK, card, 0, -1))
        release(card, BLOCK);
}

static uint64_t blocks_of(uint64_t bytes) { return (bytes + BLOCK - 1) / BLOCK; }

int charge_small_array(unsigned card, uint64_t bytes) {
    struct process *own = process();
    acquire(&own->small_lock);
    struct small_arrays *arrays = &own->arrays[card];
    uint64_t wanted = blocks_of(arrays->bytes + bytes);
    int fits = wanted <= arrays->blocks || reserve_room(card, (wanted - arrays->blocks) * BLOCK);
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
