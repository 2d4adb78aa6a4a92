"""Pods of every shape on a real kubelet: what each container gets, and why some are refused."""

import pytest

from tests.node.driver import VERSION, uuid
from tests.node.node import CONTROL, LOOK, NAMES, GpuNode, container, placement, wait_until
from vcuda.placement_annotation import GpuSlice

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

MIB = 256
WHOLE_MIB = 40960


def cards_seen(node: GpuNode, pod: str, name: str = "c0") -> set[int]:
    """Return the indexes of the cards whose device nodes a container has."""
    minors = [int(path.removeprefix("/dev/nvidia")) for path in node.seen(pod, name).devices.keys() - CONTROL]
    return {3 - minor for minor in minors}


def usage(node: GpuNode, pod: str) -> dict[str, list[int]]:
    """Return a pod's peak cores and MiB of each card, from the allocation checkpoint."""
    by_name: dict[str, dict[str, list[int]]] = {each["name"]: each["held"] for each in node.allocations().values()}
    return by_name[pod]


def test_a_container_gets_its_card_the_driver_and_its_limits_and_nothing_else(node: GpuNode) -> None:
    """In native mode: device nodes, the driver's libraries and programs, read-only limits."""
    node.run("one", container("c0", 30, 8), placed=placement(c0=[(uuid(2), 30, 8 * MIB)]))
    seen = node.seen("one")
    assert seen.devices == {"/dev/nvidia1": "195, 1", "/dev/nvidiactl": "195, 255"} | {
        "/dev/nvidia-uvm": "511, 0",
        "/dev/nvidia-uvm-tools": "511, 1",
    }
    assert {"lib64/libcuda.so.1", f"lib64/libcuda.so.{VERSION}", "lib64/libnvidia-ml.so.1", "bin/nvidia-smi"} <= {
        file.removeprefix("/usr/local/nvidia/") for file in seen.files
    }
    assert (seen.visible, seen.libraries, seen.writable) == (uuid(2), "/usr/local/nvidia/lib64", False)
    assert seen.limits is not None
    assert (seen.limits.v, seen.limits.cores, seen.limits.core_limit, seen.limits.memory_mib) == (1, 30, 30, 8 * MIB)
    assert node.placed("one") == placement(c0=[(uuid(2), 30, 8 * MIB)])


def test_a_pod_without_a_placement_is_placed_by_the_node_and_annotated(node: GpuNode) -> None:
    """By the function that the scheduler uses."""
    node.run("alone", container("c0", 40, 8), container("c1", 100, 1), container("c2", 40, 4))
    wait_until("the placement to be written", lambda: node.placed("alone"))
    placed = node.placed("alone")
    assert placed is not None
    assert cards_seen(node, "alone", "c0") == cards_seen(node, "alone", "c2"), "shares of one pod are packed"
    assert cards_seen(node, "alone", "c1").isdisjoint(cards_seen(node, "alone", "c0"))
    for name, slices in placed.items():
        assert {uuid(index) for index in cards_seen(node, "alone", name)} == {each.uuid for each in slices}


def test_several_whole_cards_are_from_one_numa_node(node: GpuNode) -> None:
    """Not one of each, although a share is on the first card."""
    node.run("share", container("c0", 10, 1), placed=placement(c0=[(uuid(0), 10, MIB)]))
    node.run("pair", container("c0", 200, 2))
    assert cards_seen(node, "pair") == {2, 3}
    assert node.seen("pair").visible == f"{uuid(2)},{uuid(3)}"


def test_an_init_containers_share_is_used_again_by_the_containers_after_it(node: GpuNode) -> None:
    """PodResources does not list plain init containers; they are identified by their counts."""
    placed = placement(first=[(uuid(1), 60, 20 * MIB)], c0=[(uuid(1), 60, 20 * MIB)])
    node.run("staged", container("c0", 60, 20), placed=placed, initContainers=[container("first", 60, 20, LOOK)])
    assert cards_seen(node, "staged", "first") == cards_seen(node, "staged") == {1}
    first, then = node.seen("staged", "first").limits, node.seen("staged").limits
    assert first is not None
    assert then is not None
    assert (first.container, then.container) == ("first", "c0")
    assert usage(node, "staged") == {uuid(1): [60, 20 * MIB]}


