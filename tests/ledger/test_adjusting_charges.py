"""A minimal caller of what the scheduler calls before a bind: the pod's charge becomes what it will really hold."""

import uuid
from collections.abc import Iterator
from functools import partial

import pytest

from cluster.in_memory import InMemoryCluster
from cluster.objects import NAMESPACES
from ledger.committing import LedgerCommitter
from ledger.ledger_store import LedgerStore
from vcuda.dimensions import CORES, MEMORY
from vcuda.ledger import ChargeResult, Ledger, LedgerState, PodKey, adjust_charge, pack_uid
from vcuda.quota import parse_quota
from vcuda.quota_usage import Charge

SYSTEM, TEAM = "quotient-system", "team"


class Binder:
    """Records pods as bound once their charge is in the ledger."""

    def __init__(self, cluster: InMemoryCluster) -> None:
        self._ledger_store = LedgerStore(cluster, SYSTEM)
        self._committer = LedgerCommitter(self._ledger_store).start()
        self.bound: dict[PodKey, Charge] = {}

    def bind(self, pod: PodKey, charge: Charge) -> ChargeResult:
        result = self._committer.apply(TEAM, partial(adjust_charge, pod=pod, charge=charge), 5)
        if not result.reasons:
            self.bound[pod] = charge
        return result

    def ledger(self) -> Ledger:
        stored = self._ledger_store.read(TEAM)
        assert stored is not None
        return stored.ledger

    def stop(self) -> None:
        self._committer.stop()


@pytest.fixture
def binder() -> Iterator[Binder]:
    """A binder in a namespace with 100 cores of A100 and 50 of T4."""
    cluster = InMemoryCluster()
    cluster.create(NAMESPACES, {"metadata": {"name": SYSTEM}})
    ledger = Ledger("uid", LedgerState.OPEN)
    ledger.set_quotas([parse_quota("types: {A100: {cores: 100, memory: 80Gi}, T4: {cores: 50}}", "team/q")], 1)
    LedgerStore(cluster, SYSTEM).create(TEAM, ledger)
    binder = Binder(cluster)
    yield binder
    binder.stop()


def test_a_pod_is_bound_with_its_charge_or_not_at_all(binder: Binder) -> None:
    """A missing charge is obtained, lowered to the card the pod gets, moved to another model, or refused when full."""
    first, second, third = (pack_uid(str(uuid.uuid4())) for _ in range(3))
    assert not binder.bind(first, Charge("A100-SXM4-80GB", 60, 81920)).reasons
    assert not binder.bind(first, Charge("A100-SXM4-40GB", 60, 40960)).reasons
    assert binder.ledger().usage.taken["team/q", "A100", MEMORY] == 40960
    assert not binder.bind(second, Charge("A100", 40, 0)).reasons
    refused = binder.bind(third, Charge("A100", 10, 0))
    assert refused.reasons[0].numbers == {"asked": 10, "used": 100, "reserved": 0, "hard": 100, "short": 10}
    assert not binder.bind(second, Charge("T4", 40, 0)).reasons
    assert not binder.bind(third, Charge("A100", 10, 0)).reasons
    ledger = binder.ledger()
    assert {pod: ledger.entry(pod) for pod in ledger.pods()} == {
        pod: (charge, None) for pod, charge in binder.bound.items()
    }
    assert ledger.usage.taken["team/q", "A100", CORES] == 70
