/* Memory of graphs: a node has its address from its creation on; memory is reserved per device when a graph is launched,
 * and stays reserved until it is trimmed. */
#include "cuda_driver.h"

static struct { uint64_t used, used_high, reserved, reserved_high; } memory[MAX_CARDS];

CUresult plan_allocation(CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    CUdevice device = params->poolProps.location.id;
    if (params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE || !device_at(device) || !params->bytesize) return CUDA_ERROR_INVALID_VALUE;
    if (params->bytesize > device_at(device)->total) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t size = round_up(params->bytesize, LARGE_PAGE), base = reserve_addresses(size, LARGE_PAGE, 0);
    if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
    struct range *range = add_range(GRAPH_RANGE, base, size, device);
    range->buffer_size = params->bytesize, range->owns_address = 1;
    params->dptr = base;
    return CUDA_SUCCESS;
}

CUresult free_graph_memory(struct range *range) {
    if (!range->is_live) return CUDA_ERROR_INVALID_VALUE;
    range->is_live = 0;
    memory[range->device].used -= range->size;
    return CUDA_SUCCESS;
}

static int reserve(CUdevice device, uint64_t wanted) {
    const struct device *on = device_at(device);
    if (wanted <= memory[device].reserved) return 1;
    if (!reserve_bytes(on->card, wanted - memory[device].reserved, on->capacity)) return 0;
    memory[device].reserved = wanted;
    if (wanted > memory[device].reserved_high) memory[device].reserved_high = wanted;
    return 1;
}

/* The most that is used at once while the nodes run, on each device. */
static CUresult find_peaks(const struct node_set *nodes, int frees_first, uint64_t peaks[MAX_CARDS]) {
    uint64_t used[MAX_CARDS];
    for (int device = 0; device < device_total(); device++) peaks[device] = used[device] = memory[device].used;
    for (size_t each = 0; each < nodes->count; each++) {
        const struct range *range = NULL;
        CUgraphNode node = nodes->nodes[each];
        if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) range = find_range(node->of.allocation.dptr);
        if (range && range->is_live && !frees_first) return CUDA_ERROR_INVALID_VALUE;
        if (range && !range->is_live) used[range->device] += range->size;
        if (range && used[range->device] > peaks[range->device]) peaks[range->device] = used[range->device];
        if (node->type == CU_GRAPH_NODE_TYPE_MEM_FREE && (range = find_range(node->of.freed))) used[range->device] -= range->size;
    }
    return CUDA_SUCCESS;
}

CUresult allocate_for_graph(const struct node_set *nodes, int frees_first) {
    uint64_t peaks[MAX_CARDS];
    CUresult result = find_peaks(nodes, frees_first, peaks);
    if (result) return result;
    for (int device = 0; device < device_total(); device++) {
        if (!reserve(device, peaks[device])) return CUDA_ERROR_OUT_OF_MEMORY;
        if (peaks[device] > memory[device].used_high) memory[device].used_high = peaks[device];
    }
    for (size_t each = 0; each < nodes->count; each++) {
        CUgraphNode node = nodes->nodes[each];
        int allocates = node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC, frees = node->type == CU_GRAPH_NODE_TYPE_MEM_FREE;
        struct range *range = allocates ? find_range(node->of.allocation.dptr) : frees ? find_range(node->of.freed) : NULL;
        if (range && allocates && !range->is_live) range->is_live = 1, memory[range->device].used += range->size;
        if (range && frees) free_graph_memory(range);
    }
    return CUDA_SUCCESS;
}

void trim_graph_memory(CUdevice device) {
    uint64_t unused = memory[device].reserved - memory[device].used;
    if (unused) release_bytes(device_at(device)->card, unused);
    memory[device].reserved = memory[device].used;
}

CUresult do_cuDeviceGraphMemTrim(CUdevice device) {
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    trim_graph_memory(device);
    return CUDA_SUCCESS;
}

static uint64_t *attribute_of(CUdevice device, CUgraphMem_attribute attribute) {
    switch ((int)attribute) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: return &memory[device].used;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: return &memory[device].used_high;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: return &memory[device].reserved;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: return &memory[device].reserved_high;
    default: return NULL;
    }
}
CUresult do_cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value) {
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!value || !attribute_of(device, attr)) return CUDA_ERROR_INVALID_VALUE;
    *(cuuint64_t *)value = *attribute_of(device, attr);
    return CUDA_SUCCESS;
}
/* Only the high marks can be set, and only to zero. */
CUresult do_cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value) {
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    int is_high = attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
    if (!value || !is_high || *(cuuint64_t *)value) return CUDA_ERROR_INVALID_VALUE;
    *attribute_of(device, attr) = *attribute_of(device, attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH ? CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT : CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
    return CUDA_SUCCESS;
}
