/* The frame of every call: the lock, what cannot be called now, and injected failures. */
#include "cuda_driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Guards all state of the process. Recursive use is an error: an implementation calls do_ functions, not exported ones. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_initialized, is_forked;
static int *failures;
static __thread int own_stream;

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
/* A driver does not work in the child of a process that used it. */
static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    is_forked = is_initialized;
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

CUresult enter(int function, int always_callable, int per_thread_stream) {
    pthread_mutex_lock(&lock);
    own_stream = per_thread_stream;
    if (is_forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_initialized && !always_callable) return CUDA_ERROR_NOT_INITIALIZED;
    return failures ? (CUresult)failures[function] : CUDA_SUCCESS;
}

CUresult leave(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

int per_thread_stream_asked(void) { return own_stream; }
void begin_waiting(void) { pthread_mutex_unlock(&lock); }
void end_waiting(void) { pthread_mutex_lock(&lock); }

void wait_until(uint64_t time_ns) {
    if (now_ns() >= time_ns) return;
    struct timespec until = {(time_t)(time_ns / 1000000000), (long)(time_ns % 1000000000)};
    begin_waiting();
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) continue;
    end_waiting();
}

static void read_failures(void) {
    failures = allocate((size_t)function_count * sizeof *failures);
    for (int each = 0; each < function_count; each++)
        failures[each] = (int)number(get("failures.%s", function_names[each]), CUDA_SUCCESS);
}

CUresult set_initialized(void) {
    if (is_initialized) return CUDA_SUCCESS;
    if (!load_description()) return CUDA_ERROR_NO_DEVICE;
    CUresult result = read_devices();
    if (result) return result;
    if (!join_devices()) return CUDA_ERROR_SYSTEM_NOT_READY;
    read_failures();
    is_initialized = 1;
    return CUDA_SUCCESS;
}

uint64_t next_id(void) {
    static uint64_t last;
    return ++last;
}

void *allocate(size_t size) {
    void *memory = calloc(1, size ? size : 1);
    if (!memory) abort();
    return memory;
}

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

CUresult do_cuInit(unsigned int Flags) {
    CUresult result = Flags ? CUDA_ERROR_INVALID_VALUE : set_initialized();
    return result ? result : (CUresult)number(get("failures.cuInit"), CUDA_SUCCESS);
}

CUresult do_cuGetErrorName(CUresult error, const char **pStr) {
    if (!pStr) return CUDA_ERROR_INVALID_VALUE;
    *pStr = NULL;
    for (const struct error_name *each = error_names; each->name; each++)
        if (each->code == (int)error) *pStr = each->name;
    return *pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The name describes the error well enough. */
CUresult do_cuGetErrorString(CUresult error, const char **pStr) { return do_cuGetErrorName(error, pStr); }

/* Private tables of functions: there are none. */
CUresult do_cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId) { return CUDA_ERROR_NOT_FOUND; }
