/* Allocates GPU memory, MiB by MiB of its arguments, says what came of it, and waits. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *driver;

static void *function(const char *name) { return dlsym(driver, name); }

int main(int count, char **sizes) {
    /* The fake driver lists all devices, a real one those whose device nodes the container has. */
    setenv("CUDA_VISIBLE_DEVICES", getenv("NVIDIA_VISIBLE_DEVICES"), 1);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        printf("no driver: %s\n", dlerror());
        return 1;
    }
    int (*init)(unsigned) = function("cuInit"), (*device)(int *, int) = function("cuDeviceGet");
    int (*retain)(void **, int) = function("cuDevicePrimaryCtxRetain"), (*use)(void *) = function("cuCtxSetCurrent");
    int (*info)(size_t *, size_t *) = function("cuMemGetInfo_v2"), (*allocate)(unsigned long long *, size_t) = function("cuMemAlloc_v2");
    void *context;
    int ordinal = 0, result = init(0);
    if (result || (result = device(&ordinal, 0)) || (result = retain(&context, ordinal)) || (result = use(context)))
        printf("error %d\n", result);
    size_t available = 0, total = 0;
    info(&available, &total);
    printf("total %zu free %zu\n", total >> 20, available >> 20);
    for (int each = 1; each < count; each++) {
        unsigned long long pointer;
        printf("allocate %s: %d\n", sizes[each], allocate(&pointer, strtoull(sizes[each], NULL, 10) << 20));
    }
    puts("== end of output");
    fflush(stdout);
    pause();
    return 0;
}
