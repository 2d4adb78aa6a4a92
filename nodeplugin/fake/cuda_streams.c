/* Streams and events. The time when work is done is known when it is queued, so nothing runs in the background. */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <stdlib.h>
#include <unistd.h>

static CUevent events;

struct callback {
    struct callback *next;
    CUstream stream;
    uint64_t due_ns;
    CUhostFn function;
    CUstreamCallback stream_callback;
    void *data;
};
static struct callback *callbacks;

int thread_number(void) { return gettid(); }

static CUstream new_stream(CUcontext context, unsigned flags, int priority) {
    CUstream stream = allocate(sizeof *stream);
    *stream = (struct CUstream_st){.context = context, .next = context->streams, .id = next_id(), .flags = flags, .priority = priority};
    return context->streams = stream;
}

static CUstream default_stream(CUcontext context, int thread) {
    for (CUstream each = context->streams; each; each = each->next)
        if (thread ? each->thread == thread : each->is_legacy) return each;
    CUstream stream = new_stream(context, CU_STREAM_DEFAULT, 0);
    stream->thread = thread, stream->is_legacy = !thread;
    return stream;
}

static int is_stream(CUcontext context, CUstream stream) {
    for (CUstream each = context->streams; each; each = each->next)
        if (each == stream) return 1;
    return 0;
}

