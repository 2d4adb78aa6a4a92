/* Measures what calls cost: isolation_overhead ROUNDS. Prints nanoseconds for a pair of cuMemAlloc and cuMemFree, of 4 MiB
 * and of 1 KiB, and for the first call of all. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static double pair_ns(long rounds, size_t bytes) {
    CUdeviceptr at;
    long long began = now();
    for (long round = 0; round < rounds; round++)
        if (cuMemAlloc_v2(&at, bytes) || cuMemFree_v2(at)) exit(1);
    return (double)(now() - began) / (double)rounds;
}

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 100000;
    CUcontext context;
    CUdeviceptr kept;
    long long began = now();
    if (cuInit(0)) return 1;
    long long first = now() - began;
    if (cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuMemAlloc_v2(&kept, 1024)) return 1;
    pair_ns(rounds / 10, 4 << 20);
    printf("%.1f %.1f %lld\n", pair_ns(rounds, 4 << 20), pair_ns(rounds, 1024), first);
    return 0;
}
