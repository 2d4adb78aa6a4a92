/* Copies and fills. They take no time on the simulated device, but a blocking one waits for what was queued before. */
#include "cuda_driver.h"

#include <string.h>

enum place { ANYWHERE, ON_DEVICE };

/* Check and open both ends; other addresses of the host are the program's own memory. */
static CUresult open_memory(uint64_t address, uint64_t size, enum place place) {
    if (!size) return CUDA_SUCCESS;
    if (place == ANYWHERE && !find_range(address)) return CUDA_SUCCESS;
    return touch(address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult wait_for_queue(void) {
    CUstream stream;
    CUresult result = find_stream(NULL, &stream);
    if (!result) result = refuse_in_capture();
    if (!result) wait_until(ready_time(stream));
    return result;
}

static CUresult copy_linear(uint64_t to, enum place to_place, uint64_t from, enum place from_place, uint64_t size) {
    CUresult result = open_memory(to, size, to_place);
    if (!result) result = open_memory(from, size, from_place);
    if (!result && size) memmove((void *)to, (const void *)from, size);
    return result;
}

static CUresult copy_now(uint64_t to, enum place to_place, uint64_t from, enum place from_place, uint64_t size) {
    CUresult result = wait_for_queue();
    return result ? result : copy_linear(to, to_place, from, from_place, size);
}

static CUresult copy_on(CUstream handle, uint64_t to, enum place to_place, uint64_t from, enum place from_place, uint64_t size) {
    CUstream stream;
    CUresult result = find_stream(handle, &stream);
    if (result) return result;
    if (!stream->capture) {
        run_on(stream, 0);
        return copy_linear(to, to_place, from, from_place, size);
    }
    if ((result = usable_capture(stream))) return result;
    CUgraphNode node = new_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEMCPY, stream->last_nodes.nodes, stream->last_nodes.count);
    node->of.copy = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcDevice = from, .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                                    .dstDevice = to, .WidthInBytes = size, .Height = 1, .Depth = 1};
    return capture_node(stream, node);
}

CUresult do_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) { return copy_now(dst, ANYWHERE, src, ANYWHERE, ByteCount); }
CUresult do_cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount) {
    return copy_now(dstDevice, ON_DEVICE, (uint64_t)srcHost, ANYWHERE, ByteCount);
}
CUresult do_cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount) {
    return copy_now((uint64_t)dstHost, ANYWHERE, srcDevice, ON_DEVICE, ByteCount);
}
CUresult do_cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
    return copy_now(dstDevice, ON_DEVICE, srcDevice, ON_DEVICE, ByteCount);
}
CUresult do_cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount) {
    return do_cuMemcpyDtoD_v2(dstDevice, srcDevice, ByteCount);
}
CUresult do_cuMemcpyHtoD(CUdeviceptr_v1 dstDevice, const void *srcHost, unsigned int ByteCount) { return do_cuMemcpyHtoD_v2(dstDevice, srcHost, ByteCount); }
CUresult do_cuMemcpyDtoH(void *dstHost, CUdeviceptr_v1 srcDevice, unsigned int ByteCount) { return do_cuMemcpyDtoH_v2(dstHost, srcDevice, ByteCount); }
CUresult do_cuMemcpyDtoD(CUdeviceptr_v1 dstDevice, CUdeviceptr_v1 srcDevice, unsigned int ByteCount) {
    return do_cuMemcpyDtoD_v2(dstDevice, srcDevice, ByteCount);
}

CUresult do_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
    return copy_on(hStream, dst, ANYWHERE, src, ANYWHERE, ByteCount);
}
CUresult do_cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream) {
    return copy_on(hStream, dstDevice, ON_DEVICE, (uint64_t)srcHost, ANYWHERE, ByteCount);
}
CUresult do_cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    return copy_on(hStream, (uint64_t)dstHost, ANYWHERE, srcDevice, ON_DEVICE, ByteCount);
}
CUresult do_cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    return copy_on(hStream, dstDevice, ON_DEVICE, srcDevice, ON_DEVICE, ByteCount);
}
CUresult do_cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount, CUstream hStream) {
    return do_cuMemcpyDtoDAsync_v2(dstDevice, srcDevice, ByteCount, hStream);
}

static uint64_t base_of(CUmemorytype type, const void *host, CUdeviceptr device) {
    return type == CU_MEMORYTYPE_HOST ? (uint64_t)host : type == CU_MEMORYTYPE_ARRAY ? 0 : device;
}

