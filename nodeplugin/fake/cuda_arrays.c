/* Arrays and mipmapped arrays: memory with a shape and without an address. */
#include "cuda_driver.h"

#include <stdlib.h>

#define MAX_LEVELS 32

struct CUarray_st { CUDA_ARRAY3D_DESCRIPTOR shape; struct range *range; uint64_t bytes; int is_level; };
struct CUmipmappedArray_st { CUDA_ARRAY3D_DESCRIPTOR shape; struct range *range; uint64_t bytes; unsigned count; struct CUarray_st levels[MAX_LEVELS]; };

static unsigned channel_bytes(CUarray_format format) {
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8: case CU_AD_FORMAT_SIGNED_INT8: return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16: case CU_AD_FORMAT_SIGNED_INT16: case CU_AD_FORMAT_HALF: return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32: case CU_AD_FORMAT_SIGNED_INT32: case CU_AD_FORMAT_FLOAT: return 4;
    default: return 0;
    }
}

/* Of the formats that say themselves how many channels they have; those in planes as an average. */
static unsigned element_bits(CUarray_format format) {
    switch ((int)format) {
    case CU_AD_FORMAT_BC1_UNORM: case CU_AD_FORMAT_BC4_SNORM: return 4;
    case CU_AD_FORMAT_BC5_UNORM: case CU_AD_FORMAT_BC7_UNORM: case CU_AD_FORMAT_UNORM_INT8X1: return 8;
    case CU_AD_FORMAT_NV12: case CU_AD_FORMAT_UINT8_PLANAR_420: return 12;
    case CU_AD_FORMAT_NV16: case CU_AD_FORMAT_YUY2: case CU_AD_FORMAT_SNORM_INT8X2: return 16;
    case CU_AD_FORMAT_P010: case CU_AD_FORMAT_Y444_PLANAR8: case CU_AD_FORMAT_UINT8_SEMIPLANAR_444: return 24;
    case CU_AD_FORMAT_P216: case CU_AD_FORMAT_AYUV: case CU_AD_FORMAT_Y410: case CU_AD_FORMAT_UNORM_INT_101010_2: return 32;
    case CU_AD_FORMAT_UINT16_PLANAR_444: return 48;
    case CU_AD_FORMAT_Y416: case CU_AD_FORMAT_UNORM_INT16X4: return 64;
    default: return 0;
    }
}

static uint64_t or_one(uint64_t value) { return value ? value : 1; }

/* Zero if the shape is invalid or its format is not known here. */
static uint64_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    int has_channels = shape->NumChannels == 1 || shape->NumChannels == 2 || shape->NumChannels == 4;
    uint64_t bits = has_channels ? 8ULL * channel_bytes(shape->Format) * shape->NumChannels : 0;
    if (!bits) bits = element_bits(shape->Format);
    return shape->Width * or_one(shape->Height) * or_one(shape->Depth) * bits / 8;
}

/* Sparse arrays get their memory by cuMemMapArrayAsync. */
static CUresult allocate_shape(const CUDA_ARRAY3D_DESCRIPTOR *shape, uint64_t bytes, struct range **range) {
    CUcontext context;
    *range = NULL;
    CUresult result = need_context(&context);
    if (!result) result = refuse_in_capture();
    if (result || !bytes) return result ? result : CUDA_ERROR_INVALID_VALUE;
    if (shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) return CUDA_SUCCESS;
    return allocate_device_memory(bytes, ARRAY_RANGE, 0, range);
}

