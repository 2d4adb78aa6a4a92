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
 * the limit leaves no room. */
static int settle(struct record *pool, uint64_t extra) {
    uint64_t now = round_up(reserved_by((CUmemoryPool)(uintptr_t)pool->key, pool->bytes), BLOCK), counted = pool->bytes + extra;
    pool->bytes = counted;
    if (now > counted && !reserve(pool->card, now - counted))
        return 0;
    if (now < counted)
        release(pool->card, counted - now);
    pool->bytes = now;
    return 1;
}

static void trim(struct record *pool, void *unused) {
    (void)unused;
    REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool->key, 0);
    settle(pool, 0);
}

static void settle_each(struct record *pool, void *unused) {
    (void)unused;
    settle(pool, 0);
}

static int is_capturing(CUstream stream, int per_thread) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = per_thread ? REAL(cuStreamIsCapturing_ptsz)(stream, &status) : REAL(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The pool's unused memory goes back to the driver, that of other pools of this process as well. What is freed on a
 * stream is not unused before the stream has come there. */
static int make_room(struct record *pool, uint64_t bytes, CUstream stream, int per_thread) {
    for (int attempt = 0; attempt < 2; attempt++) {
        if (attempt)
            per_thread ? REAL(cuStreamSynchronize_ptsz)(stream) : REAL(cuStreamSynchronize)(stream);
        trim(pool, NULL);
        each_record(POOL, trim, NULL);
        if (reserve(pool->card, bytes))
            return 1;
    }
    return 0;
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

/* How far the pool will grow is not known before: as much as is asked for is reserved, in the pool's steps. */
static CUresult allocate(const struct request *wanted, struct record *pool) {
    uint64_t growth = round_up(wanted->bytes, GROWTH);
    int is_reserved = reserve(pool->card, growth);
    if (!is_reserved)
        is_reserved = make_room(pool, growth, wanted->stream, wanted->per_thread);
    if (!is_reserved) {
        /* Near the limit, a smaller step may do. */
        growth = round_up(wanted->bytes, BLOCK);
        if (!reserve(pool->card, growth))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = call_driver(wanted);
    if (settle(pool, growth))
        return result;
    if (result == CUDA_SUCCESS)
        result = free_again(wanted);
    make_room(pool, 0, wanted->stream, wanted->per_thread);
    return result;
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

/* Pools that were created here have records; others are the default pools of devices. */
static CUresult device_of_pool(CUmemoryPool pool, CUdevice *device) {
    CUmemoryPool found;
    int number = 0;
    CUresult result = REAL(cuDeviceGetCount)(&number);
    for (*device = 0; result == CUDA_SUCCESS && *device < number; ++*device)
        if (REAL(cuDeviceGetDefaultMemPool)(&found, *device) == CUDA_SUCCESS && found == pool)
            return CUDA_SUCCESS;
    return result == CUDA_SUCCESS ? CUDA_ERROR_INVALID_VALUE : result;
}

static CUresult find_pool(const struct request *wanted, struct record *record) {
    CUmemoryPool pool = wanted->pool;
    CUdevice device;
    unsigned card = 0;
    CUresult result = CUDA_SUCCESS;
    if (!wanted->from_pool) {
        result = device_of_stream(wanted->stream, &device);
        if (result == CUDA_SUCCESS)
            result = REAL(cuDeviceGetMemPool)(&pool, device);
    }
    if (result != CUDA_SUCCESS || take_record(POOL, (uint64_t)(uintptr_t)pool, record))
        return result;
    if (wanted->from_pool)
        result = device_of_pool(pool, &device);
    if (result == CUDA_SUCCESS)
        result = card_of_device(device, &card);
    *record = (struct record){.kind = POOL, .key = (uint64_t)(uintptr_t)pool, .card = (uint8_t)card, .shared = NOT_SHARED};
    return result;
}

static CUresult allocate_from_pool(struct request wanted) {
    struct record pool;
    /* It becomes a node of a graph, which is counted at its launch. */
    if (is_capturing(wanted.stream, wanted.per_thread))
        return call_driver(&wanted);
    lock *pools = &process()->pools_lock;
    acquire(pools);
    CUresult result = find_pool(&wanted, &pool);
    if (result == CUDA_SUCCESS) {
        result = pool.handles ? call_driver(&wanted) : allocate(&wanted, &pool);
        put_record(pool);
    }
    let_go(pools);
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
    each_record(POOL, settle_each, NULL);
    let_go(pools);
}

HOOK(cuMemPoolCreate)(CUmemoryPool *pool, const CUmemPoolProps *wanted) {
    CUdevice device;
    unsigned card = 0;
    int is_on_device = wanted && is_device_location(&wanted->location, &device);
    CUresult result = is_on_device ? card_of_device(device, &card) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = REAL(cuMemPoolCreate)(pool, wanted);
    /* `handles` marks pools of host memory. */
    if (result == CUDA_SUCCESS)
        put_record((struct record){.kind = POOL, .key = (uint64_t)(uintptr_t)*pool, .card = (uint8_t)card,
                                   .shared = NOT_SHARED, .handles = !is_on_device});
    return result;
}

HOOK(cuMemPoolDestroy)(CUmemoryPool pool) {
    struct record record;
    lock *pools = &process()->pools_lock;
    acquire(pools);
    int is_known = take_record(POOL, (uint64_t)(uintptr_t)pool, &record);
    CUresult result = REAL(cuMemPoolDestroy)(pool);
    if (is_known && result == CUDA_SUCCESS)
        release(record.card, record.bytes);
    else if (is_known)
        put_record(record);
    let_go(pools);
    return result;
}

HOOK(cuMemPoolTrimTo)(CUmemoryPool pool, size_t kept) {
    CUresult result = REAL(cuMemPoolTrimTo)(pool, kept);
    settle_pools();
    return result;
}

/* The address may be one of cuMemAlloc, too. */
static CUresult free_async(__typeof__(cuMemFreeAsync) *real, CUdeviceptr pointer, CUstream stream) {
    struct record record;
    int is_known = take_record(POINTER, pointer, &record);
    CUresult result = real(pointer, stream);
    if (is_known && result == CUDA_SUCCESS)
        uncharge_record(&record);
    else if (is_known)
        put_record(record);
    return result;
}

HOOK(cuMemFreeAsync)(CUdeviceptr pointer, CUstream stream) { return free_async(REAL(cuMemFreeAsync), pointer, stream); }
HOOK(cuMemFreeAsync_ptsz)(CUdeviceptr pointer, CUstream stream) {
    return free_async(REAL(cuMemFreeAsync_ptsz), pointer, stream);
}
