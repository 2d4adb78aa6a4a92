#include "charging.h"

#include "limits.h"
#include "process.h"
#include "usage.h"

uint64_t round_up(uint64_t bytes, uint64_t unit) {
    uint64_t rest = bytes % unit;
    if (!rest)
        return bytes;
    return bytes > UINT64_MAX - unit ? UINT64_MAX - UINT64_MAX % unit : bytes - rest + unit;
}

uint64_t product(uint64_t one, uint64_t other) {
    uint64_t result;
    return __builtin_mul_overflow(one, other, &result) ? UINT64_MAX : result;
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

int reserve_room(unsigned card, uint64_t bytes) {
    if (reserve(card, bytes))
        return 1;
    trim_pools();
    settle_graphs();
    if (reserve(card, bytes))
        return 1;
    report_refusal(card, bytes);
    return 0;
}

void uncharge_record(const struct record *record) {
    int is_small = record->bytes <= LARGEST_SMALL;
    if (record->shared != NOT_SHARED)
        leave(record->shared);
    else if (is_small && record->kind == POINTER)
        remove_small(record->card, record->key);
    else if (is_small && record->kind == ARRAY)
        uncharge_small_array(record->card, record->bytes);
    else
        release(record->card, record->bytes);
}

void put_new_record(const struct record *record) {
    struct record stale;
    while (take_record((enum kind)record->kind, record->key, &stale))
        uncharge_record(&stale);
    put_record(*record);
}

/* Only a process that has made one needs to ask for each allocation whether its context is green. */
static _Atomic int knows_green;

void put_green_context(uint64_t green, uint64_t primary) {
    struct record record = {.kind = GREEN, .key = green, .object = primary, .shared = NOT_SHARED};
    put_new_record(&record);
    atomic_store_explicit(&knows_green, 1, memory_order_relaxed);
}

uint64_t current_context(void) {
    CUcontext context = NULL;
    struct record green;
    if (REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        return 0;
    uint64_t current = (uint64_t)(uintptr_t)context;
    int is_green = atomic_load_explicit(&knows_green, memory_order_relaxed) && find_record(GREEN, current, &green);
    return is_green ? green.object : current;
}
