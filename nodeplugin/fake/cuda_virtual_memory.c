/* Virtual memory management: addresses are reserved, memory is created, and one is mapped to the other. */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct reservation { uint64_t base, size; struct reservation *next; };
static struct reservation *reservations;

/* The memory's content: one file for all that cannot be exported, because each file would take a descriptor. */
static int contents = -1;
static uint64_t contents_size;

/* All handles, by which a handle is recognized. */
struct handle { struct physical *physical; struct handle *next; };
static struct handle *handles;

static struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    for (struct handle *each = handles; each; each = each->next)
        if ((uint64_t)each->physical == handle) return each->physical;
    return NULL;
}

static CUmemGenericAllocationHandle add_handle(struct physical *physical) {
    physical->is_vmm = 1;
    if (!physical->handle_references++) {
        struct handle *handle = allocate(sizeof *handle);
        *handle = (struct handle){physical, handles};
        handles = handle;
    }
    return (uint64_t)physical;
}

CUresult do_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags) {
    if (!ptr || !size || size % LARGE_PAGE || (alignment & (alignment - 1)) || flags) return CUDA_ERROR_INVALID_VALUE;
    struct reservation *made = allocate(sizeof *made);
    uint64_t base = reserve_addresses(size, alignment > LARGE_PAGE ? alignment : LARGE_PAGE, 0);
    if (!base) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (struct reservation){base, size, reservations};
    reservations = made;
    *ptr = base;
    return CUDA_SUCCESS;
}

static int has_mappings(uint64_t base, uint64_t size) {
    for (uint64_t at = base; at < base + size; at += LARGE_PAGE)
        if (find_range(at)) return 1;
    return 0;
}

CUresult do_cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    for (struct reservation **at = &reservations; *at; at = &(*at)->next) {
        struct reservation *found = *at;
        if (found->base != ptr || found->size != size) continue;
        if (has_mappings(ptr, size)) return CUDA_ERROR_INVALID_VALUE;
        *at = found->next;
        free(found);
        free_addresses(ptr, size);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* The device that the memory is on, -1 for the host, -2 if the properties are invalid. */
static CUdevice device_of(const CUmemAllocationProp *properties) {
    switch ((int)properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return device_at(properties->location.id) ? properties->location.id : -2;
    case CU_MEM_LOCATION_TYPE_HOST: case CU_MEM_LOCATION_TYPE_HOST_NUMA: case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return -1;
    default: return -2;
    }
}

CUresult do_cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    if (!granularity || !prop) return CUDA_ERROR_INVALID_VALUE;
    if (device_of(prop) == -2) return CUDA_ERROR_INVALID_DEVICE;
    *granularity = LARGE_PAGE;
    return CUDA_SUCCESS;
}

static int create_content(struct physical *physical) {
    int is_exportable = physical->properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (is_exportable) {
        physical->memfd = memfd_create("fake-device-memory", MFD_CLOEXEC);
        return physical->memfd >= 0 && !ftruncate(physical->memfd, (off_t)physical->bytes);
    }
    if (contents < 0) contents = memfd_create("fake-device-memory", MFD_CLOEXEC);
    physical->offset = contents_size;
    contents_size += physical->bytes;
    return contents >= 0 && !ftruncate(contents, (off_t)contents_size);
}

CUresult do_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    if (!handle || !prop || !size || size % LARGE_PAGE || flags) return CUDA_ERROR_INVALID_VALUE;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    CUdevice device = device_of(prop);
    if (device == -2) return CUDA_ERROR_INVALID_DEVICE;
    struct physical *physical;
    CUresult result = create_physical(device, size, &physical);
    if (result) return result;
    physical->properties = *prop;
    if (!create_content(physical)) {
        drop_physical(physical);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = add_handle(physical);
    return CUDA_SUCCESS;
}

CUresult do_cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct physical *physical = physical_of(handle);
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    if (!--physical->handle_references) {
        struct handle **at = &handles;
        while ((*at)->physical != physical) at = &(*at)->next;
        struct handle *found = *at;
        *at = found->next;
        free(found);
    }
    drop_physical(physical);
    return CUDA_SUCCESS;
}

static int is_reserved(uint64_t base, uint64_t size) {
    for (const struct reservation *each = reservations; each; each = each->next)
        if (base >= each->base && base + size <= each->base + each->size) return 1;
    return 0;
}

CUresult do_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct physical *physical = physical_of(handle);
    if (!physical || !size || size % LARGE_PAGE || ptr % LARGE_PAGE || offset || flags) return CUDA_ERROR_INVALID_VALUE;
    if (size > physical->bytes || !is_reserved(ptr, size) || has_mappings(ptr, size)) return CUDA_ERROR_INVALID_VALUE;
    int file = physical->memfd >= 0 ? physical->memfd : contents;
    uint64_t start = physical->memfd >= 0 ? 0 : physical->offset;
    if (file >= 0 && mmap((void *)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, (off_t)start) == MAP_FAILED)
        return CUDA_ERROR_MAP_FAILED;
    struct range *range = add_range(MAPPED_RANGE, ptr, size, physical->device);
    range->physical = physical;
    /* Access is given by cuMemSetAccess. */
    range->is_touched = 1;
    hold_physical(physical);
    return CUDA_SUCCESS;
}

