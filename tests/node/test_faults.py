"""What goes wrong on a node, and what the plugin makes of it."""

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
from tests.node.node import CONTROL, NAMES, GpuNode, container, placement, wait_until

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

MIB = 256
PLUGINS = "/var/lib/kubelet/device-plugins"


def registrations(node: GpuNode) -> str:
    """Count how often the plugin has registered."""
    lines = node.monitor("/metrics").splitlines()
    return next((line for line in lines if line.startswith("quotient_nodeplugin_registrations ")), "")


def test_a_deleted_socket_of_ours_is_made_again(node: GpuNode) -> None:
    """Somebody cleaned up too much: the plugin registers anew, and pods are served."""
    before = registrations(node)
    node.cluster.enter("sh", "-c", f"rm {PLUGINS}/quotient-*.sock")
    wait_until("the plugin to register again", lambda: registrations(node) not in {"", before})
    node.wait_offered()
    node.run("after", container("c0", 20, 4))


def test_a_replaced_kubelet_socket_is_noticed(node: GpuNode) -> None:
    """A kubelet that starts deletes all sockets, and makes its own anew."""
    node.run("before", container("c0", 20, 4), placed=placement(c0=[(uuid(2), 20, 4 * MIB)]))
    before = registrations(node)
    node.cluster.restart("kubelet")
    wait_until("the plugin to register again", lambda: registrations(node) not in {"", before})
    node.wait_whole()
    node.run("after", container("c0", 20, 4), placed=placement(c0=[(uuid(3), 20, 4 * MIB)]))
    assert node.seen("after").visible == uuid(3)


def test_a_sick_card_takes_its_units_out_of_both_resources_and_comes_back(node: GpuNode) -> None:
    """An XID that counts: 100 cores and 160 units less, shown on the node; well again after some quiet."""
    node.run("tenant", container("c0", 20, 4), placed=placement(c0=[(uuid(1), 20, 4 * MIB)]))
    node.driver.change(lambda said: said.setdefault("events", []).append({"card": 1, "xid": 79}))
    wait_until("the card to be taken out", lambda: node.allocatable()[NAMES.core] == "300")
    assert node.allocatable()[NAMES.memory] == "480"
    wait_until("the node to say so", lambda: [gpu.healthy for gpu in node.inventory()] == [True, False, True, True])
    wait_until("the card to be well", lambda: node.allocatable()[NAMES.core] == "400")
    wait_until("the node to say so", lambda: all(gpu.healthy for gpu in node.inventory()))
    events = node.cluster.kubectl("get", "events", "-A", "-o=jsonpath={.items[*].message}")
    assert f"GPU 1 ({uuid(1)}): XID 79" in events
    node.kill_container("tenant")
    assert node.seen("tenant").visible == uuid(1)


def test_errors_of_applications_do_not_count(node: GpuNode) -> None:
    """XID 31 is a program's fault; it is counted and shown, and the card stays."""
    node.driver.change(lambda said: said.setdefault("events", []).append({"card": 0, "xid": 31}))
    wait_until("it to be counted", lambda: 'xid="31"' in node.monitor("/metrics"))
    assert all(gpu.healthy for gpu in node.inventory())


def test_a_card_that_falls_off_the_bus_is_shown_and_comes_back(node: GpuNode) -> None:
    """Also while the plugin is started: the card it knew is missing, not forgotten."""
    node.run("tenant", container("c0", 20, 4), placed=placement(c0=[(uuid(3), 20, 4 * MIB)]))
    node.driver.change(lambda said: said["cards"][3].update(lost=True))
    wait_until("the card to be taken out", lambda: node.allocatable()[NAMES.core] == "300")
    node.cluster.restart(NODE_PLUGIN)
    node.wait_offered(300)
    wait_until("the node to say so", lambda: [gpu.healthy for gpu in node.inventory()] == [True, True, True, False])
    node.driver.change(lambda said: said["cards"][3].update(lost=False))
    node.wait_offered(400)
    wait_until("the node to say so", lambda: all(gpu.healthy for gpu in node.inventory()))


