/* What NVML says of a GPU's memory in the container: the same as CUDA. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <string.h>

#define RESULT nvmlReturn_t
#include "../limits.h"
#include "../loading.h"
#include "../usage.h"

/* Returns the card of a device, -1 if it has no limits. */
static int card_of(nvmlDevice_t device) {
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    const struct limits_file *limits = container_limits();
    if (!limits || REAL(nvmlDeviceGetUUID)(device, uuid, sizeof uuid) != NVML_SUCCESS)
        return -1;
    for (unsigned card = 0; card < limits->card_count; card++)
        if (!strncmp(limits->cards[card].uuid, uuid, UUID_BYTES))
            return (int)card;
    return -1;
}

struct numbers { unsigned long long total, used, free; };

static struct numbers limited(unsigned card, unsigned long long total, unsigned long long free) {
    unsigned long long limit = limits_of(card).memory_bytes, used = used_bytes(card), left = used < limit ? limit - used : 0;
    struct numbers numbers = {.total = limit < total ? limit : total, .free = left < free ? left : free};
    numbers.used = numbers.total - numbers.free;
    return numbers;
}

HOOK(nvmlDeviceGetMemoryInfo)(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t result = REAL(nvmlDeviceGetMemoryInfo)(device, memory);
    int card = result == NVML_SUCCESS ? card_of(device) : -1;
    if (card >= 0) {
        struct numbers numbers = limited((unsigned)card, memory->total, memory->free);
        memory->total = numbers.total, memory->used = numbers.used, memory->free = numbers.free;
    }
    return result;
}

HOOK(nvmlDeviceGetMemoryInfo_v2)(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t result = REAL(nvmlDeviceGetMemoryInfo_v2)(device, memory);
    int card = result == NVML_SUCCESS ? card_of(device) : -1;
    if (card >= 0) {
        struct numbers numbers = limited((unsigned)card, memory->total, memory->free);
        memory->total = numbers.total, memory->used = numbers.used, memory->free = numbers.free, memory->reserved = 0;
    }
    return result;
}

/* The only function that has no result: without the library it has to return a text all the same. */
#define HOOK_TEXT(name) __attribute__((visibility("default"))) const char *name
HOOK_TEXT(nvmlErrorString)(nvmlReturn_t result) {
    return driver_has(FUNCTION_nvmlErrorString) ? REAL(nvmlErrorString)(result) : "libnvidia-ml cannot be opened";
}
