/* Memory by address, and arrays: allocated with the current context, and freed with it. */
#include "charging.h"
#include "usage.h"

static CUresult begin(uint64_t bytes, struct record *record) {
    unsigned card;
    CUresult result = current_card(&card);
    if (result != CUDA_SUCCESS)
        return result;
    *record = (struct record){.card = (uint8_t)card, .shared = NOT_SHARED, .context = current_context()};
    return charge(card, bytes, &record->bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult end(CUresult result, struct record *record, enum kind kind, uint64_t key) {
    record->kind = kind, record->key = key;
    if (result != CUDA_SUCCESS)
        uncharge(record->card, record->bytes);
    else
        put_record(*record);
    return result;
}

HOOK(cuMemAlloc_v2)(CUdeviceptr *pointer, size_t bytes) {
    struct record record;
    CUresult result = begin(bytes, &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAlloc_v2)(pointer, bytes);
    return end(result, &record, POINTER, result == CUDA_SUCCESS ? *pointer : 0);
}

HOOK(cuMemAlloc)(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    struct record record;
    CUresult result = begin(bytes, &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAlloc)(pointer, bytes);
    return end(result, &record, POINTER, result == CUDA_SUCCESS ? *pointer : 0);
}

/* In full, although it is on the device only in part: the driver may bring all of it there. */
HOOK(cuMemAllocManaged)(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    struct record record;
    CUresult result = begin(bytes, &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAllocManaged)(pointer, bytes, flags);
    return end(result, &record, POINTER, result == CUDA_SUCCESS ? *pointer : 0);
}

#define PITCH 512

static uint64_t product(uint64_t one, uint64_t other) {
    uint64_t result;
    return __builtin_mul_overflow(one, other, &result) ? UINT64_MAX : result;
}

/* Charge the difference, once the driver has said how long its rows are. */
static void correct(struct record *record, uint64_t bytes) {
    uint64_t charged;
    if (round_up(bytes, BLOCK) != round_up(record->bytes, BLOCK) && charge(record->card, bytes, &charged)) {
        uncharge(record->card, record->bytes);
        record->bytes = charged;
    }
}

HOOK(cuMemAllocPitch_v2)(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    struct record record;
    CUresult result = begin(product(round_up(width, PITCH), height), &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    if (result == CUDA_SUCCESS)
        correct(&record, product(*pitch, height));
    return end(result, &record, POINTER, result == CUDA_SUCCESS ? *pointer : 0);
}

HOOK(cuMemAllocPitch)(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                      unsigned int element) {
    struct record record;
    CUresult result = begin(product(round_up(width, PITCH), height), &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAllocPitch)(pointer, pitch, width, height, element);
    if (result == CUDA_SUCCESS)
        correct(&record, product(*pitch, height));
    return end(result, &record, POINTER, result == CUDA_SUCCESS ? *pointer : 0);
}

/* The record goes before the memory: afterwards another thread may get the same address. */
static void freed(CUresult result, const struct record *record) {
    if (result == CUDA_SUCCESS)
        uncharge_record(record);
    else
        put_record(*record);
}

HOOK(cuMemFree_v2)(CUdeviceptr pointer) {
    struct record record;
    int is_known = take_record(POINTER, pointer, &record);
    CUresult result = REAL(cuMemFree_v2)(pointer);
    if (is_known)
        freed(result, &record);
    return result;
}

HOOK(cuMemFree)(CUdeviceptr_v1 pointer) {
    struct record record;
    int is_known = take_record(POINTER, pointer, &record);
    CUresult result = REAL(cuMemFree)(pointer);
    if (is_known)
        freed(result, &record);
    return result;
}

static unsigned element_bytes(CUarray_format format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        /* Compressed and packed formats: at most 16 bytes for an element of all channels. */
        return 16;
    }
}

/* One and two dimensions have 0 for those they lack. Memory that is mapped later is charged where it is created. */
static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned levels) {
    if (wanted->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0;
    uint64_t element = product(element_bytes(wanted->Format), wanted->NumChannels), sum = 0;
    for (unsigned level = 0; level < levels && level < 64; level++) {
        uint64_t width = wanted->Width >> level, height = wanted->Height >> level, depth = wanted->Depth >> level;
        if (wanted->Flags & CUDA_ARRAY3D_LAYERED)
            depth = wanted->Depth;
        uint64_t row = round_up(product(width ? width : 1, element), PITCH);
        uint64_t bytes = product(product(row, height ? height : 1), depth ? depth : 1);
        if (__builtin_add_overflow(sum, bytes, &sum))
            return UINT64_MAX;
    }
    return sum;
}

HOOK(cuArray3DCreate_v2)(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted) {
    struct record record;
    CUresult result = wanted ? begin(array_bytes(wanted, 1), &record) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuArray3DCreate_v2)(array, wanted);
    return end(result, &record, ARRAY, result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0);
}

HOOK(cuArrayCreate_v2)(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *wanted) {
    struct record record;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (wanted)
        result = begin(array_bytes(&(CUDA_ARRAY3D_DESCRIPTOR){.Width = wanted->Width, .Height = wanted->Height,
                                                              .Format = wanted->Format, .NumChannels = wanted->NumChannels}, 1), &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuArrayCreate_v2)(array, wanted);
    return end(result, &record, ARRAY, result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0);
}

HOOK(cuArray3DCreate)(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *wanted) {
    struct record record;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (wanted)
        result = begin(array_bytes(&(CUDA_ARRAY3D_DESCRIPTOR){.Width = wanted->Width, .Height = wanted->Height, .Depth = wanted->Depth,
                                                              .Format = wanted->Format, .NumChannels = wanted->NumChannels,
                                                              .Flags = wanted->Flags}, 1), &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuArray3DCreate)(array, wanted);
    return end(result, &record, ARRAY, result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0);
}

HOOK(cuArrayCreate)(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *wanted) {
    struct record record;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (wanted)
        result = begin(array_bytes(&(CUDA_ARRAY3D_DESCRIPTOR){.Width = wanted->Width, .Height = wanted->Height,
                                                              .Format = wanted->Format, .NumChannels = wanted->NumChannels}, 1), &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuArrayCreate)(array, wanted);
    return end(result, &record, ARRAY, result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0);
}

HOOK(cuMipmappedArrayCreate)(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned int levels) {
    struct record record;
    CUresult result = wanted ? begin(array_bytes(wanted, levels), &record) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMipmappedArrayCreate)(array, wanted, levels);
    return end(result, &record, ARRAY, result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0);
}

