"""Faults on a node, and how the plugin handles them."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.objects import NODES, PODS
from tests.cluster.layout import NODE_NAME, NODE_PLUGIN
from tests.node.driver import uuid
from tests.node.node import CONTROL, NAMES, WAIT_S, GpuNode, container, placement, wait_until
from tests.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

MIB = 256
PLUGINS = "/var/lib/kubelet/device-plugins"


def registrations(node: GpuNode) -> str:
    """Return the line of the metric that counts registrations; empty while the monitor does not have it."""
    lines = node.monitor("/metrics").splitlines()
    return next((line for line in lines if line.startswith("quotient_nodeplugin_registrations ")), "")


def test_the_plugin_registers_again_if_its_sockets_are_deleted(node: GpuNode) -> None:
    """Pods are served afterwards."""
    before = registrations(node)
    node.cluster.enter("sh", "-c", f"rm {PLUGINS}/quotient-*.sock")
    wait_until("the plugin to register again", lambda: registrations(node) not in {"", before})
    node.wait_offered()
    node.run("after", container("c0", 20, 4))


def test_the_plugin_registers_again_if_the_kubelet_is_restarted(node: GpuNode) -> None:
    """A starting kubelet deletes all sockets in its folder, and creates a new one."""
    node.run("before", container("c0", 20, 4), placed=placement(c0=[(uuid(2), 20, 4 * MIB)]))
    before = registrations(node)
    node.cluster.restart("kubelet")
    wait_until("the plugin to register again", lambda: registrations(node) not in {"", before})
    node.wait_ready()
    node.run("after", container("c0", 20, 4), placed=placement(c0=[(uuid(3), 20, 4 * MIB)]))
    assert node.seen("after").visible == uuid(3)


def test_an_unhealthy_card_reduces_both_resources_until_it_recovers(node: GpuNode) -> None:
    """An XID of the hardware: 100 cores and 160 units less, published on the Node; recovers after a while."""
    node.run("shared", container("c0", 20, 4), placed=placement(c0=[(uuid(1), 20, 4 * MIB)]))
    node.driver.change(lambda description: description.setdefault("events", []).append({"card": 1, "xid": 94}))
    wait_until("the card to be taken out", lambda: node.allocatable()[NAMES.core] == "300")
    assert node.allocatable()[NAMES.memory] == "480"
    wait_until(
        "the inventory to be published", lambda: [gpu.healthy for gpu in node.inventory()] == [True, False, True, True]
    )
    wait_until("the card to recover", lambda: node.allocatable()[NAMES.core] == "400")
    wait_until("the inventory to be published", lambda: all(gpu.healthy for gpu in node.inventory()))
    events = node.cluster.kubectl("get", "events", "-A", "-o=jsonpath={.items[*].message}")
    assert f"GPU 1 ({uuid(1)}): XID 94" in events
    node.kill_container("shared")
    assert node.seen("shared").visible == uuid(1)


def test_a_card_that_needs_a_reset_recovers_when_it_is_reset(node: GpuNode) -> None:
    """Time does not help, nor does a restart of the plugin; during the reset the driver does not list the card."""
    errors = [{"card": 2, "xid": 119}, {"card": 3, "xid": 94}]
    node.driver.change(lambda description: description.setdefault("events", []).extend(errors))
    wait_until("both cards to be taken out", lambda: node.allocatable()[NAMES.core] == "200")
    wait_until("the one without need of a reset to recover", lambda: node.allocatable()[NAMES.core] == "300")
    node.cluster.restart(NODE_PLUGIN)
    node.wait_offered(300)
    wait_until("the reason to be published", lambda: "XID 119" in node.inventory()[2].reason)
    node.driver.change(lambda description: description["cards"][2].update(lost=True))
    wait_until("the card to be missing", lambda: "XID 119" not in node.inventory()[2].reason)
    node.driver.change(lambda description: description["cards"][2].update(lost=False))
    node.wait_offered(400)


def test_xids_of_applications_do_not_make_a_card_unhealthy(node: GpuNode) -> None:
    """XID 31 is caused by a program; it is counted in the metrics."""
    node.driver.change(lambda description: description.setdefault("events", []).append({"card": 0, "xid": 31}))
    wait_until("it to be counted", lambda: 'xid="31"' in node.monitor("/metrics"))
    assert all(gpu.healthy for gpu in node.inventory())


def test_a_card_that_falls_off_the_bus_is_unhealthy_until_it_is_back(node: GpuNode) -> None:
    """Also across a restart of the plugin: the card is reported as missing."""
    node.run("shared", container("c0", 20, 4), placed=placement(c0=[(uuid(3), 20, 4 * MIB)]))
    node.driver.change(lambda description: description["cards"][3].update(lost=True))
    wait_until("the card to be taken out", lambda: node.allocatable()[NAMES.core] == "300")
    node.cluster.restart(NODE_PLUGIN)
    node.wait_offered(300)
    wait_until(
        "the inventory to be published", lambda: [gpu.healthy for gpu in node.inventory()] == [True, True, True, False]
    )
    node.driver.change(lambda description: description["cards"][3].update(lost=False))
    node.wait_offered(400)
    wait_until("the inventory to be published", lambda: all(gpu.healthy for gpu in node.inventory()))


def test_a_cordoned_card_keeps_its_pods_and_gets_no_others(node: GpuNode) -> None:
    """The Node's annotation takes effect without a restart."""
    node.run("shared", container("c0", 20, 4), placed=placement(c0=[(uuid(0), 20, 4 * MIB)]))
    node.api.patch(NODES, NODE_NAME, "", {"metadata": {"annotations": {NAMES.cordon: f"0, {uuid(1)}"}}})
    wait_until("the cards to be cordoned", lambda: node.allocatable()[NAMES.core] == "220")
    node.kill_container("shared")
    node.run("next", container("c0", 20, 4), placed=placement(c0=[(uuid(0), 20, 4 * MIB)]))
    assert node.seen("next").visible in {uuid(2), uuid(3)}
    node.api.patch(NODES, NODE_NAME, "", {"metadata": {"annotations": {NAMES.cordon: None}}})
    node.wait_offered()