def test_a_cordoned_card_keeps_its_pods_and_takes_no_others(node: GpuNode) -> None:
    """By an annotation of the node, and without a restart."""
    node.run("tenant", container("c0", 20, 4), placed=placement(c0=[(uuid(0), 20, 4 * MIB)]))
    node.api.patch(NODES, NODE_NAME, "", {"metadata": {"annotations": {NAMES.cordon: f"0, {uuid(1)}"}}})
    wait_until("the cards to be closed", lambda: node.allocatable()[NAMES.core] == "220")
    node.kill_container("tenant")
    node.run("next", container("c0", 20, 4), placed=placement(c0=[(uuid(0), 20, 4 * MIB)]))
    assert node.seen("next").visible in {uuid(2), uuid(3)}
    node.api.patch(NODES, NODE_NAME, "", {"metadata": {"annotations": {NAMES.cordon: None}}})
    node.wait_offered()


def test_a_node_that_another_plugin_offers_is_reported_and_not_used(node: GpuNode) -> None:
    """Two plugins for the same cards would give them away twice."""
    node.api.patch(NODES, NODE_NAME, "", {"status": {"capacity": {"nvidia.com/gpu": "4"}}}, subresource="status")
    wait_until("the cards to be closed", lambda: node.allocatable()[NAMES.core] == "0")
    wait_until(
        "the node to say so", lambda: all(gpu.cordoned and "nvidia.com/gpu" in gpu.reason for gpu in node.inventory())
    )
    node.api.patch(NODES, NODE_NAME, "", {"status": {"capacity": {"nvidia.com/gpu": None}}}, subresource="status")
    node.wait_offered()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("rm {file}", id="missing"),
        pytest.param("truncate -s 100 {file}", id="cut off"),
        pytest.param("sed -i 's/.v.:1/\"v\":0/' {file}", id="of an older version"),
        pytest.param("head -c 500 /dev/urandom > {file}", id="overwritten"),
    ],
)
def test_a_lost_book_is_rebuilt_from_the_kubelet_and_the_pods(node: GpuNode, damage: str) -> None:
    """Whatever happened to it, afterwards it says what it said."""
    node.run("one", container("c0", 20, 4), placed=placement(c0=[(uuid(2), 20, 4 * MIB)]))
    node.run("two", container("c0", 200, 2))
    before = {uid: (each["placed"], each["held"], each["containers"]) for uid, each in node.book().items()}
    node.cluster.kill(NODE_PLUGIN)
    node.cluster.enter("sh", "-c", damage.format(file="/var/lib/quotient/allocations.json"))
    node.cluster.run(NODE_PLUGIN)
    node.wait_offered()
    assert {uid: (each["placed"], each["held"], each["containers"]) for uid, each in node.book().items()} == before
    node.kill_container("one")
    assert node.seen("one").visible == uuid(2)


def test_without_the_api_server_containers_start_again(node: GpuNode) -> None:
    """Also under a plugin that was started meanwhile: it has its book, and what it knew of the pods."""
    node.run("one", container("c0", 20, 4), placed=placement(c0=[(uuid(2), 20, 4 * MIB)]))
    node.cluster.kill("kube-apiserver")
    try:
        node.cluster.restart(NODE_PLUGIN)
        wait_until("the plugin to be registered", node.is_registered)
        count = "ls /var/log/pods/default_one_*/c0/ | sort | tail -1"
        before = node.cluster.enter("sh", "-c", count).stdout
        node.cluster.enter("sh", "-c", "pkill -9 -f 'sleep [1]000000'")
        wait_until("the container to start again", lambda: node.cluster.enter("sh", "-c", count).stdout != before)
    finally:
        node.cluster.run("kube-apiserver")
        node.cluster.until("kube-apiserver to be ready", node.cluster.api_ready, "kube-apiserver")
    node.wait_whole()
    assert node.seen("one").visible == uuid(2)


