/* Stream capture: calls on a capturing stream become nodes of a graph. */
#include "cuda_driver.h"

#include <stdlib.h>

static struct capture *captures;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

void copy_nodes(struct node_set *to, const struct node_set *from) {
    to->count = 0;
    for (size_t each = 0; each < from->count; each++) add_node_to(to, from->nodes[each]);
}

/* Whether a capture forbids this thread to make calls that cannot be captured. */
static int forbids(const struct capture *capture) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return 0;
    if (capture->thread == thread_number()) return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult refuse_in_capture(void) {
    CUresult result = CUDA_SUCCESS;
    for (struct capture *each = captures; each; each = each->next)
        if (forbids(each)) each->is_invalid = 1, result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return result;
}

CUresult refuse_for_stream(CUstream stream) {
    if (!stream->capture) return CUDA_SUCCESS;
    stream->capture->is_invalid = 1;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult usable_capture(CUstream stream) {
    return stream->capture->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult capture_node(CUstream stream, CUgraphNode node) {
    stream->last_nodes.count = 0;
    add_node_to(&stream->last_nodes, node);
    return CUDA_SUCCESS;
}

CUresult capture_event(CUevent event, CUstream stream) {
    CUresult result = usable_capture(stream);
    if (result) return result;
    event->capture = stream->capture;
    copy_nodes(&event->nodes, &stream->last_nodes);
    return CUDA_SUCCESS;
}

/* A stream that waits for a captured event takes part in the capture. */
CUresult capture_wait(CUstream stream, CUevent event) {
    if (!event->capture) {
        stream->capture->is_invalid = 1;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (stream->capture && stream->capture != event->capture) {
        stream->capture->is_invalid = event->capture->is_invalid = 1;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream->capture = event->capture;
    for (size_t each = 0; each < event->nodes.count; each++) add_node_to(&stream->last_nodes, event->nodes.nodes[each]);
    return usable_capture(stream);
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, CUgraph graph, const CUgraphNode *dependencies, size_t count) {
    CUstream stream;
    CUresult result = find_stream(handle, &stream);
    if (result) return result;
    if (stream->is_legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    struct capture *capture = allocate(sizeof *capture);
    *capture = (struct capture){captures, next_id(), graph ? graph : new_graph(), stream, mode, 0, thread_number(), !graph};
    captures = stream->capture = capture;
    stream->last_nodes.count = 0;
    for (size_t each = 0; each < count; each++) add_node_to(&stream->last_nodes, dependencies[each]);
    return CUDA_SUCCESS;
}
CUresult do_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) { return begin(hStream, mode, NULL, NULL, 0); }
CUresult do_cuStreamBeginCapture(CUstream hStream) { return begin(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0); }
CUresult do_cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode) {
    return hGraph ? begin(hStream, mode, hGraph, dependencies, numDependencies) : CUDA_ERROR_INVALID_VALUE;
}

/* Streams that took part leave the capture; returns whether one of them has nodes that the origin does not depend on. */
static int release_streams(const struct capture *capture) {
    int is_unjoined = 0;
    for (CUstream each = capture->origin->context->streams; each; each = each->next) {
        if (each->capture != capture) continue;
        for (size_t one = 0; one < each->last_nodes.count && each != capture->origin; one++) {
            int has_dependent = 0;
            for (size_t other = 0; other < capture->origin->last_nodes.count; other++)
                has_dependent |= capture->origin->last_nodes.nodes[other] == each->last_nodes.nodes[one];
            for (size_t other = 0; other < capture->graph->nodes.count; other++) {
                const struct node_set *dependencies = &capture->graph->nodes.nodes[other]->dependencies;
                for (size_t at = 0; at < dependencies->count; at++) has_dependent |= dependencies->nodes[at] == each->last_nodes.nodes[one];
            }
            is_unjoined |= !has_dependent;
        }
        each->capture = NULL;
    }
    return is_unjoined;
}

CUresult do_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph) {
    CUstream stream;
    CUresult result = phGraph ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result && result != CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) return result;
    struct capture *capture = stream->capture, **at = &captures;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != thread_number()) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    int is_unjoined = release_streams(capture);
    while (*at != capture) at = &(*at)->next;
    *at = capture->next;
    *phGraph = capture->is_invalid || is_unjoined ? NULL : capture->graph;
    result = capture->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : is_unjoined ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED : CUDA_SUCCESS;
    if (result && capture->own_graph) destroy_graph(capture->graph);
    free(capture);
    return result;
}

static CUstreamCaptureStatus status_of(CUstream stream) {
    if (!stream->capture) return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult do_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out, const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out) {
    CUstream stream;
    CUresult result = captureStatus_out ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result && result != CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) return result;
    *captureStatus_out = status_of(stream);
    if (*captureStatus_out != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
    if (id_out) *id_out = stream->capture->id;
    if (graph_out) *graph_out = stream->capture->graph;
    if (dependencies_out) *dependencies_out = stream->last_nodes.nodes;
    if (edgeData_out) *edgeData_out = NULL;
    if (numDependencies_out) *numDependencies_out = stream->last_nodes.count;
    return CUDA_SUCCESS;
}
CUresult do_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out, const CUgraphNode **dependencies_out, size_t *numDependencies_out) {
    return do_cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, graph_out, dependencies_out, NULL, numDependencies_out);
}
CUresult do_cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out) {
    return do_cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, NULL, NULL, NULL, NULL);
}
CUresult do_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus) {
    return do_cuStreamGetCaptureInfo_v3(hStream, captureStatus, NULL, NULL, NULL, NULL, NULL);
}

CUresult do_cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, unsigned int flags) {
    CUstream stream;
    CUresult result = find_stream(hStream, &stream);
    if (result) return result;
    if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->last_nodes.count = 0;
    for (size_t each = 0; each < numDependencies; each++) add_node_to(&stream->last_nodes, dependencies[each]);
    return CUDA_SUCCESS;
}
CUresult do_cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags) {
    return do_cuStreamUpdateCaptureDependencies_v2(hStream, dependencies, NULL, numDependencies, flags);
}

CUresult do_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    if (!mode) return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
