#include "array_sizes.h"

#include "charging.h"

/* `side` is how many elements a block has in a row and in a column, `bytes` what a block takes in the first plane. The
 * chroma of formats in planes is in others, where `columns` times `rows` elements share a sample. */
struct layout { uint8_t side, bytes, planes, sample_bytes, columns, rows; };

#define PACKED(bytes) {1, bytes, 0, 0, 1, 1}
#define BLOCKS(bytes) {4, bytes, 0, 0, 1, 1}
/* Both samples of chroma in one plane, or in a plane each. */
#define SEMIPLANAR(bytes, columns, rows) {1, bytes, 1, 2 * bytes, columns, rows}
#define PLANAR(bytes, columns, rows) {1, bytes, 2, bytes, columns, rows}

/* Of all channels together; the others take what each channel does. */
static const struct layout LAYOUTS[] = {
    [CU_AD_FORMAT_UNORM_INT_101010_2] = PACKED(4),
    /* Documented as 4 channels for each element, though two may share their chroma. */
    [CU_AD_FORMAT_UINT8_PACKED_422] = PACKED(4),
    [CU_AD_FORMAT_UINT8_PACKED_444] = PACKED(4),
    [CU_AD_FORMAT_UINT8_SEMIPLANAR_420] = SEMIPLANAR(1, 2, 2),
    [CU_AD_FORMAT_UINT16_SEMIPLANAR_420] = SEMIPLANAR(2, 2, 2),
    [CU_AD_FORMAT_UINT8_SEMIPLANAR_422] = SEMIPLANAR(1, 2, 1),
    [CU_AD_FORMAT_UINT16_SEMIPLANAR_422] = SEMIPLANAR(2, 2, 1),
    [CU_AD_FORMAT_UINT8_SEMIPLANAR_444] = SEMIPLANAR(1, 1, 1),
    [CU_AD_FORMAT_UINT16_SEMIPLANAR_444] = SEMIPLANAR(2, 1, 1),
    [CU_AD_FORMAT_UINT8_PLANAR_420] = PLANAR(1, 2, 2),
    [CU_AD_FORMAT_UINT16_PLANAR_420] = PLANAR(2, 2, 2),
    [CU_AD_FORMAT_UINT8_PLANAR_422] = PLANAR(1, 2, 1),
    [CU_AD_FORMAT_UINT16_PLANAR_422] = PLANAR(2, 2, 1),
    [CU_AD_FORMAT_UINT8_PLANAR_444] = PLANAR(1, 1, 1),
    [CU_AD_FORMAT_UINT16_PLANAR_444] = PLANAR(2, 1, 1),
    [CU_AD_FORMAT_BC1_UNORM] = BLOCKS(8),
    [CU_AD_FORMAT_BC1_UNORM_SRGB] = BLOCKS(8),
    [CU_AD_FORMAT_BC2_UNORM] = BLOCKS(16),
    [CU_AD_FORMAT_BC2_UNORM_SRGB] = BLOCKS(16),
    [CU_AD_FORMAT_BC3_UNORM] = BLOCKS(16),
    [CU_AD_FORMAT_BC3_UNORM_SRGB] = BLOCKS(16),
    [CU_AD_FORMAT_BC4_UNORM] = BLOCKS(8),
    [CU_AD_FORMAT_BC4_SNORM] = BLOCKS(8),
    [CU_AD_FORMAT_BC5_UNORM] = BLOCKS(16),
    [CU_AD_FORMAT_BC5_SNORM] = BLOCKS(16),
    [CU_AD_FORMAT_BC6H_UF16] = BLOCKS(16),
    [CU_AD_FORMAT_BC6H_SF16] = BLOCKS(16),
    [CU_AD_FORMAT_BC7_UNORM] = BLOCKS(16),
    [CU_AD_FORMAT_BC7_UNORM_SRGB] = BLOCKS(16),
    [CU_AD_FORMAT_P010] = SEMIPLANAR(2, 2, 2),
    [CU_AD_FORMAT_P016] = SEMIPLANAR(2, 2, 2),
    [CU_AD_FORMAT_NV16] = SEMIPLANAR(1, 2, 1),
    [CU_AD_FORMAT_P210] = SEMIPLANAR(2, 2, 1),
    [CU_AD_FORMAT_P216] = SEMIPLANAR(2, 2, 1),
    [CU_AD_FORMAT_YUY2] = PACKED(2),
    [CU_AD_FORMAT_Y210] = PACKED(4),
    [CU_AD_FORMAT_Y216] = PACKED(4),
    [CU_AD_FORMAT_AYUV] = PACKED(4),
    [CU_AD_FORMAT_Y410] = PACKED(4),
    [CU_AD_FORMAT_NV12] = SEMIPLANAR(1, 2, 2),
    [CU_AD_FORMAT_Y416] = PACKED(8),
    [CU_AD_FORMAT_Y444_PLANAR8] = PLANAR(1, 1, 1),
    [CU_AD_FORMAT_Y444_PLANAR10] = PLANAR(2, 1, 1),
    [CU_AD_FORMAT_YUV444_8bit_SemiPlanar] = SEMIPLANAR(1, 1, 1),
    [CU_AD_FORMAT_YUV444_16bit_SemiPlanar] = SEMIPLANAR(2, 1, 1),
    [CU_AD_FORMAT_UNORM_INT8X1] = PACKED(1),
    [CU_AD_FORMAT_UNORM_INT8X2] = PACKED(2),
    [CU_AD_FORMAT_UNORM_INT8X4] = PACKED(4),
    [CU_AD_FORMAT_UNORM_INT16X1] = PACKED(2),
    [CU_AD_FORMAT_UNORM_INT16X2] = PACKED(4),
    [CU_AD_FORMAT_UNORM_INT16X4] = PACKED(8),
    [CU_AD_FORMAT_SNORM_INT8X1] = PACKED(1),
    [CU_AD_FORMAT_SNORM_INT8X2] = PACKED(2),
    [CU_AD_FORMAT_SNORM_INT8X4] = PACKED(4),
    [CU_AD_FORMAT_SNORM_INT16X1] = PACKED(2),
    [CU_AD_FORMAT_SNORM_INT16X2] = PACKED(4),
    [CU_AD_FORMAT_SNORM_INT16X4] = PACKED(8),
};

