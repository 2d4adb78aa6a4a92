/* Graphs that allocate: memory is reserved for their nodes when they are launched or uploaded, and stays until it is
 * trimmed. What one graph may need is counted from its nodes. */
#include <string.h>

#include "charging.h"
#include "limits.h"
#include "process.h"
#include "usage.h"

#define MAX_DEPTH 16
#define BATCH 256

/* Where the nodes of a graph allocate. The driver gives allocations that never exist at the same time the same addresses,
 * and each address its memory once: so a graph needs as much as the ranges cover. */
struct range { uint64_t begin, end; unsigned card; };
struct need { uint64_t bytes[MAX_CARDS]; struct range *ranges; size_t number, capacity; };

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

static int make_place(struct need *need) {
    if (need->number < need->capacity)
        return 1;
    size_t capacity = need->capacity ? 2 * need->capacity : BATCH;
    struct range *larger = allocate_pages(capacity * sizeof *larger);
    if (!larger)
        return 0;
    if (need->ranges) {
        memcpy(larger, need->ranges, need->number * sizeof *larger);
        free_pages(need->ranges, need->capacity * sizeof *larger);
    }
    need->ranges = larger, need->capacity = capacity;
    return 1;
}

/* Without memory for the list, it counts whole. */
static void add_range(struct need *need, unsigned card, uint64_t begin, uint64_t bytes) {
    if (make_place(need))
        need->ranges[need->number++] = (struct range){begin, begin + bytes, card};
    else
        need->bytes[card] += bytes;
}

static void sink(struct range *ranges, size_t at, size_t number) {
    for (size_t child; (child = 2 * at + 1) < number; at = child) {
        if (child + 1 < number && ranges[child + 1].begin > ranges[child].begin)
            child++;
        if (ranges[at].begin >= ranges[child].begin)
            return;
        struct range moved = ranges[at];
        ranges[at] = ranges[child], ranges[child] = moved;
    }
}

/* In place: the C library's own may call malloc, which a program may have replaced. */
static void sort(struct range *ranges, size_t number) {
    for (size_t at = number / 2; at--;)
        sink(ranges, at, number);
    while (number > 1) {
        struct range last = ranges[--number];
        ranges[number] = ranges[0], ranges[0] = last;
        sink(ranges, 0, number);
    }
}

/* Addresses are unique among all devices. */
static void sum_ranges(struct need *need) {
    uint64_t covered = 0;
    sort(need->ranges, need->number);
    for (size_t each = 0; each < need->number; each++) {
        const struct range *range = &need->ranges[each];
        uint64_t begin = range->begin > covered ? range->begin : covered;
        if (range->end > begin)
            need->bytes[range->card] += range->end - begin, covered = range->end;
    }
    if (need->ranges)
        free_pages(need->ranges, need->capacity * sizeof *need->ranges);
}

static void add_allocation(CUgraphNode node, struct need *need) {
    CUDA_MEM_ALLOC_NODE_PARAMS wanted;
    CUdevice device;
    unsigned card;
    if (REAL(cuGraphMemAllocNodeGetParams)(node, &wanted) != CUDA_SUCCESS)
        return;
    if (is_device_location(&wanted.poolProps.location, &device) && card_of_device(device, &card) == CUDA_SUCCESS)
        add_range(need, card, wanted.dptr, round_up(wanted.bytesize, BLOCK));
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
    struct need need = {.number = 0};
    if (result != CUDA_SUCCESS)
        return result;
    add_graph(graph, &need, 0);
    sum_ranges(&need);
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

/* Count what graphs have reserved on a card; `extra` is reserved for them already. */
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
    else
        account(card, now - counted);
    own->graph_bytes[card] = now;
}

void settle_graphs(void) {
    struct process *own = process();
    acquire(&own->graphs_lock);
    own->graph_generation++;
    for (unsigned card = 0; card < MAX_CARDS; card++)
        if (own->graph_bytes[card])
            settle(card, 0);
    let_go(&own->graphs_lock);
}

/* What a graph needs beyond what it has is at most what its nodes need. A graph that was launched before still has its
 * memory, unless it was trimmed meanwhile: where the limit leaves no room to reserve all of it again, it needs no more. */
static int reserve_for(struct record *graph, uint64_t *reserved) {
    struct process *own = process();
    *reserved = graph->bytes;
    if (reserve(graph->card, graph->bytes))
        return 1;
    *reserved = 0;
    if (graph->object == own->graph_generation + 1)
        return 1;
    CUdevice device = device_of_card(graph->card);
    if (device >= 0)
        REAL(cuDeviceGraphMemTrim)(device);
    own->graph_generation++;
    settle(graph->card, 0);
    settle_pools();
    if (!reserve(graph->card, graph->bytes)) {
        report_refusal(graph->card, graph->bytes);
        return 0;
    }
    *reserved = graph->bytes;
    return 1;
}

/* Launches of graphs that allocate come one by one. */
static CUresult launch_allocating(__typeof__(cuGraphLaunch) *real, CUgraphExec executable, CUstream stream, int is_launch) {
    struct record graphs[MAX_CARDS];
    uint64_t reserved[MAX_CARDS];
    unsigned number = 0, tried = 0;
    CUresult result = CUDA_SUCCESS;
    for (unsigned card = 0; card < card_count(); card++)
        number += (unsigned)find_record(GRAPH, key_of(executable, card), &graphs[number]);
    for (; tried < number && result == CUDA_SUCCESS; tried++)
        if (!reserve_for(&graphs[tried], &reserved[tried]))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = real(executable, stream);
    for (unsigned each = 0; each < tried; each++) {
        settle(graphs[each].card, reserved[each]);
        /* 0 is never; drivers need not reserve anything for an upload. */
        graphs[each].object = is_launch && result == CUDA_SUCCESS ? process()->graph_generation + 1 : 0;
        change_record(&graphs[each]);
    }
    return result;
}

static CUresult launch(__typeof__(cuGraphLaunch) *real, CUgraphExec executable, CUstream stream, int is_launch) {
    int allocates = 0;
    for (unsigned card = 0; card < card_count() && !allocates; card++)
        allocates = find_record(GRAPH, key_of(executable, card), NULL);
    if (!allocates)
        return real(executable, stream);
    acquire(&process()->graphs_lock);
    CUresult result = launch_allocating(real, executable, stream, is_launch);
    let_go(&process()->graphs_lock);
    return result;
}

HOOK(cuGraphLaunch)(CUgraphExec executable, CUstream stream) { return launch(REAL(cuGraphLaunch), executable, stream, 1); }
HOOK(cuGraphLaunch_ptsz)(CUgraphExec executable, CUstream stream) {
    return launch(REAL(cuGraphLaunch_ptsz), executable, stream, 1);
}
HOOK(cuGraphUpload)(CUgraphExec executable, CUstream stream) { return launch(REAL(cuGraphUpload), executable, stream, 0); }
HOOK(cuGraphUpload_ptsz)(CUgraphExec executable, CUstream stream) {
    return launch(REAL(cuGraphUpload_ptsz), executable, stream, 0);
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
        process()->graph_generation++;
        settle(card, 0);
        let_go(&process()->graphs_lock);
    }
    return result;
}
