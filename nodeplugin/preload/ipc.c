/* Memory that is shared with other processes by an IPC handle. It counts once in a container, until the last process has
 * closed it. */
#include "charging.h"
#include "usage.h"

/* The exporter's memory becomes an entry that importers join; what is in a block with other memory stays its own. */
HOOK(cuIpcGetMemHandle)(CUipcMemHandle *handle, CUdeviceptr pointer) {
    CUresult result = REAL(cuIpcGetMemHandle)(handle, pointer);
    CUdeviceptr base = pointer;
    size_t bytes;
    struct record record;
    if (result != CUDA_SUCCESS || REAL(cuMemGetAddressRange_v2)(&base, &bytes, pointer) != CUDA_SUCCESS)
        return result;
    if (!take_record(POINTER, base, &record))
        return result;
    if (record.shared == NOT_SHARED && record.bytes >= BLOCK)
        record.shared = share(record.card, record.bytes, handle, sizeof *handle);
    put_record(record);
    return result;
}

/* What another container exports is charged here as well. Its size is known only once it is open. */
static CUresult charge_import(CUdeviceptr pointer, struct record *record) {
    CUdeviceptr base;
    size_t bytes;
    unsigned card;
    CUresult result = REAL(cuMemGetAddressRange_v2)(&base, &bytes, pointer);
    if (result == CUDA_SUCCESS)
        result = current_card(&card);
    if (result != CUDA_SUCCESS)
        return result;
    /* A small allocation comes with its whole block. */
    record->card = (uint8_t)card, record->bytes = round_up(bytes, BLOCK);
    return reserve_room(card, record->bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult open_handle(__typeof__(cuIpcOpenMemHandle_v2) *real, CUdeviceptr *pointer, CUipcMemHandle handle,
                            unsigned int flags) {
    struct record record = {.kind = IMPORT, .handles = 1}, open;
    record.shared = join_by_key(&handle, sizeof handle, &record.bytes, NULL);
    CUresult result = real(pointer, handle, flags);
    if (result != CUDA_SUCCESS) {
        if (record.shared != NOT_SHARED)
            leave(record.shared);
        return result;
    }
    record.key = *pointer, record.context = current_context();
    /* Opened twice, it has one address, and is closed twice. */
    if (take_record(IMPORT, *pointer, &open)) {
        open.handles++;
        put_record(open);
        if (record.shared != NOT_SHARED)
            leave(record.shared);
        return result;
    }
    if (record.shared == NOT_SHARED && (result = charge_import(*pointer, &record)) != CUDA_SUCCESS) {
        REAL(cuIpcCloseMemHandle)(*pointer);
        *pointer = 0;
        return result;
    }
    put_record(record);
    return CUDA_SUCCESS;
}

HOOK(cuIpcOpenMemHandle_v2)(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    return open_handle(REAL(cuIpcOpenMemHandle_v2), pointer, handle, flags);
}

HOOK(cuIpcOpenMemHandle)(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    return open_handle(REAL(cuIpcOpenMemHandle), pointer, handle, flags);
}

HOOK(cuIpcCloseMemHandle)(CUdeviceptr pointer) {
    struct record record;
    int is_known = take_record(IMPORT, pointer, &record);
    CUresult result = REAL(cuIpcCloseMemHandle)(pointer);
    if (!is_known)
        return result;
    if (result == CUDA_SUCCESS && !--record.handles)
        uncharge_record(&record);
    else
        put_record(record);
    return result;
}
