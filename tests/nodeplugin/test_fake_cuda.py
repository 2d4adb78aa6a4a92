"""The fake CUDA driver: simulated devices that all processes of a machine share."""

import ctypes
import os
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from nodeplugin.cuda_header import find_headers, read_functions
from nodeplugin.fake.building import compile_cuda
from tests.nodeplugin.cuda_programs import CONTEXT_MIB, MEMORY_MIB, UUIDS, Machine, gpu

SITE_PACKAGES = find_headers().parents[2]
RUNTIMES = {
    "11.8": "nvidia/cuda_runtime/lib/libcudart.so.11.0",
    "12.9": "nvidia/cuda_runtime/lib/libcudart.so.12",
    "13": "nvidia/cu13/lib/libcudart.so.13",
}
FREE_MIB = MEMORY_MIB - CONTEXT_MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "driver")


@pytest.fixture
def nvml(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """NVIDIA's bindings of NVML on the machine's library, in this process."""
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(machine.folder / "libnvidia-ml.so.1")))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# The library.


def test_every_function_of_cuda_h_is_exported() -> None:
    """A program that links against any of them must start."""
    library = ctypes.CDLL(str(compile_cuda()))
    assert [each.name for each in read_functions(find_headers()) if not hasattr(library, each.name)] == []
    assert hasattr(library, "cuGLCtxCreate_v2")


def test_what_is_not_implemented_is_not_supported(tmp_path: Path) -> None:
    """And private tables do not exist."""
    machine = Machine(tmp_path, cuda=13050)
    assert machine.run("""
        device()
        tell(failed(cu.cuLogicalEndpointIdReserve(1)), failed(cu.cuGetExportTable(cu.CUuuid())))
    """) == ["CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_NOT_FOUND"]


def test_visible_devices_are_in_the_order_of_the_variable(tmp_path: Path) -> None:
    """It names indexes or prefixes of UUIDs, and ends at the first that is invalid."""
    machine = Machine(tmp_path, *(gpu(index) for index in range(4)))
    body = """
        ok(cu.cuInit(0))
        tell(*(ok(cu.cuDeviceGetUuid(each)).bytes[3] for each in range(ok(cu.cuDeviceGetCount()))))
    """
    assert machine.run(body) == ["0 1 2 3"]
    assert machine.run(body, CUDA_VISIBLE_DEVICES=f"2,{UUIDS[0][:12]},9,1") == ["2 0"]


def test_a_driver_does_not_work_in_a_forked_child(machine: Machine) -> None:
    """Every call says so."""
    assert machine.run("""
        device()
        child = os.fork()
        if not child:
            codes = [failed(cu.cuInit(0)), failed(cu.cuMemAlloc(1))]
            os._exit(codes != ["CUDA_ERROR_NOT_INITIALIZED"] * 2)
        tell(os.waitpid(child, 0)[1])
    """) == ["0"]


def test_a_failure_can_be_described(tmp_path: Path) -> None:
    """By the exported name, with the code to return."""
    machine = Machine(tmp_path, failures={"cuMemAlloc_v2": 719})
    assert machine.run("device(); tell(failed(cu.cuMemAlloc(1)))") == ["CUDA_ERROR_LAUNCH_FAILED"]


# Memory.


def test_small_allocations_share_pages_and_large_ones_have_their_own(machine: Machine) -> None:
    """A page is 2 MiB; it is given back with the last allocation on it."""
    assert machine.run("""
        device()
        tell(free_mib())
        small = [ok(cu.cuMemAlloc(1000)) for _ in range(100)]
        large = ok(cu.cuMemAlloc(MIB + 1))
        tell(free_mib(), len({int(each) for each in small}))
        for each in [*small, large]:
            ok(cu.cuMemFree(each))
        tell(free_mib())
    """) == [f"{FREE_MIB}.0", f"{FREE_MIB - 4}.0 100", f"{FREE_MIB}.0"]


def test_the_capacity_is_exact_across_processes(machine: Machine) -> None:
    """Eight processes that allocate at the same time get all memory and nothing beyond it."""
    body = """
        device()
        tell("ready")
        hear()
        count = 0
        while not cu.cuMemAlloc(2 * MIB)[0]:
            count += 1
        tell(count)
        hear()
    """
    programs = [machine.start(body) for _ in range(8)]
    try:
        assert {each.hear() for each in programs} == {"ready"}
        for each in programs:
            each.tell()
        assert sum(int(each.hear()) for each in programs) == (MEMORY_MIB - 8 * CONTEXT_MIB) // 2
    finally:
        for each in programs:
            each.kill()


