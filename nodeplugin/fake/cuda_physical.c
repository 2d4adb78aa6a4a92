/* Memory of a device, without an address: what is charged, how long it lives, and how other processes get it. */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC 0x51756F7469656E74

/* All that other processes can hold: a second import of the same block must find the first. */
static struct physical *shared_ones;

CUresult create_physical(CUdevice device, uint64_t bytes, struct physical **created) {
    const struct device *on = device_at(device);
    if (on && !reserve_bytes(on->card, bytes, on->capacity)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical *physical = allocate(sizeof *physical);
    *physical = (struct physical){.device = on ? device : -1, .bytes = bytes, .references = 1, .block = -1, .memfd = -1};
    *created = physical;
    return CUDA_SUCCESS;
}

void hold_physical(struct physical *physical) { physical->references++; }

static void forget_shared(struct physical *physical) {
    for (struct physical **at = &shared_ones; *at; at = &(*at)->next)
        if (*at == physical) {
            *at = physical->next;
            return;
        }
}

void drop_physical(struct physical *physical) {
    if (--physical->references) return;
    if (physical->block >= 0) forget_shared(physical), drop_block(physical->block);
    else if (physical->device >= 0) release_bytes(device_at(physical->device)->card, physical->bytes);
    if (physical->memfd >= 0) close(physical->memfd);
    free(physical);
}

CUresult share_physical(struct physical *physical, struct shared_memory *shared) {
    if (physical->device < 0) return CUDA_ERROR_NOT_SUPPORTED;
    int card = device_at(physical->device)->card;
    if (physical->block < 0) {
        physical->block = make_block(card, physical->bytes);
        if (physical->block < 0) return CUDA_ERROR_OUT_OF_MEMORY;
        physical->next = shared_ones;
        shared_ones = physical;
    }
    *shared = (struct shared_memory){.magic = MAGIC, .id = block_id(physical->block), .bytes = physical->bytes,
                                     .size = physical->bytes, .card = card};
    return CUDA_SUCCESS;
}

static CUdevice ordinal_of(int card) {
    for (int each = 0; each < device_total(); each++)
        if (device_at(each)->card == card) return each;
    return -1;
}

CUresult import_physical(const struct shared_memory *shared, struct physical **imported) {
    CUdevice device = ordinal_of(shared->card);
    if (shared->magic != MAGIC) return CUDA_ERROR_INVALID_HANDLE;
    if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
    for (struct physical *each = shared_ones; each; each = each->next)
        if (block_id(each->block) == shared->id) {
            hold_physical(each);
            *imported = each;
            return CUDA_SUCCESS;
        }
    int block = hold_block(shared->id, shared->card, shared->bytes, device_at(device)->capacity);
    if (block < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical *physical = allocate(sizeof *physical);
    *physical = (struct physical){.device = device, .bytes = shared->bytes, .references = 1, .block = block, .memfd = -1,
                                  .next = shared_ones};
    shared_ones = physical;
    *imported = physical;
    return CUDA_SUCCESS;
}
