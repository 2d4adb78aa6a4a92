/* cuGetProcAddress: which function a name is, for a version of CUDA. */
#include "cuda_driver.h"

#include <string.h>

static int exists(const char *symbol) {
    for (const struct resolution *each = resolutions; each->base; each++)
        if (!strcmp(each->base, symbol)) return 1;
    return 0;
}

/* The newest function that neither the version asked for nor the driver's own excludes. */
static void *resolve(const char *symbol, int version, int per_thread) {
    const struct resolution *best = NULL;
    int newest = driver_version();
    for (const struct resolution *each = resolutions; each->base; each++) {
        if (strcmp(each->base, symbol) || each->version > version || each->version > newest) continue;
        if (each->per_thread > per_thread) continue;
        int is_better = !best || each->per_thread > best->per_thread ||
                        (each->per_thread == best->per_thread && each->version > best->version);
        if (is_better) best = each;
    }
    return best ? best->function : NULL;
}

CUresult do_cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus) {
    const cuuint64_t known = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if (!symbol || !pfn || (flags & ~known) || flags == known) return CUDA_ERROR_INVALID_VALUE;
    /* The runtime asks for the empty name first. */
    if (!*symbol) {
        *pfn = (void *)cuGetProcAddress_v2;
        if (symbolStatus) *symbolStatus = CU_GET_PROC_ADDRESS_SUCCESS;
        return CUDA_SUCCESS;
    }
    *pfn = resolve(symbol, cudaVersion, flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
    if (!*pfn) status = exists(symbol) ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (symbolStatus) *symbolStatus = status;
    return *pfn || symbolStatus ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult do_cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags) {
    CUresult result = do_cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, NULL);
    if (!result && !*symbol) *pfn = (void *)cuGetProcAddress;
    return result;
}
