from collections.abc import Callable

import pytest

from tests.preload.containers import CONTEXT_MIB, MIB, Container, mib

# What a program allocates, how much of the card the driver takes for it, and how it is freed.
PATHS = {
    "memory by address": (["alloc a 10485760"], 10, ["free a"]),
    "memory of the first version": (["alloc1 a 10485760"], 10, ["free a"]),
    "memory that is not a whole number of blocks": (["alloc a 3145729"], 4, ["free a"]),
    "rows with a pitch": (["pitch a 1000 20480"], 20, ["free a"]),
    "managed memory in full": (["managed a 10485760"], 10, ["free a"]),
    "an array": (["array a 1024 1024 2"], 8, ["array-free a"]),
    "an array of two dimensions": (["array2 a 1024 1024"], 4, ["array-free a"]),
    "an array with smaller images": (["mipmap a 2048 2048 2"], 20, ["mipmap-free a"]),
    "physical memory without an address": (["create a 10485760 device 0"], 10, ["release a"]),
    "physical memory that is still mapped": (
        ["create a 10485760 device 0", "map b a 10485760", "release a"],
        10,
        ["unmap b 10485760"],
    ),
    "a mapping whose handle is retained": (
        ["create a 4194304 device 0", "map b a 4194304", "release a", "retain c b", "unmap b 4194304"],
        4,
        ["release c"],
    ),
    "many mappings that are unmapped at once": (["segments a 40"], 80, ["unmap a 83886080"]),
    "external memory": (["external a 10485760"], 10, ["external-free a"]),
    "what a pool has reserved": (["default-pool p 0", "keep p", "async a 10485760"], 32, ["async-free a", "trim p"]),
    "memory of a pool that is freed as any other": (
        ["default-pool p 0", "keep p", "async a 10485760"],
        32,
        ["free a", "trim p"],
    ),
    "memory of the thread's own stream": (
        ["default-pool p 0", "async-ptsz a 10485760"],
        32,
        ["async-free a", "trim p"],
    ),
    "a second pool": (["pool p device 0", "from-pool a 41943040 p"], 64, ["async-free a", "pool-free p"]),
    "a graph that is launched": (["graph g 10", "launch g"], 10, ["graph-free g", "primary-reset 0", "primary 0"]),
    "a graph that is uploaded": (["graph g -10 -20", "upload g"], 0, ["graph-free g"]),
    "a graph within a graph": (["child-graph g -10", "launch g"], 10, ["graph-free g", "graph-trim 0"]),
    "a captured stream": (
        ["stream s", "capture s", "async a 10485760 s", "async-free a s", "end-capture g s", "launch g s"],
        10,
        ["graph-free g", "graph-trim 0"],
    ),
    "a context": (["context c 0"], CONTEXT_MIB, ["context-free c"]),
    "a context with all that was allocated in it": (
        ["context c 0", "alloc a 10485760", "alloc b 1000", "array d 1024 1024 1", "async e 1000"],
        CONTEXT_MIB + 10 + 2 + 4 + 32,
        ["async-free e", "sync", "context-free c", "default-pool p 0", "trim p"],
    ),
    "a green context beside its primary context": (["green g"], 0, ["green-free g"]),
    "memory that is allocated and freed with a green context": (
        ["green g", "green-current g", "alloc a 10485760", "alloc b 1000", "array c 1024 1024 1"],
        10 + 2 + 4,
        ["free a", "free b", "array-free c", "green-free g", "primary 0"],
    ),
    "a primary context once": (["primary 0", "primary 0"], 0, ["primary-release 0", "primary-release 0"]),
}
NOT_CHARGED = {
    "host memory": ["host a 10485760"],
    "physical memory of the host": ["create a 10485760 host 0"],
    "physical memory of a NUMA node": ["create a 10485760 numa 0"],
    "a pool of host memory": ["pool p host 0", "from-pool a 10485760 p", "info"],
    "addresses": ["reserve a 10485760"],
}


@pytest.mark.parametrize(("calls", "taken_mib", "freeing"), PATHS.values(), ids=PATHS)
def test_every_allocation_is_charged_and_given_back(
    container: Container, calls: list[str], taken_mib: float, freeing: list[str]
) -> None:
    """What is accounted is what the driver takes, and after the memory is freed it is what it was before."""
    with container.start() as program, container.observe() as observer:
        before = container.accounted()
        assert before == mib(CONTEXT_MIB)
        for call in calls:
            program.ok(call)
        real = observer.real() - before
        assert real == mib(taken_mib) or "upload" in calls[-1]
        assert container.accounted() - before == real
        for call in freeing:
            program.ok(call)
        program.ok("info")
        assert observer.real() == before
        assert container.accounted() == before