def test_replicas_with_init_containers_started_at_once_each_get_their_own_cards(node: GpuNode) -> None:
    """They differ only in their placement; the kubelet admits one after another."""
    created = {
        number: node.create(f"replica-{number}", container("c0", 20, 4), initContainers=[container("i", 20, 4, LOOK)])
        for number in range(8)
    }
    for number, pod in created.items():
        card = [(uuid(number % 4), 20, 4 * MIB)]
        node.bind(pod, placement(i=card, c0=card))
    for number in created:
        node.wait_phase(f"replica-{number}", "Running")
        for name in ("i", "c0"):
            assert cards_seen(node, f"replica-{number}", name) == {number % 4}
            limits = node.seen(f"replica-{number}", name).limits
            assert limits is not None
            assert (limits.pod, limits.container) == (f"replica-{number}", name)


def test_init_containers_larger_and_smaller_than_what_follows_them(node: GpuNode) -> None:
    """Some device IDs are reused from the init container, others are new."""
    inits = [container("small", 10, 2, LOOK), container("large", 50, 30, LOOK)]
    node.run("mixed", container("c0", 30, 10), container("c1", 40, 5), initContainers=inits)
    assert node.seen("mixed", "small").limits is not None
    for name, cores, units in (("small", 10, 2), ("large", 50, 30), ("c0", 30, 10), ("c1", 40, 5)):
        limits = node.seen("mixed", name).limits
        assert limits is not None
        assert (limits.container, limits.cores, limits.memory_mib) == (name, cores, units * MIB)
        assert len(cards_seen(node, "mixed", name)) == 1


def test_a_sidecar_keeps_its_share_beside_the_others(node: GpuNode) -> None:
    """A restartable init container keeps running."""
    sidecar = container("side", 30, 4) | {"restartPolicy": "Always"}
    placed = placement(side=[(uuid(3), 30, 4 * MIB)], c0=[(uuid(3), 50, 4 * MIB)])
    node.run("escorted", container("c0", 50, 4), placed=placed, initContainers=[sidecar])
    assert cards_seen(node, "escorted", "side") == cards_seen(node, "escorted") == {3}
    assert usage(node, "escorted") == {uuid(3): [80, 8 * MIB]}


def test_containers_without_gpus_see_none(node: GpuNode) -> None:
    """In a pod with a GPU container."""
    node.run("beside", container("c0", 20, 4), container("plain", 0, 0))
    assert node.seen("beside", "plain").devices == {}
    assert node.seen("beside", "plain").limits is None


@pytest.mark.parametrize(
    ("cores", "units", "cards"),
    [
        pytest.param(200, 0, 2, id="whole cards without memory"),
        pytest.param(25, 0, 1, id="a share without memory"),
    ],
)
def test_a_container_that_bypassed_the_webhook_is_served(node: GpuNode, cores: int, units: int, cards: int) -> None:
    """It requests one resource, so there is only one call."""
    node.run("bypassed", container("c0", cores, units))
    assert len(cards_seen(node, "bypassed")) == cards
    limits = node.seen("bypassed").limits
    assert limits is not None
    assert limits.memory_mib == WHOLE_MIB * cores // 100


def test_an_impossible_placement_is_replaced_and_the_annotation_rewritten(node: GpuNode) -> None:
    """The card is full, and another card of the node is free."""
    node.run("first", container("c0", 70, 8), placed=placement(c0=[(uuid(0), 70, 8 * MIB)]))
    node.run("second", container("c0", 60, 8), placed=placement(c0=[(uuid(0), 60, 8 * MIB)]))
    assert cards_seen(node, "second").isdisjoint({0})
    wait_until("the placement to be rewritten", lambda: node.placed("second") != placement(c0=[(uuid(0), 60, 8 * MIB)]))
    assert node.placed("first") == placement(c0=[(uuid(0), 70, 8 * MIB)])


