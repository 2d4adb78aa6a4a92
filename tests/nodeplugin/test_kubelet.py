"""What the kubelet wrote down, as far as it can be read."""

import json
from pathlib import Path

import pytest

from nodeplugin.kubelet import CHECKPOINT, Kubelet


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    return Kubelet(tmp_path, tmp_path / "kubelet.sock")


def test_the_containers_of_a_pod_that_were_written_down(kubelet: Kubelet, tmp_path: Path) -> None:
    """Of one pod, and of any resource."""
    entries = [
        {"PodUID": uid, "ContainerName": name, "ResourceName": "example.org/x", "DeviceIDs": {"-1": ["d"]}}
        for uid, name in (("one", "a"), ("one", "b"), ("two", "c"))
    ]
    (tmp_path / CHECKPOINT).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))
    assert kubelet.written("one") == {"a", "b"}
    assert kubelet.written("three") == set()
    assert [each.ids for each in kubelet.kept()] == [frozenset({"d"})] * 3


@pytest.mark.parametrize("content", [None, "", "{"])
def test_what_cannot_be_read_is_not_taken_for_empty(kubelet: Kubelet, tmp_path: Path, content: str | None) -> None:
    """By an empty file all init containers would be asked for again; where nobody knows, the book is believed."""
    if content is not None:
        (tmp_path / CHECKPOINT).write_text(content)
    assert kubelet.written("one") is None
    assert kubelet.kept() == []
