"""Which containers the driver limits, on which nodes, and that limits are in force before a start."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import ContainerAllocation, PodAllocation
from nodeplugin.memory_limits import (
    CannotLimit,
    LimitedContainer,
    MemoryLimitFacts,
    difference,
    limited_containers,
    limited_slices,
    offers_memory_limits,
    read_facts,
    sees_cgroups,
)
from nodeplugin.nvml import NO_LIMIT, MemoryLimits
from tests.nodeplugin.builders import bound, card, mig_part
from tests.nodeplugin.limit_bench import (
    HELD,
    ID,
    LIMIT_MIB,
    OTHER_ID,
    OTHER_TOKEN,
    OTHER_UID,
    PID,
    TOKEN,
    UID,
    LimitBench,
    pod_path,
)
from vcuda.memory_units import MIB
from vcuda.placement_annotation import GpuSlice

NOT_LIMITED = MemoryLimits(0, NO_LIMIT)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LimitBench]:
    made = LimitBench(tmp_path)
    yield made
    made.close()


# Whether a node offers it.

FACTS = MemoryLimitFacts("615.20.01", "cdi", has_hook=True, controllers=frozenset({"cpu", "dmem"}))
MIG = mig_part(1)
NOT_OFFERED: dict[str, tuple[MemoryLimitFacts, Card, str]] = {
    "an older driver": (replace(FACTS, driver="610.43.02"), card(), "the driver is 610.43.02; .* from r615 on"),
    "a driver without a version": (replace(FACTS, driver=""), card(), "the driver is of unknown version"),
    "a MIG device": (FACTS, MIG, "MIG devices"),
    "no CDI": (replace(FACTS, mode="native"), card(), "needs CDI, not native"),
    "NVIDIA's runtime": (replace(FACTS, mode="nvidia-runtime"), card(), "needs CDI, not nvidia-runtime"),
    "no hook": (replace(FACTS, has_hook=False), card(), "not installed, or is on a mount with noexec"),
    "no cgroup v2": (replace(FACTS, controllers=None), card(), "no cgroup v2"),
    "an older kernel": (replace(FACTS, controllers=frozenset({"cpu"})), card(), r"no dmem controller \(Linux 6.14"),
    "a cgroup namespace": (replace(FACTS, sees_cgroups=False), card(), "cgroup namespace of its own"),
}


@pytest.mark.parametrize(("facts", "on", "reason"), NOT_OFFERED.values(), ids=NOT_OFFERED.keys())
def test_it_is_not_offered_with_a_reason(facts: MemoryLimitFacts, on: Card, reason: str) -> None:
    """An administrator can tell what to change."""
    assert re.search(reason, offers_memory_limits(facts, on))


@pytest.mark.parametrize("version", ["615.00", "615.20.01", "620.1", "1000.1"])
def test_it_is_offered_from_r615_on(version: str) -> None:
    assert not offers_memory_limits(replace(FACTS, driver=version), card())


def test_the_facts_are_read_from_the_host(bench: LimitBench, tmp_path: Path) -> None:
    """The controllers of the root of cgroup v2, and whether the plugin shares the cgroup namespace of the host."""
    for process in ("self", "1"):
        (bench.proc / process / "ns").mkdir(parents=True)
        (bench.proc / process / "ns/cgroup").symlink_to("cgroup:[4026531835]")
    facts = read_facts(bench.host, "615.1", "cdi", has_hook=True, proc=bench.proc)
    assert facts == MemoryLimitFacts("615.1", "cdi", has_hook=True, controllers=frozenset({"cpu", "memory", "dmem"}))
    assert read_facts(tmp_path / "nowhere", "", "native", has_hook=False).controllers is None
    (bench.proc / "self/ns/cgroup").unlink()
    assert not sees_cgroups(bench.proc)
    (bench.proc / "self/ns/cgroup").symlink_to("cgroup:[1]")
    assert not sees_cgroups(bench.proc)


# Which containers have it.


def test_only_shares_of_cards_are_limited() -> None:
    """Whole cards have nothing to limit, MIG devices their own memory; a card that is gone fails at the start."""
    node_cards = NodeCards()
    node_cards.update([card(0), card(1), mig_part(1)])
    share, whole = GpuSlice("GPU-0", 99, 1024), GpuSlice("GPU-1", 100, 40960)
    gone = GpuSlice("GPU-9", 10, 512)
    assert limited_slices([share, whole, GpuSlice("MIG-1", 50, 512), gone], node_cards) == (share, gone)


def test_containers_are_known_by_their_tokens() -> None:
    """Those for which the limit was chosen; adopted ones have no token."""
    node_cards = NodeCards()
    node_cards.update([card(0)])
    share = (GpuSlice("GPU-0", 30, 1024),)
    pod = PodAllocation(
        uid=UID,
        namespace="team",
        name="train",
        placed={"a": share, "b": share, "adopted": share},
        usage={},
        containers={
            "a": ContainerAllocation("token-a"),
            "b": ContainerAllocation("token-b"),
            "adopted": ContainerAllocation(""),
            "unplaced": ContainerAllocation("token-u"),
        },
    )
    found = limited_containers({UID: pod}, node_cards, lambda _, name: name != "b")
    assert found == {"token-a": LimitedContainer(UID, "team/train", "a", {"GPU-0": 1024})}


# Before a start.


def test_the_share_is_the_hard_limit_of_the_leaf(bench: LimitBench) -> None:
    """On each of the container's cards; nothing is reserved, and no other cgroup changes."""
    bench.containers[TOKEN] = LimitedContainer(UID, "team/train", "a", {"GPU-0": LIMIT_MIB, "GPU-1": 512})
    bench.limiter.apply(TOKEN, PID, ID)
    assert bench.limits() == HELD
    assert bench.limits("GPU-1") == MemoryLimits(0, 512 * MIB)
    assert bench.limits(leaf=bench.leaf.parent) == NOT_LIMITED


