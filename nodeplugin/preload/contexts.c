/* A context takes hundreds of MiB, which are charged before it is created. When it goes, so does its memory. */
#include "charging.h"
#include "limits.h"
#include "process.h"
#include "usage.h"

CUresult cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device);
CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *resolve);
CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *resolve);

static CUresult charge_context(CUdevice device, struct record *record) {
    unsigned card;
    CUresult result = card_of_device(device, &card);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t bytes = round_up(limits_of(card).context_bytes, BLOCK);
    *record = (struct record){.kind = CONTEXT, .card = (uint8_t)card, .bytes = bytes, .shared = NOT_SHARED};
    return reserve_room(card, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult put_context(CUresult result, struct record *record, const CUcontext *context) {
    if (result != CUDA_SUCCESS) {
        release(record->card, record->bytes);
        return result;
    }
    record->key = record->context = (uint64_t)(uintptr_t)*context;
    put_record(*record);
    return result;
}

/* The lock keeps a new context from having the address of one whose memory is being given back. */
#define CREATE(name, ...) do { \
        struct record record; \
        CUresult result = charge_context(device, &record); \
        if (result != CUDA_SUCCESS) \
            return result; \
        acquire(&process()->contexts_lock); \
        result = put_context(REAL(name)(__VA_ARGS__), &record, context); \
        let_go(&process()->contexts_lock); \
        return result; \
    } while (0)

HOOK(cuCtxCreate)(CUcontext *context, unsigned int flags, CUdevice device) { CREATE(cuCtxCreate, context, flags, device); }
HOOK(cuCtxCreate_v2)(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v2, context, flags, device);
}
HOOK(cuCtxCreate_v3)(CUcontext *context, CUexecAffinityParam *affinity, int number, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v3, context, affinity, number, flags, device);
}
HOOK(cuCtxCreate_v4)(CUcontext *context, CUctxCreateParams *wanted, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v4, context, wanted, flags, device);
}
HOOK(cuGLCtxCreate)(CUcontext *context, unsigned int flags, CUdevice device) { CREATE(cuGLCtxCreate, context, flags, device); }
HOOK(cuGLCtxCreate_v2)(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuGLCtxCreate_v2, context, flags, device);
}
HOOK(cuVDPAUCtxCreate)(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *resolve) {
    CREATE(cuVDPAUCtxCreate, context, flags, device, display, resolve);
}
HOOK(cuVDPAUCtxCreate_v2)(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *resolve) {
    CREATE(cuVDPAUCtxCreate_v2, context, flags, device, display, resolve);
}

/* Everything that was allocated with a context is gone with it; pools and graphs say themselves what they still have. */
static void uncharge_context(uint64_t context) {
    struct record record;
    while (take_record_of_context(context, &record))
        uncharge_record(&record);
    settle_pools();
    settle_graphs();
}

static CUresult destroy(__typeof__(cuCtxDestroy_v2) *real, CUcontext context) {
    acquire(&process()->contexts_lock);
    CUresult result = real(context);
    if (result == CUDA_SUCCESS)
        uncharge_context((uint64_t)(uintptr_t)context);
    let_go(&process()->contexts_lock);
    return result;
}

HOOK(cuCtxDestroy)(CUcontext context) { return destroy(REAL(cuCtxDestroy), context); }
HOOK(cuCtxDestroy_v2)(CUcontext context) { return destroy(REAL(cuCtxDestroy_v2), context); }

/* The older way to count references: the last one destroys the context. Whether it was the last cannot be asked. */
HOOK(cuCtxDetach)(CUcontext context) {
    unsigned int version;
    acquire(&process()->contexts_lock);
    CUresult result = REAL(cuCtxDetach)(context);
    if (result == CUDA_SUCCESS && REAL(cuCtxGetApiVersion)(context, &version) != CUDA_SUCCESS)
        uncharge_context((uint64_t)(uintptr_t)context);
    let_go(&process()->contexts_lock);
    return result;
}

