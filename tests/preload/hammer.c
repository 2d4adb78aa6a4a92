/* Allocates and frees at random: hammer SEED ROUNDS BUDGET_MIB. Says when it has a context, and goes on when it hears of
 * it. Within a budget, it ends with 1 if memory was refused. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <stdio.h>
#include <stdlib.h>

#define HELD 64
#define MIB (1ULL << 20)
enum way { ADDRESS, MANAGED, ROWS, PHYSICAL, POOL, WAYS };
static struct { unsigned long long key, bytes; enum way way; } held[HELD];

static CUresult allocate(enum way way, unsigned long long bytes, unsigned long long *key) {
    size_t pitch;
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    switch (way) {
    case ADDRESS: return cuMemAlloc_v2(key, bytes);
    case MANAGED: return cuMemAllocManaged(key, bytes, CU_MEM_ATTACH_GLOBAL);
    case ROWS: return cuMemAllocPitch_v2(key, &pitch, 512, bytes / 512 + 1, 4);
    case POOL: return cuMemAllocAsync(key, bytes, NULL);
    default: return cuMemCreate(key, (bytes + 2 * MIB - 1) / (2 * MIB) * 2 * MIB, &wanted, 0);
    }
}

static void give_back(int at) {
    CUresult result = held[at].way == PHYSICAL ? cuMemRelease(held[at].key) : held[at].way == POOL ? cuMemFreeAsync(held[at].key, NULL) : cuMemFree_v2(held[at].key);
    if (result) fprintf(stderr, "cannot free: %d\n", result), exit(2);
    held[at].bytes = 0;
}

int main(int argc, char **argv) {
    unsigned long long budget = argc > 3 ? strtoull(argv[3], NULL, 0) * MIB : 0, used = 0;
    int rounds = argc > 2 ? atoi(argv[2]) : 0, refused = 0, ways = budget ? POOL : WAYS;
    CUcontext context;
    srand((unsigned)atoi(argv[1]));
    if (cuInit(0)) return 3;
    CUresult result = cuDevicePrimaryCtxRetain(&context, 0);
    if (result) return result == CUDA_ERROR_OUT_OF_MEMORY && !budget ? 0 : 4;
    cuCtxSetCurrent(context);
    printf("ready\n");
    fflush(stdout);
    /* Until all are ready. */
    getchar();
    for (int round = 0; round < rounds; round++) {
        int at = rand() % HELD;
        unsigned long long bytes = rand() % 2 ? (unsigned long long)rand() % MIB + 1 : (unsigned long long)rand() % (8 * MIB) + 1;
        /* What the driver takes at most, a block for each small one. */
        unsigned long long taken = (bytes + 512 + 2 * MIB - 1) / (2 * MIB) * 2 * MIB;
        if (held[at].bytes) {
            used -= held[at].bytes;
            give_back(at);
            continue;
        }
        if (budget && used + taken > budget) continue;
        held[at].way = (enum way)(rand() % ways);
        result = allocate(held[at].way, bytes, &held[at].key);
        if (result == CUDA_ERROR_OUT_OF_MEMORY) refused++;
        else if (result) return fprintf(stderr, "%d\n", result), 5;
        else held[at].bytes = taken, used += taken;
    }
    printf("done\n");
    fflush(stdout);
    /* Until all are done: what they hold together is looked at. */
    getchar();
    return budget && refused ? 1 : 0;
}
