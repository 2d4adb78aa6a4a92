"""Interleavings of webhook replicas and controllers, killed and paused at any call to the cluster: the quota holds."""

import itertools
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
from ledger.committing import LedgerCommitter
from ledger.ledger_store import LedgerStore
from ledger.quota_cache import QuotaCache
from tests.controller.stepping import Actor, SteppingCluster
from vcuda.amounts import Amounts
from vcuda.decision import Unavailable
from vcuda.dimensions import CORES, MEMORY
from vcuda.dimensions import PODS as COUNT
from vcuda.ledger import ChargeRequest, ChargeResult, Ledger, LedgerState, decode_ledger, pack_uid, reserve
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX, Names
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions
from vcuda.scheme import build_scheme

TEAM, SYSTEM = "team", "quotient-system"
MAX_ATTEMPTS = 30
NAMES = Names()
# How long an API server waits for the webhook, and how long after its answer a pod may still be created.
CALL_S, MAX_CREATE_DELAY_S = 10, 34
QUOTAS = {
    "wide": "types: {A100: {cores: 200}, T4: {cores: 100}, '*': {pods: 5}}",
    "tight": "types: {A100: {cores: 100}, T4: {cores: 50}}",
}
SIZES = st.tuples(st.sampled_from([100, 50, 10]), st.sampled_from([("A100",), (), ("T4",)]))
HARD = {"wide": ({"A100": 200, "T4": 100}, 5), "tight": ({"A100": 100, "T4": 50}, 1000)}


def commit_all(committer: LedgerCommitter) -> None:
    """Commit what is pending, and again after conflicts; what waits for a ledger stays for the next time."""
    for _ in range(MAX_ATTEMPTS):
        if not committer.commit_pending(TEAM):
            return


class PodToCreate:
    """A pod whose creation was requested; it fails if another pod has the name."""

    def __init__(self, number: int, cores: int, models: tuple[str, ...], at: float, taken_name: str) -> None:
        self.uid = str(uuid.UUID(int=random.Random(number).getrandbits(128)))
        self.name, self.fails = taken_name or f"p-{self.uid[:8]}", bool(taken_name)
        self.cores, self.models, self.at = cores, models, at
        self.answered_at: float | None = None


def manifest(pod: PodToCreate, name: str) -> dict[str, Any]:
    annotations = {NAMES.use_models: ",".join(pod.models)} if pod.models else {}
    limits = {NAMES.core: str(pod.cores), NAMES.memory: "1"}
    return {
        "metadata": {"name": name, "namespace": TEAM, "annotations": annotations},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}}]},
    }


