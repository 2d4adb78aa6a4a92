/* Makes the calls of the CUDA driver API that it reads from its input, one to a line, and answers each with a line: the
 * result's number, and what the call returns. So a test decides what several processes do, and in which order.
 *
 * Names of a line, such as `a`, stand for what was allocated as them. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <sys/un.h>
#include <unistd.h>

static struct { char name[32]; unsigned long long value, size; } named[65536];
static int names;

static unsigned long long *value_of(const char *name) {
    for (int each = names; each--;)
        if (!strcmp(named[each].name, name)) return &named[each].value;
    snprintf(named[names].name, sizeof named[names].name, "%s", name);
    return &named[names++].value;
}
#define VALUE(at) (*value_of(words[at]))
#define NUMBER(at) (strtoull(words[at], NULL, 0))
#define IS(name) (!strcmp(words[0], name))

static CUmemLocation location(const char *kind, const char *id) {
    CUmemLocation found = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = atoi(id)};
    if (!strcmp(kind, "host")) found.type = CU_MEM_LOCATION_TYPE_HOST;
    if (!strcmp(kind, "numa")) found.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    return found;
}

static void hex(const void *bytes, size_t number) {
    printf(" ");
    for (size_t each = 0; each < number; each++) printf("%02x", ((const unsigned char *)bytes)[each]);
}
static void unhex(const char *text, void *bytes, size_t number) {
    for (size_t each = 0; each < number; each++) {
        unsigned one;
        sscanf(text + 2 * each, "%2x", &one);
        ((unsigned char *)bytes)[each] = (unsigned char)one;
    }
}

static struct sockaddr_un address_of(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    return address;
}

union control { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr header; };

static int send_file(const char *path, int file) {
    int sender = socket(AF_UNIX, SOCK_DGRAM, 0);
    struct sockaddr_un address = address_of(path);
    union control control = {{0}};
    char one = 1;
    struct iovec part = {&one, 1};
    struct msghdr message = {.msg_name = &address, .msg_namelen = sizeof address, .msg_iov = &part, .msg_iovlen = 1,
                             .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(head), &file, sizeof file);
    int sent = (int)sendmsg(sender, &message, 0);
    close(sender);
    return sent;
}

static int receiver = -1;
static int receive_file(void) {
    union control control;
    char one;
    int file = -1;
    struct iovec part = {&one, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    if (recvmsg(receiver, &message, 0) > 0 && CMSG_FIRSTHDR(&message)) memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof file);
    return file;
}

static CUdeviceptr reserve_and_map(unsigned long long handle, unsigned long long bytes, int *result) {
    CUdeviceptr at = 0;
    *result = cuMemAddressReserve(&at, bytes, 0, 0, 0);
    if (!*result) *result = cuMemMap(at, bytes, 0, handle, 0);
    return at;
}

static int make_graph(char **words, CUgraph *graph) {
    int result = cuGraphCreate(graph, 0);
    CUgraphNode last, node;
    int nodes = 0;
    /* Each word is an allocation in MiB on device 0, which is freed if it begins with "-". */
    for (int at = 2; words[at] && !result; at++) {
        int frees = words[at][0] == '-';
        CUDA_MEM_ALLOC_NODE_PARAMS wanted = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location("device", "0")},
                                             .bytesize = strtoull(words[at] + frees, NULL, 0) << 20};
        result = cuGraphAddMemAllocNode(&node, *graph, nodes ? &last : NULL, nodes ? 1 : 0, &wanted);
        last = node, nodes++;
        if (!result && frees) result = cuGraphAddMemFreeNode(&node, *graph, &last, 1, wanted.dptr);
        last = node;
    }
    return result;
}

static CUmemPoolProps pool_properties(char **words) {
    return (CUmemPoolProps){.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location(words[2], words[3])};
}

