/* Physical memory by handle (VMM). It lives while it has a handle or a mapping in any process. */
#include <stddef.h>

#include "charging.h"
#include "formats.h"
#include "process.h"
#include "usage.h"

static CUresult put_handle(CUmemGenericAllocationHandle handle, uint64_t object) {
    return put_record((struct record){.kind = HANDLE, .key = handle, .object = object, .shared = NOT_SHARED})
               ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* By the location that is asked for, whatever the current context is, and without one. */
HOOK(cuMemCreate)(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                  unsigned long long flags) {
    CUdevice device;
    unsigned card;
    uint64_t charged = round_up(bytes, BLOCK);
    if (!wanted || !is_device_location(&wanted->location, &device))
        return REAL(cuMemCreate)(handle, bytes, wanted, flags);
    CUresult result = card_of_device(device, &card);
    if (result != CUDA_SUCCESS)
        return result;
    if (!reserve_room(card, charged))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = REAL(cuMemCreate)(handle, bytes, wanted, flags);
    if (result == CUDA_SUCCESS)
        put_handle(*handle, put_object(charged, card, NOT_SHARED));
    else
        release(card, charged);
    return result;
}

static void uncharge_object(const struct record *object) {
    if (object->shared != NOT_SHARED)
        leave(object->shared);
    else if (object->bytes)
        release(object->card, object->bytes);
}

static void count(uint64_t object, int handles, int mappings) {
    struct record last;
    if (count_object(object, handles, mappings, &last))
        uncharge_object(&last);
}

/* While the driver releases the last handle, the memory is held as by a mapping: it is still there. */
HOOK(cuMemRelease)(CUmemGenericAllocationHandle handle) {
    struct record record, object;
    lock *objects = &process()->objects_lock;
    acquire(objects);
    int is_known = find_record(HANDLE, handle, &record);
    if (is_known) {
        count_object(record.object, -1, 1, &object);
        /* Without an object, there was no memory for its record. */
        if (!object.handles)
            take_record(HANDLE, handle, NULL);
    }
    let_go(objects);
    CUresult result = REAL(cuMemRelease)(handle);
    if (!is_known)
        return result;
    acquire(objects);
    if (result == CUDA_SUCCESS) {
        count(record.object, 0, -1);
    } else {
        count(record.object, 1, -1);
        if (!find_record(HANDLE, handle, NULL))
            put_record(record);
    }
    let_go(objects);
    return result;
}

HOOK(cuMemRetainAllocationHandle)(CUmemGenericAllocationHandle *handle, void *address) {
    struct record mapping;
    CUresult result = REAL(cuMemRetainAllocationHandle)(handle, address);
    if (result != CUDA_SUCCESS || !find_containing(MAPPING, (uint64_t)(uintptr_t)address, &mapping))
        return result;
    acquire(&process()->objects_lock);
    count(mapping.object, 1, 0);
    if (!find_record(HANDLE, *handle, NULL))
        put_handle(*handle, mapping.object);
    let_go(&process()->objects_lock);
    return result;
}

/* Imported memory that no process of this container shares has no size before it is mapped: it is at least as large as
 * the part of it that is. */
static CUresult charge_mapping(uint64_t object, CUmemGenericAllocationHandle handle, uint64_t bytes) {
    struct record record;
    CUmemAllocationProp found;
    CUdevice device;
    unsigned card;
    uint64_t wanted = round_up(bytes, BLOCK);
    if (!find_record(OBJECT, object, &record) || record.bytes >= wanted || record.shared != NOT_SHARED)
        return CUDA_SUCCESS;
    if (REAL(cuMemGetAllocationPropertiesFromHandle)(&found, handle) != CUDA_SUCCESS || !is_device_location(&found.location, &device))
        return CUDA_SUCCESS;
    CUresult result = card_of_device(device, &card);
    /* On a device of another container, as NCCL maps them: nothing of this container's. */
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t known = record.bytes;
    if (!reserve_room(card, wanted - known))
        return CUDA_ERROR_OUT_OF_MEMORY;
    acquire(&process()->objects_lock);
    int exists = take_record(OBJECT, object, &record);
    /* Another thread may have mapped it at the same time. */
    if (exists && record.bytes == known)
        record.bytes = wanted, record.card = (uint8_t)card;
    else
        release(card, wanted - known);
    if (exists)
        put_record(record);
    let_go(&process()->objects_lock);
    return CUDA_SUCCESS;
}

static void uncount_mapping(uint64_t object) {
    acquire(&process()->objects_lock);
    count(object, 0, -1);
    let_go(&process()->objects_lock);
}

HOOK(cuMemMap)(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
               unsigned long long flags) {
    struct record record;
    if (!find_record(HANDLE, handle, &record))
        return REAL(cuMemMap)(pointer, bytes, offset, handle, flags);
    CUresult result = charge_mapping(record.object, handle, (uint64_t)offset + bytes);
    if (result != CUDA_SUCCESS)
        return result;
    acquire(&process()->objects_lock);
    count(record.object, 0, 1);
    let_go(&process()->objects_lock);
    result = REAL(cuMemMap)(pointer, bytes, offset, handle, flags);
    if (result == CUDA_SUCCESS)
        put_record((struct record){.kind = MAPPING, .key = pointer, .bytes = bytes, .object = record.object, .shared = NOT_SHARED});
    else
        uncount_mapping(record.object);
    return result;
}

/* The driver unmaps whole mappings that follow on each other. Returns how many they are, 0 if it will refuse the range. */
static size_t count_mappings(CUdeviceptr pointer, size_t bytes) {
    struct record mapping;
    size_t number = 0;
    for (uint64_t at = 0; at < bytes; at += mapping.bytes, number++)
        if (!find_record(MAPPING, pointer + at, &mapping) || !mapping.bytes)
            return 0;
    return number;
}

/* The records are taken before the call, after which the addresses can be mapped again. */
static CUresult unmap_all(CUdeviceptr pointer, size_t bytes, struct record *taken, size_t number) {
    size_t found = 0;
    for (CUdeviceptr at = pointer; found < number && take_record(MAPPING, at, &taken[found]); found++)
        at += taken[found].bytes;
    CUresult result = REAL(cuMemUnmap)(pointer, bytes);
    for (size_t each = 0; each < found; each++)
        if (result == CUDA_SUCCESS)
            uncount_mapping(taken[each].object);
        else
            put_record(taken[each]);
    return result;
}

static CUresult unmap(CUdeviceptr pointer, size_t bytes) {
    struct record one, *many;
    size_t number = count_mappings(pointer, bytes);
    if (number <= 1)
        return unmap_all(pointer, bytes, &one, number);
    many = allocate_pages(number * sizeof *many);
    if (!many)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = unmap_all(pointer, bytes, many, number);
    free_pages(many, number * sizeof *many);
    return result;
}

HOOK(cuMemUnmap)(CUdeviceptr pointer, size_t bytes) { return unmap(pointer, bytes); }

static int share_object(CUmemGenericAllocationHandle handle, const void *key, size_t key_size) {
    struct record record, object;
    int shared = NOT_SHARED;
    acquire(&process()->objects_lock);
    if (find_record(HANDLE, handle, &record) && take_record(OBJECT, record.object, &object)) {
        if (object.shared == NOT_SHARED && object.bytes)
            object.shared = share(object.card, object.bytes, key, key_size);
        shared = object.shared;
        put_record(object);
    }
    let_go(&process()->objects_lock);
    return shared;
}

/* A file is recognized by its mark, and needs a key that no other entry has: the handle and the file's number with it. */
struct file_key { uint64_t handle; int32_t pid, file; char unused[KEY_BYTES - 16]; };

HOOK(cuMemExportToShareableHandle)(void *exported, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                   unsigned long long flags) {
    CUresult result = REAL(cuMemExportToShareableHandle)(exported, handle, type, flags);
    if (result != CUDA_SUCCESS)
        return result;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        int file = *(int *)exported;
        struct file_key key = {.handle = handle, .pid = process()->pid, .file = file};
        mark_file(file, share_object(handle, &key, sizeof key));
    } else if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        share_object(handle, exported, sizeof(CUmemFabricHandle));
    }
    return result;
}

