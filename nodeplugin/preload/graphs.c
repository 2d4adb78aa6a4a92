/* Graphs that allocate: memory is reserved for their nodes when they are launched or uploaded, and stays until it is
 * trimmed. What one graph may need is counted from its nodes. */
#include "charging.h"
#include "limits.h"
#include "process.h"
#include "usage.h"

#define MAX_DEPTH 16
#define BATCH 256

struct need { uint64_t bytes[MAX_CARDS]; };

static void add_node(CUgraphNode node, struct need *need, int depth);

static void add_graph(CUgraph graph, struct need *need, int depth) {
    CUgraphNode some[BATCH];
    size_t number = 0;
    if (depth > MAX_DEPTH || REAL(cuGraphGetNodes)(graph, NULL, &number) != CUDA_SUCCESS || !number)
        return;
    CUgraphNode *nodes = number <= BATCH ? some : allocate_pages(number * sizeof *nodes);
    if (nodes && REAL(cuGraphGetNodes)(graph, nodes, &number) == CUDA_SUCCESS)
        for (size_t each = 0; each < number; each++)
            add_node(nodes[each], need, depth);
    if (nodes && nodes != some)
        free_pages(nodes, number * sizeof *nodes);
}

static void add_allocation(CUgraphNode node, struct need *need) {
    CUDA_MEM_ALLOC_NODE_PARAMS wanted;
    CUdevice device;
    unsigned card;
    if (REAL(cuGraphMemAllocNodeGetParams)(node, &wanted) != CUDA_SUCCESS)
        return;
    if (is_device_location(&wanted.poolProps.location, &device) && card_of_device(device, &card) == CUDA_SUCCESS)
        need->bytes[card] += round_up(wanted.bytesize, BLOCK);
}