def test_a_killed_process_leaves_nothing_behind(machine: Machine) -> None:
    """Neither memory nor locks."""
    with machine.start("device(); ok(cu.cuMemAlloc(1024 * MIB)); tell('ready'); hear()") as program:
        program.hear()
        assert machine.run("device(); tell(free_mib())") == [f"{FREE_MIB - CONTEXT_MIB - 1024}.0"]
    assert machine.run("device(); tell(free_mib())") == [f"{FREE_MIB}.0"]


def test_processes_may_be_killed_at_any_time(machine: Machine) -> None:
    """Also while they hold the lock of all devices."""
    body = """
        device()
        tell("ready")
        while True:
            for each in [ok(cu.cuMemAlloc(size)) for size in (3 * MIB, 100)]:
                ok(cu.cuMemFree(each))
            handle = ok(cu.cuMemCreate(2 * MIB, property_of(handles=8), 0))
            ok(cu.cuMemExportToShareableHandle(handle, FABRIC, 0)), ok(cu.cuMemRelease(handle))
    """
    for _ in range(5):
        with machine.start(body) as one, machine.start(body) as other:
            one.hear(), other.hear()
    assert machine.run("device(); tell(free_mib())") == [f"{FREE_MIB}.0"]


def test_every_kind_of_device_memory_is_charged(machine: Machine) -> None:
    """Also pitched and managed memory, arrays, modules and contexts; memory of the host is not."""
    assert machine.run("""
        device()
        before = free_mib()
        def charged(call):
            global before
            ok(call)
            after, was = free_mib(), before
            before = after
            return was - after
        shape = cu.CUDA_ARRAY_DESCRIPTOR()
        shape.Width, shape.Height, shape.NumChannels = 1024, 1024, 4
        shape.Format = cu.CUarray_format.CU_AD_FORMAT_FLOAT
        deep = cu.CUDA_ARRAY3D_DESCRIPTOR()
        deep.Width, deep.Height, deep.Depth, deep.NumChannels, deep.Format = 256, 256, 64, 1, shape.Format
        tell(charged(cu.cuMemAllocPitch(513, 4096, 4)), charged(cu.cuMemAllocManaged(10 * MIB, 1)))
        tell(charged(cu.cuArrayCreate(shape)), charged(cu.cuArray3DCreate(deep)))
        tell(charged(cu.cuMipmappedArrayCreate(deep, 2)), charged(cu.cuModuleLoadData(b".fakeMiB=7")))
        tell(charged(cu.cuMemHostAlloc(64 * MIB, 0)), charged(cu.cuMemAllocHost(64 * MIB)))
        tell(charged(cu.cuCtxCreate(None, 0, 0)))
    """) == ["4.0 10.0", "16.0 16.0", "18.0 7.0", "0.0 0.0", f"{CONTEXT_MIB}.0"]


def test_a_destroyed_context_frees_its_memory(machine: Machine) -> None:
    """And so does the reset of the primary one."""
    assert (
        machine.run("""
        device()
        made = ok(cu.cuCtxCreate(None, 0, 0))
        ok(cu.cuMemAlloc(100 * MIB))
        ok(cu.cuCtxDestroy(made))
        tell(free_mib())
        ok(cu.cuMemAlloc(100 * MIB)), ok(cu.cuMemAllocAsync(100 * MIB, 0))
        ok(cu.cuDevicePrimaryCtxReset(0))
        ok(cu.cuDevicePrimaryCtxRetain(0))
        tell(free_mib())
    """)
        == [f"{FREE_MIB}.0"] * 2
    )


def test_copies_keep_their_content(machine: Machine) -> None:
    """Between host and device, and on the device."""
    assert machine.run("""
        device()
        one, other = ok(cu.cuMemAlloc(5 * MIB)), ok(cu.cuMemAlloc(100))
        sent, got = b"0123456789" * 10, bytearray(100)
        ok(cu.cuMemcpyHtoD(other, sent, 100))
        ok(cu.cuMemcpyDtoD(one, other, 100))
        ok(cu.cuMemsetD8(int(one) + 5, 120, 3))
        ok(cu.cuMemcpyDtoH(got, one, 100))
        tell(bytes(got[:10]).decode(), failed(cu.cuMemcpyDtoH(got, 4096, 100)))
    """) == ["01234xxx89 CUDA_ERROR_INVALID_VALUE"]


