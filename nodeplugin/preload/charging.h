/* Which card an allocation is on, and how much of the card the driver takes for it. */
#ifndef QUOTIENT_CHARGING_H
#define QUOTIENT_CHARGING_H

#include "blocks.h"
#include "driver.h"
#include "records.h"

CUresult card_of_device(CUdevice device, unsigned *card);
CUresult current_card(unsigned *card);
/* 1 if a location is on a device: only then it is limited. */
int is_device_location(const CUmemLocation *location, CUdevice *device);

uint64_t round_up(uint64_t bytes, uint64_t unit);
/* UINT64_MAX if it is larger than that. */
uint64_t product(uint64_t one, uint64_t other);

/* Give back what a record was charged, or leave the entry it shares. */
void uncharge_record(const struct record *record);
/* Record what the driver has just returned. Another record of the same address or handle is of what has gone with its
 * context, and the thread that destroys that has not come to it yet. */
void put_new_record(const struct record *record);

/* Reserve for what a program asks for: with what pools and graphs keep unused, if the limit leaves no other room. Not under
 * their locks. A refusal is reported. */
int reserve_room(unsigned card, uint64_t bytes);

/* Return the unused memory of all pools to the driver. */
void trim_pools(void);
/* Count again what the pools and the graphs of this process have reserved. */
void settle_pools(void);
void settle_graphs(void);

/* The context that owns what is allocated now, as the driver's handle: a green context owns nothing itself. */
uint64_t current_context(void);
void put_green_context(uint64_t green, uint64_t primary);

#endif