/* The legacy default stream would wait for a stream that is captured. */
static CUresult refuse_implicit_capture(CUcontext context) {
    CUresult result = CUDA_SUCCESS;
    for (CUstream each = context->streams; each; each = each->next)
        if (each->capture && !(each->flags & CU_STREAM_NON_BLOCKING)) {
            each->capture->is_invalid = 1;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

CUresult find_stream(CUstream handle, CUstream *stream) {
    CUcontext context;
    CUresult result = need_context(&context);
    int is_own = handle == CU_STREAM_PER_THREAD || (!handle && per_thread_stream_asked());
    if (!result && (!handle || handle == CU_STREAM_LEGACY || is_own)) {
        *stream = default_stream(context, is_own ? thread_number() : 0);
        return is_own ? CUDA_SUCCESS : refuse_implicit_capture(context);
    }
    if (result) return result;
    *stream = handle;
    return is_stream(context, handle) || is_context(handle->context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* The legacy default stream waits for all that do not decline, and they wait for it. */
uint64_t ready_time(CUstream stream) {
    uint64_t ready = stream->ready_ns;
    if (stream->flags & CU_STREAM_NON_BLOCKING) return ready;
    for (CUstream each = stream->context->streams; each; each = each->next) {
        int counts = each->is_legacy || (stream->is_legacy && !(each->flags & CU_STREAM_NON_BLOCKING));
        if (counts && each->ready_ns > ready) ready = each->ready_ns;
    }
    return ready;
}

uint64_t ready_time_of_context(CUcontext context) {
    uint64_t ready = 0;
    for (CUstream each = context->streams; each; each = each->next)
        if (each->ready_ns > ready) ready = each->ready_ns;
    return ready;
}

void run_on(CUstream stream, uint64_t duration_ns) {
    int card = device_at(stream->context->device)->card;
    uint64_t ready = ready_time(stream), now = now_ns();
    if (duration_ns) ready = add_work(card, ready, duration_ns);
    else if (ready < busy_until(card)) ready = busy_until(card);
    stream->ready_ns = ready > now ? ready : now;
}

void queue_callback(CUstream stream, CUhostFn function, CUstreamCallback stream_callback, void *data) {
    struct callback *made = allocate(sizeof *made), **at = &callbacks;
    *made = (struct callback){NULL, stream, ready_time(stream), function, stream_callback, data};
    while (*at) at = &(*at)->next;
    *at = made;
}

/* There is no thread for them: they run within the program's next call after their time, in the order of the queue. */
void run_due_callbacks(void) {
    while (callbacks && callbacks->due_ns <= now_ns()) {
        struct callback *due = callbacks;
        callbacks = due->next;
        begin_waiting();
        if (due->function) due->function(due->data);
        else due->stream_callback(due->stream, CUDA_SUCCESS, due->data);
        end_waiting();
        free(due);
    }
}

static void wait_and_trim(uint64_t time_ns) {
    wait_until(time_ns);
    run_due_callbacks();
    trim_pools();
}

void free_streams_of(CUcontext context) {
    while (context->streams) {
        CUstream stream = context->streams;
        context->streams = stream->next;
        free(stream->last_nodes.nodes);
        free(stream);
    }
    for (CUevent *at = &events; *at;) {
        CUevent event = *at;
        if (event->context != context) {
            at = &event->next;
            continue;
        }
        *at = event->next;
        free(event->nodes.nodes);
        free(event);
    }
}

CUresult do_cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (!phStream || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
    *phStream = new_stream(context, flags, priority);
    return CUDA_SUCCESS;
}
CUresult do_cuStreamCreate(CUstream *phStream, unsigned int Flags) { return do_cuStreamCreateWithPriority(phStream, Flags, 0); }

/* Work that was queued is done all the same. */
CUresult do_cuStreamDestroy_v2(CUstream hStream) {
    CUstream stream;
    CUresult result = find_stream(hStream, &stream);
    if (result) return result;
    if (stream->is_legacy || stream->thread) return CUDA_ERROR_INVALID_HANDLE;
    CUstream *at = &stream->context->streams;
    while (*at != stream) at = &(*at)->next;
    *at = stream->next;
    if (stream->ready_ns > default_stream(stream->context, 0)->ready_ns) default_stream(stream->context, 0)->ready_ns = stream->ready_ns;
    free(stream->last_nodes.nodes);
    free(stream);
    return CUDA_SUCCESS;
}
CUresult do_cuStreamDestroy(CUstream hStream) { return do_cuStreamDestroy_v2(hStream); }

CUresult do_cuStreamGetFlags(CUstream hStream, unsigned int *flags) {
    CUstream stream;
    CUresult result = flags ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *flags = stream->flags;
    return result;
}
CUresult do_cuStreamGetPriority(CUstream hStream, int *priority) {
    CUstream stream;
    CUresult result = priority ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *priority = stream->priority;
    return result;
}
CUresult do_cuStreamGetId(CUstream hStream, unsigned long long *streamId) {
    CUstream stream;
    CUresult result = streamId ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *streamId = stream->id;
    return result;
}
CUresult do_cuStreamGetCtx(CUstream hStream, CUcontext *pctx) {
    CUstream stream;
    CUresult result = pctx ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *pctx = stream->context;
    return result;
}
CUresult do_cuStreamGetDevice(CUstream hStream, CUdevice *device) {
    CUstream stream;
    CUresult result = device ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *device = stream->context->device;
    return result;
}

CUresult do_cuStreamQuery(CUstream hStream) {
    CUstream stream;
    CUresult result = find_stream(hStream, &stream);
    if (!result) result = refuse_for_stream(stream);
    if (result) return result;
    if (now_ns() < ready_time(stream)) return CUDA_ERROR_NOT_READY;
    run_due_callbacks();
    return CUDA_SUCCESS;
}

CUresult do_cuStreamSynchronize(CUstream hStream) {
    CUstream stream;
    CUresult result = find_stream(hStream, &stream);
    if (!result) result = refuse_for_stream(stream);
    if (!result) wait_and_trim(ready_time(stream));
    return result;
}

CUresult do_cuCtxSynchronize_v2(CUcontext ctx) {
    CUresult result = ctx && !is_context(ctx) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    CUcontext context = ctx;
    if (!ctx) result = need_context(&context);
    if (!result) result = refuse_in_capture();
    if (!result) wait_and_trim(ready_time_of_context(context));
    return result;
}
CUresult do_cuCtxSynchronize(void) { return do_cuCtxSynchronize_v2(NULL); }

CUresult do_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData) {
    CUstream stream;
    CUresult result = fn ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    if (!stream->capture) {
        queue_callback(stream, fn, NULL, userData);
        run_due_callbacks();
        return CUDA_SUCCESS;
    }
    if ((result = usable_capture(stream))) return result;
    CUgraphNode node = new_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_HOST, stream->last_nodes.nodes, stream->last_nodes.count);
    node->of.host = (CUDA_HOST_NODE_PARAMS){.fn = fn, .userData = userData};
    return capture_node(stream, node);
}
CUresult do_cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode) {
    return do_cuLaunchHostFunc(hStream, fn, userData);
}

CUresult do_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags) {
    CUstream stream;
    CUresult result = callback && !flags ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result) result = refuse_for_stream(stream);
    if (result) return result;
    queue_callback(stream, NULL, callback, userData);
    run_due_callbacks();
    return CUDA_SUCCESS;
}

