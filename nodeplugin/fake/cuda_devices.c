/* The devices that this process sees, from the description and CUDA_VISIBLE_DEVICES. */
#include "cuda_driver.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct device devices[MAX_CARDS];
static int count;

static void set_uuid(struct device *device, const char *text) {
    snprintf(device->uuid_text, sizeof device->uuid_text, "%s", text);
    const char *at = strncmp(text, "GPU-", 4) ? text : text + 4;
    size_t digits = 0;
    unsigned char bytes[16] = {0};
    for (; *at; at++) {
        if (*at == '-') continue;
        if (!isxdigit((unsigned char)*at) || digits >= 32) { digits = 0; break; }
        char one[2] = {*at, 0};
        bytes[digits / 2] = (unsigned char)(bytes[digits / 2] << 4 | strtoul(one, NULL, 16));
        digits++;
    }
    /* A description may use any text; its characters then are the UUID. */
    if (digits != 32) memset(bytes, 0, sizeof bytes), memcpy(bytes, text, strnlen(text, sizeof bytes));
    memcpy(device->uuid.bytes, bytes, sizeof bytes);
}

static void read_device(struct device *device, int card) {
    const char *name = get("cards[%d].product", card), *capability = get("cards[%d].capability", card);
    const char *uuid = get("cards[%d].uuid", card);
    *device = (struct device){.card = card, .major = 8};
    snprintf(device->name, sizeof device->name, "%s", name ? name : "NVIDIA T4");
    if (capability) sscanf(capability, "%d.%d", &device->major, &device->minor);
    set_uuid(device, uuid ? uuid : "");
    device->sms = (int)number(get("cards[%d].sms", card), 108);
    device->context_bytes = number(get("cards[%d].contextMiB", card), 300) * MIB;
    uint64_t described = number(get("cards[%d].usedMiB", card), 0);
    for (int each = 0; get("cards[%d].processes[%d].pid", card, each); each++)
        described += number(get("cards[%d].processes[%d].memoryMiB", card, each), 0);
    uint64_t memory = number(get("cards[%d].memoryMiB", card), 0), reserved = number(get("cards[%d].reservedMiB", card), 0);
    device->total = (memory > reserved ? memory - reserved : 0) * MIB;
    device->capacity = device->total > described * MIB ? device->total - described * MIB : 0;
}

/* The card that an entry of CUDA_VISIBLE_DEVICES names, or -1. */
static int card_named(const char *entry) {
    char *end;
    long index = strtol(entry, &end, 10);
    if (*entry && !*end) return index >= 0 && index < count_of("cards") ? (int)index : -1;
    int found = -1;
    for (int card = 0; !strncmp(entry, "GPU-", 4) && card < count_of("cards"); card++) {
        const char *uuid = get("cards[%d].uuid", card);
        if (!uuid || strncasecmp(uuid, entry, strlen(entry))) continue;
        if (found >= 0) return -1;
        found = card;
    }
    return found;
}

static int is_listed(int card) {
    for (int each = 0; each < count; each++)
        if (devices[each].card == card) return 1;
    return 0;
}

static int is_usable(int card) { return card >= 0 && !truth(get("cards[%d].lost", card)) && !is_listed(card); }

CUresult read_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    count = 0;
    if (!visible) {
        for (int card = 0; card < count_of("cards") && card < MAX_CARDS; card++)
            if (is_usable(card)) read_device(&devices[count++], card);
        return count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
    }
    char list[4096], *state = NULL;
    snprintf(list, sizeof list, "%s", visible);
    for (char *entry = strtok_r(list, ",", &state); entry; entry = strtok_r(NULL, ",", &state)) {
        entry += strspn(entry, " ");
        int card = card_named(entry);
        if (!is_usable(card) || count == MAX_CARDS) break;
        read_device(&devices[count++], card);
    }
    return count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

struct device *device_at(CUdevice ordinal) { return ordinal >= 0 && ordinal < count ? &devices[ordinal] : NULL; }
int device_total(void) { return count; }

int driver_version(void) {
    load_description();
    return (int)number(get("cuda"), 12040);
}

