/* What the driver knows about a pointer. */
#include "cuda_driver.h"

#include <string.h>

static int is_host(const struct range *range) {
    return range->kind == HOST_RANGE || range->kind == REGISTERED_RANGE || (range->device < 0 && range->kind == MAPPED_RANGE);
}

CUresult do_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    const struct range *range = find_range(ptr);
    if (!data || !range) return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = range->kind == MAPPED_RANGE ? NULL : range->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = is_host(range) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = ptr; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!is_host(range) && range->kind != MANAGED_RANGE) return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = (void *)ptr;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = range->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = range->kind == MANAGED_RANGE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = range->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)data = range->kind == DEVICE_RANGE; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = range->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = range->buffer_size; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)data = 1; break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)data = range->pool; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* Unlike the question for one attribute: what is not known is answered by zeros. */
CUresult do_cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr) {
    if (!attributes || !data) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned each = 0; each < numAttributes; each++) {
        int is_narrow = attributes[each] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE || attributes[each] == CU_POINTER_ATTRIBUTE_IS_MANAGED ||
                        attributes[each] == CU_POINTER_ATTRIBUTE_MAPPED || attributes[each] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE ||
                        attributes[each] == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
        if (!do_cuPointerGetAttribute(data[each], attributes[each], ptr)) continue;
        if (attributes[each] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)data[each] = -2;
        else memset(data[each], 0, is_narrow ? sizeof(unsigned) : sizeof(void *));
    }
    return CUDA_SUCCESS;
}

CUresult do_cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr) {
    if (!value || !find_range(ptr)) return CUDA_ERROR_INVALID_VALUE;
    return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