def test_virtual_memory_lives_as_long_as_handles_and_mappings(machine: Machine) -> None:
    """Memory of the host is not charged."""
    assert machine.run("""
        device()
        address = ok(cu.cuMemAddressReserve(8 * MIB, 0, 0, 0))
        handle = ok(cu.cuMemCreate(4 * MIB, property_of(), 0))
        ok(cu.cuMemMap(address, 4 * MIB, 0, handle, 0))
        same = ok(cu.cuMemRetainAllocationHandle(int(address)))
        ok(cu.cuMemRelease(handle)), ok(cu.cuMemRelease(same))
        tell(free_mib(), int(same) == int(handle))
        ok(cu.cuMemUnmap(address, 4 * MIB))
        ok(cu.cuMemAddressFree(address, 8 * MIB))
        ok(cu.cuMemCreate(4 * MIB, property_of(cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA), 0))
        tell(free_mib(), failed(cu.cuMemCreate(4 * MIB, property_of(ordinal=7), 0)))
    """) == [f"{FREE_MIB - 4}.0 True", f"{FREE_MIB}.0 CUDA_ERROR_INVALID_DEVICE"]


EXPORTS = {
    "a fabric handle": (
        """
        handle = ok(cu.cuMemCreate(64 * MIB, property_of(handles=8), 0))
        shared = bytes(ok(cu.cuMemExportToShareableHandle(handle, FABRIC, 0)).data)
        """,
        """
        handle = cu.CUmemFabricHandle()
        handle.data = shared
        ok(cu.cuMemImportFromShareableHandle(handle.getPtr(), FABRIC))
        """,
    ),
    "a cuIpc handle": (
        """
        handle = ok(cu.cuIpcGetMemHandle(ok(cu.cuMemAlloc(64 * MIB))))
        shared = ctypes.string_at(handle.getPtr(), 64)
        """,
        """
        handle = cu.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), shared, 64)
        ok(cu.cuIpcOpenMemHandle(handle, 1))
        """,
    ),
    "a pool's pointer": (
        """
        handle = ok(cu.cuMemPoolExportPointer(ok(cu.cuMemAllocAsync(64 * MIB, 0))))
        shared = ctypes.string_at(handle.getPtr(), 64)
        """,
        """
        handle = cu.CUmemPoolPtrExportData()
        ctypes.memmove(handle.getPtr(), shared, 64)
        ok(cu.cuMemPoolImportPointer(ok(cu.cuDeviceGetDefaultMemPool(0)), handle))
        """,
    ),
}
SAY_FREE_MEMORY = """
tell(free_mib())
hear()
tell(free_mib())
hear()
"""


@pytest.mark.parametrize(("export", "load"), EXPORTS.values(), ids=EXPORTS.keys())
def test_an_import_keeps_memory_alive(machine: Machine, export: str, load: str) -> None:
    """Also when the exporter is killed; it is charged once."""
    exporter = machine.start("device()" + textwrap.dedent(export) + "tell(shared.hex())\nhear()")
    load = "device()\nshared = bytes.fromhex(sys.argv[1])" + textwrap.dedent(load) + SAY_FREE_MEMORY
    with machine.start(load, exporter.hear()) as importer:
        assert importer.hear() == f"{FREE_MIB - CONTEXT_MIB - 64}.0"
        exporter.kill()
        importer.tell()
        assert importer.hear() == f"{FREE_MIB - 64}.0"
    assert machine.run("device(); tell(free_mib())") == [f"{FREE_MIB}.0"]


