#include "charging.h"

#include "limits.h"
#include "process.h"
#include "usage.h"

/* Allocations up to this size share blocks; a program's small ones together take as many as their sum fills. */
#define LARGEST_SMALL (1ULL << 20)
#define SMALL_UNIT 512

uint64_t round_up(uint64_t bytes, uint64_t unit) {
    uint64_t rest = bytes % unit;
    if (!rest)
        return bytes;
    return bytes > UINT64_MAX - unit ? UINT64_MAX - UINT64_MAX % unit : bytes - rest + unit;
}

static CUresult find_card(CUdevice device, unsigned *card) {
    CUuuid uuid;
    /* The second version gives the UUID of a MIG device; drivers before 11.4 have the first only. */
    CUresult result = driver_has(FUNCTION_cuDeviceGetUuid_v2) ? REAL(cuDeviceGetUuid_v2)(&uuid, device)
                                                              : REAL(cuDeviceGetUuid)(&uuid, device);
    if (result != CUDA_SUCCESS)
        return result;
    int found = card_by_uuid((const unsigned char *)uuid.bytes);
    if (found < 0) {
        WARN_ONCE("device %d is none of this container's GPUs: no memory can be allocated on it", device);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *card = (unsigned)found;
    return CUDA_SUCCESS;
}

CUresult card_of_device(CUdevice device, unsigned *card) {
    if (device < 0 || device >= MAX_DEVICES)
        return CUDA_ERROR_INVALID_DEVICE;
    _Atomic uint8_t *known = &process()->card_of_device[device];
    uint8_t found = atomic_load_explicit(known, memory_order_relaxed);
    if (found) {
        *card = found - 1u;
        return CUDA_SUCCESS;
    }
    CUresult result = find_card(device, card);
    if (result == CUDA_SUCCESS)
        atomic_store_explicit(known, (uint8_t)(*card + 1), memory_order_relaxed);
    return result;
}

CUresult current_card(unsigned *card) {
    CUdevice device;
    CUresult result = REAL(cuCtxGetDevice)(&device);
    return result == CUDA_SUCCESS ? card_of_device(device, card) : result;
}

int is_device_location(const CUmemLocation *location, CUdevice *device) {
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        *device = location->id;
        return 1;
    }
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN) {
        *device = location->localized.deviceId;
        return 1;
    }
    return 0;
}

static int charge_small(unsigned card, uint64_t bytes) {
    struct process *own = process();
    acquire(&own->small_lock);
    uint64_t wanted = round_up(own->small_bytes[card] + bytes, BLOCK) / BLOCK, present = own->small_chunks[card];
    int fits = wanted <= present || reserve(card, (wanted - present) * BLOCK);
    if (fits) {
        own->small_bytes[card] += bytes;
        own->small_chunks[card] = wanted > present ? wanted : present;
    }
    let_go(&own->small_lock);
    return fits;
}

static void uncharge_small(unsigned card, uint64_t bytes) {
    struct process *own = process();
    acquire(&own->small_lock);
    own->small_bytes[card] -= bytes < own->small_bytes[card] ? bytes : own->small_bytes[card];
    uint64_t wanted = round_up(own->small_bytes[card], BLOCK) / BLOCK;
    if (wanted < own->small_chunks[card])
        release(card, (own->small_chunks[card] - wanted) * BLOCK);
    own->small_chunks[card] = wanted;
    let_go(&own->small_lock);
}

int charge(unsigned card, uint64_t bytes, uint64_t *charged) {
    int is_small = bytes <= LARGEST_SMALL;
    *charged = round_up(bytes, is_small ? SMALL_UNIT : BLOCK);
    return is_small ? charge_small(card, *charged) : reserve(card, *charged);
}

void uncharge(unsigned card, uint64_t charged) {
    if (charged <= LARGEST_SMALL)
        uncharge_small(card, charged);
    else
        release(card, charged);
}

void uncharge_record(const struct record *record) {
    if (record->shared == NOT_SHARED)
        uncharge(record->card, record->bytes);
    else
        leave(record->shared);
}

uint64_t current_context(void) {
    CUcontext context = NULL;
    return REAL(cuCtxGetCurrent)(&context) == CUDA_SUCCESS ? (uint64_t)(uintptr_t)context : 0;
}
