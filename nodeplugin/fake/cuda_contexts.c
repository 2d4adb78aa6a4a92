/* Contexts: primary and others, and each thread's stack of them. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

#define MAX_STACK 128

static CUcontext contexts;
static CUcontext primaries[MAX_CARDS];
static unsigned primary_flags[MAX_CARDS];
static __thread CUcontext stack[MAX_STACK];
static __thread int depth;

int is_context(CUcontext context) {
    for (CUcontext each = contexts; each; each = each->next)
        if (each == context) return 1;
    return 0;
}

CUcontext current_context(void) { return depth ? stack[depth - 1] : NULL; }
CUcontext primary_context(CUdevice device) { return primaries[device]; }

CUcontext owning_context(void) {
    CUcontext context = current_context();
    return is_context(context) && context->primary ? context->primary : context;
}

CUresult need_context(CUcontext *context) {
    *context = owning_context();
    if (!*context) return CUDA_ERROR_INVALID_CONTEXT;
    if (!is_context(*context)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return (*context)->is_active ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* The context given, or the current one for NULL. */
static CUresult this_or_current(CUcontext given, CUcontext *context) {
    if (!given) return need_context(context);
    *context = given;
    return is_context(given) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult activate(CUcontext context) {
    CUresult result = create_physical(context->device, device_at(context->device)->context_bytes, &context->memory);
    context->is_active = !result;
    return result;
}

static void deactivate(CUcontext context) {
    free_memory_of(context);
    free_streams_of(context);
    free_modules_of(context);
    if (context->is_primary) free_pools_of(context->device);
    if (context->memory) drop_physical(context->memory);
    context->memory = NULL;
    context->is_active = 0;
}

static CUcontext new_context(CUdevice device, unsigned flags) {
    CUcontext context = allocate(sizeof *context);
    *context = (struct CUctx_st){.id = next_id(), .device = device, .references = 1, .flags = flags, .next = contexts};
    context->limits[CU_LIMIT_STACK_SIZE] = 1024;
    context->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = MIB;
    context->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 * MIB;
    return contexts = context;
}

static void forget_context(CUcontext context) {
    CUcontext *at = &contexts;
    while (*at != context) at = &(*at)->next;
    *at = context->next;
    free(context);
}

CUcontext new_green_context(CUcontext primary) {
    CUcontext context = new_context(primary->device, primary->flags);
    context->primary = primary;
    return context;
}

void forget_green_context(CUcontext context) {
    if (current_context() == context) depth--;
    forget_context(context);
}

static CUresult push(CUcontext context) {
    if (depth == MAX_STACK) return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *pctx, unsigned flags, CUdevice dev) {
    if (!pctx) return CUDA_ERROR_INVALID_VALUE;
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    CUcontext context = new_context(dev, flags);
    CUresult result = activate(context);
    if (result) {
        forget_context(context);
        return result;
    }
    *pctx = context;
    return push(context);
}
CUresult do_cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev) { return create(pctx, flags, dev); }
CUresult do_cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) { return create(pctx, flags, dev); }
CUresult do_cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev) {
    return numParams ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : create(pctx, flags, dev);
}
CUresult do_cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev) {
    int wants_affinity = ctxCreateParams && ctxCreateParams->numExecAffinityParams;
    return wants_affinity ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : create(pctx, flags, dev);
}

CUresult do_cuCtxDestroy_v2(CUcontext ctx) {
    if (!is_context(ctx) || ctx->is_primary || ctx->primary) return CUDA_ERROR_INVALID_CONTEXT;
    deactivate(ctx);
    if (current_context() == ctx) depth--;
    forget_context(ctx);
    return CUDA_SUCCESS;
}
CUresult do_cuCtxDestroy(CUcontext ctx) { return do_cuCtxDestroy_v2(ctx); }

