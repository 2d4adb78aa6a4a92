"""Reading the kubelet's checkpoint."""

import json
from pathlib import Path

import pytest

from nodeplugin.kubelet import CHECKPOINT, Kubelet


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    return Kubelet(tmp_path, tmp_path / "kubelet.sock")


def test_the_checkpointed_containers_of_a_pod(kubelet: Kubelet, tmp_path: Path) -> None:
    """Of one pod, and of any resource."""
    entries = [
        {"PodUID": uid, "ContainerName": name, "ResourceName": "example.org/x", "DeviceIDs": {"-1": ["d"]}}
        for uid, name in (("one", "a"), ("one", "b"), ("two", "c"))
    ]
    (tmp_path / CHECKPOINT).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))
    assert kubelet.checkpointed_containers("one") == {"a", "b"}
    assert kubelet.checkpointed_containers("three") == set()
    assert [each.ids for each in kubelet.checkpointed()] == [frozenset({"d"})] * 3


@pytest.mark.parametrize(
    "device_ids",
    [
        pytest.param({"0": ["d", "e"], "1": ["f"]}, id="by NUMA node"),
        pytest.param({"0": ["d", "e", "f"], "1": None}, id="by NUMA node, one of them null"),
        pytest.param(["d", "e", "f"], id="a plain list, as older kubelets wrote"),
    ],
)
def test_device_ids_are_read_in_every_form(kubelet: Kubelet, tmp_path: Path, device_ids: object) -> None:
    entry = {"PodUID": "one", "ContainerName": "a", "ResourceName": "x", "DeviceIDs": device_ids}
    (tmp_path / CHECKPOINT).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    assert [each.ids for each in kubelet.checkpointed()] == [frozenset({"d", "e", "f"})]


@pytest.mark.parametrize("response", ["", "not base64", "AAAA"], ids=["empty", "not base64", "not a response"])
def test_a_response_that_cannot_be_decoded_counts_as_empty(kubelet: Kubelet, tmp_path: Path, response: str) -> None:
    entry = {"PodUID": "one", "ContainerName": "a", "ResourceName": "x", "AllocResp": response}
    (tmp_path / CHECKPOINT).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    (only,) = kubelet.checkpointed()
    assert dict(only.response.annotations) == {}


@pytest.mark.parametrize("content", [None, "", "{"])
def test_an_unreadable_checkpoint_is_not_an_empty_one(kubelet: Kubelet, tmp_path: Path, content: str | None) -> None:
    """An empty one would mean that the kubelet lost all init containers; without it, our checkpoint is trusted."""
    if content is not None:
        (tmp_path / CHECKPOINT).write_text(content)
    assert kubelet.checkpointed_containers("one") is None
    assert kubelet.checkpointed() == []
