/* A driver of which each call costs next to nothing: so what a call through the library takes is the library's own. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <string.h>

/* The UUID of the first card in the limits that bench/isolation.py writes. */
static const unsigned char UUID[16] = {0, 0, 0, 0, 0x11, 0x11, 0x22, 0x22, 0x33, 0x33, 0x44, 0x44, 0x44, 0x44, 0x44, 0x44};
static CUdeviceptr next = 1ULL << 40;
static int active;

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&active; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memcpy(uuid->bytes, UUID, sizeof UUID); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active) { *is_active = active; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)&active; active = 1; return CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) { *pointer = bytes > 1 << 20 ? next += bytes : next + 512; return CUDA_SUCCESS; }
CUresult cuMemFree_v2(CUdeviceptr pointer) { return CUDA_SUCCESS; }
