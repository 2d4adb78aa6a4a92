/* Memory of pools, in the order of streams: counted by what the pools have reserved, used or not. */
#include "charging.h"
#include "process.h"
#include "usage.h"

/* A pool grows by at least so much. */
#define GROWTH (32ULL << 20)

static uint64_t reserved_by(CUmemoryPool pool, uint64_t otherwise) {
    cuuint64_t reserved = 0;
    return REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) == CUDA_SUCCESS ? reserved : otherwise;
}

/* Count what a pool has reserved now; `extra` is reserved for its growth already. Returns 0 if it has grown further and
 * the limit leaves no room; it is counted all the same. */
static int settle(struct record *pool, uint64_t extra) {
    uint64_t now = round_up(reserved_by((CUmemoryPool)(uintptr_t)pool->key, pool->bytes), BLOCK), counted = pool->bytes + extra;
    int fits = now <= counted || reserve(pool->card, now - counted);
    if (!fits)
        account(pool->card, now - counted);
    if (now < counted)
        release(pool->card, counted - now);
    pool->bytes = now;
    return fits;
}

static uint64_t used_of(const struct record *pool) {
    cuuint64_t used = 0;
    REAL(cuMemPoolGetAttribute)((CUmemoryPool)(uintptr_t)pool->key, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);
    return used;
}

/* `handles` marks pools of host memory, `mappings` those that the program has destroyed, which live on while there is
 * memory in use of them. */
static int next_pool(uint64_t *place, struct record *pool) {
    while (next_record(POOL, place, pool))
        if (!pool->handles)
            return 1;
    return 0;
}

static CUresult destroy_pool(struct record *pool) {
    CUresult result = REAL(cuMemPoolDestroy)((CUmemoryPool)(uintptr_t)pool->key);
    if (result == CUDA_SUCCESS && take_record(POOL, pool->key, pool) && !pool->handles)
        release(pool->card, pool->bytes);
    return result;
}

/* Memory of an address that was freed in the order of a stream is in use until the stream comes there. */
static int is_stream_busy(CUstream stream, int per_thread) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = per_thread ? REAL(cuStreamIsCapturing_ptsz)(stream, &status) : REAL(cuStreamIsCapturing)(stream, &status);
    /* Asking a stream that takes part in a capture would end the capture. */
    if (status != CU_STREAM_CAPTURE_STATUS_NONE || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return 1;
    return (per_thread ? REAL(cuStreamQuery_ptsz)(stream) : REAL(cuStreamQuery)(stream)) == CUDA_ERROR_NOT_READY;
}

/* `object` is the stream, `mappings` whether its default is that of the thread. */
static void settle_freed(void) {
    struct record freed;
    for (uint64_t place = 0; next_record(FREED, &place, &freed);)
        if (!is_stream_busy((CUstream)(uintptr_t)freed.object, (int)freed.mappings) && take_record(FREED, freed.key, &freed)) {
            freed.kind = POINTER;
            uncharge_record(&freed);
        }
}

static void settle_all(void) {
    struct record pool;
    for (uint64_t place = 0; next_pool(&place, &pool);) {
        settle(&pool, 0);
        change_record(&pool);
        if (pool.mappings && !used_of(&pool))
            destroy_pool(&pool);
    }
    settle_freed();
}

/* The unused memory of all pools goes back to the driver. */
static void trim_all(void) {
    struct record pool;
    for (uint64_t place = 0; next_pool(&place, &pool);)
        REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool.key, 0);
    settle_all();
}

