/* Memory of other processes by the older means: cuIpc handles and external memory. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct CUextMemory_st { struct physical *physical; };

CUresult do_cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr) {
    const struct range *range = find_range(dptr);
    struct shared_memory shared;
    if (!pHandle || !range || range->kind != DEVICE_RANGE) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = share_physical(range->physical, &shared);
    if (result) return result;
    /* Memory of another allocation may lie before it on the same page. */
    shared.offset = range->base % LARGE_PAGE, shared.size = range->buffer_size;
    memset(pHandle, 0, sizeof *pHandle);
    memcpy(pHandle, &shared, sizeof shared);
    return CUDA_SUCCESS;
}

static struct range *range_of(const struct physical *physical, enum range_kind kind) {
    struct range *range;
    for (size_t at = 0; (range = range_number(at)); at++)
        if (range->kind == kind && range->physical == physical) return range;
    return NULL;
}

CUresult do_cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    struct shared_memory shared;
    struct physical *physical;
    CUcontext context;
    CUresult result = pdptr ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    memcpy(&shared, &handle, sizeof shared);
    result = import_physical(&shared, &physical);
    if (result) return result;
    if (range_of(physical, DEVICE_RANGE)) {
        drop_physical(physical);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    /* One mapping serves all handles of the same memory; it counts them. */
    struct range *range = range_of(physical, IMPORTED_RANGE);
    if (range) drop_physical(physical);
    else {
        range = add_range(IMPORTED_RANGE, reserve_addresses(shared.bytes, LARGE_PAGE, 0), shared.bytes, physical->device);
        range->physical = physical, range->owns_address = 1;
    }
    range->flags++;
    *pdptr = range->base + shared.offset;
    return CUDA_SUCCESS;
}
CUresult do_cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) { return do_cuIpcOpenMemHandle_v2(pdptr, handle, Flags); }

CUresult do_cuIpcCloseMemHandle(CUdeviceptr dptr) {
    struct range *range = find_range(dptr);
    if (!range || range->kind != IMPORTED_RANGE) return CUDA_ERROR_INVALID_VALUE;
    return --range->flags ? CUDA_SUCCESS : free_range(range);
}

/* A descriptor of our own shares memory; any other stands for a graphics library's, whose memory is reserved here. The
 * import takes the descriptor. */
CUresult do_cuImportExternalMemory(CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc) {
    CUcontext context;
    struct physical *physical;
    CUresult result = extMem_out && memHandleDesc && memHandleDesc->size ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    if (memHandleDesc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD) return CUDA_ERROR_NOT_SUPPORTED;
    result = import_descriptor(memHandleDesc->handle.fd, &physical);
    if (result == CUDA_ERROR_INVALID_VALUE) result = create_physical(context->device, round_up(memHandleDesc->size, LARGE_PAGE), &physical);
    if (result) return result;
    close(memHandleDesc->handle.fd);
    *extMem_out = allocate(sizeof **extMem_out);
    (*extMem_out)->physical = physical;
    return CUDA_SUCCESS;
}

CUresult do_cuExternalMemoryGetMappedBuffer(CUdeviceptr *devPtr, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *bufferDesc) {
    if (!devPtr || !extMem || !bufferDesc || !bufferDesc->size) return CUDA_ERROR_INVALID_VALUE;
    if (bufferDesc->offset + bufferDesc->size > extMem->physical->bytes) return CUDA_ERROR_INVALID_VALUE;
    uint64_t size = round_up(bufferDesc->size, LARGE_PAGE);
    struct range *range = add_range(EXTERNAL_RANGE, reserve_addresses(size, LARGE_PAGE, 0), size, extMem->physical->device);
    range->physical = extMem->physical, range->buffer_size = bufferDesc->size, range->owns_address = 1;
    hold_physical(range->physical);
    *devPtr = range->base;
    return CUDA_SUCCESS;
}

CUresult do_cuDestroyExternalMemory(CUexternalMemory extMem) {
    if (!extMem) return CUDA_ERROR_INVALID_HANDLE;
    drop_physical(extMem->physical);
    free(extMem);
    return CUDA_SUCCESS;
}