HOOK(cuArrayDestroy)(CUarray array) {
    struct record record;
    int is_known = take_record(ARRAY, (uint64_t)(uintptr_t)array, &record);
    CUresult result = REAL(cuArrayDestroy)(array);
    if (is_known)
        freed(result, &record);
    return result;
}

HOOK(cuMipmappedArrayDestroy)(CUmipmappedArray array) {
    struct record record;
    int is_known = take_record(ARRAY, (uint64_t)(uintptr_t)array, &record);
    CUresult result = REAL(cuMipmappedArrayDestroy)(array);
    if (is_known)
        freed(result, &record);
    return result;
}

/* Memory of another API. It has its size; the device it is on is the current one. Imported again within the container, it
 * counts once. */
HOOK(cuImportExternalMemory)(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *wanted) {
    struct record record = {.shared = NOT_SHARED};
    if (!wanted)
        return CUDA_ERROR_INVALID_VALUE;
    /* Before the driver takes over the file. */
    if (wanted->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
        record.shared = join_by_file(wanted->handle.fd, NULL, NULL);
    CUresult result = record.shared == NOT_SHARED ? begin(wanted->size, &record) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuImportExternalMemory)(memory, wanted);
    record.kind = EXTERNAL, record.key = result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*memory : 0;
    if (result == CUDA_SUCCESS)
        put_record(record);
    else
        uncharge_record(&record);
    return result;
}

HOOK(cuDestroyExternalMemory)(CUexternalMemory memory) {
    struct record record;
    int is_known = take_record(EXTERNAL, (uint64_t)(uintptr_t)memory, &record);
    CUresult result = REAL(cuDestroyExternalMemory)(memory);
    if (is_known)
        freed(result, &record);
    return result;
}