static int is_capturing(CUstream stream, int per_thread) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = per_thread ? REAL(cuStreamIsCapturing_ptsz)(stream, &status) : REAL(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

struct request { CUdeviceptr *pointer; size_t bytes; CUmemoryPool pool; CUstream stream; int per_thread, from_pool; };

static CUresult call_driver(const struct request *wanted) {
    if (wanted->from_pool)
        return wanted->per_thread ? REAL(cuMemAllocFromPoolAsync_ptsz)(wanted->pointer, wanted->bytes, wanted->pool, wanted->stream)
                                  : REAL(cuMemAllocFromPoolAsync)(wanted->pointer, wanted->bytes, wanted->pool, wanted->stream);
    return wanted->per_thread ? REAL(cuMemAllocAsync_ptsz)(wanted->pointer, wanted->bytes, wanted->stream)
                              : REAL(cuMemAllocAsync)(wanted->pointer, wanted->bytes, wanted->stream);
}

static CUresult free_again(const struct request *wanted) {
    CUdeviceptr pointer = *wanted->pointer;
    *wanted->pointer = 0;
    if (wanted->per_thread)
        REAL(cuMemFreeAsync_ptsz)(pointer, wanted->stream);
    else
        REAL(cuMemFreeAsync)(pointer, wanted->stream);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* How far the pool will grow is not known before: as much as is asked for is reserved, in the pool's steps. Less than a
 * step that is left of the limit is not for pools: they would have it exceeded until they are asked. */
static uint64_t reserve_growth(unsigned card, size_t bytes) {
    uint64_t growth = round_up(bytes, GROWTH);
    if (reserve(card, growth))
        return growth;
    trim_all();
    return reserve(card, growth) ? growth : 0;
}

static CUresult allocate(const struct request *wanted, struct record *pool) {
    uint64_t growth = reserve_growth(pool->card, wanted->bytes);
    if (!growth)
        return CUDA_ERROR_OUT_OF_MEMORY;
    /* Trimming has changed it. */
    find_record(POOL, pool->key, pool);
    CUresult result = call_driver(wanted);
    int fits = settle(pool, growth);
    change_record(pool);
    atomic_store(&process()->has_unsettled, 1);
    if (fits)
        return result;
    if (result == CUDA_SUCCESS)
        result = free_again(wanted);
    trim_all();
    return result;
}

/* What is freed on a stream is not unused before the stream has come there. */
static void synchronize(const struct request *wanted) {
    /* Another thread may be capturing. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    wanted->per_thread ? REAL(cuStreamSynchronize_ptsz)(wanted->stream) : REAL(cuStreamSynchronize)(wanted->stream);
    REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

static CUresult device_of_stream(CUstream stream, CUdevice *device) {
    CUcontext context;
    /* The default streams are those of the current context. */
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return REAL(cuCtxGetDevice)(device);
    CUresult result = REAL(cuStreamGetCtx)(stream, &context);
    if (result == CUDA_SUCCESS)
        result = REAL(cuCtxPushCurrent_v2)(context);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuCtxGetDevice)(device);
    REAL(cuCtxPopCurrent_v2)(&context);
    return result;
}

/* Pools that were created here have records; others are the default pools of devices, or of the host. */
static int is_default_pool(CUmemoryPool pool, CUdevice *device) {
    CUmemoryPool found;
    int number = 0;
    REAL(cuDeviceGetCount)(&number);
    for (*device = 0; *device < number; ++*device)
        if (REAL(cuDeviceGetDefaultMemPool)(&found, *device) == CUDA_SUCCESS && found == pool)
            return 1;
    return 0;
}

/* Managed memory may come to any device: it counts on the current one. Drivers without such pools do not know this. */
static int is_managed_pool(CUmemoryPool pool, CUdevice *device) {
    CUmemAllocationType type = CU_MEM_ALLOCATION_TYPE_INVALID;
    return REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &type) == CUDA_SUCCESS &&
           type == CU_MEM_ALLOCATION_TYPE_MANAGED && REAL(cuCtxGetDevice)(device) == CUDA_SUCCESS;
}

static CUresult put_pool(CUmemoryPool pool, int is_on_device, CUdevice device, struct record *record) {
    unsigned card = 0;
    CUresult result = is_on_device ? card_of_device(device, &card) : CUDA_SUCCESS;
    *record = (struct record){.kind = POOL, .key = (uint64_t)(uintptr_t)pool, .card = (uint8_t)card, .shared = NOT_SHARED,
                              .handles = !is_on_device};
    if (result == CUDA_SUCCESS && !put_record(*record))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    return result;
}

static CUresult find_pool(const struct request *wanted, struct record *record) {
    CUmemoryPool pool = wanted->pool;
    CUdevice device;
    CUresult result = CUDA_SUCCESS;
    int is_on_device = 1;
    if (!wanted->from_pool) {
        result = device_of_stream(wanted->stream, &device);
        if (result == CUDA_SUCCESS)
            result = REAL(cuDeviceGetMemPool)(&pool, device);
    }
    if (result != CUDA_SUCCESS || find_record(POOL, (uint64_t)(uintptr_t)pool, record))
        return result;
    if (wanted->from_pool)
        is_on_device = is_default_pool(pool, &device) || is_managed_pool(pool, &device);
    return put_pool(pool, is_on_device, device, record);
}

static CUresult attempt(const struct request *wanted) {
    struct record pool;
    lock *pools = &process()->pools_lock;
    acquire(pools);
    CUresult result = find_pool(wanted, &pool);
    if (result == CUDA_SUCCESS)
        result = pool.handles ? call_driver(wanted) : allocate(wanted, &pool);
    let_go(pools);
    return result;
}

static CUresult allocate_from_pool(struct request wanted) {
    /* It becomes a node of a graph, which is counted at its launch. */
    if (is_capturing(wanted.stream, wanted.per_thread))
        return call_driver(&wanted);
    CUresult result = attempt(&wanted);
    if (result != CUDA_ERROR_OUT_OF_MEMORY)
        return result;
    /* Without the lock: the stream may wait for what another thread allocates. */
    synchronize(&wanted);
    result = attempt(&wanted);
    unsigned card;
    if (result == CUDA_ERROR_OUT_OF_MEMORY && current_card(&card) == CUDA_SUCCESS)
        report_refusal(card, wanted.bytes);
    return result;
}

HOOK(cuMemAllocAsync)(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    return allocate_from_pool((struct request){pointer, bytes, NULL, stream, 0, 0});
}
HOOK(cuMemAllocAsync_ptsz)(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    return allocate_from_pool((struct request){pointer, bytes, NULL, stream, 1, 0});
}
HOOK(cuMemAllocFromPoolAsync)(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return allocate_from_pool((struct request){pointer, bytes, pool, stream, 0, 1});
}
HOOK(cuMemAllocFromPoolAsync_ptsz)(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return allocate_from_pool((struct request){pointer, bytes, pool, stream, 1, 1});
}

