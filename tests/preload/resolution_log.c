/* Stands in front of a libcuda.so.1 and writes down what it answers to cuGetProcAddress: symbol, version, flags, result,
 * the name of the function, and the library it is in. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *log_file(void) {
    static FILE *opened;
    if (!opened) opened = fopen(getenv("RESOLUTION_LOG"), "ae");
    return opened;
}

static void write_down(const char *symbol, int version, unsigned long long flags, int result, void *found) {
    Dl_info at = {0};
    if (found) dladdr(found, &at);
    const char *file = at.dli_fname ? at.dli_fname : "-";
    fprintf(log_file(), "%s %d %llu %d %s %s\n", *symbol ? symbol : "-", version, flags, result, at.dli_sname ? at.dli_sname : "-", file);
    fflush(log_file());
}

/* By the handle: the name itself would find this library again where another stands before it. */
static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

int cuGetProcAddress_v2(const char *symbol, void **found, int version, unsigned long long flags, int *status) {
    int (*real)(const char *, void **, int, unsigned long long, int *) = next("cuGetProcAddress_v2");
    int result = real(symbol, found, version, flags, status);
    write_down(symbol, version, flags, result, result ? NULL : *found);
    /* The runtime goes on with what it gets for the empty name. */
    if (!result && *found == (void *)real) *found = (void *)cuGetProcAddress_v2;
    return result;
}

int cuGetProcAddress(const char *symbol, void **found, int version, unsigned long long flags) {
    int (*real)(const char *, void **, int, unsigned long long) = next("cuGetProcAddress");
    int result = real(symbol, found, version, flags);
    write_down(symbol, version, flags, result, result ? NULL : *found);
    if (!result && *found == (void *)real) *found = (void *)cuGetProcAddress;
    return result;
}

int cuDriverGetVersion(int *version) {
    int (*real)(int *) = next("cuDriverGetVersion");
    return real(version);
}
