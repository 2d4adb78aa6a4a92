/* Memory pools. A pool reserves memory in large steps, gives parts of it out in the order of the stream, and keeps what
 * is freed until a synchronization, and then as much as its threshold says. */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define STEP (32 * MIB)
#define UNIT 512

struct part { struct part *next; uint64_t base, size; };
/* The parts in use, in the order of addresses. */
struct segment { struct segment *next; uint64_t base, size; struct physical *physical; struct part *parts; };
struct CUmemPoolHandle_st {
    CUmemoryPool next;
    CUmemPoolProps properties;
    CUdevice device;
    struct segment *segments;
    uint64_t threshold, reserved, reserved_high, used, used_high;
    int reuse[3], is_default;
};
static CUmemoryPool pools, current_pools[MAX_CARDS], default_pools[MAX_CARDS];

static int is_pool(CUmemoryPool pool) {
    for (CUmemoryPool each = pools; each; each = each->next)
        if (each == pool) return 1;
    return 0;
}

static CUmemoryPool new_pool(const CUmemPoolProps *properties, CUdevice device) {
    CUmemoryPool pool = allocate(sizeof *pool);
    *pool = (struct CUmemPoolHandle_st){.next = pools, .properties = *properties, .device = device, .reuse = {1, 1, 1}};
    return pools = pool;
}

static CUmemoryPool default_pool(CUdevice device) {
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    if (!default_pools[device]) {
        default_pools[device] = new_pool(&properties, device);
        default_pools[device]->is_default = 1;
    }
    return default_pools[device];
}
static CUmemoryPool current_pool(CUdevice device) { return current_pools[device] ? current_pools[device] : default_pool(device); }

/* The first gap of a segment that is large enough; returns 0 if there is none. */
static uint64_t take_part(struct segment *segment, uint64_t size) {
    uint64_t at = segment->base;
    struct part **next = &segment->parts;
    for (; *next && (*next)->base - at < size; next = &(*next)->next) at = (*next)->base + (*next)->size;
    if (!*next && segment->base + segment->size - at < size) return 0;
    struct part *part = allocate(sizeof *part);
    *part = (struct part){*next, at, size};
    *next = part;
    return at;
}

static void drop_segment(CUmemoryPool pool, struct segment **at) {
    struct segment *segment = *at;
    *at = segment->next;
    pool->reserved -= segment->size;
    free_addresses(segment->base, segment->size);
    drop_physical(segment->physical);
    free(segment);
}

static void trim(CUmemoryPool pool, uint64_t keep) {
    for (struct segment **at = &pool->segments; *at && pool->reserved > keep;) {
        if ((*at)->parts || pool->reserved - (*at)->size < keep) at = &(*at)->next;
        else drop_segment(pool, at);
    }
}

void trim_pools(void) {
    for (CUmemoryPool each = pools; each; each = each->next) trim(each, each->threshold);
}

static CUresult grow(CUmemoryPool pool, uint64_t size) {
    struct physical *physical;
    CUresult result = create_physical(pool->device, size, &physical);
    if (result) return result;
    struct segment *segment = allocate(sizeof *segment);
    *segment = (struct segment){pool->segments, reserve_addresses(size, LARGE_PAGE, 0), size, physical, NULL};
    pool->segments = segment;
    pool->reserved += size;
    if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
}

/* Memory that is kept in vain must not make an allocation fail. */
static CUresult grow_somehow(CUmemoryPool pool, uint64_t size) {
    CUresult result = grow(pool, round_up(size, STEP));
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        for (CUmemoryPool each = pools; each; each = each->next) trim(each, 0);
        result = grow(pool, round_up(size, LARGE_PAGE));
    }
    return result;
}

CUresult allocate_from_pool(CUmemoryPool pool, uint64_t size, CUdeviceptr *address) {
    if (!size || !address) return CUDA_ERROR_INVALID_VALUE;
    if (pool->device >= 0 && size > device_at(pool->device)->total) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t rounded = round_up(size, UNIT), base = 0;
    struct segment *segment = pool->segments;
    for (; segment && !(base = take_part(segment, rounded));) segment = segment->next;
    if (!segment) {
        CUresult result = grow_somehow(pool, rounded);
        if (result) return result;
        segment = pool->segments;
        base = take_part(segment, rounded);
    }
    struct range *range = add_range(POOL_RANGE, base, rounded, pool->device);
    range->physical = segment->physical, range->pool = pool, range->buffer_size = size;
    pool->used += rounded;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    *address = base;
    return CUDA_SUCCESS;
}