/* Freed memory stays with its pool; what the pool gives back is counted when somebody asks how much there is. */
void settle_pools(void) {
    lock *pools = &process()->pools_lock;
    acquire(pools);
    settle_all();
    let_go(pools);
}

/* Without a location, managed memory counts on the current device. */
static int find_device(const CUmemPoolProps *wanted, CUdevice *device) {
    if (is_device_location(&wanted->location, device))
        return 1;
    return wanted->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED &&
           (REAL(cuCtxGetDevice)(device) == CUDA_SUCCESS || REAL(cuDeviceGet)(device, 0) == CUDA_SUCCESS);
}

void trim_pools(void) {
    lock *pools = &process()->pools_lock;
    acquire(pools);
    trim_all();
    let_go(pools);
}

/* The driver takes back what pools keep unused when a program waits for a stream: others may have room then. */
static CUresult settled(CUresult result) {
    if (result == CUDA_SUCCESS && atomic_load_explicit(&process()->has_unsettled, memory_order_relaxed))
        settle_pools();
    return result;
}

HOOK(cuStreamSynchronize)(CUstream stream) { return settled(REAL(cuStreamSynchronize)(stream)); }
HOOK(cuStreamSynchronize_ptsz)(CUstream stream) { return settled(REAL(cuStreamSynchronize_ptsz)(stream)); }
HOOK(cuCtxSynchronize)(void) { return settled(REAL(cuCtxSynchronize)()); }
HOOK(cuCtxSynchronize_v2)(CUcontext context) { return settled(REAL(cuCtxSynchronize_v2)(context)); }
HOOK(cuEventSynchronize)(CUevent event) { return settled(REAL(cuEventSynchronize)(event)); }

HOOK(cuMemPoolCreate)(CUmemoryPool *pool, const CUmemPoolProps *wanted) {
    CUdevice device = 0;
    struct record record;
    int is_on_device = wanted && find_device(wanted, &device);
    CUresult result = REAL(cuMemPoolCreate)(pool, wanted);
    if (result == CUDA_SUCCESS && (result = put_pool(*pool, is_on_device, device, &record)) != CUDA_SUCCESS)
        REAL(cuMemPoolDestroy)(*pool);
    return result;
}

/* A pool that is destroyed is no device's current one. */
static void stop_using(CUmemoryPool pool) {
    CUmemoryPool found;
    int number = 0;
    REAL(cuDeviceGetCount)(&number);
    for (CUdevice device = 0; device < number; device++)
        if (REAL(cuDeviceGetMemPool)(&found, device) == CUDA_SUCCESS && found == pool &&
            REAL(cuDeviceGetDefaultMemPool)(&found, device) == CUDA_SUCCESS)
            REAL(cuDeviceSetMemPool)(device, found);
}

/* The driver keeps a pool while there is memory in use of it, but does not say any more how much. So it is destroyed when
 * there is none. */
static CUresult destroy_or_mark(CUmemoryPool pool, struct record *record) {
    if (record->handles || !used_of(record))
        return destroy_pool(record);
    record->mappings = 1;
    change_record(record);
    stop_using(pool);
    return CUDA_SUCCESS;
}

HOOK(cuMemPoolDestroy)(CUmemoryPool pool) {
    struct record record;
    lock *pools = &process()->pools_lock;
    acquire(pools);
    int is_known = find_record(POOL, (uint64_t)(uintptr_t)pool, &record);
    CUresult result = is_known ? destroy_or_mark(pool, &record) : REAL(cuMemPoolDestroy)(pool);
    let_go(pools);
    return result;
}

HOOK(cuMemPoolTrimTo)(CUmemoryPool pool, size_t kept) {
    CUresult result = REAL(cuMemPoolTrimTo)(pool, kept);
    settle_pools();
    return result;
}

/* The address may be one of cuMemAlloc, too. */
static CUresult free_async(__typeof__(cuMemFreeAsync) *real, CUdeviceptr pointer, CUstream stream, int per_thread) {
    struct record record;
    int is_known = take_record(POINTER, pointer, &record);
    CUresult result = real(pointer, stream);
    if (!is_known)
        return result;
    if (result != CUDA_SUCCESS) {
        put_record(record);
    } else if (is_stream_busy(stream, per_thread)) {
        record.kind = FREED, record.object = (uint64_t)(uintptr_t)stream, record.mappings = (uint32_t)per_thread;
        put_record(record);
        atomic_store(&process()->has_unsettled, 1);
    } else {
        uncharge_record(&record);
    }
    return result;
}

HOOK(cuMemFreeAsync)(CUdeviceptr pointer, CUstream stream) {
    return free_async(REAL(cuMemFreeAsync), pointer, stream, 0);
}
HOOK(cuMemFreeAsync_ptsz)(CUdeviceptr pointer, CUstream stream) {
    return free_async(REAL(cuMemFreeAsync_ptsz), pointer, stream, 1);
}
