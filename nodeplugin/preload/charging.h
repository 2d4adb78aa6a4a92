/* Which card an allocation is on, and how much of the card the driver takes for it. */
#ifndef QUOTIENT_CHARGING_H
#define QUOTIENT_CHARGING_H

#include "driver.h"
#include "records.h"

/* The driver maps memory in blocks of this size. */
#define BLOCK (2ULL << 20)

CUresult card_of_device(CUdevice device, unsigned *card);
CUresult current_card(unsigned *card);
/* 1 if a location is on a device: only then it is limited. */
int is_device_location(const CUmemLocation *location, CUdevice *device);

uint64_t round_up(uint64_t bytes, uint64_t unit);

/* Reserve what the driver takes for an allocation; 0 if the limit leaves no room. */
int charge(unsigned card, uint64_t bytes, uint64_t *charged);
void uncharge(unsigned card, uint64_t charged);
/* Give back what a record was charged, or leave the entry it shares. */
void uncharge_record(const struct record *record);

/* Count again what the pools of this process have reserved. */
void settle_pools(void);

/* The current context, as the driver's handle. */
uint64_t current_context(void);

#endif
