/* What programs are told of a device's memory: the container's limit, and what is left of it. */
#include <limits.h>

#include "charging.h"
#include "limits.h"
#include "usage.h"

static uint64_t smaller(uint64_t one, uint64_t other) { return one < other ? one : other; }

static void limit_info(unsigned card, uint64_t *free, uint64_t *total) {
    settle_pools();
    uint64_t limit = limits_of(card).memory_bytes, used = used_bytes(card);
    *total = smaller(*total, limit);
    /* Never more than the device has, whoever else uses it. */
    *free = smaller(*free, used < limit ? limit - used : 0);
}

HOOK(cuMemGetInfo_v2)(size_t *free, size_t *total) {
    unsigned card;
    CUresult result = REAL(cuMemGetInfo_v2)(free, total);
    if (result != CUDA_SUCCESS || (result = current_card(&card)) != CUDA_SUCCESS)
        return result;
    uint64_t free_bytes = *free, total_bytes = *total;
    limit_info(card, &free_bytes, &total_bytes);
    *free = free_bytes, *total = total_bytes;
    return CUDA_SUCCESS;
}

HOOK(cuMemGetInfo)(unsigned int *free, unsigned int *total) {
    unsigned card;
    CUresult result = REAL(cuMemGetInfo)(free, total);
    if (result != CUDA_SUCCESS || (result = current_card(&card)) != CUDA_SUCCESS)
        return result;
    uint64_t free_bytes = *free, total_bytes = *total;
    limit_info(card, &free_bytes, &total_bytes);
    *free = (unsigned int)smaller(free_bytes, UINT_MAX), *total = (unsigned int)smaller(total_bytes, UINT_MAX);
    return CUDA_SUCCESS;
}

HOOK(cuDeviceTotalMem_v2)(size_t *bytes, CUdevice device) {
    unsigned card;
    CUresult result = REAL(cuDeviceTotalMem_v2)(bytes, device);
    if (result == CUDA_SUCCESS && (result = card_of_device(device, &card)) == CUDA_SUCCESS)
        *bytes = smaller(*bytes, limits_of(card).memory_bytes);
    return result;
}

HOOK(cuDeviceTotalMem)(unsigned int *bytes, CUdevice device) {
    unsigned card;
    CUresult result = REAL(cuDeviceTotalMem)(bytes, device);
    if (result == CUDA_SUCCESS && (result = card_of_device(device, &card)) == CUDA_SUCCESS)
        *bytes = (unsigned int)smaller(*bytes, limits_of(card).memory_bytes);
    return result;
}
