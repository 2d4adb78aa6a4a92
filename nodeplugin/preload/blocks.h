/* Small allocations, which share blocks of the driver. */
#ifndef QUOTIENT_BLOCKS_H
#define QUOTIENT_BLOCKS_H

#include <stdint.h>

/* The driver maps memory in blocks of this size; allocations up to half of it share them. */
#define BLOCK (2ULL << 20)
#define LARGEST_SMALL (1ULL << 20)
#define SMALL_UNIT 512

/* By address: which block an allocation is in is known afterwards. So a block is reserved before, and given back if the
 * allocation has found a place in one that is counted already. */
enum room { NO_ROOM, OWN_BLOCK, KNOWN_BLOCK };
enum room find_room(unsigned card, uint64_t context, uint64_t bytes);
/* Returns 0 if it is in a block that is not counted, although none could be reserved: then it has to be freed. */
int place_small(unsigned card, uint64_t context, enum room room, uint64_t address);
void remove_small(unsigned card, uint64_t address);

/* Arrays have no address: together they take as many blocks as their sum fills, and afterwards as many as may still hold
 * one of them. */
int charge_small_array(unsigned card, uint64_t bytes);
void uncharge_small_array(unsigned card, uint64_t bytes);

#endif
