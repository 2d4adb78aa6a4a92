/* Graphs: nodes, executable graphs, and their launch. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

struct CUgraphExec_st { unsigned id; uint64_t flags; struct node_set nodes; };

void add_node_to(struct node_set *set, CUgraphNode node) {
    for (size_t each = 0; each < set->count; each++)
        if (set->nodes[each] == node) return;
    set->nodes = realloc(set->nodes, (set->count + 1) * sizeof(CUgraphNode));
    if (!set->nodes) abort();
    set->nodes[set->count++] = node;
}

CUgraph new_graph(void) {
    CUgraph graph = allocate(sizeof *graph);
    graph->id = (unsigned)next_id();
    return graph;
}

CUgraphNode new_node(CUgraph graph, CUgraphNodeType type, const CUgraphNode *dependencies, size_t count) {
    CUgraphNode node = allocate(sizeof *node);
    *node = (struct CUgraphNode_st){.graph = graph, .type = type, .id = ++graph->last_node};
    for (size_t each = 0; each < count; each++) add_node_to(&node->dependencies, dependencies[each]);
    add_node_to(&graph->nodes, node);
    return node;
}

static void free_nodes(struct node_set *set) {
    for (size_t each = 0; each < set->count; each++) {
        free(set->nodes[each]->dependencies.nodes);
        free(set->nodes[each]);
    }
    free(set->nodes);
}

/* The addresses of its memory nodes stay reserved: executable graphs and the program may still use them. */
void destroy_graph(CUgraph graph) {
    free_nodes(&graph->nodes);
    free(graph);
}

static CUgraph copy_graph(CUgraph from);

static void copy_parameters(CUgraphNode to, CUgraphNode from) {
    to->of = from->of;
    to->source = from;
    if (from->type == CU_GRAPH_NODE_TYPE_GRAPH) to->of.child = copy_graph(from->of.child);
}

static CUgraph copy_graph(CUgraph from) {
    CUgraph copy = new_graph();
    for (size_t each = 0; each < from->nodes.count; each++)
        copy_parameters(new_node(copy, from->nodes.nodes[each]->type, NULL, 0), from->nodes.nodes[each]);
    for (size_t each = 0; each < from->nodes.count; each++) {
        const struct node_set *dependencies = &from->nodes.nodes[each]->dependencies;
        for (size_t one = 0; one < dependencies->count; one++)
            for (size_t other = 0; other < from->nodes.count; other++)
                if (from->nodes.nodes[other] == dependencies->nodes[one]) add_node_to(&copy->nodes.nodes[each]->dependencies, copy->nodes.nodes[other]);
    }
    return copy;
}

CUresult do_cuGraphCreate(CUgraph *phGraph, unsigned int flags) {
    if (!phGraph || flags) return CUDA_ERROR_INVALID_VALUE;
    *phGraph = new_graph();
    return CUDA_SUCCESS;
}
CUresult do_cuGraphDestroy(CUgraph hGraph) {
    if (!hGraph) return CUDA_ERROR_INVALID_VALUE;
    destroy_graph(hGraph);
    return CUDA_SUCCESS;
}
CUresult do_cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph) {
    if (!phGraphClone || !originalGraph) return CUDA_ERROR_INVALID_VALUE;
    *phGraphClone = copy_graph(originalGraph);
    return CUDA_SUCCESS;
}