/* Tiles of sparse arrays. Which tile of which array is not kept: what was mapped stays, as if none were unmapped. */
CUresult do_cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream) {
    for (unsigned int each = 0; each < count; each++) {
        if (mapInfoList[each].memOperationType != CU_MEM_OPERATION_TYPE_MAP) continue;
        struct physical *physical = physical_of(mapInfoList[each].memHandle.memHandle);
        if (!physical) return CUDA_ERROR_INVALID_VALUE;
        hold_physical(physical);
    }
    return CUDA_SUCCESS;
}

/* All mappings within the addresses, which must not cut one in two. */
CUresult do_cuMemUnmap(CUdeviceptr ptr, size_t size) {
    if (!size || size % LARGE_PAGE || !is_reserved(ptr, size)) return CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = ptr; at < ptr + size;) {
        struct range *range = find_range(at);
        if (!range || range->kind != MAPPED_RANGE || range->base != at || at + range->size > ptr + size) return CUDA_ERROR_INVALID_VALUE;
        at += range->size;
    }
    for (uint64_t at = ptr; at < ptr + size;) {
        struct range *range = find_range(at);
        at += range->size;
        free_range(range);
    }
    mmap((void *)ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return CUDA_SUCCESS;
}

CUresult do_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    if (!size || !desc || !count) return CUDA_ERROR_INVALID_VALUE;
    for (size_t each = 0; each < count; each++)
        if (desc[each].location.type == CU_MEM_LOCATION_TYPE_DEVICE && !device_at(desc[each].location.id)) return CUDA_ERROR_INVALID_DEVICE;
    for (uint64_t at = ptr; at < ptr + size;) {
        struct range *range = find_range(at);
        if (!range) return CUDA_ERROR_INVALID_VALUE;
        range->flags = desc[0].flags;
        at = range->base + range->size;
    }
    int access = desc[0].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ? PROT_NONE : PROT_READ | PROT_WRITE;
    return mprotect((void *)ptr, size, access) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult do_cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr) {
    const struct range *range = find_range(ptr);
    if (!flags || !location || !range) return CUDA_ERROR_INVALID_VALUE;
    *flags = range->flags;
    return CUDA_SUCCESS;
}

CUresult do_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) {
    struct range *range = find_range((uint64_t)addr);
    if (!handle || !range || range->kind != MAPPED_RANGE) return CUDA_ERROR_INVALID_VALUE;
    hold_physical(range->physical);
    *handle = add_handle(range->physical);
    return CUDA_SUCCESS;
}

CUresult do_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    const struct physical *physical = physical_of(handle);
    if (!prop || !physical) return CUDA_ERROR_INVALID_VALUE;
    *prop = physical->properties;
    return CUDA_SUCCESS;
}

/* Each export is an open file description of its own, of the same file. */
static int open_again(int file) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    return opened >= 0 ? opened : fcntl(file, F_DUPFD_CLOEXEC, 0);
}

/* What an importer needs stands in the file, behind the memory. */
struct exported { struct shared_memory shared; CUmemAllocationProp properties; };

static CUresult export_descriptor(struct physical *physical, const struct exported *content, int *descriptor) {
    if (physical->memfd < 0) return CUDA_ERROR_INVALID_VALUE;
    if (pwrite(physical->memfd, content, sizeof *content, (off_t)physical->bytes) != (ssize_t)sizeof *content)
        return CUDA_ERROR_OPERATING_SYSTEM;
    *descriptor = open_again(physical->memfd);
    return *descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

_Static_assert(sizeof(struct shared_memory) <= 64, "it must fit into a fabric handle");

CUresult do_cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType, unsigned long long flags) {
    struct physical *physical = physical_of(handle);
    if (!shareableHandle || !physical || flags) return CUDA_ERROR_INVALID_VALUE;
    if (!(physical->properties.requestedHandleTypes & handleType)) return CUDA_ERROR_INVALID_VALUE;
    struct exported content = {.properties = physical->properties};
    CUresult result = share_physical(physical, &content.shared);
    if (result) return result;
    if (handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return export_descriptor(physical, &content, shareableHandle);
    if (handleType != CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
    memset(shareableHandle, 0, 64);
    memcpy(shareableHandle, &content.shared, sizeof content.shared);
    return CUDA_SUCCESS;
}

static int read_exported(int descriptor, struct exported *content) {
    off_t size = lseek(descriptor, 0, SEEK_END) - (off_t)sizeof *content;
    return size > 0 && pread(descriptor, content, sizeof *content, size) == (ssize_t)sizeof *content;
}

CUresult import_descriptor(int descriptor, struct physical **imported) {
    struct exported content;
    if (!read_exported(descriptor, &content)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = import_physical(&content.shared, imported);
    if (result) return result;
    if ((*imported)->memfd < 0) (*imported)->memfd = open_again(descriptor);
    (*imported)->properties = content.properties;
    (*imported)->properties.location.id = (*imported)->device;
    return CUDA_SUCCESS;
}

static CUresult import_fabric(const void *handle, struct physical **imported) {
    struct shared_memory shared;
    memcpy(&shared, handle, sizeof shared);
    CUresult result = import_physical(&shared, imported);
    if (result) return result;
    (*imported)->properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (*imported)->device}};
    return CUDA_SUCCESS;
}

CUresult do_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType) {
    struct physical *physical;
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) result = import_descriptor((int)(intptr_t)osHandle, &physical);
    if (shHandleType == CU_MEM_HANDLE_TYPE_FABRIC && osHandle) result = import_fabric(osHandle, &physical);
    if (!result) *handle = add_handle(physical);
    return result;
}
