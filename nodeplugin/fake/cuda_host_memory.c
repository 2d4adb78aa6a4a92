/* Host memory that devices can use. It charges no device. */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <sys/mman.h>

CUresult do_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (!pp || !bytesize) return CUDA_ERROR_INVALID_VALUE;
    uint64_t size = round_up(bytesize, 4096), base = reserve_addresses(size, 4096, 0);
    if (!base || mprotect((void *)base, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct range *range = add_range(HOST_RANGE, base, size, context->device);
    range->flags = Flags, range->buffer_size = bytesize, range->owns_address = 1;
    *pp = (void *)base;
    return CUDA_SUCCESS;
}
CUresult do_cuMemAllocHost_v2(void **pp, size_t bytesize) { return do_cuMemHostAlloc(pp, bytesize, 0); }
CUresult do_cuMemAllocHost(void **pp, unsigned int bytesize) { return do_cuMemHostAlloc(pp, bytesize, 0); }

CUresult do_cuMemFreeHost(void *p) {
    struct range *range = find_range((uint64_t)p);
    if (!p) return CUDA_SUCCESS;
    if (!range || range->base != (uint64_t)p || range->kind != HOST_RANGE) return CUDA_ERROR_INVALID_VALUE;
    return free_range(range);
}

CUresult do_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (!p || !bytesize) return CUDA_ERROR_INVALID_VALUE;
    if (find_range((uint64_t)p) || find_range((uint64_t)p + bytesize - 1)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add_range(REGISTERED_RANGE, (uint64_t)p, bytesize, context->device)->flags = Flags;
    return CUDA_SUCCESS;
}
CUresult do_cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags) { return do_cuMemHostRegister_v2(p, bytesize, Flags); }

CUresult do_cuMemHostUnregister(void *p) {
    struct range *range = find_range((uint64_t)p);
    if (!range || range->base != (uint64_t)p || range->kind != REGISTERED_RANGE) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    remove_range(range);
    return CUDA_SUCCESS;
}

static struct range *host_range(const void *p) {
    struct range *range = find_range((uint64_t)p);
    return range && (range->kind == HOST_RANGE || range->kind == REGISTERED_RANGE) ? range : NULL;
}

CUresult do_cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags) {
    if (!pdptr || !host_range(p)) return CUDA_ERROR_INVALID_VALUE;
    *pdptr = (CUdeviceptr)p;
    return CUDA_SUCCESS;
}

CUresult do_cuMemHostGetFlags(unsigned int *pFlags, void *p) {
    if (!pFlags || !host_range(p)) return CUDA_ERROR_INVALID_VALUE;
    *pFlags = host_range(p)->flags;
    return CUDA_SUCCESS;
}
