"""The file of what was given to whom: it is read as it was written, or not at all."""

import hashlib
import json
from pathlib import Path
from typing import Any

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
from vcuda.placement_annotation import GpuSlice

FULL = AllocationCheckpoint(
    holds={
        "uid-1": PodAllocation(
            uid="uid-1",
            namespace="team",
            name="träin",
            placed={"a": (GpuSlice("GPU-0", 50, 1024), GpuSlice("GPU-1", 50, 1024)), "i": ()},
            held={"GPU-0": (50, 1024), "GPU-1": (50, 1024)},
            containers={"a": ContainerAllocation("token", {Resource.CORE: ("core-0", "core-1"), Resource.MEMORY: ()})},
            chosen_here=True,
        ),
        "uid-2": PodAllocation(uid="uid-2", namespace="", name="", placed={}, held={}),
    },
    cards=(card(links={"GPU-1": "nvlink4"}, numa=0), mig_part(3)),
)


def written(folder: Path, book: AllocationCheckpoint = FULL) -> Path:
    path = folder / CHECKPOINT_FILE
    write_checkpoint(path, book)
    return path


def with_data(folder: Path, data: Any, **changes: Any) -> Path:
    """A file whose checksum is right, whatever it says."""
    raw = json.dumps(data, separators=(",", ":"))
    file = {"v": 1, "sha256": hashlib.sha256(raw.encode()).hexdigest(), "data": data} | changes
    path = folder / CHECKPOINT_FILE
    path.write_text(json.dumps(file, separators=(",", ":")))
    return path


@pytest.mark.parametrize("book", [FULL, AllocationCheckpoint()], ids=["a full book", "an empty one"])
def test_a_book_is_read_as_it_was_written(tmp_path: Path, book: AllocationCheckpoint) -> None:
    """Nothing of it is lost."""
    assert read_checkpoint(written(tmp_path, book)) == book


def test_a_file_that_was_cut_off_is_not_trusted(tmp_path: Path) -> None:
    """Wherever it ends."""
    path = written(tmp_path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(BadCheckpoint):
            read_checkpoint(path)


def test_a_file_with_a_wrong_byte_is_not_trusted(tmp_path: Path) -> None:
    """Wherever it is, and whichever of its bits is the other way round."""
    path = written(tmp_path)
    content = path.read_bytes()
    for at in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with pytest.raises(BadCheckpoint):
                read_checkpoint(path)


@given(content=st.binary(max_size=200))
def test_whatever_a_file_holds_it_is_read_or_not_trusted(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """No content raises anything else."""
    path = tmp_path_factory.mktemp("book") / CHECKPOINT_FILE
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)


def test_a_file_that_is_nested_too_deeply_is_not_trusted(tmp_path: Path) -> None:
    """Nor does it end the plugin."""
    path = tmp_path / CHECKPOINT_FILE
    path.write_bytes(b'{"v":1,"sha256":"","data":' + b"[" * 100_000)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)


STRANGE: dict[str, dict[str, Any]] = {
    "holds are no mapping": {"data": {"holds": []}},
    "a hold lacks its pod": {"data": {"holds": {"uid-1": {}}}},
    "a card has no index": {"data": {"cards": [{"uuid": "GPU-0"}]}},
    "an unknown resource": {
        "data": {
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
        }
    },
    "no book at all": {"data": None},
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE.keys())
def test_a_file_with_another_content_is_not_trusted(tmp_path: Path, strange: dict[str, Any]) -> None:
    """Even where its checksum is right."""
    with pytest.raises(BadCheckpoint):
        read_checkpoint(with_data(tmp_path, strange["data"]))


@pytest.mark.parametrize("version", [0, 2, 999], ids=["an older one", "the next one", "one from far away"])
def test_a_file_of_another_version_is_named(tmp_path: Path, version: int) -> None:
    """Its content may mean something else."""
    with pytest.raises(BadCheckpoint, match=f"version {version} is not known here, 1 is"):
        read_checkpoint(with_data(tmp_path, {}, v=version))


def test_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    """So that nobody looks for a mistake in what it says."""
    with pytest.raises(BadCheckpoint, match="the checksum does not match"):
        read_checkpoint(with_data(tmp_path, {}, sha256="0" * 64))


def test_keys_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    """A plugin that was rolled back goes on with the book."""
    assert read_checkpoint(with_data(tmp_path, {"holds": {}, "later": 1})) == AllocationCheckpoint()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """As is a folder in its place."""
    with pytest.raises(BadCheckpoint, match="No such file"):
        read_checkpoint(tmp_path / CHECKPOINT_FILE)
    with pytest.raises(BadCheckpoint, match="Is a directory"):
        read_checkpoint(tmp_path)


def test_a_scratch_file_that_a_crash_left_does_not_matter(tmp_path: Path) -> None:
    """Neither to reading nor to writing, however long it is; and none is left behind."""
    path = written(tmp_path, AllocationCheckpoint())
    (tmp_path / f".{CHECKPOINT_FILE}.new").write_bytes(b"half a book" * 10_000)
    assert read_checkpoint(path) == AllocationCheckpoint()
    write_checkpoint(path, FULL)
    assert read_checkpoint(path) == FULL
    assert [each.name for each in tmp_path.iterdir()] == [CHECKPOINT_FILE]


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    """A full disk costs what was to be written, and nothing that was."""
    path = written(tmp_path)
    # A folder where the scratch file should be cannot be written, not even by root.
    (tmp_path / f".{CHECKPOINT_FILE}.new").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_checkpoint(path, AllocationCheckpoint())
    assert read_checkpoint(path) == FULL


def test_the_book_is_readable_for_its_owner_alone(tmp_path: Path) -> None:
    """It names pods of all namespaces; what containers read says so itself."""
    assert written(tmp_path).stat().st_mode & 0o777 == 0o600
    shared = tmp_path / "shared"
    replace_file(shared, b"1", mode=0o444)
    replace_file(shared, b"2", mode=0o444)
    assert shared.stat().st_mode & 0o777 == 0o444
    assert shared.read_bytes() == b"2"


def test_a_hold_names_the_cards_of_each_container() -> None:
    """One that it does not know has none."""
    hold = FULL.holds["uid-1"]
    assert hold.title == "team/träin"
    assert [hold.cards_of(name) for name in ("a", "i", "stranger")] == [["GPU-0", "GPU-1"], [], []]
