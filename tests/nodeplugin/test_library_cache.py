"""The hook by which the dynamic linker of a container finds the driver's libraries."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from nodeplugin import library_cache, runtime_hooks
from nodeplugin.compiler import run_compiler
from nodeplugin.library_cache import HOOK, LibraryCache
from nodeplugin.runtime_hooks import own_program, read_static
from tests.nodeplugin.test_injection import ALLOCATION, HALF, POD, Host, InjectorBench

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can enter another root file system")

FOLDER = "/usr/local/nvidia/lib64"


@pytest.fixture
def cache(tmp_path: Path) -> LibraryCache:
    """The hook as it is installed on a host."""
    made = LibraryCache(tmp_path / "hooks", Path("/"))
    made.install()
    return made


class Bundle:
    """A container at the time of its createContainer hooks: root file system, configuration and state."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder, self.root = folder, folder / "rootfs"
        (self.root / "etc").mkdir(parents=True)
        libraries = self.root / FOLDER[1:]
        libraries.mkdir(parents=True)
        source = folder / "driver.c"
        source.write_text("int nvml(void) { return 1; }\n")
        target = libraries / "libnvidia-ml.so.1"
        run_compiler("-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", str(target), str(source))
        self.configure(**config)

    def configure(self, **config: Any) -> None:
        (self.folder / "config.json").write_text(
            json.dumps({"ociVersion": "1.1.0", "root": {"path": "rootfs"}} | config)
        )

    def run(self, cache: LibraryCache, **state: Any) -> "subprocess.CompletedProcess[str]":
        """Run the hook as a runtime does: in the container's mount namespace, with only the hook's environment."""
        hook = cache.hook(FOLDER)
        assert hook is not None
        state = {"ociVersion": "1.1.0", "id": "c", "status": "creating", "bundle": str(self.folder)} | state
        return subprocess.run(
            ["/usr/bin/unshare", "--mount", hook["path"], *hook["args"][1:]],
            input=json.dumps(state),
            env=dict(each.split("=", 1) for each in hook["env"]),
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def cached(self) -> str:
        """Return what the container's dynamic linker has in its cache."""
        command = ["/sbin/ldconfig", "-r", str(self.root), "-p"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@needs_root
def test_the_linker_of_a_container_finds_the_driver(cache: LibraryCache, tmp_path: Path) -> None:
    """Nothing but the cache is written, and the host's own is left alone."""
    bundle = Bundle(tmp_path / "bundle")
    before = Path("/etc/ld.so.cache").stat()
    done = bundle.run(cache)
    assert done.returncode == 0, done.stderr
    assert f"libnvidia-ml.so.1 (libc6,x86-64) => {FOLDER}/libnvidia-ml.so.1" in bundle.cached()
    assert {each.name for each in (bundle.root / "etc").iterdir()} == {"ld.so.cache"}
    assert Path("/etc/ld.so.cache").stat() == before


@needs_root
def test_libraries_of_the_image_stay_in_its_cache(cache: LibraryCache, tmp_path: Path) -> None:
    """Those of the folders that the image's configuration names, and of the standard ones of other distributions."""
    bundle = Bundle(tmp_path / "bundle")
    for folder in ("opt/own", "usr/lib64"):
        (bundle.root / folder).mkdir(parents=True)
        name = f"lib{Path(folder).name}.so.1"
        target = bundle.root / folder / name
        run_compiler("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(target), str(bundle.folder / "driver.c"))
    (bundle.root / "etc/ld.so.conf").write_text("/opt/own\n")
    assert bundle.run(cache).returncode == 0
    for path in (f"{FOLDER}/libnvidia-ml.so.1", "/opt/own/libown.so.1", "/usr/lib64/liblib64.so.1"):
        assert f"=> {path}\n" in bundle.cached()


HOSTILE = '","root":{"path":"/"},"x":"'
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "an absolute root": {"root": {"path": "@ROOT@", "readonly": True}},
    "text that looks like a root": {"process": {"env": [f"A={HOSTILE}", 'B=\\"}]}']}, "root": {"path": "rootfs"}},
    "a key of that name elsewhere": {"annotations": {"root": {"path": "/"}}, "a": [[{"root": {"path": "/"}}]]},
    "megabytes of text": {"annotations": {"a": "x" * 3_000_000}},
}


@needs_root
@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_the_root_is_the_runtimes(cache: LibraryCache, tmp_path: Path, config: dict[str, Any]) -> None:
    """The configuration has strings of the tenant: they are read as strings."""
    bundle = Bundle(tmp_path / "bundle")
    own = {"process": {}, **json.loads(json.dumps(config).replace("@ROOT@", str(bundle.root)))}
    # The decoy comes first.
    root = own.pop("root", {"path": "rootfs"})
    (bundle.folder / "config.json").write_text(json.dumps({**own, "root": root}))
    done = bundle.run(cache, annotations={"bundle": "/", "a": HOSTILE})
    assert done.returncode == 0, done.stderr
    assert "libnvidia-ml.so.1" in bundle.cached()


@needs_root
def test_a_link_in_the_image_cannot_lead_out_of_it(cache: LibraryCache, tmp_path: Path) -> None:
    """Neither of the cache nor of its folder."""
    bundle, outside = Bundle(tmp_path / "bundle"), tmp_path / "outside"
    outside.mkdir()
    (bundle.root / "etc").rmdir()
    (bundle.root / "etc").symlink_to(outside)
    done = bundle.run(cache)
    assert done.returncode != 0
    assert list(outside.iterdir()) == []


INVALID = {
    "no bundle": ({"bundle": None}, {}, "no bundle in the state"),
    "a bundle that there is not": ({"bundle": "/nowhere"}, {}, "/nowhere: No such file or directory"),
    "no root": ({}, {"root": {}}, "no root in config.json"),
    "a path with an escape": ({}, {"root": {"path": 'a"b'}}, "no root in config.json"),
}


@pytest.mark.parametrize(("state", "config", "message"), INVALID.values(), ids=INVALID.keys())
def test_what_cannot_be_done_fails_with_a_reason(
    cache: LibraryCache, tmp_path: Path, state: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    """The container does not start, and its events show the reason: it would not find the driver."""
    done = Bundle(tmp_path / "bundle", **config).run(cache, **state)
    assert done.returncode == 1
    assert f"the container's library cache cannot be updated: {message}" in done.stderr
    assert "nodePlugin.injection: native works without it" in done.stderr


@pytest.mark.parametrize("text", ["", "{", "[", '{"bundle"', '{"bundle":', '{"a":[}', '{"a":"\\', "{" * 100_000, "]"])
def test_broken_json_ends_the_hook(cache: LibraryCache, text: str) -> None:
    hook = cache.hook(FOLDER)
    assert hook is not None
    command = [hook["path"], *hook["args"][1:]]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1


def test_the_hook_has_an_environment_of_its_own(cache: LibraryCache) -> None:
    """Otherwise runc passes the container's, and with it LD_PRELOAD; and both programs are static."""
    hook = cache.hook(FOLDER)
    assert hook is not None
    assert hook["env"]
    assert all(read_static(Path(each)) is not None for each in (hook["path"], hook["args"][1]))
    shell = shutil.which("python3")
    assert shell is not None
    assert read_static(Path(shell)) is None


def test_programs_are_replaced_only_if_they_differ(cache: LibraryCache, tmp_path: Path) -> None:
    """Containers may be starting with them."""
    hook = tmp_path / "hooks/update-ldcache"
    before = hook.stat().st_ino
    cache.install()
    assert hook.stat().st_ino == before
    hook.write_bytes(b"old")
    cache.install()
    assert hook.read_bytes() == own_program(HOOK).read_bytes()
    assert os.access(hook, os.X_OK)


@needs_root
@pytest.mark.parametrize("missing", ["program", "right to execute"])
def test_without_the_hook_the_variable_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """No compiler at installation, or a folder that is mounted with noexec."""
    if missing == "program":
        monkeypatch.setattr(library_cache, "own_program", lambda _: tmp_path / "nowhere")
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)
    with capture_logs() as logs:
        bench = InjectorBench(Host(tmp_path), tmp_path, "cdi")
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    edits = bench.spec(ALLOCATION)["devices"][0]["containerEdits"]
    assert f"LD_LIBRARY_PATH={FOLDER}" in edits["env"]
    assert "hooks" not in edits
    assert missing != "program" or "library_cache_hook_missing" in {entry["event"] for entry in logs}


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(runtime_hooks, "replace_file", refuse)
    with capture_logs() as logs:
        LibraryCache(tmp_path / "hooks", Path("/")).install()
    assert [entry["event"] for entry in logs] == ["library_cache_hook_not_installed"]
