"""Every interleaving: replicas, controllers, kills and pauses at any call to the cluster, and the quota holds."""

import random
import uuid
from contextlib import suppress
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.errors import ApiError, NotFound
from cluster.events import EventRecorder
from cluster.in_memory import InMemoryCluster
from cluster.objects import CONFIG_MAPS, NAMESPACES, PODS, ConfigMap, Metadata
from controller.quota_controller import QuotaController
from ledger.committing import LedgerCommitter, PendingChange
from ledger.ledger_store import LedgerStore
from ledger.quota_cache import QuotaCache
from tests.controller.stepping import Actor, Stepping
from vcuda.amounts import CORES, MEMORY, Amounts
from vcuda.amounts import PODS as COUNT
from vcuda.decision import Unavailable
from vcuda.ledger import ChargeRequest, ChargeResult, Ledger, LedgerState, decode_ledger, pack_uid, reserve
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX, Names
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions
from vcuda.scheme import build_scheme

TEAM, SYSTEM = "team", "quotient-system"
NAMES = Names()
# What an API server waits for an answer, and how long after it a pod may still appear.
CALL_S, LATEST_S = 10, 34
QUOTAS = {
    "wide": "types: {A100: {cores: 200}, T4: {cores: 100}, '*': {pods: 5}}",
    "tight": "types: {A100: {cores: 100}, T4: {cores: 50}}",
}
SIZES = st.tuples(st.sampled_from([100, 50, 10]), st.sampled_from([("A100",), (), ("T4",)]))
HARD = {"wide": ({"A100": 200, "T4": 100}, 5), "tight": ({"A100": 100, "T4": 50}, 1000)}


class Asked:
    """A pod that somebody wants to create."""

    def __init__(self, number: int, cores: int, models: tuple[str, ...], at: float) -> None:
        self.uid = str(uuid.UUID(int=random.Random(number).getrandbits(128)))
        self.cores, self.models, self.at = cores, models, at
        self.answered_at: float | None = None


def manifest(asked: Asked, name: str) -> dict[str, Any]:
    notes = {NAMES.use_models: ",".join(asked.models)} if asked.models else {}
    limits = {NAMES.core: str(asked.cores), NAMES.memory: "1"}
    return {
        "metadata": {"name": name, "namespace": TEAM, "annotations": notes},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}}]},
    }


