/* Memory by address, and arrays: allocated with the current context, and freed with it. */
#include "array_sizes.h"
#include "charging.h"
#include "usage.h"

static CUresult begin_record(struct record *record, enum kind kind, uint64_t bytes) {
    unsigned card;
    CUresult result = current_card(&card);
    if (result != CUDA_SUCCESS)
        return result;
    *record = (struct record){.kind = kind, .card = (uint8_t)card, .shared = NOT_SHARED, .context = current_context(),
                              .bytes = round_up(bytes, bytes <= LARGEST_SMALL && kind != EXTERNAL ? SMALL_UNIT : BLOCK)};
    return CUDA_SUCCESS;
}

static int is_small(const struct record *record) { return record->bytes <= LARGEST_SMALL; }

/* `handles` keeps what was found for a small one until it has an address. */
static CUresult begin(uint64_t bytes, struct record *record) {
    CUresult result = begin_record(record, POINTER, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    record->handles = is_small(record) ? find_room(record->card, record->context, record->bytes) : (unsigned)reserve_room(record->card, record->bytes);
    return record->handles ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void give_back(const struct record *record) {
    if (!is_small(record))
        release(record->card, record->bytes);
    else if (record->handles == OWN_BLOCK)
        release(record->card, BLOCK);
}

static CUresult end(CUresult result, struct record *record, CUdeviceptr pointer) {
    if (result != CUDA_SUCCESS) {
        give_back(record);
        return result;
    }
    record->key = pointer;
    if (is_small(record) && !place_small(record->card, record->context, (enum room)record->handles, pointer)) {
        REAL(cuMemFree_v2)(pointer);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    put_new_record(record);
    return CUDA_SUCCESS;
}

HOOK(cuMemAlloc_v2)(CUdeviceptr *pointer, size_t bytes) {
    struct record record;
    CUresult result = begin(bytes, &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAlloc_v2)(pointer, bytes);
    return end(result, &record, result == CUDA_SUCCESS ? *pointer : 0);
}

HOOK(cuMemAlloc)(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    struct record record;
    CUresult result = begin(bytes, &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAlloc)(pointer, bytes);
    return end(result, &record, result == CUDA_SUCCESS ? *pointer : 0);
}

/* In full, although it is on the device only in part: the driver may bring all of it there. */
HOOK(cuMemAllocManaged)(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    struct record record;
    CUresult result = begin(bytes, &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAllocManaged)(pointer, bytes, flags);
    return end(result, &record, result == CUDA_SUCCESS ? *pointer : 0);
}

/* The driver says how long its rows are: what they take beyond what was reserved is counted, too. */
static void correct(struct record *record, uint64_t bytes) {
    uint64_t real = round_up(bytes, BLOCK);
    if (is_small(record) || real <= record->bytes)
        return;
    account(record->card, real - record->bytes);
    record->bytes = real;
}

HOOK(cuMemAllocPitch_v2)(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    struct record record;
    CUresult result = begin(product(round_up(width, PITCH), height), &record);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    if (result == CUDA_SUCCESS)
        correct(&record, product(*pitch, height));
    return end(result, &record, result == CUDA_SUCCESS ? *pointer : 0);
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
    return end(result, &record, result == CUDA_SUCCESS ? *pointer : 0);
}

static CUresult begin_array(uint64_t bytes, struct record *record) {
    CUresult result = begin_record(record, ARRAY, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    int fits = is_small(record) ? charge_small_array(record->card, record->bytes) : reserve_room(record->card, record->bytes);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult end_object(CUresult result, struct record *record, const void *object) {
    record->key = (uint64_t)(uintptr_t)object;
    if (result != CUDA_SUCCESS)
        uncharge_record(record);
    else
        put_new_record(record);
    return result;
}

/* The record goes before the memory: afterwards another thread may get the same address. */
static void freed(CUresult result, const struct record *record) {
    if (result == CUDA_SUCCESS)
        uncharge_record(record);
    else
        put_record(*record);
}

#define FREE(name, kind, object) do { \
        struct record record; \
        int is_known = take_record(kind, (uint64_t)(uintptr_t)(object), &record); \
        CUresult result = REAL(name)(object); \
        if (is_known) \
            freed(result, &record); \
        return result; \
    } while (0)

HOOK(cuMemFree_v2)(CUdeviceptr pointer) { FREE(cuMemFree_v2, POINTER, pointer); }
HOOK(cuMemFree)(CUdeviceptr_v1 pointer) { FREE(cuMemFree, POINTER, pointer); }

/* `described` is what is wanted in the descriptor that has all fields; it is looked at only if there is one. */
#define CREATE_ARRAY(name, described, levels, ...) do { \
        struct record record; \
        CUresult result = wanted ? begin_array(array_bytes(described, levels), &record) : CUDA_ERROR_INVALID_VALUE; \
        if (result != CUDA_SUCCESS) \
            return result; \
        result = REAL(name)(__VA_ARGS__); \
        return end_object(result, &record, result == CUDA_SUCCESS ? *array : NULL); \
    } while (0)
#define DESCRIBED(...) \
    (&(CUDA_ARRAY3D_DESCRIPTOR){.Width = wanted->Width, .Height = wanted->Height, .Format = wanted->Format, \
                                .NumChannels = wanted->NumChannels, __VA_ARGS__})

HOOK(cuArray3DCreate_v2)(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted) {
    CREATE_ARRAY(cuArray3DCreate_v2, wanted, 1, array, wanted);
}
HOOK(cuArrayCreate_v2)(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *wanted) {
    CREATE_ARRAY(cuArrayCreate_v2, DESCRIBED(.Depth = 0), 1, array, wanted);
}
HOOK(cuArray3DCreate)(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *wanted) {
    CREATE_ARRAY(cuArray3DCreate, DESCRIBED(.Depth = wanted->Depth, .Flags = wanted->Flags), 1, array, wanted);
}
HOOK(cuArrayCreate)(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *wanted) {
    CREATE_ARRAY(cuArrayCreate, DESCRIBED(.Depth = 0), 1, array, wanted);
}
HOOK(cuMipmappedArrayCreate)(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned int levels) {
    CREATE_ARRAY(cuMipmappedArrayCreate, wanted, levels, array, wanted, levels);
}

HOOK(cuArrayDestroy)(CUarray array) { FREE(cuArrayDestroy, ARRAY, array); }
HOOK(cuMipmappedArrayDestroy)(CUmipmappedArray array) { FREE(cuMipmappedArrayDestroy, ARRAY, array); }

/* Memory of another API. It has its size; the device it is on is the current one. Imported again within the container, it
 * counts once. */
static CUresult begin_external(const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *wanted, struct record *record) {
    CUresult result = begin_record(record, EXTERNAL, wanted->size);
    if (result != CUDA_SUCCESS)
        return result;
    /* Before the driver takes over the file. */
    if (wanted->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
        record->shared = join_by_file(wanted->handle.fd, NULL, NULL);
    return record->shared != NOT_SHARED || reserve_room(record->card, record->bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

HOOK(cuImportExternalMemory)(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *wanted) {
    struct record record;
    CUresult result = wanted ? begin_external(wanted, &record) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuImportExternalMemory)(memory, wanted);
    return end_object(result, &record, result == CUDA_SUCCESS ? *memory : NULL);
}

HOOK(cuDestroyExternalMemory)(CUexternalMemory memory) { FREE(cuDestroyExternalMemory, EXTERNAL, memory); }