static CUresult add(CUgraphNode *added, CUgraph graph, CUgraphNodeType type, const CUgraphNode *dependencies, size_t count) {
    if (!added || !graph || (count && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
    *added = new_node(graph, type, dependencies, count);
    return CUDA_SUCCESS;
}

CUresult do_cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
    if (!nodeParams || (!nodeParams->func && !nodeParams->kern)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_KERNEL, dependencies, numDependencies);
    if (!result) (*phGraphNode)->of.kernel = *nodeParams;
    return result;
}
static CUDA_KERNEL_NODE_PARAMS widened(const CUDA_KERNEL_NODE_PARAMS_v1 *old) {
    return (CUDA_KERNEL_NODE_PARAMS){.func = old->func, .gridDimX = old->gridDimX, .gridDimY = old->gridDimY, .gridDimZ = old->gridDimZ,
        .blockDimX = old->blockDimX, .blockDimY = old->blockDimY, .blockDimZ = old->blockDimZ, .sharedMemBytes = old->sharedMemBytes,
        .kernelParams = old->kernelParams, .extra = old->extra};
}
CUresult do_cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS wide = widened(nodeParams);
    return do_cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &wide);
}
CUresult do_cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams) {
    if (!hNode || !nodeParams || hNode->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
    *nodeParams = hNode->of.kernel;
    return CUDA_SUCCESS;
}
CUresult do_cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
    if (!hNode || !nodeParams || hNode->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
    hNode->of.kernel = *nodeParams;
    return CUDA_SUCCESS;
}
CUresult do_cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS wide = widened(nodeParams);
    return do_cuGraphKernelNodeSetParams_v2(hNode, &wide);
}
CUresult do_cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx) {
    CUresult result = copyParams ? add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_MEMCPY, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
    if (!result) (*phGraphNode)->of.copy = *copyParams;
    return result;
}
CUresult do_cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx) {
    CUresult result = memsetParams ? add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_MEMSET, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
    if (!result) (*phGraphNode)->of.set = *memsetParams;
    return result;
}
CUresult do_cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams) {
    CUresult result = nodeParams && nodeParams->fn ? add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_HOST, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
    if (!result) (*phGraphNode)->of.host = *nodeParams;
    return result;
}
CUresult do_cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUgraph childGraph) {
    CUresult result = childGraph ? add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_GRAPH, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
    if (!result) (*phGraphNode)->of.child = copy_graph(childGraph);
    return result;
}
CUresult do_cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph) {
    if (!hNode || !phGraph || hNode->type != CU_GRAPH_NODE_TYPE_GRAPH) return CUDA_ERROR_INVALID_VALUE;
    *phGraph = hNode->of.child;
    return CUDA_SUCCESS;
}
CUresult do_cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies) {
    return add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_EMPTY, dependencies, numDependencies);
}
CUresult do_cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUevent event) {
    CUresult result = event ? add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_EVENT_RECORD, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
    if (!result) (*phGraphNode)->of.event = event;
    return result;
}
CUresult do_cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUevent event) {
    CUresult result = event ? add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_WAIT_EVENT, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
    if (!result) (*phGraphNode)->of.event = event;
    return result;
}
CUresult do_cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams) {
    CUresult result = nodeParams ? plan_allocation(nodeParams) : CUDA_ERROR_INVALID_VALUE;
    if (!result) result = add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_MEM_ALLOC, dependencies, numDependencies);
    if (!result) (*phGraphNode)->of.allocation = *nodeParams;
    return result;
}
CUresult do_cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out) {
    if (!hNode || !params_out || hNode->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC) return CUDA_ERROR_INVALID_VALUE;
    *params_out = hNode->of.allocation;
    return CUDA_SUCCESS;
}
CUresult do_cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUdeviceptr dptr) {
    const struct range *range = find_range(dptr);
    if (!range || range->kind != GRAPH_RANGE || range->base != dptr) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = add(phGraphNode, hGraph, CU_GRAPH_NODE_TYPE_MEM_FREE, dependencies, numDependencies);
    if (!result) (*phGraphNode)->of.freed = dptr;
    return result;
}
CUresult do_cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out) {
    if (!hNode || !dptr_out || hNode->type != CU_GRAPH_NODE_TYPE_MEM_FREE) return CUDA_ERROR_INVALID_VALUE;
    *dptr_out = hNode->of.freed;
    return CUDA_SUCCESS;
}

CUresult do_cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    const CUDA_KERNEL_NODE_PARAMS_v3 *kernel = &nodeParams->kernel;
    const CUDA_MEMSET_NODE_PARAMS_v2 *set = &nodeParams->memset;
    CUDA_MEM_ALLOC_NODE_PARAMS_v2 *allocation = &nodeParams->alloc;
    CUresult result;
    switch ((int)nodeParams->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return do_cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &(CUDA_KERNEL_NODE_PARAMS){
            .func = kernel->func, .kern = kernel->kern, .ctx = kernel->ctx, .gridDimX = kernel->gridDimX, .gridDimY = kernel->gridDimY,
            .gridDimZ = kernel->gridDimZ, .blockDimX = kernel->blockDimX, .blockDimY = kernel->blockDimY, .blockDimZ = kernel->blockDimZ,
            .sharedMemBytes = kernel->sharedMemBytes, .kernelParams = kernel->kernelParams, .extra = kernel->extra});
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return do_cuGraphAddMemcpyNode(phGraphNode, hGraph, dependencies, numDependencies, &nodeParams->memcpy.copyParams, NULL);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return do_cuGraphAddMemsetNode(phGraphNode, hGraph, dependencies, numDependencies, &(CUDA_MEMSET_NODE_PARAMS){
            set->dst, set->pitch, set->value, set->elementSize, set->width, set->height}, NULL);
    case CU_GRAPH_NODE_TYPE_HOST:
        return do_cuGraphAddHostNode(phGraphNode, hGraph, dependencies, numDependencies, &(CUDA_HOST_NODE_PARAMS){
            nodeParams->host.fn, nodeParams->host.userData});
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return do_cuGraphAddChildGraphNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams->graph.graph);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return do_cuGraphAddEmptyNode(phGraphNode, hGraph, dependencies, numDependencies);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return do_cuGraphAddEventRecordNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return do_cuGraphAddEventWaitNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams->eventWait.event);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
        CUDA_MEM_ALLOC_NODE_PARAMS plain = {.poolProps = allocation->poolProps, .bytesize = allocation->bytesize};
        result = do_cuGraphAddMemAllocNode(phGraphNode, hGraph, dependencies, numDependencies, &plain);
        allocation->dptr = plain.dptr;
        return result;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return do_cuGraphAddMemFreeNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams->free.dptr);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}
