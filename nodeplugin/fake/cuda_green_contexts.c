/* Green contexts: part of a device's multiprocessors, which are no fewer here. All else is the primary context's, which
 * each of them retains. */
#include "cuda_driver.h"

#include <stdlib.h>

struct CUdevResourceDesc_st { CUdevResource resource; };
struct CUgreenCtx_st { uint64_t id; CUcontext context; CUdevResource resource; };

CUresult do_cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!resource) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *resource = (CUdevResource){.type = type, .sm = {.smCount = (unsigned)device_at(device)->sms}};
    return CUDA_SUCCESS;
}
CUresult do_cuCtxGetDevResource(CUcontext hCtx, CUdevResource *resource, CUdevResourceType type) {
    return is_context(hCtx) ? do_cuDeviceGetDevResource(hCtx->device, resource, type) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult do_cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *nbGroups, const CUdevResource *input, CUdevResource *remainder, unsigned int flags, unsigned int minCount) {
    if (!nbGroups || !input || input->type != CU_DEV_RESOURCE_TYPE_SM || !input->sm.smCount) return CUDA_ERROR_INVALID_VALUE;
    /* Processors come in pairs. */
    unsigned size = (unsigned)round_up(minCount ? minCount : 2, 2), most = input->sm.smCount / size;
    if (!most) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    if (!result || *nbGroups > most) *nbGroups = most;
    for (unsigned each = 0; result && each < *nbGroups; each++) {
        result[each] = *input;
        result[each].sm.smCount = size;
    }
    if (remainder) *remainder = *input, remainder->sm.smCount = input->sm.smCount - *nbGroups * size;
    return CUDA_SUCCESS;
}

CUresult do_cuDevResourceGenerateDesc(CUdevResourceDesc *phDesc, CUdevResource *resources, unsigned int nbResources) {
    if (!phDesc || !resources || !nbResources) return CUDA_ERROR_INVALID_VALUE;
    *phDesc = allocate(sizeof **phDesc);
    (*phDesc)->resource = resources[0];
    return CUDA_SUCCESS;
}

CUresult do_cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags) {
    CUcontext primary;
    if (!phCtx || !desc) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = do_cuDevicePrimaryCtxRetain(&primary, dev);
    if (result) return result;
    *phCtx = allocate(sizeof **phCtx);
    **phCtx = (struct CUgreenCtx_st){next_id(), new_green_context(primary), desc->resource};
    return CUDA_SUCCESS;
}
CUresult do_cuGreenCtxDestroy(CUgreenCtx hCtx) {
    if (!hCtx) return CUDA_ERROR_INVALID_HANDLE;
    CUdevice device = hCtx->context->device;
    forget_green_context(hCtx->context);
    free(hCtx);
    return do_cuDevicePrimaryCtxRelease_v2(device);
}
CUresult do_cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx) {
    if (!pContext || !hCtx) return CUDA_ERROR_INVALID_VALUE;
    *pContext = hCtx->context;
    return CUDA_SUCCESS;
}
CUresult do_cuGreenCtxGetDevResource(CUgreenCtx hCtx, CUdevResource *resource, CUdevResourceType type) {
    if (!hCtx || !resource) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *resource = hCtx->resource;
    return CUDA_SUCCESS;
}
CUresult do_cuGreenCtxGetId(CUgreenCtx greenCtx, unsigned long long *greenCtxId) {
    if (!greenCtx || !greenCtxId) return CUDA_ERROR_INVALID_VALUE;
    *greenCtxId = greenCtx->id;
    return CUDA_SUCCESS;
}
CUresult do_cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority) {
    if (!greenCtx || !(flags & CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = do_cuCtxPushCurrent_v2(greenCtx->context);
    if (result) return result;
    result = do_cuStreamCreateWithPriority(phStream, flags, priority);
    do_cuCtxPopCurrent_v2(NULL);
    return result;
}