def test_memory_is_shared_by_a_descriptor(machine: Machine) -> None:
    """With its content. Each export is an open file description of its own, of the same file."""
    assert machine.run("""
        import fcntl, struct, subprocess
        device()
        handle = ok(cu.cuMemCreate(4 * MIB, property_of(handles=1), 0))
        first, second = (ok(cu.cuMemExportToShareableHandle(handle, FD, 0)) for _ in range(2))
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0)
        fcntl.fcntl(first, 37, lock)
        inodes = {os.fstat(first).st_ino, os.fstat(second).st_ino, os.stat(f"/proc/self/fd/{first}").st_ino}
        tell(len(inodes))
        try:
            fcntl.fcntl(second, 37, lock)
        except BlockingIOError:
            tell("locked")
        access = cu.CUmemAccessDesc()
        access.location, access.flags = property_of().location, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        imported = ok(cu.cuMemImportFromShareableHandle(second, FD))
        addresses = [ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0)) for _ in range(2)]
        for address, each in zip(addresses, (handle, imported)):
            ok(cu.cuMemMap(address, 4 * MIB, 0, each, 0)), ok(cu.cuMemSetAccess(address, 4 * MIB, [access], 1))
        got = bytearray(5)
        ok(cu.cuMemcpyHtoD(addresses[0], b"hello", 5)), ok(cu.cuMemcpyDtoH(got, addresses[1], 5))
        tell(got.decode(), free_mib())
    """) == ["1", "locked", f"hello {FREE_MIB - 4}.0"]


def test_external_memory_is_charged_until_its_last_buffer_is_freed(machine: Machine) -> None:
    """A foreign descriptor stands for a graphics library's memory. The import closes it."""
    assert machine.run("""
        device()
        wanted = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
        wanted.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
        wanted.handle.fd = os.memfd_create("foreign")
        wanted.size = 16 * MIB
        memory = ok(cu.cuImportExternalMemory(wanted))
        buffer = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
        buffer.size = 10 * MIB
        address = ok(cu.cuExternalMemoryGetMappedBuffer(memory, buffer))
        ok(cu.cuDestroyExternalMemory(memory))
        tell(free_mib(), os.path.exists(f"/proc/self/fd/{wanted.handle.fd}"))
        ok(cu.cuMemFree(address))
        tell(free_mib())
    """) == [f"{FREE_MIB - 16}.0 False", f"{FREE_MIB}.0"]


def test_the_oldest_functions_have_addresses_of_32_bits(machine: Machine) -> None:
    """Those without a version suffix; they count like the others."""
    assert machine.run_c("""
        #include <dlfcn.h>
        typedef CUresult (*allocate)(unsigned *address, unsigned size);
        typedef CUresult (*release)(unsigned address);
        int main(void) {
            CUcontext context;
            size_t before, after, total;
            unsigned address;
            OK(cuInit(0));
            OK(cuDevicePrimaryCtxRetain(&context, 0));
            OK(cuCtxSetCurrent(context));
            OK(cuMemGetInfo(&before, &total));
            OK(((allocate)dlsym(RTLD_DEFAULT, "cuMemAlloc"))(&address, 4 * MIB));
            OK(cuMemGetInfo(&after, &total));
            OK(((release)dlsym(RTLD_DEFAULT, "cuMemFree"))(address));
            printf("%lu\\n", (before - after) / MIB);
            return 0;
        }
    """) == ["4"]


def test_a_green_context_is_the_primary_context_with_some_multiprocessors(machine: Machine) -> None:
    """It retains that one and takes no memory of its own; what is allocated with it outlives it."""
    assert machine.run("""
        device()
        whole = ok(cu.cuDeviceGetDevResource(0, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
        groups, count, rest = ok(cu.cuDevSmResourceSplitByCount(1, whole, 0, 54))
        made = ok(cu.cuGreenCtxCreate(ok(cu.cuDevResourceGenerateDesc(groups, 1)), 0, 1))
        tell(groups[0].sm.smCount, rest.sm.smCount, free_mib())
        ok(cu.cuCtxPushCurrent(ok(cu.cuCtxFromGreenCtx(made))))
        ok(cu.cuMemAlloc(10 << 20))
        ok(cu.cuGreenCtxDestroy(made))
        tell(free_mib())
    """) == [f"54 54 {FREE_MIB}.0", f"{FREE_MIB - 10}.0"]


def test_functions_of_the_program_run_after_what_was_queued_before(machine: Machine) -> None:
    """Within the next call after that time: the driver has no thread."""
    assert machine.run_c("""
        static void tell(void *text) { puts(text); fflush(stdout); }
        int main(void) {
            CUcontext context;
            CUmodule module;
            CUfunction spin;
            OK(cuInit(0));
            OK(cuDevicePrimaryCtxRetain(&context, 0));
            OK(cuCtxSetCurrent(context));
            OK(cuModuleLoadData(&module, "x"));
            OK(cuModuleGetFunction(&spin, module, "spin_50000"));
            OK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
            OK(cuLaunchHostFunc(NULL, tell, "after the kernel"));
            tell("queued");
            OK(cuCtxSynchronize());
            tell("synchronized");
            return 0;
        }
    """) == ["queued", "after the kernel", "synchronized"]