CUresult do_cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUgraphNodeParams *nodeParams) {
    return do_cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, NULL, numDependencies, nodeParams);
}
CUresult do_cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams) {
    return do_cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
}

CUresult do_cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type) {
    if (!hNode || !type) return CUDA_ERROR_INVALID_VALUE;
    *type = hNode->type;
    return CUDA_SUCCESS;
}
static CUresult list_nodes(const struct node_set *set, CUgraphNode *nodes, size_t *count) {
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    for (size_t each = 0; nodes && each < *count; each++) nodes[each] = each < set->count ? set->nodes[each] : NULL;
    if (!nodes || *count > set->count) *count = set->count;
    return CUDA_SUCCESS;
}
CUresult do_cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes) {
    return hGraph ? list_nodes(&hGraph->nodes, nodes, numNodes) : CUDA_ERROR_INVALID_VALUE;
}
CUresult do_cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes) {
    if (!hGraph) return CUDA_ERROR_INVALID_VALUE;
    struct node_set roots = {NULL, 0};
    for (size_t each = 0; each < hGraph->nodes.count; each++)
        if (!hGraph->nodes.nodes[each]->dependencies.count) add_node_to(&roots, hGraph->nodes.nodes[each]);
    CUresult result = list_nodes(&roots, rootNodes, numRootNodes);
    free(roots.nodes);
    return result;
}
CUresult do_cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies) {
    return hNode ? list_nodes(&hNode->dependencies, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
}
CUresult do_cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies) {
    if (!hGraph || (numDependencies && (!from || !to))) return CUDA_ERROR_INVALID_VALUE;
    for (size_t each = 0; each < numDependencies; each++) add_node_to(&to[each]->dependencies, from[each]);
    return CUDA_SUCCESS;
}
CUresult do_cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData, size_t numDependencies) {
    return do_cuGraphAddDependencies(hGraph, from, to, numDependencies);
}

static int contains(const struct node_set *set, CUgraphNode node) {
    for (size_t each = 0; each < set->count; each++)
        if (set->nodes[each] == node) return 1;
    return 0;
}

/* The nodes in an order in which each comes after those that it depends on; child graphs in place of their nodes. */
static int put_in_order(const struct node_set *nodes, struct node_set *ordered) {
    for (size_t before = SIZE_MAX, left = nodes->count; left; left = 0) {
        while (before != ordered->count) {
            before = ordered->count;
            for (size_t each = 0; each < nodes->count; each++) {
                CUgraphNode node = nodes->nodes[each];
                int is_ready = 1;
                for (size_t one = 0; one < node->dependencies.count; one++) is_ready &= contains(ordered, node->dependencies.nodes[one]);
                if (is_ready) add_node_to(ordered, node);
            }
        }
    }
    return ordered->count == nodes->count;
}

static void append_copies(struct node_set *to, const struct node_set *ordered) {
    for (size_t each = 0; each < ordered->count; each++) {
        CUgraphNode from = ordered->nodes[each];
        if (from->type == CU_GRAPH_NODE_TYPE_GRAPH) {
            struct node_set inner = {NULL, 0};
            put_in_order(&from->of.child->nodes, &inner);
            append_copies(to, &inner);
            free(inner.nodes);
            continue;
        }
        CUgraphNode copy = allocate(sizeof *copy);
        *copy = (struct CUgraphNode_st){.type = from->type, .id = from->id, .source = from, .of = from->of};
        add_node_to(to, copy);
    }
}

