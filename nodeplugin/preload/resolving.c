/* cuGetProcAddress, by which programs get most functions: where the driver has one that is hooked, they get the hook of
 * the same version and the same default stream. */
#include <string.h>

#include "driver.h"
#include "limits.h"

#include "resolutions.h"

struct resolution {
    const char *base;
    int since, per_thread;
    enum function function;
    void *hook;
};

static const struct resolution TABLE[] = {RESOLUTIONS};
#define ROWS (sizeof TABLE / sizeof *TABLE)

static int is_hooked(const char *symbol) {
    for (size_t row = 0; row < ROWS; row++)
        if (!strcmp(TABLE[row].base, symbol))
            return 1;
    return 0;
}

/* The row of the newest version that the caller knows. Where there is none for the thread's default stream, both streams
 * have the same function. */
static const struct resolution *find_row(const char *symbol, int version, int per_thread) {
    const struct resolution *found = NULL;
    for (size_t row = 0; row < ROWS; row++) {
        const struct resolution *each = &TABLE[row];
        if (strcmp(each->base, symbol) || each->since > version || each->per_thread > per_thread)
            continue;
        if (!found || each->per_thread > found->per_thread ||
            (each->per_thread == found->per_thread && each->since > found->since))
            found = each;
    }
    return found;
}

/* The driver's function itself says which it is, if it is one that is exported. */
static const struct resolution *find_by_address(const char *symbol, const void *address) {
    for (size_t row = 0; row < ROWS; row++)
        if (!strcmp(TABLE[row].base, symbol) && driver_functions[TABLE[row].function] == address)
            return &TABLE[row];
    return NULL;
}

struct answer { CUresult result; CUdriverProcAddressQueryResult status; void *found; };

static struct answer ask_driver(const char *symbol, int version, cuuint64_t flags) {
    struct answer answer = {.status = CU_GET_PROC_ADDRESS_SUCCESS};
    if (driver_has(FUNCTION_cuGetProcAddress_v2)) {
        answer.result = REAL(cuGetProcAddress_v2)(symbol, &answer.found, version, flags, &answer.status);
        return answer;
    }
    answer.result = REAL(cuGetProcAddress)(symbol, &answer.found, version, flags);
    if (!answer.found)
        answer.status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return answer;
}

/* A driver may have a version that is newer than the headers this library was built with. The caller can only call it as
 * it is declared there, so it must not get an older hook, nor a way around it. */
static int is_newer(const char *symbol, int version, cuuint64_t flags, const void *found) {
    return version > HEADER_VERSION && ask_driver(symbol, HEADER_VERSION, flags).found != found;
}

static struct answer resolve(const char *symbol, int version, cuuint64_t flags) {
    struct answer answer = ask_driver(symbol, version, flags);
    if (answer.result != CUDA_SUCCESS || !answer.found || !symbol || !is_hooked(symbol))
        return answer;
    const struct resolution *row = find_by_address(symbol, answer.found);
    if (!row && !is_newer(symbol, version, flags, answer.found))
        row = find_row(symbol, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0);
    if (row && row->hook) {
        answer.found = row->hook;
        return answer;
    }
    WARN_ONCE("%s of CUDA %d is newer than this library: programs cannot use it where GPU memory is limited", symbol, version);
    return (struct answer){.result = CUDA_ERROR_NOT_FOUND, .status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT};
}

HOOK(cuGetProcAddress)(const char *symbol, void **found, int version, cuuint64_t flags) {
    if (!symbol || !found)
        return CUDA_ERROR_INVALID_VALUE;
    struct answer answer = resolve(symbol, version, flags);
    *found = answer.found;
    return answer.result;
}

HOOK(cuGetProcAddress_v2)(const char *symbol, void **found, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    if (!symbol || !found)
        return CUDA_ERROR_INVALID_VALUE;
    struct answer answer = resolve(symbol, version, flags);
    *found = answer.found;
    if (status)
        *status = answer.status;
    return answer.result;
}