def test_a_pool_keeps_what_its_threshold_says(machine: Machine) -> None:
    """It reserves in steps of 32 MiB; a synchronization gives the rest back."""
    assert machine.run("""
        device()
        pool = ok(cu.cuDeviceGetDefaultMemPool(0))
        name = cu.CUmemPool_attribute
        def state():
            kinds = (name.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, name.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
            return [int(ok(cu.cuMemPoolGetAttribute(pool, each))) // MIB for each in kinds] + [free_mib()]
        first = ok(cu.cuMemAllocAsync(10 * MIB, 0))
        tell(*state())
        ok(cu.cuMemFreeAsync(first, 0))
        tell(*state())
        ok(cu.cuStreamSynchronize(0))
        tell(*state())
        ok(cu.cuMemPoolSetAttribute(pool, name.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(64 * MIB)))
        ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(10 * MIB, 0)), 0))
        ok(cu.cuCtxSynchronize())
        tell(*state())
        ok(cu.cuMemPoolTrimTo(pool, 0))
        tell(*state())
    """) == [
        f"32 10 {FREE_MIB - 32}.0",
        f"32 0 {FREE_MIB - 32}.0",
        f"0 0 {FREE_MIB}.0",
        f"32 0 {FREE_MIB - 32}.0",
        f"0 0 {FREE_MIB}.0",
    ]


# Time.


def test_events_measure_simulated_time(machine: Machine) -> None:
    """A kernel named spin_<microseconds> takes so long; a synchronization waits for it."""
    (told,) = machine.run("""
        device()
        start, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
        kernel = function("spin_30000")
        ok(cu.cuEventRecord(start, 0))
        ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        ok(cu.cuEventRecord(end, 0))
        pending = cu.cuEventQuery(end)[0].name
        ok(cu.cuEventSynchronize(end))
        tell(pending, round(ok(cu.cuEventElapsedTime(start, end))))
    """)
    assert told == "CUDA_ERROR_NOT_READY 60"


def test_processes_wait_for_each_other(machine: Machine) -> None:
    """They share the device; work of a killed process is gone."""
    with machine.start("device(); launch('spin_60000000'); tell('ready'); hear()") as program:
        program.hear()
        assert machine.run("device(); launch('spin_1000'); tell(cu.cuStreamQuery(0)[0].name)") == [
            "CUDA_ERROR_NOT_READY"
        ]
    machine.run("device(); launch('spin_1000'); ok(cu.cuCtxSynchronize())")


def test_nvml_reports_what_programs_do(machine: Machine, nvml: Any) -> None:
    """Their pids, memory and share of the device's time, after a while."""
    body = """
        device()
        ok(cu.cuMemAlloc(50 * MIB))
        tell("ready")
        while True:
            launch("spin_5000")
            ok(cu.cuCtxSynchronize())
    """
    with machine.start(body) as program:
        program.hear()
        (seen,) = pynvml.nvmlDeviceGetComputeRunningProcesses(nvml)
        assert (seen.pid, seen.usedGpuMemory >> 20) == (program.pid, CONTEXT_MIB + 50)
        assert pynvml.nvmlDeviceGetMemoryInfo(nvml).used >> 20 == CONTEXT_MIB + 50

        def utilization() -> int:
            since = int((time.time() - 0.2) * 1_000_000)
            (sample,) = pynvml.nvmlDeviceGetProcessUtilization(nvml, since)
            assert sample.pid == program.pid
            return int(sample.smUtil)

        wait_for(lambda: utilization() > 60)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(nvml) == []
    assert pynvml.nvmlDeviceGetMemoryInfo(nvml).used == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_nvml_reports_the_pids_of_its_own_namespace(machine: Machine, nvml: Any) -> None:
    """Two containers may have processes with the same pid."""
    body = "device(); tell(os.getpid()); hear()"
    inside = [machine.start(body, within=("unshare", "--pid", "--kill-child", "--fork")) for _ in range(2)]
    try:
        assert [each.hear() for each in inside] == ["1", "1"]
        seen = sorted(each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(nvml))
        assert seen == sorted(each.child() for each in inside)
    finally:
        for each in inside:
            each.kill()
    wait_for(lambda: not pynvml.nvmlDeviceGetComputeRunningProcesses(nvml))