static CUresult instantiate(CUgraphExec *made, CUgraph graph, uint64_t flags) {
    CUcontext context;
    CUresult result = made && graph ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    struct node_set ordered = {NULL, 0};
    if (!put_in_order(&graph->nodes, &ordered)) {
        free(ordered.nodes);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *made = allocate(sizeof **made);
    (*made)->id = (unsigned)next_id(), (*made)->flags = flags;
    append_copies(&(*made)->nodes, &ordered);
    free(ordered.nodes);
    return CUDA_SUCCESS;
}
CUresult do_cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags) { return instantiate(phGraphExec, hGraph, flags); }
CUresult do_cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize) {
    return instantiate(phGraphExec, hGraph, 0);
}
CUresult do_cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize) {
    return instantiate(phGraphExec, hGraph, 0);
}
CUresult do_cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
    if (!instantiateParams) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = instantiate(phGraphExec, hGraph, instantiateParams->flags);
    instantiateParams->result_out = result ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return result;
}
CUresult do_cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags) {
    if (!hGraphExec || !flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = hGraphExec->flags;
    return CUDA_SUCCESS;
}
CUresult do_cuGraphExecDestroy(CUgraphExec hGraphExec) {
    if (!hGraphExec) return CUDA_ERROR_INVALID_VALUE;
    free_nodes(&hGraphExec->nodes);
    free(hGraphExec);
    return CUDA_SUCCESS;
}

/* The parameters of the nodes in their order, which both graphs have in common. */
CUresult do_cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo) {
    CUgraphExec other;
    CUresult result = hGraphExec && resultInfo ? instantiate(&other, hGraph, hGraphExec->flags) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    int is_same = other->nodes.count == hGraphExec->nodes.count;
    for (size_t each = 0; is_same && each < other->nodes.count; each++) is_same = other->nodes.nodes[each]->type == hGraphExec->nodes.nodes[each]->type;
    struct node_set unused = is_same ? hGraphExec->nodes : other->nodes;
    if (is_same) hGraphExec->nodes = other->nodes;
    free_nodes(&unused);
    free(other);
    *resultInfo = (CUgraphExecUpdateResultInfo){.result = is_same ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED};
    return is_same ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}
CUresult do_cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult *updateResult_out) {
    CUgraphExecUpdateResultInfo info = {.result = CU_GRAPH_EXEC_UPDATE_ERROR};
    CUresult result = do_cuGraphExecUpdate_v2(hGraphExec, hGraph, &info);
    if (hErrorNode_out) *hErrorNode_out = NULL;
    if (updateResult_out) *updateResult_out = info.result;
    return result;
}

static CUgraphNode node_in(CUgraphExec exec, CUgraphNode node) {
    for (size_t each = 0; exec && each < exec->nodes.count; each++)
        if (exec->nodes.nodes[each]->source == node) return exec->nodes.nodes[each];
    return NULL;
}
CUresult do_cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
    return do_cuGraphKernelNodeSetParams_v2(node_in(hGraphExec, hNode), nodeParams);
}
CUresult do_cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
    return do_cuGraphKernelNodeSetParams(node_in(hGraphExec, hNode), nodeParams);
}
CUresult do_cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled) {
    CUgraphNode node = node_in(hGraphExec, hNode);
    if (!node) return CUDA_ERROR_INVALID_VALUE;
    node->is_disabled = !isEnabled;
    return CUDA_SUCCESS;
}

static CUresult run_node(CUstream stream, CUgraphNode node) {
    if (node->is_disabled) return CUDA_SUCCESS;
    CUfunction function = node->of.kernel.func ? node->of.kernel.func : (CUfunction)node->of.kernel.kern;
    switch ((int)node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: run_on(stream, function->duration_ns); return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY: return copy_3d(&node->of.copy);
    case CU_GRAPH_NODE_TYPE_MEMSET: return set_memory(&node->of.set);
    case CU_GRAPH_NODE_TYPE_HOST: queue_callback(stream, node->of.host.fn, NULL, node->of.host.userData); return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        node->of.event->is_recorded = 1;
        node->of.event->at_ns = ready_time(stream) > now_ns() ? ready_time(stream) : now_ns();
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        if (node->of.event->at_ns > stream->ready_ns) stream->ready_ns = node->of.event->at_ns;
        return CUDA_SUCCESS;
    default: return CUDA_SUCCESS;
    }
}

CUresult do_cuGraphLaunch(CUgraphExec hGraph, CUstream hStream) {
    CUstream stream;
    CUresult result = hGraph ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result) result = refuse_for_stream(stream);
    if (!result) result = allocate_for_graph(&hGraph->nodes, hGraph->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH ? 1 : 0);
    for (size_t each = 0; !result && each < hGraph->nodes.count; each++) result = run_node(stream, hGraph->nodes.nodes[each]);
    run_due_callbacks();
    return result;
}
CUresult do_cuGraphUpload(CUgraphExec hGraph, CUstream hStream) {
    CUstream stream;
    return hGraph ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
}