static int memory_call(char **words, int *result) {
    if (IS("alloc")) *result = cuMemAlloc_v2(&VALUE(1), NUMBER(2));
    else if (IS("alloc1")) { CUdeviceptr_v1 at = 0; *result = cuMemAlloc(&at, (unsigned)NUMBER(2)); VALUE(1) = at; }
    else if (IS("managed")) *result = cuMemAllocManaged(&VALUE(1), NUMBER(2), CU_MEM_ATTACH_GLOBAL);
    else if (IS("pitch")) { size_t pitch; *result = cuMemAllocPitch_v2(&VALUE(1), &pitch, NUMBER(2), NUMBER(3), 4); }
    else if (IS("host")) { void *at; *result = cuMemHostAlloc(&at, NUMBER(2), 0); }
    else if (IS("free")) *result = cuMemFree_v2(VALUE(1));
    else if (IS("array")) {
        CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = NUMBER(2), .Height = NUMBER(3), .Depth = NUMBER(4), .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUarray made = NULL; *result = cuArray3DCreate_v2(&made, &shape); VALUE(1) = (unsigned long long)made;
    } else if (IS("array-of")) {
        CUDA_ARRAY_DESCRIPTOR shape = {.Width = NUMBER(3), .Height = NUMBER(4), .Format = (CUarray_format)NUMBER(2), .NumChannels = 3};
        CUarray made = NULL; *result = cuArrayCreate_v2(&made, &shape); VALUE(1) = (unsigned long long)made;
    } else if (IS("array2")) {
        CUDA_ARRAY_DESCRIPTOR shape = {.Width = NUMBER(2), .Height = NUMBER(3), .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUarray made = NULL; *result = cuArrayCreate_v2(&made, &shape); VALUE(1) = (unsigned long long)made;
    } else if (IS("mipmap")) {
        CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = NUMBER(2), .Height = NUMBER(3), .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUmipmappedArray made = NULL; *result = cuMipmappedArrayCreate(&made, &shape, (unsigned)NUMBER(4)); VALUE(1) = (unsigned long long)made;
    } else if (IS("array-free")) *result = cuArrayDestroy((CUarray)VALUE(1));
    else if (IS("mipmap-free")) *result = cuMipmappedArrayDestroy((CUmipmappedArray)VALUE(1));
    else if (IS("external")) {
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC wanted = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = NUMBER(2)};
        CUexternalMemory made = NULL;
        wanted.handle.fd = open("/dev/null", O_RDWR);
        *result = cuImportExternalMemory(&made, &wanted); VALUE(1) = (unsigned long long)made;
    } else if (IS("external-free")) *result = cuDestroyExternalMemory((CUexternalMemory)VALUE(1));
    else if (IS("info")) { size_t available = 0, total = 0; *result = cuMemGetInfo_v2(&available, &total); printf("%d %zu %zu\n", *result, available, total); return 2; }
    else if (IS("total")) { size_t total = 0; *result = cuDeviceTotalMem_v2(&total, (int)NUMBER(1)); printf("%d %zu\n", *result, total); return 2; }
    else if (IS("burst")) {
        int done = 0;
        CUdeviceptr at;
        while (done < (int)NUMBER(1) && !(*result = cuMemAlloc_v2(&at, NUMBER(2)))) done++, *value_of("last") = at;
        printf("%d %d\n", *result, done);
        return 2;
    } else return 0;
    return 1;
}