class World(RuleBasedStateMachine):
    """One namespace, three webhook replicas, two controllers that both act as leader, and a slow API server."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.memory = InMemoryCluster()
        self.cluster = SteppingCluster(self.memory)
        for name in (TEAM, SYSTEM):
            self.memory.create(NAMESPACES, {"metadata": {"name": name}})
        self.actors: list[Actor] = []
        # Admitted, and not created yet.
        self.in_flight: list[PodToCreate] = []
        self.requested = 0
        self.ledger_was_lost = False
        self.quota = "wide"
        self.committers = [self.new_committer() for _ in range(3)]
        self.controllers = [self.new_controller() for _ in range(2)]

    @initialize()
    def begin(self) -> None:
        """Create a quota, and let the first controller create the ledger."""
        metadata = Metadata(name="q", namespace=TEAM, labels={NAMES.quota_label: "true"})
        self.memory.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data={"quota.yaml": QUOTAS[self.quota]}))
        for quota_controller in self.controllers:
            self.sync(quota_controller)
        self.controllers[0].reconcile(TEAM)

    def new_committer(self) -> LedgerCommitter:
        # Each look at this clock is a minute later: no turn is waited for, so every interleaving is possible.
        minutes_ms = itertools.count(step=60_000)
        return LedgerCommitter(LedgerStore(self.cluster, SYSTEM), lambda: self.now, lambda: next(minutes_ms))

    def new_controller(self) -> QuotaController:
        scheme = build_scheme()
        quotas = QuotaCache(self.cluster, scheme)
        recorder = EventRecorder(self.memory, "test")
        return QuotaController(
            self.cluster, scheme, SYSTEM, quotas, recorder, clock=lambda: self.now, wall=lambda: self.now
        )

    def sync(self, quota_controller: QuotaController) -> None:
        """Bring a controller's caches up to date, as its watches do."""
        informers: list[Any] = [*quota_controller.caches.informers, *quota_controller.caches.quotas._informers]
        for informer in informers:
            listing = self.memory.list(informer._kind, informer._namespace, informer._selector)
            informer._replace(filter(None, map(informer._try_convert, listing.items)))
            informer._version = int(listing.resource_version)
            informer._synced.set()

    def ledger(self) -> Ledger | None:
        try:
            config_map = self.memory.get(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)
        except NotFound:
            return None
        return decode_ledger(config_map.data[LEDGER_KEY])

    def start(self, name: str, work: Any) -> None:
        def act(actor: Actor) -> None:
            self.cluster.act_as(actor)
            work()

        self.actors.append(Actor(name, act))

    @rule(replica=st.integers(0, 2), sizes=st.lists(SIZES, min_size=1, max_size=3), reuse=st.booleans())
    @precondition(lambda self: len(self.actors) < 6)
    def admit(self, replica: int, sizes: list[tuple[int, tuple[str, ...]]], reuse: bool) -> None:  # noqa: FBT001
        """One replica gets several pods to admit, in one batch; they may have the name of an existing pod."""
        existing = [pod.metadata.name for pod in self.memory.list(PODS, TEAM).items] if reuse else []
        taken = existing[0] if existing else ""
        pods = [PodToCreate(self.requested + index, *size, self.now, taken) for index, size in enumerate(sizes)]
        self.requested += len(pods)
        committer = self.committers[replica]
        for pod in pods:
            committer.submit(TEAM, self.charge(pod), CALL_S, self.answer(pod))
        self.start(f"webhook {replica}", lambda: commit_all(committer))

    def charge(self, pod: PodToCreate) -> Any:
        demand = lambda _: Amounts({CORES: pod.cores, MEMORY: 256, COUNT: 1})  # noqa: E731
        request = ChargeRequest(pack_uid(pod.uid), demand, PodOptions(models=pod.models), {}, name=pod.name)

        def change(ledger: Ledger) -> ChargeResult:
            return reserve(ledger, request, int(self.now), Mode.ENFORCE)

        return change

    def answer(self, pod: PodToCreate) -> Any:
        def on_result(result: ChargeResult | Exception) -> None:
            # The API server refuses a pod whose webhook answers after the timeout.
            if isinstance(result, ChargeResult) and not result.reasons and self.now - pod.at <= CALL_S:
                pod.answered_at = self.now
                self.in_flight.append(pod)

        return on_result

    @rule(data=st.data())
    @precondition(lambda self: self.actors)
    def step_one(self, data: st.DataObject) -> None:
        """One actor makes some steps."""
        actor = data.draw(st.sampled_from(self.actors))
        for _ in range(data.draw(st.sampled_from([1, 2, 3, 5, 100]))):
            actor.step()
        self.actors = [each for each in self.actors if not each.is_over]

    @rule()
    @precondition(lambda self: self.actors)
    def finish_all(self) -> None:
        """All actors run to their end, one after another."""
        for actor in self.actors:
            while not actor.is_over:
                actor.step()
        self.actors = []

    @rule()
    def create_all(self) -> None:
        """All admitted pods are created."""
        for pod in self.in_flight:
            self.store(pod)
        self.in_flight = []

    @rule(data=st.data())
    @precondition(lambda self: self.actors)
    def kill(self, data: st.DataObject) -> None:
        """An actor is killed between two steps; a webhook replica starts again with an empty cache."""
        actor = data.draw(st.sampled_from(self.actors))
        actor.kill()
        self.actors.remove(actor)
        if actor.name.startswith("webhook"):
            index = int(actor.name.split()[1])
            self.committers[index] = self.new_committer()

    @rule(data=st.data(), is_created=st.booleans())
    @precondition(lambda self: self.in_flight)
    def create_one(self, data: st.DataObject, is_created: bool) -> None:  # noqa: FBT001
        """An admitted pod is created, or refused by another admission plugin."""
        pod = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(pod)
        if is_created:
            self.store(pod)

    def store(self, pod: PodToCreate) -> None:
        is_in_time = pod.answered_at is not None and self.now - pod.answered_at <= MAX_CREATE_DELAY_S
        if is_in_time and not pod.fails:
            made = manifest(pod, pod.name)
            stored = self.memory._create(PODS, {"apiVersion": "v1", "kind": "Pod", **made}, dry_run=True)
            stored["metadata"]["uid"] = pod.uid
            self.memory._store.put(("pods", TEAM, made["metadata"]["name"]), stored)

    @rule(data=st.data(), how=st.sampled_from(["delete", "succeed"]))
    def end_a_pod(self, data: st.DataObject, how: str) -> None:
        """A pod completes, or is deleted."""
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
        """Changes reach a controller's caches, which are stale until then."""
        self.sync(self.controllers[index])

    @rule()
    def quiesce(self) -> None:
        """The first controller sees and reconciles everything; the caches of the second may still be stale."""
        self.finish_all()
        self.create_all()
        self.sync(self.controllers[0])
        self.try_reconcile(self.controllers[0])

    @rule(index=st.integers(0, 1))
    @precondition(lambda self: len(self.actors) < 6)
    def reconcile(self, index: int) -> None:
        """A controller reconciles the namespace, with whatever its caches hold."""
        quota_controller = self.controllers[index]
        if quota_controller.caches.synced:
            self.start(f"controller {index}", lambda: self.try_reconcile(quota_controller))

    def try_reconcile(self, quota_controller: QuotaController) -> None:
        with suppress(ApiError, Unavailable):  # the worker would retry
            quota_controller.reconcile(TEAM)

    @rule(index=st.integers(0, 1))
    def restart(self, index: int) -> None:
        """A controller is replaced by one without state."""
        self.controllers[index] = self.new_controller()
        self.sync(self.controllers[index])

    @rule(seconds=st.sampled_from([1, 5, 20, 46]))
    def wait(self, seconds: int) -> None:
        """Time passes, also for actors that are in the middle of a call."""
        self.now += seconds

    @rule(one_in_six=st.integers(0, 5))
    def lose_the_ledger(self, one_in_six: int) -> None:
        """The ledger is deleted; seldom, because it closes the namespace for 45 s."""
        if one_in_six:
            return
        self.ledger_was_lost = True
        with suppress(NotFound):
            self.memory.delete(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)

    @invariant()
    def existing_pods_fit_the_quota(self) -> None:
        """Whatever the ledger says."""
        cores, pods = HARD[self.quota]
        alive = [pod for pod in self.memory.list(PODS, TEAM).items if pod.status.phase not in ("Succeeded", "Failed")]
        # Pods that may run on several models fit if some assignment does. All are tried: there are few pods.
        assert self.fits(alive, dict(cores)), f"{len(alive)} pods are too many"
        assert len(alive) <= pods

    def fits(self, pods: list[Any], free: dict[str, int]) -> bool:
        if not pods:
            return True
        first, *rest = pods
        only_model = first.metadata.annotations.get(NAMES.use_models)
        cores = int(first.spec.containers[0].resources.limits[NAMES.core])
        return any(
            free[model] >= cores and self.fits(rest, free | {model: free[model] - cores})
            for model in ([only_model] if only_model else free)
        )

    @invariant()
    def the_ledger_never_exceeds_the_quota(self) -> None:
        ledger = self.ledger()
        if ledger is not None:
            usage = ledger.usage
            assert all(usage.taken[key] <= hard for key, hard in usage.hard.items())

    def teardown(self) -> None:
        """In the end the ledger charges exactly the pods that exist."""
        for actor in self.actors:
            actor.kill()
        for _ in range(4):
            self.now += 60
            self.sync(self.controllers[0])
            self.controllers[0].reconcile(TEAM)
        ledger = self.ledger()
        assert ledger is not None
        assert ledger.state is LedgerState.OPEN
        assert list(ledger.reservations()) == []
        alive = {
            pack_uid(pod.metadata.uid)
            for pod in self.memory.list(PODS, TEAM).items
            if pod.status.phase not in ("Succeeded", "Failed")
        }
        # A rebuilt ledger may charge pods without a model to other models than before; then one may have to wait.
        waiting = set(self.controllers[0].states.waiting(TEAM))
        assert self.ledger_was_lost or not waiting
        assert set(ledger.pods()) == alive - waiting


# The profile for full-size runs sets its own number.
EXAMPLES = 60 if settings().max_examples <= 100 else settings().max_examples
World.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
TestEveryInterleaving = World.TestCase
