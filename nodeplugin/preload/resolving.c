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

/* The driver's function itself says which it is, if it is one that is exported; whatever name it was asked for by, as the
 * runtime asks for the empty one. */
static const struct resolution *find_by_address(const void *address) {
    for (size_t row = 0; row < ROWS; row++)
        if (driver_functions[TABLE[row].function] == address)
            return &TABLE[row];
    return NULL;
}

/* What the driver answers depends on whether it can say why it has nothing. */
static CUresult ask_driver(const char *symbol, void **found, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    if (driver_has(FUNCTION_cuGetProcAddress_v2))
        return REAL(cuGetProcAddress_v2)(symbol, found, version, flags, status);
    CUresult result = REAL(cuGetProcAddress)(symbol, found, version, flags);
    if (status)
        *status = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return result;
}

/* A driver may have a version that is newer than the headers this library was built with. The caller can only call it as
 * it is declared there, so it must not get an older hook, nor a way around it. */
static int is_newer(const char *symbol, int version, cuuint64_t flags, const void *found) {
    void *known = NULL;
    CUdriverProcAddressQueryResult status;
    if (version <= HEADER_VERSION)
        return 0;
    ask_driver(symbol, &known, HEADER_VERSION, flags, &status);
    return known != found;
}

static CUresult resolve(const char *symbol, void **found, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    CUresult result = ask_driver(symbol, found, version, flags, status);
    if (result != CUDA_SUCCESS || !*found)
        return result;
    const struct resolution *row = find_by_address(*found);
    if (!row && !is_hooked(symbol))
        return result;
    if (!row && !is_newer(symbol, version, flags, *found))
        row = find_row(symbol, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0);
    *found = row ? row->hook : NULL;
    if (*found)
        return result;
    WARN_ONCE("%s of CUDA %d is newer than this library: programs cannot use it where GPU memory is limited", symbol, version);
    if (status)
        *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return CUDA_ERROR_NOT_FOUND;
}

HOOK(cuGetProcAddress)(const char *symbol, void **found, int version, cuuint64_t flags) {
    if (!symbol || !found)
        return CUDA_ERROR_INVALID_VALUE;
    *found = NULL;
    return resolve(symbol, found, version, flags, NULL);
}

HOOK(cuGetProcAddress_v2)(const char *symbol, void **found, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    if (!symbol || !found)
        return CUDA_ERROR_INVALID_VALUE;
    *found = NULL;
    return resolve(symbol, found, version, flags, status);
}