CUresult free_to_pool(struct range *range) {
    CUmemoryPool pool = range->pool;
    for (struct segment *segment = pool->segments; segment; segment = segment->next)
        for (struct part **at = &segment->parts; *at; at = &(*at)->next) {
            if ((*at)->base != range->base) continue;
            struct part *part = *at;
            *at = part->next;
            pool->used -= part->size;
            free(part);
            remove_range(range);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static void free_all_parts(CUmemoryPool pool) {
    struct range *range;
    for (size_t at = 0; (range = range_number(at));)
        if (range->kind == POOL_RANGE && range->pool == pool) free_to_pool(range);
        else at++;
}

void free_pools_of(CUdevice device) {
    for (CUmemoryPool each = pools; each; each = each->next) {
        if (each->device != device) continue;
        free_all_parts(each);
        trim(each, 0);
    }
}

static CUresult allocate_on(CUstream handle, CUmemoryPool pool, size_t size, CUdeviceptr *dptr) {
    CUstream stream;
    CUresult result = dptr ? find_stream(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    if (!pool) pool = current_pool(stream->context->device);
    if (!is_pool(pool)) return CUDA_ERROR_INVALID_VALUE;
    if (!stream->capture) return allocate_from_pool(pool, size, dptr);
    if ((result = usable_capture(stream))) return result;
    CUDA_MEM_ALLOC_NODE_PARAMS params = {.poolProps = pool->properties, .bytesize = size};
    result = plan_allocation(&params);
    if (result) return result;
    CUgraphNode node = new_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEM_ALLOC, stream->last_nodes.nodes, stream->last_nodes.count);
    node->of.allocation = params;
    *dptr = params.dptr;
    return capture_node(stream, node);
}
CUresult do_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) { return allocate_on(hStream, NULL, bytesize, dptr); }
CUresult do_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
    return pool ? allocate_on(hStream, pool, bytesize, dptr) : CUDA_ERROR_INVALID_VALUE;
}

CUresult do_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    CUstream stream;
    CUresult result = find_stream(hStream, &stream);
    if (result || !dptr) return result;
    struct range *range = find_range(dptr);
    if (!range || range->base != dptr) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) {
        if ((result = usable_capture(stream))) return result;
        if (range->kind != GRAPH_RANGE) return refuse_for_stream(stream);
        CUgraphNode node = new_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEM_FREE, stream->last_nodes.nodes, stream->last_nodes.count);
        node->of.freed = dptr;
        return capture_node(stream, node);
    }
    if (range->kind == POOL_RANGE) return free_to_pool(range);
    if (range->kind == GRAPH_RANGE) return free_graph_memory(range);
    return range->kind == EXTERNAL_RANGE ? free_range(range) : CUDA_ERROR_INVALID_VALUE;
}

