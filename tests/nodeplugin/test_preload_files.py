"""What a node and its containers get so that memory is limited by the preloaded library."""

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeplugin import preload_files
from nodeplugin.preload_files import CUDA, NVML, PRELOAD_PATH, PreloadFiles
from nodeplugin.share_files import USAGE_BYTES, CardLimits, create_usage, read_limits, read_usage

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
LIMITS = [CardLimits("GPU-1", 1 << 30, 1 << 28, 50, 60)]
CONTAINER = "t1"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreloadFiles]:
    """An installation with libraries, on a node without containers."""
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    for name in (CUDA, NVML):
        (compiled / name).write_bytes(f"{name} 1".encode())
    monkeypatch.setattr(preload_files, "compiled_libraries", lambda: compiled)
    made = PreloadFiles(tmp_path / "preload", tmp_path / "containers", tmp_path / "accounts", proc_of(tmp_path))
    (tmp_path / "containers" / CONTAINER).mkdir(parents=True)
    yield made
    made.remove(CONTAINER)


def proc_of(folder: Path, fields: str = "shared:1") -> Path:
    """Return a /proc of a container of its own, where the folder is a volume."""
    proc = folder / "proc"
    for process, namespace in (("self", "mnt:[2]"), ("1", "mnt:[1]")):
        (proc / process / "ns").mkdir(parents=True, exist_ok=True)
        (proc / process / "ns/mnt").unlink(missing_ok=True)
        (proc / process / "ns/mnt").symlink_to(namespace)
    lines = ["1 0 0:1 / / rw - overlay overlay rw", f"2 1 8:1 / {folder} rw,relatime {fields} - ext4 /dev/sda rw"]
    (proc / "self/mountinfo").write_text("\n".join(lines).replace("  ", " "))
    return proc


def change_library(tmp_path: Path, version: int) -> None:
    for name in (CUDA, NVML):
        (tmp_path / "compiled" / name).write_bytes(f"{name} {version}".encode())


def test_a_new_version_gets_a_path_of_its_own(files: PreloadFiles, tmp_path: Path) -> None:
    """Containers that run have the old one mounted; it goes when none of them is left."""
    files.install()
    (first,) = files.versions()
    change_library(tmp_path, 2)
    files.install()
    assert len(files.versions()) == 2
    assert (tmp_path / "preload" / first / CUDA).read_bytes() == f"{CUDA} 1".encode()
    files.remove_old()
    assert first not in files.versions()
    assert len(files.versions()) == 1


def test_a_library_that_was_damaged_on_the_node_is_installed_again(files: PreloadFiles, tmp_path: Path) -> None:
    files.install()
    (version,) = files.versions()
    library = tmp_path / "preload" / version / CUDA
    library.unlink()
    files.install()
    assert library.read_bytes() == f"{CUDA} 1".encode()
    assert library.stat().st_mode & 0o777 == 0o555


@needs_root
def test_without_libraries_the_rung_is_not_offered(files: PreloadFiles, tmp_path: Path) -> None:
    (tmp_path / "compiled" / NVML).unlink()
    files.install()
    assert "not installed" in files.problem()


@needs_root
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        pytest.param("shared:7", "", id="a volume with mountPropagation Bidirectional"),
        pytest.param("master:7", "Bidirectional", id="a volume that only receives mounts"),
        pytest.param("", "Bidirectional", id="a private volume"),
    ],
)
def test_mounts_have_to_reach_the_host(files: PreloadFiles, tmp_path: Path, fields: str, problem: str) -> None:
    """The runtime takes a container's mounts from there."""
    proc_of(tmp_path, fields)
    files.install()
    assert problem in files.problem()
    assert bool(files.problem()) == bool(problem)


@needs_root
def test_a_plugin_in_the_hosts_own_namespace_needs_no_volume(files: PreloadFiles, tmp_path: Path) -> None:
    proc = proc_of(tmp_path, "")
    (proc / "self/ns/mnt").unlink()
    (proc / "self/ns/mnt").symlink_to("mnt:[1]")
    files.install()
    assert files.problem() == ""


@needs_root
def test_a_container_gets_limits_and_a_small_tmpfs(files: PreloadFiles, tmp_path: Path) -> None:
    """Nobody can fill the node through it, and any user of the container can write to the file in it."""
    files.install()
    files.prepare(CONTAINER, LIMITS, "550.54.15", "/usr/local/nvidia/lib64")
    account = files.account(CONTAINER)
    assert read_limits(tmp_path / "containers" / CONTAINER) == LIMITS
    assert os.path.ismount(account.parent)
    assert account.stat().st_size == USAGE_BYTES
    assert account.stat().st_mode & 0o777 == 0o666
    with pytest.raises(OSError, match="No space left"):
        account.with_name("more").write_bytes(bytes(10_000_000))
    usage = read_usage(account, 1)
    assert usage is not None
    assert usage.card_bytes == (0,)


