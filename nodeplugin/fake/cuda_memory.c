/* cuMemAlloc and its relatives, host memory, and questions about pointers. */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Like the real driver: large allocations have pages of their own, small ones share a page. */
#define LARGEST_SMALL MIB
#define UNIT 512
#define UNITS (LARGE_PAGE / UNIT)
#define PITCH_ALIGNMENT 512

struct chunk {
    struct chunk *next;
    uint64_t base;
    CUcontext context;
    int below_4_gib, used_units;
    struct physical *physical;
    unsigned char used[UNITS];
};
static struct chunk *chunks;

static int find_units(const struct chunk *chunk, int wanted) {
    for (int first = 0, length = 0; first + length < (int)UNITS;) {
        if (chunk->used[first + length]) first += length + 1, length = 0;
        else if (++length == wanted) return first;
    }
    return -1;
}

static struct chunk *create_chunk(CUcontext context, int below_4_gib, CUresult *result) {
    struct physical *physical;
    *result = create_physical(context->device, LARGE_PAGE, &physical);
    if (*result) return NULL;
    struct chunk *chunk = allocate(sizeof *chunk);
    *chunk = (struct chunk){.next = chunks, .context = context, .below_4_gib = below_4_gib, .physical = physical};
    chunk->base = reserve_addresses(LARGE_PAGE, LARGE_PAGE, below_4_gib);
    return chunks = chunk;
}

static CUresult allocate_small(CUcontext context, uint64_t size, enum range_kind kind, int below_4_gib, struct range **allocated) {
    int wanted = (int)(round_up(size, UNIT) / UNIT), first = -1;
    struct chunk *chunk = chunks;
    for (; chunk; chunk = chunk->next)
        if (chunk->context == context && chunk->below_4_gib == below_4_gib && (first = find_units(chunk, wanted)) >= 0) break;
    if (!chunk) {
        CUresult result;
        chunk = create_chunk(context, below_4_gib, &result);
        if (!chunk) return result;
        first = 0;
    }
    memset(&chunk->used[first], 1, (size_t)wanted);
    chunk->used_units += wanted;
    *allocated = add_range(kind, chunk->base + (uint64_t)first * UNIT, (uint64_t)wanted * UNIT, context->device);
    (*allocated)->chunk = chunk;
    (*allocated)->physical = chunk->physical;
    return CUDA_SUCCESS;
}

static void free_small(struct range *range) {
    struct chunk *chunk = range->chunk;
    size_t units = range->size / UNIT;
    memset(&chunk->used[(range->base - chunk->base) / UNIT], 0, units);
    chunk->used_units -= (int)units;
    if (chunk->used_units) return;
    struct chunk **at = &chunks;
    while (*at != chunk) at = &(*at)->next;
    *at = chunk->next;
    free_addresses(chunk->base, LARGE_PAGE);
    drop_physical(chunk->physical);
    free(chunk);
}

CUresult allocate_device_memory(uint64_t size, enum range_kind kind, int below_4_gib, struct range **allocated) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    if (size > device_at(context->device)->total) return CUDA_ERROR_OUT_OF_MEMORY;
    if (size <= LARGEST_SMALL) result = allocate_small(context, size, kind, below_4_gib, allocated);
    else {
        struct physical *physical;
        uint64_t bytes = round_up(size, LARGE_PAGE);
        result = create_physical(context->device, bytes, &physical);
        if (result) return result;
        uint64_t base = reserve_addresses(bytes, LARGE_PAGE, below_4_gib);
        if (!base) {
            drop_physical(physical);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *allocated = add_range(kind, base, bytes, context->device);
        (*allocated)->physical = physical;
        (*allocated)->owns_address = 1;
    }
    if (!result) (*allocated)->buffer_size = size;
    return result;
}

CUresult free_range(struct range *range) {
    if (range->chunk) free_small(range);
    else {
        if (range->owns_address) free_addresses(range->base, range->size);
        if (range->physical) drop_physical(range->physical);
    }
    remove_range(range);
    return CUDA_SUCCESS;
}

/* What a context owns ends with it; mappings of cuMemMap and host memory registered by the program do not. */
void free_memory_of(CUcontext context) {
    struct range *range;
    for (size_t at = 0; (range = range_number(at));) {
        int ends = range->kind != MAPPED_RANGE && range->kind != REGISTERED_RANGE && range->kind != POOL_RANGE;
        if (range->context != context || !ends) {
            at++;
            continue;
        }
        if (range->is_live) free_graph_memory(range);
        free_range(range);
    }
    trim_graph_memory(context->device);
}