def test_what_the_description_says_is_added(tmp_path: Path) -> None:
    """Memory that it gives to others is not available."""
    machine = Machine(tmp_path, gpu(usedMiB=200, processes=[{"pid": 1, "memoryMiB": 100}]))
    assert machine.run("device(); tell(free_mib(), ok(cu.cuMemGetInfo())[1] / MIB)") == [f"{FREE_MIB - 300}.0 2048.0"]


def test_nvml_does_not_create_the_state_file(machine: Machine, nvml: Any) -> None:
    """The node plugin's root may be read-only, and its user another."""
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(nvml) == []
    assert not (machine.folder / "fake-devices.state").exists()


# Graphs.


def test_a_captured_graph_takes_its_time_and_memory(machine: Machine) -> None:
    """At its launch. What it reserves stays until it is trimmed."""
    assert machine.run("""
        device()
        stream = ok(cu.cuStreamCreate(1))
        kernel = function("spin_20000")
        ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        memory = ok(cu.cuMemAllocAsync(10 * MIB, stream))
        ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
        ok(cu.cuMemFreeAsync(memory, stream))
        graph = ok(cu.cuStreamEndCapture(stream))
        tell(ok(cu.cuGraphGetNodes(graph))[1], free_mib())
        ready = ok(cu.cuGraphInstantiate(graph, 0))
        start, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
        ok(cu.cuEventRecord(start, stream))
        ok(cu.cuGraphLaunch(ready, stream)), ok(cu.cuGraphLaunch(ready, stream))
        ok(cu.cuEventRecord(end, stream))
        ok(cu.cuStreamSynchronize(stream))
        tell(round(ok(cu.cuEventElapsedTime(start, end))), free_mib())
        name = cu.CUgraphMem_attribute
        kinds = (name.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, name.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT)
        tell(*(int(ok(cu.cuDeviceGetGraphMemAttribute(0, each))) // MIB for each in kinds))
        ok(cu.cuDeviceGraphMemTrim(0))
        tell(free_mib())
    """) == [f"3 {FREE_MIB}.0", f"40 {FREE_MIB - 10}.0", "10 0", f"{FREE_MIB}.0"]


def test_a_graph_that_does_not_fit_is_not_launched(machine: Machine) -> None:
    """Its nodes can be created: addresses cost nothing."""
    assert machine.run("""
        device()
        params = cu.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location = property_of().location
        params.bytesize = 1000 * MIB
        graph = ok(cu.cuGraphCreate(0))
        for _ in range(3):
            ok(cu.cuGraphAddMemAllocNode(graph, None, 0, params))
        ready = ok(cu.cuGraphInstantiate(graph, 0))
        tell(failed(cu.cuGraphLaunch(ready, 0)), free_mib())
    """) == [f"CUDA_ERROR_OUT_OF_MEMORY {FREE_MIB}.0"]


@pytest.mark.parametrize("call", ["cuCtxSynchronize()", "cuMemAlloc(1)"])
def test_a_capture_is_invalidated_by_what_cannot_be_captured(machine: Machine, call: str) -> None:
    """Unless the thread has relaxed its mode."""
    assert machine.run(f"""
        device()
        stream = ok(cu.cuStreamCreate(1))
        mode = cu.CUstreamCaptureMode
        for relaxed in (False, True):
            ok(cu.cuStreamBeginCapture(stream, mode.CU_STREAM_CAPTURE_MODE_GLOBAL))
            if relaxed:
                ok(cu.cuThreadExchangeStreamCaptureMode(mode.CU_STREAM_CAPTURE_MODE_RELAXED))
            tell(cu.{call}[0].name, cu.cuStreamEndCapture(stream)[0].name)
    """) == [
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "CUDA_SUCCESS CUDA_SUCCESS",
    ]


def test_the_legacy_default_stream_is_not_captured(machine: Machine) -> None:
    """Its use invalidates the capture of a stream that it would wait for; a non-blocking one is not concerned."""
    assert machine.run("""
        device()
        for flags in (0, 1):
            stream = ok(cu.cuStreamCreate(flags))
            kernel = function("k")
            ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            tell(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)[0].name, cu.cuStreamEndCapture(stream)[0].name)
    """) == [
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "CUDA_SUCCESS CUDA_SUCCESS",
    ]