@pytest.mark.parametrize(
    "placed",
    [
        pytest.param({"c0": (GpuSlice("GPU-of-another-node", 30, MIB),)}, id="a card of another node"),
        pytest.param({"c0": (GpuSlice(uuid(0), 30, MIB), GpuSlice(uuid(1), 30, MIB))}, id="two cards for a share"),
        pytest.param({"other": (GpuSlice(uuid(0), 30, MIB),)}, id="another container"),
    ],
)
def test_an_invalid_placement_is_replaced(node: GpuNode, placed: dict[str, tuple[GpuSlice, ...]]) -> None:
    """As if there were none."""
    node.run("odd", container("c0", 30, 1), placed=placed)
    wait_until("the placement to be rewritten", lambda: node.placed("odd") != placed)
    assert len(cards_seen(node, "odd")) == 1


def test_amounts_in_a_placement_are_not_trusted(node: GpuNode) -> None:
    """The cards come from the placement, the amounts from the request."""
    node.run("modest", container("c0", 50, 40), placed=placement(c0=[(uuid(0), 1, 1)]))
    limits = node.seen("modest").limits
    assert limits is not None
    assert (limits.cores, limits.memory_mib) == (50, 40 * MIB)
    assert usage(node, "modest") == {uuid(0): [50, 40 * MIB]}


def test_a_pod_that_fits_on_no_card_is_refused_with_what_is_free(node: GpuNode) -> None:
    """The node has enough cores in total, but no card has; the refused pod leaves nothing allocated."""
    for index in range(4):
        node.run(f"half-{index}", container("c0", 60, 8), placed=placement(c0=[(uuid(index), 60, 8 * MIB)]))
    node.bind(node.create("large", container("c0", 50, 8)))
    message = node.wait_failed("large")
    assert "pod default/large, container c0" in message
    assert "insufficient GPUs for c0 (50 cores and 2048 MiB)" in message
    assert "GPU 0 (A100-SXM4-40GB): 40 cores and 38912 MiB free" in message
    assert "large" not in {each["name"] for each in node.allocations().values()}
    node.run("small", container("c0", 40, 8))


def test_the_cards_of_a_pod_that_ended_are_free_at_once(node: GpuNode) -> None:
    """The scheduler binds the next pod as soon as the API server has the end."""
    for round_ in range(4):
        name = f"turn-{round_}"
        node.bind(node.create(name, container("c0", 400, 4, LOOK), restartPolicy="Never"))
        node.wait_phase(name, "Succeeded")


def test_a_force_deleted_pod_keeps_its_cards_until_its_processes_end(node: GpuNode) -> None:
    """Deleted without grace and recreated at once: the next pod waits for the processes, then runs."""
    for _ in range(3):
        node.run("again", container("c0", 400, 4))
        node.delete("again")


def test_an_invalid_request_is_refused_with_the_remedy(node: GpuNode) -> None:
    """150 cores are neither a share of a card nor whole cards."""
    node.bind(node.create("strange", container("c0", 150, 2)))
    assert "ask for 100 or 200" in node.wait_failed("strange")


def test_a_pod_for_another_model_is_refused(node: GpuNode) -> None:
    """The message names the model."""
    node.bind(node.create("picky", container("c0", 10, 1), annotations={NAMES.use_models: "T4"}))
    assert "no GPU of the requested models: T4" in node.wait_failed("picky")


def test_the_monitor_shows_allocations(node: GpuNode) -> None:
    """gpu-manager's series and ours, as JSON and as a page."""
    node.run("shown", container("c0", 30, 8), placed=placement(c0=[(uuid(1), 30, 8 * MIB)]))
    for path in ("/metrics", "/metric"):
        metrics = node.monitor(path)
        labels = 'container_name="c0",namespace="default",node="node-1",pod_name="shown",'
        assert f'container_request_gpu_utilization{{{labels}req_of_gpu="total"}} 0.3' in metrics
        assert f'container_request_gpu_memory{{{labels}req_of_gpu_memory="total"}} 2048.0' in metrics
    usage = node.monitor("/usage")
    assert '"spec":{"c0":{"gpu":0.3,"mem":2048}}' in usage
    page = node.monitor("/usage", "Accept: text/html")
    assert "<table>" in page
    assert "default/shown" in page
