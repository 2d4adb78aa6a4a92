"""Variables of a ConfigMap on a real node: they cannot select GPUs, by native injection."""

import pytest

from tests.node.driver import uuid
from tests.node.env_from import admit, greedy_config_map
from tests.node.node import CONTROL, LOOK, WAIT_FOR_EVER, GpuNode, container, placement

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

MIB = 256


def test_a_config_map_cannot_select_gpus(node: GpuNode) -> None:
    """In an init container, a sidecar, a container, and one without GPU; each gets its own card as before."""
    with greedy_config_map(node) as sources:
        first = container("first", 30, 8, LOOK, envFrom=sources)
        side = container("side", 30, 8, WAIT_FOR_EVER, envFrom=sources, restartPolicy="Always")
        first, side, own = admit(container("c0", 30, 8, envFrom=sources), first, side)
        share = [(uuid(1), 30, 8 * MIB)]
        node.run("one", own, placed=placement(first=share, side=share, c0=share), initContainers=[first, side])
        for name in ("first", "side", "c0"):
            seen = node.seen("one", name)
            assert seen.visible == "void"
            assert seen.devices.keys() - CONTROL == {"/dev/nvidia2"}
            assert seen.libraries == "/elsewhere"  # a process could set this for itself
        assert node.seen("one", "c0").limits is not None


def test_a_container_without_gpu_hides_them_in_the_same_way(node: GpuNode) -> None:
    """Its entry of `env` wins over the ConfigMap."""
    with greedy_config_map(node) as sources:
        plain, own = admit(container("c0", 30, 8), container("plain", 0, 0, LOOK, envFrom=sources))
        node.run("one", own, placed=placement(c0=[(uuid(1), 30, 8 * MIB)]), initContainers=[plain])
        assert node.seen("one", "plain").visible == "void"
        assert node.seen("one", "plain").devices == {}