def test_a_plugin_killed_again_and_again_swaps_nobody(node: GpuNode) -> None:
    """Pods that the kubelet refuses meanwhile are made again; those that run have what they were given."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    names = [f"pod-{number}" for number in range(8)]
    places = {name: placement(c0=[(uuid(number % 4), 10, (1 + number) * MIB)]) for number, name in enumerate(names)}
    waiting, refused = set(names), 0
    while waiting:
        for name in sorted(waiting):
            if name in node.pods():
                node.delete(name)
            node.bind(node.create(name, container("c0", 10, 1 + int(name[4:]))), places[name])
        time.sleep(chance.uniform(0, 0.3))
        node.cluster.restart(NODE_PLUGIN)
        node.wait_offered()
        for name in sorted(waiting):
            wait_until(f"{name} to be decided on", lambda: node.pod(name).status.phase in {"Running", "Failed"})  # noqa: B023
            if node.pod(name).status.phase == "Running":
                waiting.discard(name)
            else:
                refused += 1
    for number, name in enumerate(names):
        seen = node.seen(name)
        assert seen.devices.keys() - CONTROL == {f"/dev/nvidia{3 - number % 4}"}, f"seed {seed}, {refused} refused"
        assert seen.limits is not None
        assert (seen.limits.pod, seen.limits.memory_mib) == (name, (1 + number) * MIB)
    uids = {pod.metadata.uid for pod in node.api.list(PODS, "default").items}
    wait_until("the book to hold these pods alone", lambda: set(node.book()) == uids)


def test_a_kubelet_killed_before_it_wrote_the_answer_down(node: GpuNode) -> None:
    """It asks for both containers again, of which the book has one already; each gets its own, and nothing is empty."""
    kubelet, book = node.host_pid("kubelet"), Path(f"/proc/{node.plugin_pid()}/root/var/lib/quotient/allocations.json")
    pod = node.create("twins", container("c0", 20, 4), container("c1", 20, 4))
    before = book.stat().st_ino if book.exists() else 0
    node.bind(pod, placement(c0=[(uuid(2), 20, 4 * MIB)], c1=[(uuid(1), 20, 4 * MIB)]))
    deadline = time.monotonic() + 30
    while not book.exists() or book.stat().st_ino == before:
        assert time.monotonic() < deadline, "the kubelet never asked"
    os.kill(kubelet, signal.SIGKILL)
    wait_until("the kubelet to be gone", lambda: "kubelet" not in node.cluster.running())
    node.cluster.run("kubelet")
    node.wait_whole()
    node.wait_phase("twins", "Running")
    for name, card in (("c0", 2), ("c1", 1)):
        seen = node.seen("twins", name)
        assert seen.visible == uuid(card)
        assert seen.devices.keys() - CONTROL == {f"/dev/nvidia{3 - card}"}
        assert seen.limits is not None
        assert seen.limits.container == name


def test_a_folder_that_was_deleted_is_made_again(node: GpuNode) -> None:
    """Somebody cleaned up too much: while the plugin runs; and while it does not, and a runtime made some of it."""
    node.run("first", container("c0", 20, 4))
    node.cluster.enter("rm", "-rf", "/var/lib/quotient")
    node.run("second", container("c0", 20, 4))
    assert node.seen("second").files
    node.cluster.kill(NODE_PLUGIN)
    node.cluster.enter("rm", "-rf", "/var/lib/quotient")
    node.cluster.enter("mkdir", "-p", "/var/lib/quotient/driver/current/lib64", "/var/lib/quotient/driver/current/bin")
    node.cluster.run(NODE_PLUGIN)
    node.wait_whole()
    for name in ("first", "second"):
        node.kill_container(name)
        seen = node.seen(name)
        assert seen.files
        assert seen.limits is not None
        assert seen.limits.pod == name
    assert len(node.book()) == 2


@pytest.mark.long
def test_cards_that_a_boot_numbers_anew_are_nobody_elses(node: GpuNode) -> None:
    """What the kubelet remembers names the other's device node: such a container does not start."""
    for name, card in (("mine", 1), ("other", 2)):
        node.run(name, container("c0", 100, 160), placed=placement(c0=[(uuid(card), 100, 160 * MIB)]))
    assert node.seen("mine").devices.keys() - CONTROL == {"/dev/nvidia2"}

    def swap(said: dict[str, Any]) -> None:
        one, two = said["cards"][1], said["cards"][2]
        one["minor"], two["minor"] = two["minor"], one["minor"]

    node.driver.change(swap)
    node.reboot()
    wait_until("it to be said", lambda: "another device node" in node.cluster.kubectl("describe", "pod", "mine"))
    assert not node.container_id("mine")
    node.delete("mine", "other")
    node.run("again", container("c0", 100, 160), placed=placement(c0=[(uuid(1), 100, 160 * MIB)]))
    assert node.seen("again").devices.keys() - CONTROL == {"/dev/nvidia1"}
    node.delete("again")
    node.driver.describe()
    node.reboot()