def test_cards_that_another_plugin_offers_are_cordoned(node: GpuNode) -> None:
    """Two plugins would allocate the same cards twice."""
    node.api.patch(NODES, NODE_NAME, "", {"status": {"capacity": {"nvidia.com/gpu": "4"}}}, subresource="status")
    wait_until("the cards to be cordoned", lambda: node.allocatable()[NAMES.core] == "0")
    wait_until(
        "the inventory to be published",
        lambda: all(gpu.cordoned and "nvidia.com/gpu" in gpu.reason for gpu in node.inventory()),
    )
    node.api.patch(NODES, NODE_NAME, "", {"status": {"capacity": {"nvidia.com/gpu": None}}}, subresource="status")
    node.wait_offered()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("rm {file}", id="missing"),
        pytest.param("truncate -s 100 {file}", id="truncated"),
        pytest.param("sed -i 's/.v.:1/\"v\":0/' {file}", id="of an older version"),
        pytest.param("head -c 500 /dev/urandom > {file}", id="overwritten"),
    ],
)
def test_a_lost_checkpoint_is_rebuilt_from_the_kubelets(node: GpuNode, damage: str) -> None:
    """With the same content, whatever the damage."""
    node.run("one", container("c0", 20, 4), placed=placement(c0=[(uuid(2), 20, 4 * MIB)]))
    node.run("two", container("c0", 200, 2))
    before = {uid: (each["placed"], each["held"], each["containers"]) for uid, each in node.allocations().items()}
    node.cluster.kill(NODE_PLUGIN)
    node.cluster.enter("sh", "-c", damage.format(file="/var/lib/quotient/allocations.json"))
    node.cluster.run(NODE_PLUGIN)
    node.wait_offered()
    assert {
        uid: (each["placed"], each["held"], each["containers"]) for uid, each in node.allocations().items()
    } == before
    node.kill_container("one")
    assert node.seen("one").visible == uuid(2)


def test_containers_restart_without_the_api_server(node: GpuNode) -> None:
    """Also with a plugin that starts during the outage: it has its checkpoint and the saved pods."""
    pod = node.run("one", container("c0", 20, 4), placed=placement(c0=[(uuid(2), 20, 4 * MIB)]))
    # With its UID: the kubelet may keep the logs of an earlier pod of this name for a minute.
    restarted = f"/var/log/pods/default_one_{pod.metadata.uid}/c0/1.log"
    node.cluster.kill("kube-apiserver")
    try:
        node.cluster.restart(NODE_PLUGIN)
        wait_until("the plugin to be registered", node.is_registered)
        node.cluster.enter("sh", "-c", "pkill -9 -f 'sleep [1]000000'")
        eventually(
            lambda: node.cluster.enter("test", "-e", restarted).returncode == 0,
            "the container to restart",
            WAIT_S,
            lambda: "\n".join(node.cluster.log_end(each, 30) for each in (NODE_PLUGIN, "kubelet")),
        )
    finally:
        node.cluster.run("kube-apiserver")
        node.cluster.until("kube-apiserver to be ready", node.cluster.api_ready, "kube-apiserver")
    node.wait_ready()
    assert node.seen("one").visible == uuid(2)