CUresult do_cuDriverGetVersion(int *driverVersion) {
    if (!driverVersion) return CUDA_ERROR_INVALID_VALUE;
    *driverVersion = driver_version();
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetCount(int *found) {
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    *found = count;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGet(CUdevice *device, int ordinal) {
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!device_at(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetName(char *name, int len, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!name || len <= 0) return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)len, "%s", device_at(dev)->name);
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    *uuid = device_at(dev)->uuid;
    return CUDA_SUCCESS;
}
CUresult do_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) { return do_cuDeviceGetUuid(uuid, dev); }

CUresult do_cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    *bytes = device_at(dev)->total;
    return CUDA_SUCCESS;
}
CUresult do_cuDeviceTotalMem(unsigned int *bytes, CUdevice dev) {
    size_t wide = 0;
    CUresult result = bytes ? do_cuDeviceTotalMem_v2(&wide, dev) : CUDA_ERROR_INVALID_VALUE;
    if (!result) *bytes = wide > UINT32_MAX ? UINT32_MAX : (unsigned)wide;
    return result;
}

CUresult do_cuDeviceComputeCapability(int *major, int *minor, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
    *major = device_at(dev)->major, *minor = device_at(dev)->minor;
    return CUDA_SUCCESS;
}

static unsigned bus_part(const struct device *device, int part) {
    unsigned domain = 0, bus = (unsigned)device->card + 1, slot = 0;
    const char *configured = get("cards[%d].bus", device->card);
    if (configured) sscanf(configured, "%x:%x:%x", &domain, &bus, &slot);
    return part == 0 ? domain : part == 1 ? bus : slot;
}

static const struct { CUdevice_attribute attribute; int value; } ATTRIBUTES[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7FFFFFFF},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 166912},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 167936},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 0x7FFFFFFF},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1410000},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1215000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 41943040},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
    {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT}};

CUresult do_cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    const struct device *device = device_at(dev);
    if (!device) return CUDA_ERROR_INVALID_DEVICE;
    if (!pi || attrib <= 0 || attrib >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *pi = 0;
    for (size_t each = 0; each < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; each++)
        if (ATTRIBUTES[each].attribute == attrib) *pi = ATTRIBUTES[each].value;
    switch ((int)attrib) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *pi = device->sms; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *pi = device->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *pi = device->minor; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *pi = (int)bus_part(device, 0); break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *pi = (int)bus_part(device, 1); break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *pi = (int)bus_part(device, 2); break;
    default: break;
    }
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetProperties(CUdevprop *prop, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    if (!prop) return CUDA_ERROR_INVALID_VALUE;
    *prop = (CUdevprop){.maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {0x7FFFFFFF, 65535, 65535},
        .sharedMemPerBlock = 49152, .totalConstantMemory = 65536, .SIMDWidth = 32, .memPitch = 0x7FFFFFFF,
        .regsPerBlock = 65536, .clockRate = 1410000, .textureAlign = 512};
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev) {
    const struct device *device = device_at(dev);
    if (!device) return CUDA_ERROR_INVALID_DEVICE;
    if (!pciBusId || len < 13) return CUDA_ERROR_INVALID_VALUE;
    snprintf(pciBusId, (size_t)len, "%04X:%02X:%02X.0", bus_part(device, 0), bus_part(device, 1), bus_part(device, 2));
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId) {
    unsigned domain = 0, bus = 0, slot = 0;
    if (!dev || !pciBusId || sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &slot) != 3) return CUDA_ERROR_INVALID_VALUE;
    for (int each = 0; each < count; each++)
        if (bus_part(&devices[each], 0) == domain && bus_part(&devices[each], 1) == bus && bus_part(&devices[each], 2) == slot) {
            *dev = each;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult do_cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev) {
    if (!device_at(dev) || !device_at(peerDev)) return CUDA_ERROR_INVALID_DEVICE;
    *canAccessPeer = dev != peerDev;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice) {
    if (!device_at(srcDevice) || !device_at(dstDevice)) return CUDA_ERROR_INVALID_DEVICE;
    if (!value || srcDevice == dstDevice) return CUDA_ERROR_INVALID_VALUE;
    *value = attrib == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetExecAffinitySupport(int *pi, CUexecAffinityType type, CUdevice dev) {
    if (!device_at(dev)) return CUDA_ERROR_INVALID_DEVICE;
    *pi = 0;
    return CUDA_SUCCESS;
}