CUresult do_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    struct range *range;
    if (!dptr) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = refuse_in_capture();
    if (!result) result = allocate_device_memory(bytesize, DEVICE_RANGE, 0, &range);
    if (!result) *dptr = range->base;
    return result;
}
CUresult do_cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize) {
    struct range *range;
    CUresult result = dptr ? allocate_device_memory(bytesize, DEVICE_RANGE, 1, &range) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *dptr = (CUdeviceptr_v1)range->base;
    return result;
}

static CUresult allocate_pitch(uint64_t width, uint64_t height, unsigned element, int below_4_gib, struct range **range, uint64_t *pitch) {
    if (!width || !height || (element != 4 && element != 8 && element != 16)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = refuse_in_capture();
    *pitch = round_up(width, PITCH_ALIGNMENT);
    if (*pitch < width || height > UINT64_MAX / *pitch) return CUDA_ERROR_OUT_OF_MEMORY;
    return result ? result : allocate_device_memory(*pitch * height, DEVICE_RANGE, below_4_gib, range);
}
CUresult do_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes) {
    struct range *range;
    uint64_t pitch;
    if (!dptr || !pPitch) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate_pitch(WidthInBytes, Height, ElementSizeBytes, 0, &range, &pitch);
    if (!result) *dptr = range->base, *pPitch = pitch;
    return result;
}
CUresult do_cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes, unsigned int Height, unsigned int ElementSizeBytes) {
    struct range *range;
    uint64_t pitch;
    if (!dptr || !pPitch) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate_pitch(WidthInBytes, Height, ElementSizeBytes, 1, &range, &pitch);
    if (!result) *dptr = (CUdeviceptr_v1)range->base, *pPitch = (unsigned)pitch;
    return result;
}

CUresult do_cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags) {
    struct range *range;
    if (!dptr || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = refuse_in_capture();
    if (!result) result = allocate_device_memory(bytesize, MANAGED_RANGE, 0, &range);
    if (result) return result;
    touch(range->base, range->size);
    *dptr = range->base;
    return CUDA_SUCCESS;
}

CUresult do_cuMemFree_v2(CUdeviceptr dptr) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (!result) result = refuse_in_capture();
    if (result || !dptr) return result;
    struct range *range = find_range(dptr);
    if (!range || range->base != dptr) return CUDA_ERROR_INVALID_VALUE;
    switch (range->kind) {
    case DEVICE_RANGE: case MANAGED_RANGE: case EXTERNAL_RANGE: return free_range(range);
    case POOL_RANGE: return free_to_pool(range);
    case GRAPH_RANGE: return free_graph_memory(range);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}
CUresult do_cuMemFree(CUdeviceptr_v1 dptr) { return do_cuMemFree_v2(dptr); }

CUresult do_cuMemGetInfo_v2(size_t *available, size_t *total) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (!available || !total) return CUDA_ERROR_INVALID_VALUE;
    const struct device *device = device_at(context->device);
    uint64_t used = used_bytes(device->card);
    *total = device->total, *available = device->capacity > used ? device->capacity - used : 0;
    return CUDA_SUCCESS;
}
CUresult do_cuMemGetInfo(unsigned int *available, unsigned int *total) {
    size_t wide_available = 0, wide_total = 0;
    if (!available || !total) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = do_cuMemGetInfo_v2(&wide_available, &wide_total);
    if (result) return result;
    *available = wide_available > UINT32_MAX ? UINT32_MAX : (unsigned)wide_available;
    *total = wide_total > UINT32_MAX ? UINT32_MAX : (unsigned)wide_total;
    return CUDA_SUCCESS;
}

CUresult do_cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) {
    const struct range *range = find_range(dptr);
    if (!range || range->kind == REGISTERED_RANGE) return CUDA_ERROR_NOT_FOUND;
    if (pbase) *pbase = range->base;
    if (psize) *psize = range->buffer_size;
    return CUDA_SUCCESS;
}
CUresult do_cuMemGetAddressRange(CUdeviceptr_v1 *pbase, unsigned int *psize, CUdeviceptr_v1 dptr) {
    CUdeviceptr base = 0;
    size_t size = 0;
    CUresult result = do_cuMemGetAddressRange_v2(&base, &size, dptr);
    if (!result && pbase) *pbase = (CUdeviceptr_v1)base;
    if (!result && psize) *psize = (unsigned)size;
    return result;
}