def test_the_limit_is_renewed_at_each_start(bench: LimitBench) -> None:
    """A container that starts again has a new cgroup, which has no limit."""
    bench.limiter.apply(TOKEN, PID, ID)
    again = bench.start_process(PID + 1, pod_path(container_id=OTHER_ID))
    assert bench.limits(leaf=again) == NOT_LIMITED
    bench.limiter.apply(TOKEN, PID + 1, OTHER_ID)
    assert bench.limits(leaf=again) == HELD


REFUSED: dict[str, tuple[str, int, str, str]] = {
    "an unknown token": ("c" * 16, PID, ID, "no share of GPU memory is allocated for this token"),
    "the token of another pod": (OTHER_TOKEN, PID, ID, f"is of pod {UID}, container {ID}: not of this token"),
    "another container's id": (TOKEN, PID, OTHER_ID, "not of this token"),
    "a process that is gone": (TOKEN, PID + 1, ID, "cannot be read"),
    "a process outside of pods": (TOKEN, 1, ID, "is not that of a container"),
    "a path out of the hierarchy": (TOKEN, 2, ID, "cannot see"),
}


@pytest.mark.parametrize(("token", "pid", "container_id", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_container_starts_only_with_its_own_token(
    bench: LimitBench, token: str, pid: int, container_id: str, reason: str
) -> None:
    """And nothing is set for another."""
    bench.start_process(1, "/system.slice/containerd.service")
    bench.write_process(2, f"0::/..{pod_path()}\n")
    with pytest.raises(CannotLimit, match=reason):
        bench.limiter.apply(token, pid, container_id)
    assert bench.limits() == bench.limits("GPU-1") == NOT_LIMITED


def test_a_pod_cannot_pose_as_another_by_the_names_of_its_own_cgroups(bench: LimitBench) -> None:
    """A pod with a kubelet inside can have cgroups with any names; the outermost known pod counts."""
    inner = f"{pod_path(OTHER_UID, OTHER_ID)}/kubepods/pod{UID}/{ID}"
    bench.start_process(PID, inner)
    with pytest.raises(CannotLimit, match=f"is of pod {OTHER_UID}, container {OTHER_ID}"):
        bench.limiter.apply(TOKEN, PID, ID)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "the driver refuses": ({"failures": {"setMemoryLimits": "not_supported"}}, "Not Supported"),
    "it cannot be read back": ({"failures": {"getMemoryLimits": "unknown"}}, "Unknown Error"),
    "the driver ignores it": ({"ignoresMemoryLimits": True}, "the driver has the hard limit none"),
    "the card is lost": ({"lost": True}, "GPU is lost"),
}


@pytest.mark.parametrize(("changes", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_without_a_limit_in_force_nothing_starts(bench: LimitBench, changes: dict[str, Any], reason: str) -> None:
    """The reason names card and cgroup."""
    bench.change(**changes)
    with pytest.raises(CannotLimit, match=f"GPU-0.*{reason}") as refused:
        bench.limiter.apply(TOKEN, PID, ID)
    assert str(bench.leaf) in str(refused.value)


def test_a_controller_that_cannot_be_enabled_is_a_reason(bench: LimitBench) -> None:
    """As where a cgroup above has processes of its own."""
    control = bench.leaf.parent / "cgroup.subtree_control"
    control.unlink()
    control.mkdir()
    with pytest.raises(CannotLimit, match="the dmem controller cannot be enabled"):
        bench.limiter.apply(TOKEN, PID, ID)


def test_without_cgroup_v2_nothing_starts(bench: LimitBench) -> None:
    (bench.root / "cgroup.controllers").unlink()
    with pytest.raises(CannotLimit, match="no cgroup v2"):
        bench.limiter.apply(TOKEN, PID, ID)


def test_a_container_without_a_share_is_not_taken_for_a_limited_one(bench: LimitBench) -> None:
    """As if its card had been put into MIG mode since the hook was given to it."""
    bench.containers[TOKEN] = LimitedContainer(UID, "team/train", "a", {})
    with pytest.raises(CannotLimit, match="no share of GPU memory"):
        bench.limiter.apply(TOKEN, PID, ID)


DIFFERENCES = {
    "the same": (HELD, True),
    "rounded down to a page": (MemoryLimits(0, HELD.hard_bytes - 2 * MIB + 1), True),
    "a page less": (MemoryLimits(0, HELD.hard_bytes - 2 * MIB), False),
    "a byte more": (MemoryLimits(0, HELD.hard_bytes + 1), False),
    "none": (NOT_LIMITED, False),
    "a reservation": (MemoryLimits(1, HELD.hard_bytes), False),
}


@pytest.mark.parametrize(("found", "is_held"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_the_limit_that_was_set_is_compared(found: MemoryLimits, *, is_held: bool) -> None:
    """The driver may round it down to its pages, and never up."""
    assert (difference(found, HELD.hard_bytes) == "") is is_held


# After a start.

PODS = {UID: replace(bound("train"), container_ids={ID: "a"})}


def test_limits_are_checked_when_the_plugin_starts_again(bench: LimitBench) -> None:
    """They belong to the cgroup, so nothing is set again; what is missing is reported."""
    bench.limiter.apply(TOKEN, PID, ID)
    assert bench.limiter.verify(PODS) == []
    bench.driver.clear_memory_limits("GPU-0", bench.leaf)
    with capture_logs() as logs:
        (problem,) = bench.limiter.verify(PODS)
    assert problem.startswith("pod team/train, container a, GPU GPU-0: the driver has the hard limit none")
    assert [entry["event"] for entry in logs] == ["memory_limit_not_in_force"]
    assert bench.limits() == NOT_LIMITED


def test_a_cgroup_below_a_limited_one_is_limited(bench: LimitBench) -> None:
    """Programs of a container may make some; the problem of several processes is reported once."""
    bench.limiter.apply(TOKEN, PID, ID)
    for pid in (8, 9):
        bench.start_process(pid, f"{pod_path()}/init.scope/{pid}")
    assert bench.limiter.verify(PODS) == []
    bench.driver.clear_memory_limits("GPU-0", bench.leaf)
    assert len(bench.limiter.verify(PODS)) == 1


def test_a_limit_that_cannot_be_read_is_reported(bench: LimitBench) -> None:
    bench.change(failures={"getMemoryLimits": "unknown"})
    (problem,) = bench.limiter.verify(PODS)
    assert "Unknown Error" in problem


@pytest.mark.parametrize("missing", ["the pod", "the container", "cgroup v2", "all containers"])
def test_what_is_not_known_is_not_checked(bench: LimitBench, missing: str) -> None:
    """A pod's status arrives late, and other pods have no limit."""
    pods = {} if missing == "the pod" else {UID: bound("train")} if missing == "the container" else PODS
    if missing == "cgroup v2":
        (bench.root / "cgroup.controllers").unlink()
    if missing == "all containers":
        bench.containers.clear()
    assert bench.limiter.verify(pods) == []


@pytest.mark.parametrize("is_restarted", [False, True], ids=["the same plugin", "a plugin that was started again"])
def test_nothing_stays_reserved_for_a_container_that_has_ended(bench: LimitBench, *, is_restarted: bool) -> None:
    """An administrator may have set a soft limit. The hard limit stays: programs may still run."""
    bench.limiter.apply(TOKEN, PID, ID)
    if is_restarted:
        bench.limiter._leaves.clear()
        bench.limiter.verify(PODS)
    reserved = MemoryLimits(1024, HELD.hard_bytes)
    bench.driver.set_memory_limits("GPU-0", bench.leaf, reserved)
    bench.limiter.release_ended()
    assert bench.limits() == reserved
    del bench.containers[TOKEN]
    bench.limiter.release_ended()
    assert bench.limits() == HELD


def test_a_cgroup_that_is_gone_has_nothing_reserved(bench: LimitBench) -> None:
    """A driver that fails is logged only if the cgroup is there."""
    bench.limiter.apply(TOKEN, PID, ID)
    del bench.containers[TOKEN]
    bench.change(failures={"getMemoryLimits": "unknown"})
    with capture_logs() as logs:
        bench.limiter.release_ended()
        bench.limiter.release_ended()
    assert [entry["event"] for entry in logs] == ["memory_reservation_kept"]