@needs_root
def test_an_account_takes_no_memory_of_the_plugin(files: PreloadFiles) -> None:
    """What its processes write is theirs."""
    files.install()
    files.prepare(CONTAINER, LIMITS, "550.54.15", "")
    assert files.account(CONTAINER).stat().st_blocks * 512 <= 8192


@needs_root
def test_what_programs_have_accounted_survives_a_restart_of_the_plugin(files: PreloadFiles) -> None:
    """Preparing again, as before each start, keeps the file that they have mapped, and repairs what is missing."""
    files.install()
    files.prepare(CONTAINER, LIMITS, "550.54.15", "")
    account = files.account(CONTAINER)
    before = account.stat().st_ino
    files.prepare(CONTAINER, LIMITS, "550.54.15", "")
    assert account.stat().st_ino == before
    account.unlink()
    files.prepare(CONTAINER, LIMITS, "550.54.15", "")
    assert account.stat().st_size == USAGE_BYTES


@needs_root
def test_a_tmpfs_is_unmounted_with_its_container(files: PreloadFiles) -> None:
    """Also where a program still has the file open; and nothing is left of it."""
    files.install()
    files.prepare(CONTAINER, LIMITS, "550.54.15", "")
    assert files.tokens() == {CONTAINER}
    with files.account(CONTAINER).open("rb"):
        files.remove(CONTAINER)
    assert not files.account(CONTAINER).parent.exists()
    assert files.tokens() == set()
    files.remove(CONTAINER)


def replace_by_fifo(account: Path) -> None:
    account.unlink()
    os.mkfifo(account)


def replace_by_link(account: Path) -> None:
    account.unlink()
    account.symlink_to("/dev/zero")


def lease(account: Path) -> None:
    """Hold a lease, which an ordinary open waits 45 s for; the kernel tells its holder by a signal."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    file = os.open(account, os.O_RDWR)
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)


SPOILED: dict[str, Callable[[Path], object]] = {
    "shortened": lambda account: os.truncate(account, 100),
    "enlarged without end": lambda account: os.truncate(account, 1 << 40),
    "a pipe that is never written": replace_by_fifo,
    "a link to a device": replace_by_link,
    "leased": lease,
    "full of nonsense": lambda account: account.write_bytes(b"\xff" * USAGE_BYTES),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_no_account_holds_up_whoever_reads_it(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    """Whatever a program has made of the file: nothing is followed, and nothing waited for."""
    account = tmp_path / "gpu-usage"
    create_usage(account)
    spoil(account)
    usage = read_usage(account, 2)
    assert usage is None or usage.card_bytes == (0, 0)


@needs_root
def test_a_container_without_a_readable_library_does_not_start(files: PreloadFiles, tmp_path: Path) -> None:
    """Its programs would print an error each, and run without limits."""
    files.install()
    (version,) = files.versions()
    (tmp_path / "preload" / version / CUDA).unlink()
    with pytest.raises(OSError, match=f"{CUDA} cannot be read"):
        files.prepare(CONTAINER, LIMITS, "550.54.15", "")


@needs_root
def test_the_mounts_of_a_container(files: PreloadFiles, tmp_path: Path) -> None:
    """All are read-only but the tmpfs."""
    files.install()
    (version,) = files.versions()
    mounts = {each.container: (each.host, each.read_only) for each in files.mounts(CONTAINER)}
    folder = tmp_path / "containers" / CONTAINER
    assert mounts == {
        "/etc/quotient/usage/gpu-usage": (str(files.account(CONTAINER)), False),
        "/usr/local/nvidia/preload": (str(tmp_path / "preload" / version), True),
        PRELOAD_PATH: (str(folder / "ld.so.preload"), True),
    }


def test_the_library_stands_where_programs_look_for_the_drivers(files: PreloadFiles, tmp_path: Path) -> None:
    """The driver's own keep their versioned names, by which the library opens them; for each installed version."""
    driver = tmp_path / "driver"
    (driver / "lib64").mkdir(parents=True)
    for name in ("libcuda.so.550", "libnvidia-ml.so.550", "libnvoptix.so.550"):
        (driver / "lib64" / name).write_text(name)
    for link in ("libcuda", "libnvidia-ml", "libnvoptix"):
        (driver / f"lib64/{link}.so.1").symlink_to(f"{link}.so.550")
    files.install()
    files.stand_in(driver)
    folder = driver / files.library_folder
    assert (folder / CUDA).read_bytes() == f"{CUDA} 1".encode()
    assert (folder / NVML).read_bytes() == f"{NVML} 1".encode()
    assert (folder / "libcuda.so.550").read_text() == "libcuda.so.550"
    assert (folder / "libnvoptix.so.1").readlink() == Path("libnvoptix.so.550")
    (folder / CUDA).unlink()
    files.stand_in(driver)
    assert (folder / CUDA).exists()
    change_library(tmp_path, 2)
    files.install()
    files.stand_in(driver)
    assert (driver / files.library_folder / CUDA).read_bytes() == f"{CUDA} 2".encode()
    assert (folder / CUDA).read_bytes() == f"{CUDA} 1".encode()
