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
    return reserve(card, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
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

#define CREATE(name, ...) do { \
        struct record record; \
        CUresult result = charge_context(device, &record); \
        return result == CUDA_SUCCESS ? put_context(REAL(name)(__VA_ARGS__), &record, context) : result; \
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

/* Everything that was allocated with a context is gone with it. */
static void uncharge_context(uint64_t context) {
    struct record record;
    while (take_record_of_context(context, &record))
        if (record.kind == CONTEXT)
            release(record.card, record.bytes);
        else
            uncharge_record(&record);
}

static CUresult destroyed(CUresult result, CUcontext context) {
    if (result == CUDA_SUCCESS)
        uncharge_context((uint64_t)(uintptr_t)context);
    return result;
}

HOOK(cuCtxDestroy)(CUcontext context) { return destroyed(REAL(cuCtxDestroy)(context), context); }
HOOK(cuCtxDestroy_v2)(CUcontext context) { return destroyed(REAL(cuCtxDestroy_v2)(context), context); }

/* The older way to count references: the last one destroys the context. Whether it was the last cannot be asked. */
HOOK(cuCtxDetach)(CUcontext context) {
    unsigned int version;
    CUresult result = REAL(cuCtxDetach)(context);
    if (result == CUDA_SUCCESS && REAL(cuCtxGetApiVersion)(context, &version) != CUDA_SUCCESS)
        uncharge_context((uint64_t)(uintptr_t)context);
    return result;
}

static int is_primary_active(CUdevice device) {
    unsigned int flags;
    int active = 0;
    return REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

/* One primary context for each device: charged by the first that retains it, given back when it is no longer active. The
 * lock keeps two threads from both being the first. */
HOOK(cuDevicePrimaryCtxRetain)(CUcontext *context, CUdevice device) {
    struct record record = {0};
    lock *contexts = &process()->contexts_lock;
    acquire(contexts);
    CUresult result = is_primary_active(device) ? CUDA_SUCCESS : charge_context(device, &record);
    if (result == CUDA_SUCCESS) {
        result = REAL(cuDevicePrimaryCtxRetain)(context, device);
        if (record.kind)
            put_context(result, &record, context);
    }
    let_go(contexts);
    return result;
}

/* NULL if it is not active: only then it would be created by this. */
static CUcontext primary_context(CUdevice device) {
    CUcontext context = NULL;
    if (is_primary_active(device) && REAL(cuDevicePrimaryCtxRetain)(&context, device) == CUDA_SUCCESS)
        REAL(cuDevicePrimaryCtxRelease_v2)(device);
    return context;
}

static CUresult release_primary(__typeof__(cuDevicePrimaryCtxRelease_v2) *real, CUdevice device) {
    lock *contexts = &process()->contexts_lock;
    acquire(contexts);
    CUcontext context = primary_context(device);
    CUresult result = real(device);
    if (result == CUDA_SUCCESS && context && !is_primary_active(device))
        uncharge_context((uint64_t)(uintptr_t)context);
    let_go(contexts);
    return result;
}

HOOK(cuDevicePrimaryCtxRelease)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxRelease), device); }
HOOK(cuDevicePrimaryCtxRelease_v2)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxRelease_v2), device); }
HOOK(cuDevicePrimaryCtxReset)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxReset), device); }
HOOK(cuDevicePrimaryCtxReset_v2)(CUdevice device) { return release_primary(REAL(cuDevicePrimaryCtxReset_v2), device); }

/* A green context is a part of the primary one, which it may be the first to need. */
HOOK(cuGreenCtxCreate)(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags) {
    struct record record = {0};
    lock *contexts = &process()->contexts_lock;
    acquire(contexts);
    CUresult result = is_primary_active(device) ? CUDA_SUCCESS : charge_context(device, &record);
    if (result == CUDA_SUCCESS) {
        result = REAL(cuGreenCtxCreate)(context, resources, device, flags);
        CUcontext primary = primary_context(device);
        if (record.kind)
            put_context(primary ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT, &record, &primary);
    }
    let_go(contexts);
    return result;
}