CUresult do_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps) {
    if (!pool || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    int is_on_device = poolProps->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (is_on_device && !device_at(poolProps->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    if (poolProps->handleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    *pool = new_pool(poolProps, is_on_device ? poolProps->location.id : -1);
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolDestroy(CUmemoryPool pool) {
    if (!is_pool(pool) || pool->is_default) return CUDA_ERROR_INVALID_VALUE;
    free_all_parts(pool);
    trim(pool, 0);
    for (int device = 0; device < device_total(); device++)
        if (current_pools[device] == pool) current_pools[device] = NULL;
    CUmemoryPool *at = &pools;
    while (*at != pool) at = &(*at)->next;
    *at = pool->next;
    free(pool);
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep) {
    if (!is_pool(pool)) return CUDA_ERROR_INVALID_VALUE;
    trim(pool, minBytesToKeep);
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value) {
    if (!is_pool(pool) || !value) return CUDA_ERROR_INVALID_VALUE;
    cuuint64_t *wide = value;
    switch ((int)attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: *(int *)value = pool->reuse[0]; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: *(int *)value = pool->reuse[1]; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = pool->reuse[2]; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *wide = pool->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *wide = pool->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *wide = pool->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *wide = pool->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *wide = pool->used_high; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value) {
    if (!is_pool(pool) || !value) return CUDA_ERROR_INVALID_VALUE;
    cuuint64_t wide = attr >= CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ? *(cuuint64_t *)value : 0;
    switch ((int)attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: pool->reuse[0] = *(int *)value; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: pool->reuse[1] = *(int *)value; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: pool->reuse[2] = *(int *)value; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->threshold = wide; break;
    /* High marks can only be reset. */
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: if (wide) return CUDA_ERROR_INVALID_VALUE; pool->reserved_high = pool->reserved; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: if (wide) return CUDA_ERROR_INVALID_VALUE; pool->used_high = pool->used; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count) {
    return is_pool(pool) && map && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult do_cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location) {
    if (!flags || !is_pool(memPool) || !location) return CUDA_ERROR_INVALID_VALUE;
    *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!pool_out) return CUDA_ERROR_INVALID_VALUE;
    *pool_out = default_pool(dev);
    return CUDA_SUCCESS;
}
CUresult do_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    *pool = current_pool(dev);
    return CUDA_SUCCESS;
}
CUresult do_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!is_pool(pool) || pool->device != dev) return CUDA_ERROR_INVALID_VALUE;
    current_pools[dev] = pool;
    return CUDA_SUCCESS;
}
CUresult do_cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type) {
    if (!location || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return location ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    return do_cuDeviceGetDefaultMemPool(pool_out, location->id);
}
CUresult do_cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    if (!location || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return location ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    return do_cuDeviceGetMemPool(pool, location->id);
}
CUresult do_cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool) {
    if (!location || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return location ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    return do_cuDeviceSetMemPool(location->id, pool);
}

/* A pool's descriptor says only on which card it is; its memory is shared by pointers. */
CUresult do_cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags) {
    if (!handle_out || !is_pool(pool) || flags || pool->device < 0) return CUDA_ERROR_INVALID_VALUE;
    if (handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(pool->properties.handleTypes & handleType)) return CUDA_ERROR_INVALID_VALUE;
    int file = memfd_create("fake-device-pool", MFD_CLOEXEC), card = device_at(pool->device)->card;
    if (file < 0 || pwrite(file, &card, sizeof card, 0) != (ssize_t)sizeof card) return CUDA_ERROR_OPERATING_SYSTEM;
    *(int *)handle_out = file;
    return CUDA_SUCCESS;
}
CUresult do_cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags) {
    int card;
    if (!pool_out || flags || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    if (pread((int)(intptr_t)handle, &card, sizeof card, 0) != (ssize_t)sizeof card) return CUDA_ERROR_INVALID_VALUE;
    for (CUdevice device = 0; device < device_total(); device++)
        if (device_at(device)->card == card) {
            *pool_out = new_pool(&default_pool(device)->properties, device);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult do_cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr) {
    const struct range *range = find_range(ptr);
    if (!shareData_out || !range || range->kind != POOL_RANGE || range->base != ptr) return CUDA_ERROR_INVALID_VALUE;
    struct shared_memory shared;
    CUresult result = share_physical(range->physical, &shared);
    if (result) return result;
    for (const struct segment *each = range->pool->segments; each; each = each->next)
        if (each->physical == range->physical) shared.offset = ptr - each->base;
    shared.size = range->buffer_size;
    memset(shareData_out, 0, sizeof *shareData_out);
    memcpy(shareData_out, &shared, sizeof shared);
    return CUDA_SUCCESS;
}
CUresult do_cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData) {
    struct shared_memory shared;
    struct physical *physical;
    if (!ptr_out || !is_pool(pool) || !shareData) return CUDA_ERROR_INVALID_VALUE;
    memcpy(&shared, shareData, sizeof shared);
    CUresult result = import_physical(&shared, &physical);
    if (result) return result;
    uint64_t size = round_up(shared.size, LARGE_PAGE);
    struct range *range = add_range(EXTERNAL_RANGE, reserve_addresses(size, LARGE_PAGE, 0), size, physical->device);
    range->physical = physical, range->buffer_size = shared.size, range->owns_address = 1;
    *ptr_out = range->base;
    return CUDA_SUCCESS;
}