static void add_node(CUgraphNode node, struct need *need, int depth) {
    CUgraphNodeType type;
    CUgraph child;
    if (REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return;
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        add_allocation(node, need);
    else if (type == CU_GRAPH_NODE_TYPE_GRAPH && REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
        add_graph(child, need, depth + 1);
}

/* One record for each card, numbered in the upper bits of the key, which addresses leave free. */
static uint64_t key_of(CUgraphExec graph, unsigned card) { return (uint64_t)(uintptr_t)graph ^ (uint64_t)card << 58; }

static void forget_graph(CUgraphExec graph) {
    for (unsigned card = 0; card < MAX_CARDS; card++)
        take_record(GRAPH, key_of(graph, card), NULL);
}

static CUresult instantiated(CUresult result, const CUgraphExec *executable, CUgraph graph) {
    struct need need = {{0}};
    if (result != CUDA_SUCCESS)
        return result;
    add_graph(graph, &need, 0);
    forget_graph(*executable);
    for (unsigned card = 0; card < MAX_CARDS; card++)
        if (need.bytes[card])
            put_record((struct record){.kind = GRAPH, .key = key_of(*executable, card), .bytes = need.bytes[card],
                                       .card = (uint8_t)card, .shared = NOT_SHARED});
    return result;
}

HOOK(cuGraphInstantiate)(CUgraphExec *executable, CUgraph graph, CUgraphNode *failed, char *log, size_t size) {
    return instantiated(REAL(cuGraphInstantiate)(executable, graph, failed, log, size), executable, graph);
}
HOOK(cuGraphInstantiate_v2)(CUgraphExec *executable, CUgraph graph, CUgraphNode *failed, char *log, size_t size) {
    return instantiated(REAL(cuGraphInstantiate_v2)(executable, graph, failed, log, size), executable, graph);
}
HOOK(cuGraphInstantiateWithFlags)(CUgraphExec *executable, CUgraph graph, unsigned long long flags) {
    return instantiated(REAL(cuGraphInstantiateWithFlags)(executable, graph, flags), executable, graph);
}

HOOK(cuGraphExecUpdate)(CUgraphExec executable, CUgraph graph, CUgraphNode *failed, CUgraphExecUpdateResult *why) {
    return instantiated(REAL(cuGraphExecUpdate)(executable, graph, failed, why), &executable, graph);
}
HOOK(cuGraphExecUpdate_v2)(CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo *why) {
    return instantiated(REAL(cuGraphExecUpdate_v2)(executable, graph, why), &executable, graph);
}

HOOK(cuGraphExecDestroy)(CUgraphExec executable) {
    forget_graph(executable);
    return REAL(cuGraphExecDestroy)(executable);
}

static CUdevice device_of_card(unsigned card) {
    unsigned found;
    for (CUdevice device = 0; device < MAX_DEVICES; device++)
        if (process()->card_of_device[device] && card_of_device(device, &found) == CUDA_SUCCESS && found == card)
            return device;
    return -1;
}

/* Count what graphs have reserved on a card; `extra` is reserved for them already. What goes beyond that is counted as far
 * as there is room. */
static void settle(unsigned card, uint64_t extra) {
    struct process *own = process();
    uint64_t counted = own->graph_bytes[card] + extra;
    cuuint64_t now = counted;
    CUdevice device = device_of_card(card);
    if (device >= 0)
        REAL(cuDeviceGetGraphMemAttribute)(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &now);
    now = round_up(now, BLOCK);
    if (now < counted)
        release(card, counted - now);
    if (now <= counted || reserve(card, now - counted))
        counted = now;
    own->graph_bytes[card] = counted;
}

static int reserve_for(unsigned card, uint64_t bytes) {
    if (reserve(card, bytes))
        return 1;
    CUdevice device = device_of_card(card);
    if (device >= 0)
        REAL(cuDeviceGraphMemTrim)(device);
    settle(card, 0);
    settle_pools();
    return reserve(card, bytes);
}

/* What this graph does not have yet is at most what its nodes need. Launches of graphs that allocate come one by one. */
static CUresult launch(__typeof__(cuGraphLaunch) *real, CUgraphExec executable, CUstream stream) {
    struct need need = {{0}};
    struct record record;
    int allocates = 0;
    for (unsigned card = 0; card < card_count(); card++)
        if (find_record(GRAPH, key_of(executable, card), &record))
            need.bytes[card] = record.bytes, allocates = 1;
    if (!allocates)
        return real(executable, stream);
    CUresult result = CUDA_SUCCESS;
    unsigned reserved = 0;
    lock *graphs = &process()->graphs_lock;
    acquire(graphs);
    for (; reserved < card_count() && result == CUDA_SUCCESS; reserved++)
        if (need.bytes[reserved] && !reserve_for(reserved, need.bytes[reserved])) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
            break;
        }
    if (result == CUDA_SUCCESS)
        result = real(executable, stream);
    for (unsigned card = 0; card < reserved; card++)
        if (need.bytes[card])
            settle(card, need.bytes[card]);
    let_go(graphs);
    return result;
}

HOOK(cuGraphLaunch)(CUgraphExec executable, CUstream stream) { return launch(REAL(cuGraphLaunch), executable, stream); }
HOOK(cuGraphLaunch_ptsz)(CUgraphExec executable, CUstream stream) {
    return launch(REAL(cuGraphLaunch_ptsz), executable, stream);
}
HOOK(cuGraphUpload)(CUgraphExec executable, CUstream stream) { return launch(REAL(cuGraphUpload), executable, stream); }
HOOK(cuGraphUpload_ptsz)(CUgraphExec executable, CUstream stream) {
    return launch(REAL(cuGraphUpload_ptsz), executable, stream);
}

HOOK(cuGraphInstantiateWithParams)(CUgraphExec *executable, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *wanted) {
    return instantiated(REAL(cuGraphInstantiateWithParams)(executable, graph, wanted), executable, graph);
}
HOOK(cuGraphInstantiateWithParams_ptsz)(CUgraphExec *executable, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *wanted) {
    return instantiated(REAL(cuGraphInstantiateWithParams_ptsz)(executable, graph, wanted), executable, graph);
}

HOOK(cuDeviceGraphMemTrim)(CUdevice device) {
    unsigned card;
    CUresult result = REAL(cuDeviceGraphMemTrim)(device);
    if (card_of_device(device, &card) == CUDA_SUCCESS) {
        acquire(&process()->graphs_lock);
        settle(card, 0);
        let_go(&process()->graphs_lock);
    }
    return result;
}
