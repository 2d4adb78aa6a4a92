/* Several threads that do everything at the same time; the library is a part of this program, so that sanitizers see it. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define THREADS 8
#define MIB (1ULL << 20)
static CUcontext primary;
static CUdeviceptr crossing[THREADS];

static void check(CUresult result, int line) {
    if (!result || result == CUDA_ERROR_OUT_OF_MEMORY) return;
    fprintf(stderr, "line %d: %d\n", line, result);
    exit(2);
}
#define TRY(call) check(call, __LINE__)

static void share(void) {
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                  .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    CUmemGenericAllocationHandle made, imported;
    CUdeviceptr at;
    int file;
    if (cuMemCreate(&made, 2 * MIB, &wanted, 0)) return;
    TRY(cuMemExportToShareableHandle(&file, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    TRY(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)file, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(file);
    TRY(cuMemAddressReserve(&at, 2 * MIB, 0, 0, 0));
    TRY(cuMemMap(at, 2 * MIB, 0, imported, 0));
    TRY(cuMemRelease(made));
    TRY(cuMemRelease(imported));
    TRY(cuMemUnmap(at, 2 * MIB));
    TRY(cuMemAddressFree(at, 2 * MIB));
}

static void launch(void) {
    CUgraph graph;
    CUgraphNode node, last;
    CUgraphExec executable;
    CUDA_MEM_ALLOC_NODE_PARAMS wanted = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
                                         .bytesize = 3 * MIB};
    TRY(cuGraphCreate(&graph, 0));
    TRY(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &wanted));
    TRY(cuGraphAddMemFreeNode(&last, graph, &node, 1, wanted.dptr));
    TRY(cuGraphInstantiateWithFlags(&executable, graph, 0));
    TRY(cuGraphLaunch(executable, NULL));
    TRY(cuGraphExecDestroy(executable));
    TRY(cuGraphDestroy(graph));
}

static void one_round(unsigned number, unsigned *seed) {
    CUdeviceptr at = 0;
    CUcontext context;
    CUarray array;
    size_t available, total;
    CUDA_ARRAY_DESCRIPTOR shape = {64, 64, CU_AD_FORMAT_FLOAT, 1};
    switch (rand_r(seed) % 8) {
    case 0: if (!cuMemAlloc_v2(&at, 1000)) TRY(cuMemFree_v2(at)); break;
    case 1: if (!cuMemAlloc_v2(&at, 5 * MIB)) TRY(cuMemFree_v2(at)); break;
    /* Another thread frees what this one has allocated. */
    case 2: if (!cuMemAlloc_v2(&at, 3 * MIB)) at = __atomic_exchange_n(&crossing[(number + 1) % THREADS], at, __ATOMIC_SEQ_CST); if (at) TRY(cuMemFree_v2(at)); break;
    case 3: if (!cuMemAllocAsync(&at, MIB, NULL)) TRY(cuMemFreeAsync(at, NULL)); break;
    case 4: share(); break;
    case 5: launch(); break;
    case 6: TRY(cuMemGetInfo_v2(&available, &total)); if (!cuArrayCreate_v2(&array, &shape)) TRY(cuArrayDestroy(array)); break;
    default:
        if (cuCtxCreate_v2(&context, 0, 0)) break;
        /* What it has is given back with it. */
        cuMemAlloc_v2(&at, 2 * MIB);
        TRY(cuCtxDestroy_v2(context));
        TRY(cuCtxSetCurrent(primary));
    }
}

static int rounds;
static void *run(void *number) {
    unsigned seed = (unsigned)(uintptr_t)number;
    TRY(cuCtxSetCurrent(primary));
    for (int round = 0; round < rounds; round++) one_round((unsigned)(uintptr_t)number, &seed);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    rounds = argc > 1 ? atoi(argv[1]) : 100;
    TRY(cuInit(0));
    TRY(cuDevicePrimaryCtxRetain(&primary, 0));
    for (uintptr_t each = 0; each < THREADS; each++) pthread_create(&threads[each], NULL, run, (void *)each);
    for (int each = 0; each < THREADS; each++) pthread_join(threads[each], NULL);
    TRY(cuCtxSetCurrent(primary));
    for (int each = 0; each < THREADS; each++) if (crossing[each]) TRY(cuMemFree_v2(crossing[each]));
    CUmemoryPool pool;
    TRY(cuDeviceGetDefaultMemPool(&pool, 0));
    TRY(cuCtxSynchronize());
    TRY(cuMemPoolTrimTo(pool, 0));
    TRY(cuDeviceGraphMemTrim(0));
    printf("done\n");
    fflush(stdout);
    /* The test reads what is accounted. */
    getchar();
    _exit(0);
}