CUresult do_cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray) {
    struct range *range;
    if (!pHandle || !pAllocateArray) return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = bytes_of(pAllocateArray);
    CUresult result = allocate_shape(pAllocateArray, bytes, &range);
    if (result) return result;
    *pHandle = allocate(sizeof **pHandle);
    **pHandle = (struct CUarray_st){*pAllocateArray, range, bytes, 0};
    return CUDA_SUCCESS;
}
CUresult do_cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray) {
    if (!pAllocateArray) return CUDA_ERROR_INVALID_VALUE;
    return do_cuArray3DCreate_v2(pHandle, &(CUDA_ARRAY3D_DESCRIPTOR){.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
        .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels});
}
CUresult do_cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *pAllocateArray) {
    if (!pAllocateArray) return CUDA_ERROR_INVALID_VALUE;
    return do_cuArray3DCreate_v2(pHandle, &(CUDA_ARRAY3D_DESCRIPTOR){.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
        .Depth = pAllocateArray->Depth, .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels, .Flags = pAllocateArray->Flags});
}
CUresult do_cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *pAllocateArray) {
    if (!pAllocateArray) return CUDA_ERROR_INVALID_VALUE;
    return do_cuArray3DCreate_v2(pHandle, &(CUDA_ARRAY3D_DESCRIPTOR){.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
        .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels});
}

CUresult do_cuArrayDestroy(CUarray hArray) {
    if (!hArray || hArray->is_level) return CUDA_ERROR_INVALID_HANDLE;
    if (hArray->range) free_range(hArray->range);
    free(hArray);
    return CUDA_SUCCESS;
}
CUresult do_cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray) {
    if (!pArrayDescriptor || !hArray) return CUDA_ERROR_INVALID_VALUE;
    *pArrayDescriptor = hArray->shape;
    return CUDA_SUCCESS;
}
CUresult do_cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *pArrayDescriptor, CUarray hArray) {
    if (!pArrayDescriptor || !hArray) return CUDA_ERROR_INVALID_VALUE;
    *pArrayDescriptor = (CUDA_ARRAY_DESCRIPTOR){hArray->shape.Width, hArray->shape.Height, hArray->shape.Format, hArray->shape.NumChannels};
    return CUDA_SUCCESS;
}
CUresult do_cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *memoryRequirements, CUarray array, CUdevice device) {
    if (!memoryRequirements || !array) return CUDA_ERROR_INVALID_VALUE;
    *memoryRequirements = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = round_up(array->bytes, 65536), .alignment = 65536};
    return CUDA_SUCCESS;
}

static uint64_t halved(uint64_t size, unsigned level) { return size >> level ? size >> level : size > 0; }

CUresult do_cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, unsigned int numMipmapLevels) {
    if (!pHandle || !pMipmappedArrayDesc || !numMipmapLevels || numMipmapLevels > MAX_LEVELS) return CUDA_ERROR_INVALID_VALUE;
    CUmipmappedArray made = allocate(sizeof *made);
    made->shape = *pMipmappedArrayDesc, made->count = numMipmapLevels;
    for (unsigned level = 0; level < numMipmapLevels; level++) {
        CUDA_ARRAY3D_DESCRIPTOR shape = *pMipmappedArrayDesc;
        shape.Width = halved(shape.Width, level), shape.Height = halved(shape.Height, level), shape.Depth = halved(shape.Depth, level);
        made->levels[level] = (struct CUarray_st){shape, NULL, bytes_of(&shape), 1};
        made->bytes += made->levels[level].bytes;
    }
    CUresult result = allocate_shape(pMipmappedArrayDesc, made->bytes, &made->range);
    if (result) free(made);
    else *pHandle = made;
    return result;
}
CUresult do_cuMipmappedArrayGetLevel(CUarray *pLevelArray, CUmipmappedArray hMipmappedArray, unsigned int level) {
    if (!pLevelArray || !hMipmappedArray || level >= hMipmappedArray->count) return CUDA_ERROR_INVALID_VALUE;
    *pLevelArray = &hMipmappedArray->levels[level];
    return CUDA_SUCCESS;
}
CUresult do_cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray) {
    if (!hMipmappedArray) return CUDA_ERROR_INVALID_HANDLE;
    if (hMipmappedArray->range) free_range(hMipmappedArray->range);
    free(hMipmappedArray);
    return CUDA_SUCCESS;
}