static int is_event(CUevent event) {
    for (CUevent each = events; each; each = each->next)
        if (each == event) return 1;
    return 0;
}

CUresult do_cuEventCreate(CUevent *phEvent, unsigned int Flags) {
    CUcontext context;
    CUresult result = need_context(&context);
    if (result) return result;
    if (!phEvent) return CUDA_ERROR_INVALID_VALUE;
    CUevent event = allocate(sizeof *event);
    *event = (struct CUevent_st){.context = context, .next = events, .flags = Flags};
    *phEvent = events = event;
    return CUDA_SUCCESS;
}

CUresult do_cuEventDestroy_v2(CUevent hEvent) {
    if (!is_event(hEvent)) return CUDA_ERROR_INVALID_HANDLE;
    CUevent *at = &events;
    while (*at != hEvent) at = &(*at)->next;
    *at = hEvent->next;
    free(hEvent->nodes.nodes);
    free(hEvent);
    return CUDA_SUCCESS;
}
CUresult do_cuEventDestroy(CUevent hEvent) { return do_cuEventDestroy_v2(hEvent); }

CUresult do_cuEventRecord(CUevent hEvent, CUstream hStream) {
    CUstream stream;
    if (!is_event(hEvent)) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = find_stream(hStream, &stream);
    if (result) return result;
    if (stream->capture) return capture_event(hEvent, stream);
    uint64_t ready = ready_time(stream), now = now_ns();
    hEvent->is_recorded = 1, hEvent->capture = NULL;
    hEvent->at_ns = ready > now ? ready : now;
    return CUDA_SUCCESS;
}
CUresult do_cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags) { return do_cuEventRecord(hEvent, hStream); }

CUresult do_cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
    CUstream stream;
    if (!is_event(hEvent)) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = find_stream(hStream, &stream);
    if (result) return result;
    if (stream->capture || hEvent->capture) return capture_wait(stream, hEvent);
    if (hEvent->at_ns > stream->ready_ns) stream->ready_ns = hEvent->at_ns;
    return CUDA_SUCCESS;
}

CUresult do_cuEventQuery(CUevent hEvent) {
    if (!is_event(hEvent)) return CUDA_ERROR_INVALID_HANDLE;
    if (hEvent->capture) return CUDA_ERROR_CAPTURED_EVENT;
    CUresult result = refuse_in_capture();
    if (result) return result;
    if (now_ns() < hEvent->at_ns) return CUDA_ERROR_NOT_READY;
    run_due_callbacks();
    return CUDA_SUCCESS;
}

CUresult do_cuEventSynchronize(CUevent hEvent) {
    if (!is_event(hEvent)) return CUDA_ERROR_INVALID_HANDLE;
    if (hEvent->capture) return CUDA_ERROR_CAPTURED_EVENT;
    CUresult result = refuse_in_capture();
    if (!result) wait_and_trim(hEvent->at_ns);
    return result;
}

CUresult do_cuEventElapsedTime_v2(float *pMilliseconds, CUevent hStart, CUevent hEnd) {
    if (!is_event(hStart) || !is_event(hEnd) || (hStart->flags | hEnd->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
    if (!hStart->is_recorded || !hEnd->is_recorded) return CUDA_ERROR_INVALID_HANDLE;
    if (!pMilliseconds) return CUDA_ERROR_INVALID_VALUE;
    if (now_ns() < hStart->at_ns || now_ns() < hEnd->at_ns) return CUDA_ERROR_NOT_READY;
    *pMilliseconds = (float)((double)(int64_t)(hEnd->at_ns - hStart->at_ns) / 1e6);
    return CUDA_SUCCESS;
}
CUresult do_cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd) {
    return do_cuEventElapsedTime_v2(pMilliseconds, hStart, hEnd);
}