class World(RuleBasedStateMachine):
    """One namespace, three webhooks, two controllers that both believe to lead, an API server that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.memory = InMemoryCluster()
        self.cluster = Stepping(self.memory)
        for name in (TEAM, SYSTEM):
            self.memory.create(NAMESPACES, {"metadata": {"name": name}})
        self.actors: list[Actor] = []
        self.flying: list[Asked] = []
        self.asked = 0
        self.was_lost = False
        self.quota = "wide"
        self.cashiers = [LedgerCommitter(LedgerStore(self.cluster, SYSTEM), lambda: self.now) for _ in range(3)]
        self.keepers = [self.new_keeper() for _ in range(2)]

    @initialize()
    def begin(self) -> None:
        """Write a quota, and let the first controller make the ledger."""
        metadata = Metadata(name="q", namespace=TEAM, labels={NAMES.quota_label: "true"})
        self.memory.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data={"quota.yaml": QUOTAS[self.quota]}))
        for quota_controller in self.keepers:
            self.see(quota_controller)
        self.keepers[0].look_at(TEAM)

    def new_keeper(self) -> QuotaController:
        scheme = build_scheme()
        follower = QuotaCache(self.cluster, scheme)
        recorder = EventRecorder(self.memory, "test")
        return QuotaController(
            self.cluster, scheme, SYSTEM, follower, recorder, clock=lambda: self.now, wall=lambda: self.now
        )

    def see(self, quota_controller: QuotaController) -> None:
        """Bring a controller's view of the cluster up to date, as its watches do."""
        followed: list[Any] = [*quota_controller.caches.informers, *quota_controller.caches.quotas._informers]
        for informer in followed:
            listing = self.memory.list(informer._kind, informer._namespace, informer._selector)
            informer._replace(filter(None, map(informer._try_convert, listing.items)))
            informer._version = int(listing.resource_version)
            informer._synced.set()

    def ledger(self) -> Ledger | None:
        try:
            found = self.memory.get(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)
        except NotFound:
            return None
        return decode_ledger(found.data[LEDGER_KEY])

    def start(self, name: str, work: Any) -> None:
        def play(actor: Actor) -> None:
            self.cluster.played_by(actor)
            work()

        self.actors.append(Actor(name, play))

    @rule(replica=st.integers(0, 2), sizes=st.lists(SIZES, min_size=1, max_size=3))
    @precondition(lambda self: len(self.actors) < 6)
    def ask(self, replica: int, sizes: list[tuple[int, tuple[str, ...]]]) -> None:
        """Pods are to be created, at the same moment, by one replica."""
        pods = [Asked(self.asked + index, *size, self.now) for index, size in enumerate(sizes)]
        self.asked += len(pods)
        waiters = [PendingChange(self.change(each), self.now + CALL_S, self.answer(each)) for each in pods]
        committer = self.cashiers[replica]
        self.start(f"webhook {replica}", lambda: committer._commit(TEAM, waiters))

    def change(self, asked: Asked) -> Any:
        demand = lambda _: Amounts({CORES: asked.cores, MEMORY: 256, COUNT: 1})  # noqa: E731
        claim = ChargeRequest(pack_uid(asked.uid), demand, PodOptions(models=asked.models), {})

        def change(ledger: Ledger) -> ChargeResult:
            return reserve(ledger, claim, int(self.now), Mode.ENFORCE)

        return change

    def answer(self, asked: Asked) -> Any:
        def done(outcome: ChargeResult | Exception) -> None:
            # The API server does not wait for ever: what is answered too late is refused by it.
            if isinstance(outcome, ChargeResult) and not outcome.reasons and self.now - asked.at <= CALL_S:
                asked.answered_at = self.now
                self.flying.append(asked)

        return done

    @rule(data=st.data())
    @precondition(lambda self: self.actors)
    def go_on(self, data: st.DataObject) -> None:
        """Somebody makes a step."""
        actor = data.draw(st.sampled_from(self.actors))
        for _ in range(data.draw(st.sampled_from([1, 2, 3, 5, 100]))):
            actor.step()
        self.actors = [each for each in self.actors if not each.is_over]

    @rule()
    @precondition(lambda self: self.actors)
    def all_go_on(self) -> None:
        """Nobody is held up."""
        for actor in self.actors:
            while not actor.is_over:
                actor.step()
        self.actors = []

    @rule()
    def all_land(self) -> None:
        """Everything that was admitted appears."""
        for asked in self.flying:
            self.appear(asked)
        self.flying = []

    @rule(data=st.data())
    @precondition(lambda self: self.actors)
    def kill(self, data: st.DataObject) -> None:
        """Somebody dies between two steps."""
        actor = data.draw(st.sampled_from(self.actors))
        actor.kill()
        self.actors.remove(actor)
        if actor.name.startswith("webhook"):
            index = int(actor.name.split()[1])
            self.cashiers[index] = LedgerCommitter(LedgerStore(self.cluster, SYSTEM), lambda: self.now)

    @rule(data=st.data(), lands=st.booleans())
    @precondition(lambda self: self.flying)
    def land(self, data: st.DataObject, lands: bool) -> None:  # noqa: FBT001
        """A pod appears, or is refused by somebody after us."""
        asked = data.draw(st.sampled_from(self.flying))
        self.flying.remove(asked)
        if lands:
            self.appear(asked)

    def appear(self, asked: Asked) -> None:
        if asked.answered_at is not None and self.now - asked.answered_at <= LATEST_S:
            made = manifest(asked, f"p-{asked.uid[:8]}")
            stored = self.memory._create(PODS, {"apiVersion": "v1", "kind": "Pod", **made}, dry_run=True)
            stored["metadata"]["uid"] = asked.uid
            self.memory._store.put(("pods", TEAM, made["metadata"]["name"]), stored)

    @rule(data=st.data(), how=st.sampled_from(["delete", "succeed"]))
    def end_a_pod(self, data: st.DataObject, how: str) -> None:
        """A pod ends, or is deleted."""
        pods = self.memory.list(PODS, TEAM).items
        if not pods:
            return
        pod = data.draw(st.sampled_from(pods))
        if how == "delete":
            self.memory.delete(PODS, pod.metadata.name, TEAM, grace_s=0)
        else:
            self.memory.patch(PODS, pod.metadata.name, TEAM, {"status": {"phase": "Succeeded"}}, subresource="status")

    @rule(index=st.integers(0, 1))
    def watch(self, index: int) -> None:
        """News reach a controller; until then its view is old."""
        self.see(self.keepers[index])

    @rule()
    def all_calm_down(self) -> None:
        """The first controller sees and does everything there is to do; the second may still live in the past."""
        self.all_go_on()
        self.all_land()
        self.see(self.keepers[0])
        self.look(self.keepers[0])

    @rule(index=st.integers(0, 1))
    @precondition(lambda self: len(self.actors) < 6)
    def keep(self, index: int) -> None:
        """A controller looks at the namespace, with whatever view it has."""
        quota_controller = self.keepers[index]
        if quota_controller.caches.synced:
            self.start(f"controller {index}", lambda: self.look(quota_controller))

    def look(self, quota_controller: QuotaController) -> None:
        with suppress(ApiError, Unavailable):  # it would try again
            quota_controller.look_at(TEAM)

    @rule(index=st.integers(0, 1))
    def restart(self, index: int) -> None:
        """A controller is replaced by one that remembers nothing."""
        self.keepers[index] = self.new_keeper()
        self.see(self.keepers[index])

    @rule(seconds=st.sampled_from([1, 5, 20, 46]))
    def wait(self, seconds: int) -> None:
        """Time passes; actors may be in the middle of something."""
        self.now += seconds

    @rule(unlikely=st.integers(0, 5))
    def lose_the_ledger(self, unlikely: int) -> None:
        """Somebody deletes it."""
        if unlikely:
            return
        self.was_lost = True
        with suppress(NotFound):
            self.memory.delete(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)

    @invariant()
    def no_more_runs_than_is_allowed(self) -> None:
        """Of the pods that exist, whatever the ledger says."""
        cores, pods = HARD[self.quota]
        alive = [pod for pod in self.memory.list(PODS, TEAM).items if pod.status.phase not in ("Succeeded", "Failed")]
        # A pod of several models fits if some assignment does: tried in full, for they are few.
        assert self.fits(alive, dict(cores)), f"{len(alive)} pods are too many"
        assert len(alive) <= pods

    def fits(self, pods: list[Any], room: dict[str, int]) -> bool:
        if not pods:
            return True
        first, *rest = pods
        wanted = first.metadata.annotations.get(NAMES.use_models)
        size = int(first.spec.containers[0].resources.limits[NAMES.core])
        return any(
            room[model] >= size and self.fits(rest, room | {model: room[model] - size})
            for model in ([wanted] if wanted else room)
        )

    @invariant()
    def no_more_is_granted_than_is_allowed(self) -> None:
        """By the ledger."""
        ledger = self.ledger()
        if ledger is not None:
            usage = ledger.usage
            assert all(usage.taken[key] <= hard for key, hard in usage.hard.items())

    def teardown(self) -> None:
        """When everything has calmed down, the ledger says what runs, and nothing else."""
        for actor in self.actors:
            actor.kill()
        for _ in range(4):
            self.now += 60
            self.see(self.keepers[0])
            self.keepers[0].look_at(TEAM)
        ledger = self.ledger()
        assert ledger is not None
        assert ledger.state is LedgerState.OPEN
        assert list(ledger.reservations()) == []
        alive = {
            pack_uid(pod.metadata.uid)
            for pod in self.memory.list(PODS, TEAM).items
            if pod.status.phase not in ("Succeeded", "Failed")
        }
        # Made anew, a ledger may choose other models for pods that leave the choice; one may then have to wait.
        waiting = set(self.keepers[0]._notes.of(TEAM).waiting)
        assert self.was_lost or not waiting
        assert set(ledger.pods()) == alive - waiting


# Under the profile for full-size runs, as many as that one says.
EXAMPLES = 60 if settings().max_examples <= 100 else settings().max_examples
World.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
TestEveryInterleaving = World.TestCase