CUresult do_cuCtxAttach(CUcontext *pctx, unsigned int flags) {
    CUresult result = pctx && !flags ? need_context(pctx) : CUDA_ERROR_INVALID_VALUE;
    if (!result) (*pctx)->references++;
    return result;
}
CUresult do_cuCtxDetach(CUcontext ctx) {
    if (!is_context(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
    return --ctx->references ? CUDA_SUCCESS : do_cuCtxDestroy_v2(ctx);
}

CUresult do_cuCtxPushCurrent_v2(CUcontext ctx) { return is_context(ctx) ? push(ctx) : CUDA_ERROR_INVALID_CONTEXT; }
CUresult do_cuCtxPushCurrent(CUcontext ctx) { return do_cuCtxPushCurrent_v2(ctx); }
CUresult do_cuCtxPopCurrent_v2(CUcontext *pctx) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (pctx) *pctx = stack[depth];
    return CUDA_SUCCESS;
}
CUresult do_cuCtxPopCurrent(CUcontext *pctx) { return do_cuCtxPopCurrent_v2(pctx); }
CUresult do_cuCtxSetCurrent(CUcontext ctx) {
    if (ctx && !is_context(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
    if (depth) depth--;
    return ctx ? push(ctx) : CUDA_SUCCESS;
}
CUresult do_cuCtxGetCurrent(CUcontext *pctx) {
    if (!pctx) return CUDA_ERROR_INVALID_VALUE;
    *pctx = current_context();
    return CUDA_SUCCESS;
}

CUresult do_cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx) {
    CUcontext context;
    CUresult result = device ? this_or_current(ctx, &context) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *device = context->device;
    return result;
}
/* Also for a primary context that was reset. */
CUresult do_cuCtxGetDevice(CUdevice *device) {
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!is_context(current_context())) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current_context()->device;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxGetFlags(unsigned int *flags) {
    CUcontext context;
    CUresult result = flags ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *flags = context->flags;
    return result;
}
CUresult do_cuCtxSetFlags(unsigned int flags) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (!result) context->flags = flags;
    return result;
}
CUresult do_cuCtxGetId(CUcontext ctx, unsigned long long *ctxId) {
    CUcontext context;
    CUresult result = ctxId ? this_or_current(ctx, &context) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *ctxId = context->id;
    return result;
}
CUresult do_cuCtxGetApiVersion(CUcontext ctx, unsigned int *version) {
    CUcontext context;
    CUresult result = version ? this_or_current(ctx, &context) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *version = 3020;
    return result;
}
CUresult do_cuCtxGetLimit(size_t *pvalue, CUlimit limit) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (!pvalue || (unsigned)limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *pvalue = context->limits[limit];
    return CUDA_SUCCESS;
}
CUresult do_cuCtxSetLimit(CUlimit limit, size_t value) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if ((unsigned)limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}
CUresult do_cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (leastPriority) *leastPriority = 0;
    if (greatestPriority) *greatestPriority = -5;
    return CUDA_SUCCESS;
}
CUresult do_cuCtxGetCacheConfig(CUfunc_cache *pconfig) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (!result) *pconfig = CU_FUNC_CACHE_PREFER_NONE;
    return result;
}
CUresult do_cuCtxSetCacheConfig(CUfunc_cache config) {
    CUcontext context;
    return need_context(&context);
}
CUresult do_cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
    CUcontext context;
    CUresult result = need_context(&context);
    return result ? result : is_context(peerContext) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult do_cuCtxDisablePeerAccess(CUcontext peerContext) { return do_cuCtxEnablePeerAccess(peerContext, 0); }

CUresult do_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!pctx) return CUDA_ERROR_INVALID_VALUE;
    CUcontext context = primaries[dev];
    /* The object outlives a release: threads may still have it as their current context. */
    if (!context) {
        context = primaries[dev] = new_context(dev, primary_flags[dev]);
        context->is_primary = 1, context->references = 0;
    }
    CUresult result = context->is_active ? CUDA_SUCCESS : activate(context);
    if (result) return result;
    context->references++;
    *pctx = context;
    return CUDA_SUCCESS;
}

CUresult do_cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (primaries[dev] && primaries[dev]->is_active) deactivate(primaries[dev]);
    return CUDA_SUCCESS;
}
CUresult do_cuDevicePrimaryCtxReset(CUdevice dev) { return do_cuDevicePrimaryCtxReset_v2(dev); }

CUresult do_cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!primaries[dev] || !primaries[dev]->references) return CUDA_ERROR_INVALID_CONTEXT;
    return --primaries[dev]->references ? CUDA_SUCCESS : do_cuDevicePrimaryCtxReset_v2(dev);
}
CUresult do_cuDevicePrimaryCtxRelease(CUdevice dev) { return do_cuDevicePrimaryCtxRelease_v2(dev); }

CUresult do_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    primary_flags[dev] = flags;
    if (primaries[dev]) primaries[dev]->flags = flags;
    return CUDA_SUCCESS;
}
CUresult do_cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags) { return do_cuDevicePrimaryCtxSetFlags_v2(dev, flags); }

CUresult do_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
    *flags = primary_flags[dev], *active = primaries[dev] && primaries[dev]->is_active;
    return CUDA_SUCCESS;
}
