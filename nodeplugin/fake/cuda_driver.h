/* What the parts of the fake CUDA driver share.
 *
 * The exported functions are generated (nodeplugin/fake/building.py): each takes the lock, refuses what cannot be
 * called now, and calls the implementation, do_ and its name. So an implementation holds the lock, and gives it up only
 * while it waits for the simulated device or runs a function of the program.
 */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_functions.h"
#include "description.h"
#include "device_state.h"

#define MIB (1ULL << 20)
#define LARGE_PAGE (2 * MIB)

struct error_name { int code; const char *name; };
struct resolution { const char *base; int version, per_thread; void *function; };
extern const int function_count;
extern const char *const function_names[];
extern const struct error_name error_names[];
extern const struct resolution resolutions[];

/* cuda_calls.c: the frame of every call. */
CUresult enter(int function, int always_callable, int per_thread_stream);
CUresult leave(CUresult result);
/* Whether the call is of the form with a thread's own default stream. */
int per_thread_stream_asked(void);
void begin_waiting(void);
void end_waiting(void);
void wait_until(uint64_t time_ns);
CUresult set_initialized(void);
uint64_t next_id(void);
/* Memory of the driver itself; ends the process if there is none, which tests need not survive. */
void *allocate(size_t size);
uint64_t round_up(uint64_t value, uint64_t unit);

/* cuda_devices.c */
struct device {
    int card, major, minor, sms;
    char name[256], uuid_text[64];
    CUuuid uuid;
    /* What programs can have: the description's usedMiB, reservedMiB and processes are not in it. */
    uint64_t total, capacity, context_bytes;
};
CUresult read_devices(void);
int driver_version(void);
struct device *device_at(CUdevice ordinal);
int device_total(void);

/* cuda_physical.c: memory of a device, without an address. */
struct physical {
    CUdevice device; /* -1: host memory, which charges no device */
    uint64_t bytes;
    int references, block; /* block: -1 as long as no other process can hold it */
    int is_vmm, handle_references;
    CUmemAllocationProp properties;
    int memfd;
    uint64_t offset;
    struct physical *next;
};
CUresult create_physical(CUdevice device, uint64_t bytes, struct physical **created);
void hold_physical(struct physical *physical);
void drop_physical(struct physical *physical);
/* What another process needs to hold the same memory. */
struct shared_memory { uint64_t magic, id, bytes, offset, size; int32_t card, kind; };
CUresult share_physical(struct physical *physical, struct shared_memory *shared);
CUresult import_physical(const struct shared_memory *shared, struct physical **imported);

/* cuda_ranges.c: addresses. */
/* IMPORTED: by cuIpcOpenMemHandle. EXTERNAL: other memory of another process, which cuMemFree gives back. */
enum range_kind { DEVICE_RANGE, MANAGED_RANGE, HOST_RANGE, REGISTERED_RANGE, POOL_RANGE, GRAPH_RANGE,
                  MAPPED_RANGE, IMPORTED_RANGE,
                  EXTERNAL_RANGE, ARRAY_RANGE };
struct range {
    uint64_t base, size, id, buffer_size;
    enum range_kind kind;
    CUdevice device;
    CUcontext context;
    struct physical *physical;
    struct chunk *chunk;
    struct CUmemPoolHandle_st *pool;
    unsigned flags;
    int is_touched, owns_address, is_live; /* is_live: of a graph's memory, between its allocation and its end */
};
uint64_t reserve_addresses(uint64_t size, uint64_t alignment, int below_4_gib);
void free_addresses(uint64_t base, uint64_t size);
struct range *add_range(enum range_kind kind, uint64_t base, uint64_t size, CUdevice device);
void remove_range(struct range *range);
struct range *find_range(uint64_t address);
struct range *range_number(size_t number);
/* Make memory readable and writable for a copy; returns 0 if part of it is no allocation of the driver's. */
int touch(uint64_t address, uint64_t size);

/* cuda_memory.c */
CUresult allocate_device_memory(uint64_t size, enum range_kind kind, int below_4_gib, struct range **allocated);
CUresult free_range(struct range *range);
void free_memory_of(CUcontext context);

/* cuda_contexts.c */
struct CUctx_st {
    uint64_t id;
    CUdevice device;
    int is_primary, references, is_active;
    unsigned flags;
    struct CUctx_st *primary; /* of a green context, which owns nothing itself */
    struct physical *memory;
    struct CUstream_st *streams;
    struct CUctx_st *next;
    size_t limits[CU_LIMIT_MAX];
};
CUcontext current_context(void);
/* What owns that which is allocated with the current context: of a green context, its primary context. */
CUcontext owning_context(void);
/* The same, if it is usable. */
CUresult need_context(CUcontext *context);
CUcontext new_green_context(CUcontext primary);
void forget_green_context(CUcontext context);
int is_context(CUcontext context);
CUcontext primary_context(CUdevice device);