/* Row by row. Arrays have no content: nothing here computes with them. */
CUresult copy_3d(const CUDA_MEMCPY3D *copy) {
    uint64_t from = base_of(copy->srcMemoryType, copy->srcHost, copy->srcDevice), to = base_of(copy->dstMemoryType, copy->dstHost, copy->dstDevice);
    CUresult result = CUDA_SUCCESS;
    if (!from || !to) return CUDA_SUCCESS;
    for (size_t z = 0; z < copy->Depth && !result; z++)
        for (size_t y = 0; y < copy->Height && !result; y++) {
            uint64_t source = from + ((copy->srcZ + z) * copy->srcHeight + copy->srcY + y) * copy->srcPitch + copy->srcXInBytes;
            uint64_t target = to + ((copy->dstZ + z) * copy->dstHeight + copy->dstY + y) * copy->dstPitch + copy->dstXInBytes;
            result = copy_linear(target, ANYWHERE, source, ANYWHERE, copy->WidthInBytes);
        }
    return result;
}

static CUDA_MEMCPY3D as_3d(const CUDA_MEMCPY2D *copy) {
    return (CUDA_MEMCPY3D){.srcXInBytes = copy->srcXInBytes, .srcY = copy->srcY, .srcMemoryType = copy->srcMemoryType, .srcHost = copy->srcHost,
        .srcDevice = copy->srcDevice, .srcPitch = copy->srcPitch, .dstXInBytes = copy->dstXInBytes, .dstY = copy->dstY,
        .dstMemoryType = copy->dstMemoryType, .dstHost = copy->dstHost, .dstDevice = copy->dstDevice, .dstPitch = copy->dstPitch,
        .WidthInBytes = copy->WidthInBytes, .Height = copy->Height, .Depth = 1};
}
CUresult do_cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy) {
    CUresult result = pCopy ? wait_for_queue() : CUDA_ERROR_INVALID_VALUE;
    return result ? result : copy_3d(pCopy);
}
CUresult do_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream) {
    CUstream stream;
    CUresult result = pCopy ? find_stream(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    if (!stream->capture) {
        run_on(stream, 0);
        return copy_3d(pCopy);
    }
    if ((result = usable_capture(stream))) return result;
    CUgraphNode node = new_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEMCPY, stream->last_nodes.nodes, stream->last_nodes.count);
    node->of.copy = *pCopy;
    return capture_node(stream, node);
}
CUresult do_cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy) {
    CUDA_MEMCPY3D wide = pCopy ? as_3d(pCopy) : (CUDA_MEMCPY3D){0};
    return do_cuMemcpy3D_v2(pCopy ? &wide : NULL);
}
CUresult do_cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy) { return do_cuMemcpy2D_v2(pCopy); }
CUresult do_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream) {
    CUDA_MEMCPY3D wide = pCopy ? as_3d(pCopy) : (CUDA_MEMCPY3D){0};
    return do_cuMemcpy3DAsync_v2(pCopy ? &wide : NULL, hStream);
}

CUresult set_memory(const CUDA_MEMSET_NODE_PARAMS *set) {
    uint64_t rows = set->height ? set->height : 1, pitch = rows > 1 ? set->pitch : 0;
    for (uint64_t row = 0; row < rows; row++) {
        unsigned char *at = (unsigned char *)set->dst + row * pitch;
        if (set->width && !touch((uint64_t)at, set->width * set->elementSize)) return CUDA_ERROR_INVALID_VALUE;
        if (set->elementSize == 1) memset(at, (int)set->value, set->width);
        else for (size_t each = 0; each < set->width; each++) memcpy(at + each * set->elementSize, &set->value, set->elementSize);
    }
    return CUDA_SUCCESS;
}

static CUresult set_on(CUstream handle, int waits, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height) {
    CUDA_MEMSET_NODE_PARAMS set = {to, pitch, value, element, width, height};
    CUstream stream;
    CUresult result = waits ? wait_for_queue() : find_stream(handle, &stream);
    if (result || waits) return result ? result : set_memory(&set);
    if (!stream->capture) {
        run_on(stream, 0);
        return set_memory(&set);
    }
    if ((result = usable_capture(stream))) return result;
    CUgraphNode node = new_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEMSET, stream->last_nodes.nodes, stream->last_nodes.count);
    node->of.set = set;
    return capture_node(stream, node);
}
CUresult do_cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N) { return set_on(NULL, 1, dstDevice, 0, uc, 1, N, 1); }
CUresult do_cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N) { return set_on(NULL, 1, dstDevice, 0, us, 2, N, 1); }
CUresult do_cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N) { return set_on(NULL, 1, dstDevice, 0, ui, 4, N, 1); }
CUresult do_cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height) {
    return set_on(NULL, 1, dstDevice, dstPitch, uc, 1, Width, Height);
}
CUresult do_cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height) {
    return set_on(NULL, 1, dstDevice, dstPitch, us, 2, Width, Height);
}
CUresult do_cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height) {
    return set_on(NULL, 1, dstDevice, dstPitch, ui, 4, Width, Height);
}
CUresult do_cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) { return set_on(hStream, 0, dstDevice, 0, uc, 1, N, 1); }
CUresult do_cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream) { return set_on(hStream, 0, dstDevice, 0, us, 2, N, 1); }
CUresult do_cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) { return set_on(hStream, 0, dstDevice, 0, ui, 4, N, 1); }