HOOK(cuMemImportFromShareableHandle)(CUmemGenericAllocationHandle *handle, void *exported, CUmemAllocationHandleType type) {
    uint64_t bytes = 0, object;
    unsigned card = 0;
    int shared = NOT_SHARED;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        shared = join_by_file((int)(intptr_t)exported, &bytes, &card);
    else if (type == CU_MEM_HANDLE_TYPE_FABRIC)
        shared = join_by_key(exported, sizeof(CUmemFabricHandle), &bytes, &card);
    CUresult result = REAL(cuMemImportFromShareableHandle)(handle, exported, type);
    if (result != CUDA_SUCCESS) {
        if (shared != NOT_SHARED)
            leave(shared);
        return result;
    }
    object = put_object(bytes, card, shared);
    put_handle(*handle, object);
    return result;
}

/* Tiles of a sparse array hold memory as a mapping does. What is mapped is known by its handle only; so memory that was
 * ever mapped so is counted until its process ends, if the handle is released first. */
static void count_tiles(const CUarrayMapInfo *tiles, unsigned int number) {
    struct record record;
    /* Another thread that shares the object takes its record for a moment: the tiles would not be counted. */
    acquire(&process()->objects_lock);
    for (unsigned int each = 0; each < number; each++)
        if (tiles[each].memOperationType == CU_MEM_OPERATION_TYPE_MAP &&
            find_record(HANDLE, tiles[each].memHandle.memHandle, &record))
            count_object(record.object, 0, 1, NULL);
    let_go(&process()->objects_lock);
}

HOOK(cuMemMapArrayAsync)(CUarrayMapInfo *tiles, unsigned int number, CUstream stream) {
    CUresult result = REAL(cuMemMapArrayAsync)(tiles, number, stream);
    if (result == CUDA_SUCCESS)
        count_tiles(tiles, number);
    return result;
}

HOOK(cuMemMapArrayAsync_ptsz)(CUarrayMapInfo *tiles, unsigned int number, CUstream stream) {
    CUresult result = REAL(cuMemMapArrayAsync_ptsz)(tiles, number, stream);
    if (result == CUDA_SUCCESS)
        count_tiles(tiles, number);
    return result;
}