def test_a_stream_joins_a_capture_by_an_event(machine: Machine) -> None:
    """And must be joined again before its end."""
    assert machine.run("""
        device()
        one, other = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        event = ok(cu.cuEventCreate(0))
        for joins in (True, False):
            ok(cu.cuStreamBeginCapture(one, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            ok(cu.cuEventRecord(event, one)), ok(cu.cuStreamWaitEvent(other, event, 0))
            launch("k", other)
            if joins:
                ok(cu.cuEventRecord(event, other)), ok(cu.cuStreamWaitEvent(one, event, 0))
            tell(cu.cuStreamEndCapture(one)[0].name)
    """) == ["CUDA_SUCCESS", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"]


# cuGetProcAddress.


def test_names_are_resolved_by_version(tmp_path: Path) -> None:
    """The newest that neither the version asked for nor the driver's excludes, for the default stream asked for."""
    machine = Machine(tmp_path / "driver", cuda=12040)
    assert machine.run_c("""
        #include <dlfcn.h>
        #include <string.h>
        static void tell(const char *name, int version, int flags) {
            void *found;
            CUdriverProcAddressQueryResult status;
            Dl_info where = {0};
            int code = cuGetProcAddress(name, &found, version, flags, &status);
            if (found) dladdr(found, &where);
            printf("%d %d %s\\n", code, status, found ? where.dli_sname : "none");
        }
        int main(void) {
            tell("cuMemAlloc", 2000, 0);
            tell("cuMemAlloc", 3020, 0);
            tell("cuMemAlloc", 13000, 0);
            tell("cuLaunchKernel", 7000, 2);
            tell("cuLaunchKernel", 7000, 1);
            tell("cuMemAlloc", 1000, 0);
            tell("cuNothing", 12000, 0);
            tell("cuCtxGetDevice", 13000, 0);
            tell("cuGetProcAddress", 11030, 0);
            tell("cuGetProcAddress", 12000, 0);
            tell("", 0, 0);
            return 0;
        }
    """) == [
        "0 0 cuMemAlloc",
        "0 0 cuMemAlloc_v2",
        "0 0 cuMemAlloc_v2",
        "0 0 cuLaunchKernel_ptsz",
        "0 0 cuLaunchKernel",
        "0 2 none",
        "0 1 none",
        "0 0 cuCtxGetDevice",
        "0 0 cuGetProcAddress",
        "0 0 cuGetProcAddress_v2",
        "0 0 cuGetProcAddress_v2",
    ]


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES.keys())
def test_nvidias_runtimes_resolve_their_functions(tmp_path: Path, runtime: str) -> None:
    """They then stop, with the answer to the question for a private table of functions: it is not found."""
    machine = Machine(tmp_path, cuda=13050)
    assert machine.run(
        """
        runtime = ctypes.CDLL(sys.argv[1])
        version, pointer = ctypes.c_int(), ctypes.c_void_p()
        tell(runtime.cudaDriverGetVersion(ctypes.byref(version)), version.value)
        tell(runtime.cudaMalloc(ctypes.byref(pointer), 1))
    """,
        str(SITE_PACKAGES / runtime),
    ) == ["0 13050", "500"]


def test_threads_may_call_at_the_same_time(machine: Machine) -> None:
    """What each frees is there again afterwards."""
    assert machine.run_c("""
        #include <pthread.h>
        static CUcontext context;
        static void *work(void *unused) {
            OK(cuCtxSetCurrent(context));
            for (int round = 0; round < 500; round++) {
                CUdeviceptr one, other;
                OK(cuMemAlloc(&one, 4 * MIB));
                OK(cuMemAllocAsync(&other, 1000, CU_STREAM_PER_THREAD));
                OK(cuMemFree(one));
                OK(cuMemFreeAsync(other, CU_STREAM_PER_THREAD));
            }
            return unused;
        }
        int main(void) {
            pthread_t threads[8];
            size_t before, after, total;
            OK(cuInit(0));
            OK(cuDevicePrimaryCtxRetain(&context, 0));
            OK(cuCtxSetCurrent(context));
            OK(cuMemGetInfo(&before, &total));
            for (int each = 0; each < 8; each++) pthread_create(&threads[each], NULL, work, NULL);
            for (int each = 0; each < 8; each++) pthread_join(threads[each], NULL);
            OK(cuCtxSynchronize());
            OK(cuMemGetInfo(&after, &total));
            printf("%d\\n", before == after);
            return 0;
        }
    """) == ["1"]
