/* Runs a program that allocates and frees once, kills it after so many instructions of that, and prints how many there
 * were: stepper INSTRUCTIONS. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static int allocate_and_free(void) {
    CUcontext context;
    CUdeviceptr at;
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    /* All names are resolved. */
    if (cuMemAlloc_v2(&at, 10 << 20) || cuMemFree_v2(at)) return 1;
    raise(SIGSTOP);
    if (cuMemAlloc_v2(&at, 10 << 20) || cuMemAlloc_v2(&at, 1000) || cuMemFree_v2(at)) return 1;
    return 0;
}

int main(int argc, char **argv) {
    long wanted = atol(argv[1]), done = 0;
    int status = 0;
    pid_t child = fork();
    if (!child) _exit(allocate_and_free());
    waitpid(child, &status, 0);
    while (WIFSTOPPED(status) && done < wanted) {
        if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL)) break;
        waitpid(child, &status, 0);
        done++;
    }
    if (WIFSTOPPED(status)) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    printf("%ld\n", done);
    return argc > 2;
}