static unsigned channel_bytes(CUarray_format format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        return 0;
    }
}

static struct layout layout_of(CUarray_format format, unsigned channels) {
    unsigned bytes = channel_bytes(format) * (channels < 4 ? channels : 4);
    if (bytes)
        return (struct layout)PACKED((uint8_t)bytes);
    if ((size_t)format < sizeof LAYOUTS / sizeof *LAYOUTS && LAYOUTS[format].side)
        return LAYOUTS[format];
    /* A format of a newer driver: at most 16 bytes for an element of all channels. */
    return (struct layout)PACKED(16);
}

/* One and two dimensions have 0 for those they lack. */
static uint64_t parts(uint64_t elements, unsigned size) { return elements ? (elements - 1) / size + 1 : 1; }

static uint64_t plane_bytes(uint64_t columns, uint64_t rows, unsigned bytes) {
    return product(round_up(product(columns, bytes), PITCH), rows);
}

static uint64_t level_bytes(const struct layout *layout, uint64_t width, uint64_t height) {
    uint64_t first = plane_bytes(parts(width, layout->side), parts(height, layout->side), layout->bytes), sum;
    uint64_t other = plane_bytes(parts(width, layout->columns), parts(height, layout->rows), layout->sample_bytes);
    return __builtin_add_overflow(first, product(other, layout->planes), &sum) ? UINT64_MAX : sum;
}

/* Memory that is mapped later is charged where it is created. */
uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned levels) {
    if (wanted->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0;
    struct layout layout = layout_of(wanted->Format, wanted->NumChannels);
    uint64_t sum = 0;
    for (unsigned level = 0; level < levels && level < 64; level++) {
        uint64_t depth = wanted->Depth >> level;
        if (wanted->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP))
            depth = wanted->Depth;
        uint64_t bytes = product(level_bytes(&layout, wanted->Width >> level, wanted->Height >> level), depth ? depth : 1);
        if (__builtin_add_overflow(sum, bytes, &sum))
            return UINT64_MAX;
    }
    return sum;
}