def test_a_plugin_killed_repeatedly_swaps_no_pods(node: GpuNode) -> None:
    """Pods that the kubelet rejects are recreated; those that run have their own cards."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    names = [f"pod-{number}" for number in range(8)]
    places = {name: placement(c0=[(uuid(number % 4), 10, (1 + number) * MIB)]) for number, name in enumerate(names)}
    waiting, rejected = set(names), 0
    while waiting:
        for name in sorted(waiting):
            if name in node.pods():
                node.delete(name)
            node.bind(node.create(name, container("c0", 10, 1 + int(name[4:]))), places[name])
        time.sleep(chance.uniform(0, 0.3))
        node.cluster.restart(NODE_PLUGIN)
        node.wait_offered()
        for name in sorted(waiting):
            wait_until(f"{name} to run or fail", lambda: node.pod(name).status.phase in {"Running", "Failed"})  # noqa: B023
            if node.pod(name).status.phase == "Running":
                waiting.discard(name)
            else:
                rejected += 1
    for number, name in enumerate(names):
        seen = node.seen(name)
        assert seen.devices.keys() - CONTROL == {f"/dev/nvidia{3 - number % 4}"}, f"seed {seed}, {rejected} rejected"
        assert seen.limits is not None
        assert (seen.limits.pod, seen.limits.memory_mib) == (name, (1 + number) * MIB)
    uids = {pod.metadata.uid for pod in node.api.list(PODS, "default").items}
    wait_until("the checkpoint to have just these pods", lambda: set(node.allocations()) == uids)


def test_a_kubelet_killed_before_it_wrote_its_checkpoint(node: GpuNode) -> None:
    """It allocates both containers again, one of which is in our checkpoint; each gets its own card."""
    kubelet = node.host_pid("kubelet")
    checkpoint = Path(f"/proc/{node.plugin_pid()}/root/var/lib/quotient/allocations.json")
    pod = node.create("twins", container("c0", 20, 4), container("c1", 20, 4))
    before = checkpoint.stat().st_ino if checkpoint.exists() else 0
    node.bind(pod, placement(c0=[(uuid(2), 20, 4 * MIB)], c1=[(uuid(1), 20, 4 * MIB)]))
    deadline = time.monotonic() + 30
    while not checkpoint.exists() or checkpoint.stat().st_ino == before:
        assert time.monotonic() < deadline, "the kubelet made no allocation"
    os.kill(kubelet, signal.SIGKILL)
    wait_until("the kubelet to be gone", lambda: "kubelet" not in node.cluster.running())
    node.cluster.run("kubelet")
    node.wait_ready()
    node.wait_phase("twins", "Running")
    for name, card in (("c0", 2), ("c1", 1)):
        seen = node.seen("twins", name)
        assert seen.visible == uuid(card)
        assert seen.devices.keys() - CONTROL == {f"/dev/nvidia{3 - card}"}
        assert seen.limits is not None
        assert seen.limits.container == name


def test_a_deleted_state_folder_is_created_again(node: GpuNode) -> None:
    """Deleted while the plugin runs; and while it does not, when a runtime has created a part of it."""
    node.run("first", container("c0", 20, 4))
    node.cluster.enter("rm", "-rf", "/var/lib/quotient")
    node.run("second", container("c0", 20, 4))
    assert node.seen("second").files
    node.cluster.kill(NODE_PLUGIN)
    node.cluster.enter("rm", "-rf", "/var/lib/quotient")
    node.cluster.enter("mkdir", "-p", "/var/lib/quotient/driver/current/lib64", "/var/lib/quotient/driver/current/bin")
    node.cluster.run(NODE_PLUGIN)
    node.wait_ready()
    for name in ("first", "second"):
        node.kill_container(name)
        seen = node.seen(name)
        assert seen.files
        assert seen.limits is not None
        assert seen.limits.pod == name
    assert len(node.allocations()) == 2


@pytest.mark.long
def test_a_container_does_not_start_with_the_device_node_of_another_card(node: GpuNode) -> None:
    """After a reboot that changes minor numbers, the kubelet replays responses with the old ones."""
    for name, card in (("mine", 1), ("other", 2)):
        node.run(name, container("c0", 100, 160), placed=placement(c0=[(uuid(card), 100, 160 * MIB)]))
    assert node.seen("mine").devices.keys() - CONTROL == {"/dev/nvidia2"}

    def swap(description: dict[str, Any]) -> None:
        one, two = description["cards"][1], description["cards"][2]
        one["minor"], two["minor"] = two["minor"], one["minor"]

    node.driver.change(swap)
    node.reboot()
    refusal = "the device node of its GPU has changed"
    wait_until("the start to be refused", lambda: refusal in node.cluster.kubectl("describe", "pod", "mine"))
    assert not node.container_id("mine")
    node.delete("mine", "other")
    node.run("again", container("c0", 100, 160), placed=placement(c0=[(uuid(1), 100, 160 * MIB)]))
    assert node.seen("again").devices.keys() - CONTROL == {"/dev/nvidia1"}
    node.delete("again")
    node.driver.describe()
    node.reboot()