static CUmemGenericAllocationHandle exported;
static pthread_t exporting;
static void *export_now(void *unused) {
    int file;
    (void)unused;
    return (void *)(long)cuMemExportToShareableHandle(&file, exported, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static int virtual_call(char **words, int *result) {
    if (IS("create")) {
        CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location(words[3], words[4]),
                                      .requestedHandleTypes = words[5] ? (CUmemAllocationHandleType)NUMBER(5) : CU_MEM_HANDLE_TYPE_NONE};
        *result = cuMemCreate(&VALUE(1), NUMBER(2), &wanted, 0);
    } else if (IS("release")) *result = cuMemRelease(VALUE(1));
    else if (IS("map")) VALUE(1) = reserve_and_map(VALUE(2), NUMBER(3), result);
    else if (IS("map-at")) *result = cuMemMap(VALUE(1) + NUMBER(2), NUMBER(3), 0, VALUE(4), 0);
    else if (IS("reserve")) *result = cuMemAddressReserve(&VALUE(1), NUMBER(2), 0, 0, 0);
    else if (IS("unmap")) *result = cuMemUnmap(VALUE(1), NUMBER(2));
    else if (IS("retain")) *result = cuMemRetainAllocationHandle(&VALUE(1), (void *)VALUE(2));
    else if (IS("segments")) {
        /* Maps one range by as many handles as the second word says, which are released at once. */
        CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location("device", "0")};
        unsigned long long step = 2 << 20, number = NUMBER(2);
        *result = cuMemAddressReserve(&VALUE(1), number * step, 0, 0, 0);
        for (unsigned long long each = 0; each < number && !*result; each++) {
            CUmemGenericAllocationHandle handle;
            *result = cuMemCreate(&handle, step, &wanted, 0);
            if (!*result) *result = cuMemMap(VALUE(1) + each * step, step, 0, handle, 0);
            if (!*result) *result = cuMemRelease(handle);
        }
    } else if (IS("export")) { int file = -1; *result = cuMemExportToShareableHandle(&file, VALUE(2), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0); VALUE(1) = (unsigned long long)file; }
    /* In a thread, to the end of which the second call waits. */
    else if (IS("begin-export")) { exported = VALUE(1); *result = pthread_create(&exporting, NULL, export_now, NULL); }
    else if (IS("end-export")) { void *returned; pthread_join(exporting, &returned); *result = (int)(long)returned; }
    else if (IS("tile")) {
        CUarrayMapInfo tile = {.memOperationType = CU_MEM_OPERATION_TYPE_MAP, .memHandleType = CU_MEM_HANDLE_TYPE_GENERIC, .memHandle.memHandle = VALUE(1)};
        *result = cuMemMapArrayAsync(&tile, 1, NULL);
    } else if (IS("import")) *result = cuMemImportFromShareableHandle(&VALUE(1), (void *)(long)VALUE(2), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    else if (IS("export-fabric")) { CUmemFabricHandle made; *result = cuMemExportToShareableHandle(&made, VALUE(1), CU_MEM_HANDLE_TYPE_FABRIC, 0); printf("%d", *result); hex(&made, sizeof made); printf("\n"); return 2; }
    else if (IS("import-fabric")) { CUmemFabricHandle made; unhex(words[2], &made, sizeof made); *result = cuMemImportFromShareableHandle(&VALUE(1), &made, CU_MEM_HANDLE_TYPE_FABRIC); }
    else if (IS("ipc-get")) { CUipcMemHandle made; *result = cuIpcGetMemHandle(&made, VALUE(1)); printf("%d", *result); hex(&made, sizeof made); printf("\n"); return 2; }
    else if (IS("ipc-open")) { CUipcMemHandle made; unhex(words[2], &made, sizeof made); *result = cuIpcOpenMemHandle_v2(&VALUE(1), made, 1); }
    else if (IS("ipc-close")) *result = cuIpcCloseMemHandle(VALUE(1));
    else if (IS("listen")) { struct sockaddr_un address = address_of(words[1]); receiver = socket(AF_UNIX, SOCK_DGRAM, 0); *result = bind(receiver, (struct sockaddr *)&address, sizeof address); }
    else if (IS("send")) *result = send_file(words[2], (int)VALUE(1)) > 0 ? 0 : errno;
    else if (IS("receive")) { int file = receive_file(); VALUE(1) = (unsigned long long)file; *result = file < 0; }
    else if (IS("close")) *result = close((int)VALUE(1));
    else return 0;
    return 1;
}

static int pool_call(char **words, int *result) {
    if (IS("async")) *result = cuMemAllocAsync(&VALUE(1), NUMBER(2), words[3] ? (CUstream)VALUE(3) : NULL);
    else if (IS("async-ptsz")) *result = cuMemAllocAsync_ptsz(&VALUE(1), NUMBER(2), NULL);
    else if (IS("from-pool")) *result = cuMemAllocFromPoolAsync(&VALUE(1), NUMBER(2), (CUmemoryPool)VALUE(3), words[4] ? (CUstream)VALUE(4) : NULL);
    else if (IS("async-free")) *result = cuMemFreeAsync(VALUE(1), words[2] ? (CUstream)VALUE(2) : NULL);
    else if (IS("pool")) { CUmemPoolProps wanted = pool_properties(words); CUmemoryPool made = NULL; *result = cuMemPoolCreate(&made, &wanted); VALUE(1) = (unsigned long long)made; }
    else if (IS("default-pool")) { CUmemoryPool made = NULL; *result = cuDeviceGetDefaultMemPool(&made, (int)NUMBER(2)); VALUE(1) = (unsigned long long)made; }
    else if (IS("pool-free")) *result = cuMemPoolDestroy((CUmemoryPool)VALUE(1));
    else if (IS("trim")) *result = cuMemPoolTrimTo((CUmemoryPool)VALUE(1), 0);
    else if (IS("keep")) { cuuint64_t all = ~0ULL; *result = cuMemPoolSetAttribute((CUmemoryPool)VALUE(1), CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all); }
    else if (IS("stream")) { CUstream made = NULL; *result = cuStreamCreate(&made, CU_STREAM_NON_BLOCKING); VALUE(1) = (unsigned long long)made; }
    else if (IS("sync")) *result = cuCtxSynchronize();
    else if (IS("sync-stream")) *result = cuStreamSynchronize((CUstream)VALUE(1));
    else if (IS("spin")) {
        char name[32];
        CUmodule module;
        CUfunction kernel;
        snprintf(name, sizeof name, "spin_%llu", NUMBER(1));
        *result = cuModuleLoadData(&module, "image");
        if (!*result) *result = cuModuleGetFunction(&kernel, module, name);
        if (!*result) *result = cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, (CUstream)VALUE(2), NULL, NULL);
    } else if (IS("descriptors")) {
        struct rlimit limit = {.rlim_cur = NUMBER(1), .rlim_max = 1024};
        *result = setrlimit(RLIMIT_NOFILE, &limit) ? errno : 0;
    }
    else return 0;
    return 1;
}

