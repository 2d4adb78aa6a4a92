"""The allocation checkpoint: read exactly as it was written, or not at all."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeplugin.checkpoint import (
    CHECKPOINT_FILE,
    AllocationCheckpoint,
    BadCheckpoint,
    ContainerAllocation,
    PodAllocation,
    read_checkpoint,
    replace_file,
    write_checkpoint,
)
from nodeplugin.device_ids import Resource
from tests.nodeplugin.builders import card, mig_part
from vcuda.isolation import EXCLUSIVE, NO_ISOLATION, Isolation, Rung
from vcuda.placement_annotation import GpuSlice

FULL = AllocationCheckpoint(
    pods={
        "uid-1": PodAllocation(
            uid="uid-1",
            namespace="team",
            name="träin",
            placed={"a": (GpuSlice("GPU-0", 50, 1024), GpuSlice("GPU-1", 50, 1024)), "i": ()},
            usage={"GPU-0": (50, 1024), "GPU-1": (50, 1024)},
            containers={
                "a": ContainerAllocation(
                    "token",
                    {Resource.CORE: ("core-0", "core-1"), Resource.MEMORY: ()},
                    "cdi",
                    Isolation(Rung.DRIVER, Rung.PRELOAD),
                )
            },
            chosen_here=True,
        ),
        "uid-2": PodAllocation(uid="uid-2", namespace="", name="", placed={}, usage={}),
    },
    cards=(card(links={"GPU-1": "nvlink4"}, numa=0), mig_part(3)),
    boot_id="8b7c",
    mode="cdi",
)
# What earlier versions wrote, and must be able to read after a rollback: every key, in order.
FULL_JSON = (
    '{"holds":{"uid-1":{"uid":"uid-1","namespace":"team","name":"träin",'
    '"placed":{"a":[{"uuid":"GPU-0","cores":50,"memoryMiB":1024},{"uuid":"GPU-1","cores":50,"memoryMiB":1024}],'
    '"i":[]},"held":{"GPU-0":[50,1024],"GPU-1":[50,1024]},'
    '"containers":{"a":{"token":"token","ids":{"core":["core-0","core-1"],"memory":[]},"way":"cdi",'
    '"isolation":{"memory":"driver","compute":"preload"}}},'
    '"chosenHere":true},"uid-2":{"uid":"uid-2","namespace":"","name":"","placed":{},"held":{}}},'
    '"cards":[{"uuid":"GPU-0","index":0,"minor":7,"product":"NVIDIA A100-SXM4-40GB","memoryMiB":40960,"numa":0,'
    '"links":{"GPU-1":"nvlink4"}},{"uuid":"MIG-3","index":0,"minor":7,'
    '"product":"NVIDIA A100-SXM4-40GB MIG 1g.5gb","memoryMiB":4864,"parent":"GPU-0","gpuInstance":3,'
    '"computeInstance":0}],"boot":"8b7c","way":"cdi"}'
)


def write(folder: Path, checkpoint: AllocationCheckpoint = FULL) -> Path:
    path = folder / CHECKPOINT_FILE
    write_checkpoint(path, checkpoint)
    return path


def write_raw(folder: Path, data: Any, **changes: Any) -> Path:
    """A file with a correct checksum, whatever its data."""
    raw = json.dumps(data, separators=(",", ":"))
    file = {"v": 1, "sha256": hashlib.sha256(raw.encode()).hexdigest(), "data": data} | changes
    path = folder / CHECKPOINT_FILE
    path.write_text(json.dumps(file, separators=(",", ":")))
    return path


def test_the_json_keys_of_a_checkpoint_are_fixed(tmp_path: Path) -> None:
    """A plugin reads the checkpoint of the version before, and of the one it is rolled back from."""
    assert msgspec.json.encode(FULL).decode() == FULL_JSON
    assert json.loads(write(tmp_path).read_bytes()) == {
        "v": 1,
        "sha256": hashlib.sha256(FULL_JSON.encode()).hexdigest(),
        "data": json.loads(FULL_JSON),
    }


@pytest.mark.parametrize("checkpoint", [FULL, AllocationCheckpoint()], ids=["full", "empty"])
def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path, checkpoint: AllocationCheckpoint) -> None:
    assert read_checkpoint(write(tmp_path, checkpoint)) == checkpoint


def test_allocations_of_earlier_releases_have_no_isolation(tmp_path: Path) -> None:
    """But for whole cards, which are exclusive without it."""
    slices = {"part": (GpuSlice("GPU-0", 50, 1024),), "whole": (GpuSlice("GPU-1", 100, 40960),)}
    containers = {name: {"token": name, "ids": {}, "way": "cdi"} for name in slices}
    allocation = {
        "uid": "u",
        "namespace": "team",
        "name": "p",
        "placed": msgspec.to_builtins(slices),
        "held": {},
        "containers": containers,
    }
    read = read_checkpoint(write_raw(tmp_path, {"holds": {"u": allocation}})).pods["u"]
    assert [read.isolation_of(name) for name in ("part", "whole", "other")] == [NO_ISOLATION, EXCLUSIVE, NO_ISOLATION]


def test_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    """At every length."""
    path = write(tmp_path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(BadCheckpoint):
            read_checkpoint(path)


def test_a_file_with_a_flipped_bit_is_rejected(tmp_path: Path) -> None:
    """Every bit of every byte."""
    path = write(tmp_path)
    content = path.read_bytes()
    for at in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with pytest.raises(BadCheckpoint):
                read_checkpoint(path)


@given(content=st.binary(max_size=200))
def test_no_content_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / CHECKPOINT_FILE
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)


def test_a_file_that_is_nested_too_deeply_is_rejected(tmp_path: Path) -> None:
    """It does not exhaust the stack."""
    path = tmp_path / CHECKPOINT_FILE
    path.write_bytes(b'{"v":1,"sha256":"","data":' + b"[" * 100_000)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)


INVALID_DATA: dict[str, Any] = {
    "pods are no object": {"holds": []},
    "an allocation without its pod": {"holds": {"uid-1": {}}},
    "a card without an index": {"cards": [{"uuid": "GPU-0"}]},
    "an unknown resource": {
        "holds": {
            "u": {
                "uid": "u",
                "namespace": "n",
                "name": "p",
                "placed": {},
                "held": {},
                "containers": {"a": {"token": "t", "ids": {"disk": []}}},
            }
        }
    },
    "no data": None,
}


@pytest.mark.parametrize("data", INVALID_DATA.values(), ids=INVALID_DATA.keys())
def test_a_file_with_other_data_is_rejected(tmp_path: Path, data: Any) -> None:
    """Even if its checksum is correct."""
    with pytest.raises(BadCheckpoint, match="damaged, not the JSON of an allocation checkpoint"):
        read_checkpoint(write_raw(tmp_path, data))


@pytest.mark.parametrize("version", [0, 2, 999], ids=["an older one", "the next one", "a much later one"])
def test_a_file_of_another_version_is_rejected(tmp_path: Path, version: int) -> None:
    """Its content may have another meaning."""
    with pytest.raises(BadCheckpoint, match=f"unsupported version {version}, expected 1"):
        read_checkpoint(write_raw(tmp_path, {}, v=version))


def test_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="checksum mismatch"):
        read_checkpoint(write_raw(tmp_path, {}, sha256="0" * 64))


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    """A plugin that was rolled back keeps the allocations."""
    assert read_checkpoint(write_raw(tmp_path, {"holds": {}, "later": 1})) == AllocationCheckpoint()


def test_a_missing_file_and_a_folder_in_its_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="No such file"):
        read_checkpoint(tmp_path / CHECKPOINT_FILE)
    with pytest.raises(BadCheckpoint, match="Is a directory"):
        read_checkpoint(tmp_path)


def test_a_scratch_file_left_by_a_crash_does_no_harm(tmp_path: Path) -> None:
    """Neither to reading nor to writing, however long it is; and writing leaves none."""
    path = write(tmp_path, AllocationCheckpoint())
    (tmp_path / f".{CHECKPOINT_FILE}.new").write_bytes(b"half a checkpoint" * 10_000)
    assert read_checkpoint(path) == AllocationCheckpoint()
    write_checkpoint(path, FULL)
    assert read_checkpoint(path) == FULL
    assert [each.name for each in tmp_path.iterdir()] == [CHECKPOINT_FILE]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """As on a full disk."""
    path = write(tmp_path)
    # A folder in place of the scratch file fails the write even for root.
    (tmp_path / f".{CHECKPOINT_FILE}.new").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_checkpoint(path, AllocationCheckpoint())
    assert read_checkpoint(path) == FULL


def test_only_its_owner_can_read_a_checkpoint(tmp_path: Path) -> None:
    """It names pods of all namespaces; files for containers ask for another mode."""
    assert write(tmp_path).stat().st_mode & 0o777 == 0o600
    shared = tmp_path / "shared"
    replace_file(shared, b"1", mode=0o444)
    replace_file(shared, b"2", mode=0o444)
    assert shared.stat().st_mode & 0o777 == 0o444
    assert shared.read_bytes() == b"2"


def test_an_allocation_returns_the_cards_of_each_container() -> None:
    """None for a container that it does not know."""
    allocation = FULL.pods["uid-1"]
    assert allocation.title == "team/träin"
    assert [allocation.cards_of(name) for name in ("a", "i", "unknown")] == [["GPU-0", "GPU-1"], [], []]
