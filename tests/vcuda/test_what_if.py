"""What-if questions on a cluster in memory."""

import pytest

from simulator.replay import table_of
from simulator.trace_files import TraceNode
from vcuda.namespace_policy import Mode
from vcuda.placement_costs import prior_estimate
from vcuda.placement_strategies import PlacementStrategy
from vcuda.quota import parse_quota
from vcuda.quota_usage import QuotaUsage
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.trial_cluster import TrialCluster, TrialPod
from vcuda.vocabulary import Share
from vcuda.what_if import Missing, try_replicas, what_if


def cluster_of(*nodes: TraceNode, quota: str = "", mode: Mode = Mode.ENFORCE) -> TrialCluster:
    usages = {"team": QuotaUsage([parse_quota(quota, "team/q")])} if quota else {}
    return TrialCluster(
        table_of(nodes),
        prior_estimate(),
        unit_mib=256,
        strategy=PlacementStrategy.FRAGMENTATION,
        usages=usages,
        cluster_mode=mode,
    )


def node(name: str = "n", gpus: int = 4) -> TraceNode:
    return TraceNode(name, 64_000, 256_000, gpus, "T4")


def pod(cores: int) -> TrialPod:
    share = Share(cores, memory_follows_cores=cores < 100)
    return TrialPod(PodRequest((ContainerRequest("c", Role.APP, share, "vcuda"),)), "team")


def test_a_question_changes_nothing() -> None:
    """Not the GPUs, the CPU and memory, nor what is used of quotas."""
    cluster = cluster_of(node(), quota="types: {T4: {cores: 300}}")
    answers = [what_if(cluster, pod(100), 5) for _ in range(3)]
    assert [len(each.placed) for each in answers] == [3, 3, 3]
    assert cluster.table.free_cores() == 400
    assert len(try_replicas(cluster, pod(100), 2).placed) == 2
    assert len(what_if(cluster, pod(100), 5).placed) == 1


@pytest.mark.parametrize(
    ("cluster", "cores", "missing"),
    [
        (cluster_of(), 50, Missing.NODES),
        (cluster_of(node()), 1600, Missing.ROOM),
        (cluster_of(node(), quota="types: {T4: {cores: 10}}"), 50, Missing.QUOTA),
        (cluster_of(node(), quota="pools: [training]"), 50, Missing.POOL),
    ],
    ids=["no nodes", "more GPUs than a node has", "quota", "pool"],
)
def test_what_is_missing(cluster: TrialCluster, cores: int, missing: Missing) -> None:
    assert what_if(cluster, pod(cores)).missing is missing


def test_in_audit_mode_quotas_only_say_what_they_would_refuse() -> None:
    cluster = cluster_of(node(), quota="types: {T4: {cores: 150}}", mode=Mode.AUDIT)
    found = what_if(cluster, pod(100), 5)
    assert (len(found.placed), found.admitted, found.missing) == (4, 5, Missing.ROOM)
    assert "used 0, reserved 100, hard 150: short by 50" in found.audited[0].message
    assert not found.reasons