@pytest.mark.parametrize("calls", NOT_CHARGED.values(), ids=NOT_CHARGED)
def test_memory_that_is_on_no_device_is_not_charged(container: Container, calls: list[str]) -> None:
    """Host memory and addresses take nothing of a device's limit."""
    with container.start() as program:
        for call in calls:
            program.ok(call)
        assert container.accounted() == mib(CONTEXT_MIB)


# CU_AD_FORMAT_*, and the bits of an element of all channels.
FORMATS = {
    "BC1_UNORM": (0x91, 4),
    "BC4_SNORM": (0x98, 4),
    "BC5_UNORM": (0x99, 8),
    "BC7_UNORM": (0x9D, 8),
    "UNORM_INT8X1": (0xC0, 8),
    "NV12": (0xB0, 12),
    "UINT8_PLANAR_420": (0x59, 12),
    "NV16": (0xA2, 16),
    "YUY2": (0xA5, 16),
    "SNORM_INT8X2": (0xC7, 16),
    "P010": (0x9F, 24),
    "Y444_PLANAR8": (0xB2, 24),
    "UINT8_SEMIPLANAR_444": (0x57, 24),
    "P216": (0xA4, 32),
    "AYUV": (0xA8, 32),
    "Y410": (0xA9, 32),
    "UNORM_INT_101010_2": (0x50, 32),
    "UINT16_PLANAR_444": (0x5E, 48),
    "Y416": (0xB1, 64),
    "UNORM_INT16X4": (0xC5, 64),
}


@pytest.mark.parametrize(("number", "bits"), FORMATS.values(), ids=FORMATS)
def test_arrays_are_charged_what_their_format_takes(container: Container, number: int, bits: int) -> None:
    """Compressed, planar and packed formats are charged their own size, not the largest of any format."""
    with container.start() as program, container.observe() as observer:
        program.ok(f"array-of a {number} 4096 4096")
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB + 2 * bits)
        program.ok("array-free a")
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB)


def test_memory_of_a_green_context_outlives_it(container: Container) -> None:
    """What is allocated with a green context is the primary context's: it is given back when that ends."""
    with container.start() as program, container.observe() as observer:
        for call in ("green g", "green-current g", "alloc a 10485760", "alloc b 1000", "array c 1024 1024 1"):
            program.ok(call)
        program.ok("green-free g")
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB + 10 + 2 + 4)
        program.ok("primary-reset 0")
        assert container.accounted() == observer.real() == 0


def test_the_first_green_context_is_charged_its_primary_context(container: Container) -> None:
    """Where nothing else has activated the primary context, it is charged and given back with the green ones, once."""
    with container.start(context=False) as program, container.observe() as observer:
        for call in ("init", "green g", "green h", "green-current h", "alloc a 10485760"):
            program.ok(call)
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB + 10)
        program.ok("green-free g")
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB + 10)
        program.ok("green-free h")
        assert container.accounted() == observer.real() == 0


def test_physical_memory_is_charged_without_a_context(container: Container) -> None:
    """CuMemCreate needs no context: it says itself on which device."""
    with container.start(context=False) as program:
        program.ok("init")
        program.ok("create a 10485760 device 0")
        assert container.accounted() == mib(10)


def test_the_default_pool_of_another_device_is_charged_there(make_container: Callable[..., Container]) -> None:
    """A pool's memory is on the pool's device, whatever device is current."""
    container = make_container(1024, 1024)
    with container.start() as program:
        program.ok("default-pool p 1")
        program.ok("from-pool a 1048576 p")
        assert container.accounted(1) == mib(32)
        assert container.accounted(0) == mib(CONTEXT_MIB)


def test_small_allocations_that_are_left_over_hold_their_blocks(container: Container) -> None:
    """A block of 2 MiB is charged until the last small allocation in it is freed, however little that is."""
    with container.start() as program, container.observe() as observer:
        for number in range(64):
            program.ok(f"alloc a{number} 262144")
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB + 16)
        for number in range(64):
            if number % 8:
                program.ok(f"free a{number}")
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB + 16)
        for number in range(0, 64, 8):
            program.ok(f"free a{number}")
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB)


def test_unmapping_takes_no_longer_for_each_mapping_the_more_there_are(container: Container) -> None:
    """A range of 2,000 mappings is unmapped at once, without a search of all mappings for each of them."""
    container.limit(8192)
    with container.start() as program:
        program.ok("segments a 2000")
        assert container.accounted() == mib(CONTEXT_MIB + 4000)
        program.ok(f"unmap a {2000 * 2 * MIB}")
        assert container.accounted() == mib(CONTEXT_MIB)