static int is_primary_active(CUdevice device) {
    unsigned int flags;
    int active = 0;
    return REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

/* Several calls may end a primary context: what it was charged is given back once it is no longer active. */
static void settle_primaries(void) {
    for (CUdevice device = 0; device < MAX_DEVICES; device++) {
        uint64_t *context = &process()->primary_contexts[device];
        if (!*context || is_primary_active(device))
            continue;
        uncharge_context(*context);
        *context = 0;
    }
}

/* One primary context for each device, charged by what activates it. The lock keeps two threads from both doing so. */
HOOK(cuDevicePrimaryCtxRetain)(CUcontext *context, CUdevice device) {
    struct record record = {0};
    lock *contexts = &process()->contexts_lock;
    acquire(contexts);
    CUresult result = is_primary_active(device) ? CUDA_SUCCESS : charge_context(device, &record);
    if (result == CUDA_SUCCESS) {
        result = REAL(cuDevicePrimaryCtxRetain)(context, device);
        if (record.kind)
            put_context(result, &record, context);
        if (result == CUDA_SUCCESS && device < MAX_DEVICES)
            process()->primary_contexts[device] = (uint64_t)(uintptr_t)*context;
    }
    let_go(contexts);
    return result;
}

static CUresult release_primary(__typeof__(cuDevicePrimaryCtxRelease_v2) *real, CUdevice device) {
    lock *contexts = &process()->contexts_lock;
    acquire(contexts);
    CUresult result = real(device);
    settle_primaries();
    let_go(contexts);
    return result;
}

HOOK(cuDevicePrimaryCtxRelease)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxRelease), device); }
HOOK(cuDevicePrimaryCtxRelease_v2)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxRelease_v2), device); }
HOOK(cuDevicePrimaryCtxReset)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxReset), device); }
HOOK(cuDevicePrimaryCtxReset_v2)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxReset_v2), device); }

/* While a green context holds a reference, asking for the handle takes one more for a moment. */
static CUcontext find_primary(CUdevice device) {
    CUcontext primary = NULL;
    if (is_primary_active(device) && REAL(cuDevicePrimaryCtxRetain)(&primary, device) == CUDA_SUCCESS)
        REAL(cuDevicePrimaryCtxRelease_v2)(device);
    return primary;
}

static CUresult create_green(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags) {
    struct record record = {0};
    CUcontext plain = NULL;
    CUresult result = is_primary_active(device) ? CUDA_SUCCESS : charge_context(device, &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuGreenCtxCreate)(context, resources, device, flags);
    CUcontext primary = find_primary(device);
    if (record.kind)
        put_context(primary ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT, &record, &primary);
    if (primary && device < MAX_DEVICES)
        process()->primary_contexts[device] = (uint64_t)(uintptr_t)primary;
    if (result == CUDA_SUCCESS && REAL(cuCtxFromGreenCtx)(&plain, *context) == CUDA_SUCCESS)
        put_green_context((uint64_t)(uintptr_t)plain, (uint64_t)(uintptr_t)primary);
    return result;
}

/* It is the primary context with part of the multiprocessors, and retains it: what is allocated with it outlives it. */
HOOK(cuGreenCtxCreate)(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags) {
    acquire(&process()->contexts_lock);
    CUresult result = create_green(context, resources, device, flags);
    let_go(&process()->contexts_lock);
    return result;
}

HOOK(cuGreenCtxDestroy)(CUgreenCtx context) {
    CUcontext plain = NULL;
    acquire(&process()->contexts_lock);
    REAL(cuCtxFromGreenCtx)(&plain, context);
    CUresult result = REAL(cuGreenCtxDestroy)(context);
    if (result == CUDA_SUCCESS)
        take_record(GREEN, (uint64_t)(uintptr_t)plain, NULL);
    settle_primaries();
    let_go(&process()->contexts_lock);
    return result;
}