static int graph_call(char **words, int *result) {
    CUgraph graph = NULL, outer;
    CUgraphNode node;
    CUgraphExec made = NULL;
    if (IS("graph") || IS("child-graph")) {
        *result = make_graph(words, &graph);
        if (!*result && IS("child-graph")) {
            *result = cuGraphCreate(&outer, 0);
            if (!*result) *result = cuGraphAddChildGraphNode(&node, outer, NULL, 0, graph);
            graph = outer;
        }
        if (!*result) *result = cuGraphInstantiateWithFlags(&made, graph, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
        VALUE(1) = (unsigned long long)made;
    } else if (IS("capture")) *result = cuStreamBeginCapture_v2((CUstream)VALUE(1), CU_STREAM_CAPTURE_MODE_GLOBAL);
    else if (IS("end-capture")) {
        *result = cuStreamEndCapture((CUstream)VALUE(2), &graph);
        if (!*result) *result = cuGraphInstantiateWithFlags(&made, graph, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
        VALUE(1) = (unsigned long long)made;
    } else if (IS("launch")) *result = cuGraphLaunch((CUgraphExec)VALUE(1), words[2] ? (CUstream)VALUE(2) : NULL);
    else if (IS("upload")) *result = cuGraphUpload((CUgraphExec)VALUE(1), NULL);
    else if (IS("graph-free")) *result = cuGraphExecDestroy((CUgraphExec)VALUE(1));
    else if (IS("graph-trim")) *result = cuDeviceGraphMemTrim((int)NUMBER(1));
    else return 0;
    return 1;
}

static int context_call(char **words, int *result) {
    CUcontext made = NULL;
    if (IS("init")) *result = cuInit(0);
    else if (IS("count")) { int number = 0; *result = cuDeviceGetCount(&number); printf("%d %d\n", *result, number); return 2; }
    else if (IS("primary")) { *result = cuDevicePrimaryCtxRetain(&made, (int)NUMBER(1)); if (!*result) *result = cuCtxSetCurrent(made); }
    else if (IS("primary-release")) *result = cuDevicePrimaryCtxRelease_v2((int)NUMBER(1));
    else if (IS("primary-reset")) *result = cuDevicePrimaryCtxReset_v2((int)NUMBER(1));
    else if (IS("context")) { *result = cuCtxCreate_v2(&made, 0, (int)NUMBER(2)); VALUE(1) = (unsigned long long)made; }
    else if (IS("context-free")) *result = cuCtxDestroy_v2((CUcontext)VALUE(1));
    else if (IS("current")) *result = cuCtxSetCurrent((CUcontext)VALUE(1));
    else if (IS("green")) {
        CUdevResource resource; CUdevResourceDesc described; CUgreenCtx green = NULL;
        *result = cuDeviceGetDevResource(0, &resource, CU_DEV_RESOURCE_TYPE_SM);
        if (!*result) *result = cuDevResourceGenerateDesc(&described, &resource, 1);
        if (!*result) *result = cuGreenCtxCreate(&green, described, 0, CU_GREEN_CTX_DEFAULT_STREAM);
        VALUE(1) = (unsigned long long)green;
    } else if (IS("green-current")) { *result = cuCtxFromGreenCtx(&made, (CUgreenCtx)VALUE(1)); if (!*result) *result = cuCtxSetCurrent(made); }
    else if (IS("green-free")) *result = cuGreenCtxDestroy((CUgreenCtx)VALUE(1));
    else return 0;
    return 1;
}

static int fork_and_call(char **words);
static int process_call(char **words, int *result) {
    if (IS("fork")) *result = fork_and_call(words + 1);
    else if (IS("linger")) {
        pid_t child = fork();
        while (!child) pause();
        printf("0 %d\n", (int)child);
        return 2;
    } else if (IS("close-all")) { *result = 0; for (int each = 3; each < 1024; each++) close(each); }
    else if (IS("chroot")) *result = chroot(words[1]) ? errno : 0;
    else if (IS("user")) *result = setgid(65534) || setuid(65534) ? errno : 0;
    else if (IS("exec")) { fflush(stdout); execl("/proc/self/exe", "shell", NULL); *result = errno; }
    else if (IS("vfork")) { pid_t child = vfork(); int status = 0; if (!child) { execl("/bin/true", "true", NULL); _exit(1); } waitpid(child, &status, 0); *result = status; }
    else if (IS("exit")) exit(0);
    else if (IS("abort")) _exit(3);
    else return 0;
    return 1;
}

static void call(char **words) {
    static int (*const groups[])(char **, int *) = {memory_call, virtual_call, pool_call, graph_call, context_call, process_call};
    int result = -1, answered = 0;
    for (size_t each = 0; each < sizeof groups / sizeof *groups && !answered; each++) answered = groups[each](words, &result);
    if (answered != 2) printf("%d\n", answered ? result : -2);
    fflush(stdout);
}

/* The rest of the line is a list of calls, separated by commas, that the child makes before it ends: it writes its answers. */
static int fork_and_call(char **words) {
    fflush(stdout);
    pid_t child = fork();
    int status = 0;
    for (char **at = words; !child && *at;) {
        char *one[32] = {0};
        for (int number = 0; *at && strcmp(*at, ","); at++) one[number++] = *at;
        at += *at != NULL;
        call(one);
    }
    if (!child) _exit(0);
    waitpid(child, &status, 0);
    return status;
}

int main(void) {
    static char line[65536];
    /* What follows is for the program that replaces this one. */
    setvbuf(stdin, NULL, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        char *words[4096] = {0}, *state = NULL;
        int number = 0;
        for (char *word = strtok_r(line, " \n", &state); word; word = strtok_r(NULL, " \n", &state)) words[number++] = word;
        if (number) call(words);
    }
    return 0;
}
