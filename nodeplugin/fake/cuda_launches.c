/* Launches of kernels: all forms end in launch(). */
#include "cuda_driver.h"

static CUresult launch(CUstream handle, const CUDA_KERNEL_NODE_PARAMS *kernel) {
    CUstream stream;
    CUfunction function = kernel->func ? kernel->func : (CUfunction)kernel->kern;
    CUresult result = function ? find_stream(handle, &stream) : CUDA_ERROR_INVALID_HANDLE;
    if (result) return result;
    uint64_t threads = (uint64_t)kernel->blockDimX * kernel->blockDimY * kernel->blockDimZ;
    if (!threads || threads > 1024 || !kernel->gridDimX || !kernel->gridDimY || !kernel->gridDimZ) return CUDA_ERROR_INVALID_VALUE;
    if (!stream->capture) {
        run_on(stream, function->duration_ns);
        return CUDA_SUCCESS;
    }
    if ((result = usable_capture(stream))) return result;
    CUgraphNode node = new_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_KERNEL, stream->last_nodes.nodes, stream->last_nodes.count);
    node->of.kernel = *kernel;
    return capture_node(stream, node);
}

CUresult do_cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra) {
    return launch(hStream, &(CUDA_KERNEL_NODE_PARAMS){.func = f, .gridDimX = gridDimX, .gridDimY = gridDimY, .gridDimZ = gridDimZ,
        .blockDimX = blockDimX, .blockDimY = blockDimY, .blockDimZ = blockDimZ, .sharedMemBytes = sharedMemBytes,
        .kernelParams = kernelParams, .extra = extra});
}
CUresult do_cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams) {
    return do_cuLaunchKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams, NULL);
}
CUresult do_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
    if (!config) return CUDA_ERROR_INVALID_VALUE;
    return do_cuLaunchKernel(f, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                             config->blockDimZ, config->sharedMemBytes, config->hStream, kernelParams, extra);
}
CUresult do_cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags) {
    CUresult result = launchParamsList ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (unsigned each = 0; each < numDevices && !result; each++) {
        const CUDA_LAUNCH_PARAMS *one = &launchParamsList[each];
        result = do_cuLaunchKernel(one->function, one->gridDimX, one->gridDimY, one->gridDimZ, one->blockDimX, one->blockDimY,
                                   one->blockDimZ, one->sharedMemBytes, one->hStream, one->kernelParams, NULL);
    }
    return result;
}

/* The oldest forms: the shape of a block is part of the function's state; one thread is as good as any here. */
CUresult do_cuFuncSetBlockShape(CUfunction hfunc, int x, int y, int z) { return hfunc ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
CUresult do_cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream) {
    return do_cuLaunchKernel(f, (unsigned)grid_width, (unsigned)grid_height, 1, 1, 1, 1, 0, hStream, NULL, NULL);
}
CUresult do_cuLaunchGrid(CUfunction f, int grid_width, int grid_height) { return do_cuLaunchGridAsync(f, grid_width, grid_height, NULL); }
CUresult do_cuLaunch(CUfunction f) { return do_cuLaunchGrid(f, 1, 1); }