/* cuda_virtual_memory.c */
CUresult import_descriptor(int descriptor, struct physical **imported);

/* cuda_pools.c */
CUresult allocate_from_pool(CUmemoryPool pool, uint64_t size, CUdeviceptr *address);
CUresult free_to_pool(struct range *range);
/* Give memory above the pools' thresholds back, as at every synchronization. */
void trim_pools(void);
void free_pools_of(CUdevice device);

/* cuda_modules.c */
struct CUfunc_st {
    CUmodule module;
    CUlibrary library;
    struct CUfunc_st *next;
    uint64_t duration_ns;
    int limits[2];
    char name[];
};
void free_modules_of(CUcontext context);

/* cuda_streams.c */
struct node_set { CUgraphNode *nodes; size_t count; };
struct CUstream_st {
    CUcontext context;
    CUstream next;
    uint64_t id, ready_ns;
    unsigned flags;
    int priority, is_legacy, thread; /* thread: whose own default stream it is, otherwise 0 */
    struct capture *capture;
    struct node_set last_nodes;
};
struct CUevent_st {
    CUcontext context;
    CUevent next;
    unsigned flags;
    int is_recorded;
    uint64_t at_ns;
    struct capture *capture;
    struct node_set nodes;
};
/* The stream of a handle, which may stand for a default stream. */
CUresult find_stream(CUstream handle, CUstream *stream);
/* When all that was queued so far is done. */
uint64_t ready_time(CUstream stream);
void run_on(CUstream stream, uint64_t duration_ns);
/* Run a function of the program when the stream is ready. */
void queue_callback(CUstream stream, CUhostFn function, CUstreamCallback stream_callback, void *data);
void run_due_callbacks(void);
uint64_t ready_time_of_context(CUcontext context);
void free_streams_of(CUcontext context);
int thread_number(void);

/* cuda_copies.c */
CUresult copy_3d(const CUDA_MEMCPY3D *copy);
CUresult set_memory(const CUDA_MEMSET_NODE_PARAMS *set);

/* cuda_capture.c */
struct capture {
    struct capture *next;
    uint64_t id;
    CUgraph graph;
    CUstream origin;
    CUstreamCaptureMode mode;
    int is_invalid, thread, own_graph;
};
/* What cannot be captured, such as cuMemAlloc, ends captures that forbid it. */
CUresult refuse_in_capture(void);
/* The same, for a call that waits for a stream. */
CUresult refuse_for_stream(CUstream stream);
CUresult usable_capture(CUstream stream);
CUresult capture_node(CUstream stream, CUgraphNode node);
CUresult capture_event(CUevent event, CUstream stream);
CUresult capture_wait(CUstream stream, CUevent event);
void copy_nodes(struct node_set *to, const struct node_set *from);

/* cuda_graphs.c */
struct CUgraphNode_st {
    CUgraph graph;
    CUgraphNodeType type;
    unsigned id;
    int is_disabled;
    struct node_set dependencies;
    CUgraphNode source; /* in an executable graph: the node that it was made from */
    union {
        CUDA_KERNEL_NODE_PARAMS kernel;
        CUDA_MEMCPY3D copy;
        CUDA_MEMSET_NODE_PARAMS set;
        CUDA_HOST_NODE_PARAMS host;
        CUDA_MEM_ALLOC_NODE_PARAMS allocation;
        CUdeviceptr freed;
        CUgraph child;
        CUevent event;
    } of;
};
struct CUgraph_st { unsigned id; struct node_set nodes; unsigned last_node; };
CUgraph new_graph(void);
CUgraphNode new_node(CUgraph graph, CUgraphNodeType type, const CUgraphNode *dependencies, size_t count);
void add_node_to(struct node_set *set, CUgraphNode node);
void destroy_graph(CUgraph graph);
/* cuda_graph_memory.c */
CUresult plan_allocation(CUDA_MEM_ALLOC_NODE_PARAMS *params);
CUresult free_graph_memory(struct range *range);
/* Reserve what the nodes need beyond what is reserved, and mark what lives after them. */
CUresult allocate_for_graph(const struct node_set *nodes, int frees_first);
void trim_graph_memory(CUdevice device);

#endif
