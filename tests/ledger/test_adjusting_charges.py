"""The smallest caller of what a scheduler will call: before it binds a pod, its charge becomes what it will hold."""

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
    """Binds pods, in its imagination; no pod is bound that has not its charge in the ledger."""

    def __init__(self, cluster: InMemoryCluster) -> None:
        self._ledger_store = LedgerStore(cluster, SYSTEM)
        self._committer = LedgerCommitter(self._ledger_store).start()
        self.bound: dict[PodKey, Charge] = {}

    def bind(self, pod: PodKey, charge: Charge) -> ChargeResult:
        verdict = self._committer.apply(TEAM, partial(adjust_charge, pod=pod, charge=charge), 5)
        if not verdict.reasons:
            self.bound[pod] = charge
        return verdict

    def ledger(self) -> Ledger:
        page = self._ledger_store.read(TEAM)
        assert page is not None
        return page.ledger

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
    made = Binder(cluster)
    yield made
    made.stop()


def test_a_pod_is_bound_with_its_charge_or_not_at_all(binder: Binder) -> None:
    """Obtained where it had none, lowered to the card it got, moved to another model, refused without room."""
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
        pod: (held, None) for pod, held in binder.bound.items()
    }
    assert ledger.usage.taken["team/q", "A100", CORES] == 70
