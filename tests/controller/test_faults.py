"""Three webhook replicas, two controllers and an API server are killed and paused at random, and quotas hold."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.api import connect
from cluster.errors import ApiError
from cluster.objects import CONFIG_MAPS, PODS
from settings.configuration import Configuration
from tests.cluster.objects import new_namespace
from tests.cluster.real import RealCluster
from tests.controller.checker import Checker, Hard
from tests.running import Running, RunningController
from tests.waiting import eventually
from tests.webhook.pods import NAMES, gpu, pod
from tests.webhook.running import Authority, RunningWebhook, register, run_controller
from tests.webhook.service import Service
from vcuda.decision import Unavailable
from vcuda.ledger import decode_ledger, pack_uid
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX

pytestmark = pytest.mark.kubernetes

SYSTEM = Configuration().system_namespace
QUOTAS: dict[str, tuple[str, Hard]] = {
    "cores": ("types: {A100: {cores: 300}}", {"A100": (300, None, None)}),
    "several": (
        'types: {A100: {cores: 200, memory: 8Gi}, T4: {cores: 100}, "*": {pods: 8}}',
        {"A100": (200, 8192, None), "T4": (100, None, None), "*": (None, None, 8)},
    ),
    "total": ('types: {"*": {cores: 250, memory: 6Gi}}', {"*": (250, 6144, None)}),
}
CLIENTS = 6
API = "kube-apiserver"


class Load:
    """Clients that create pods at the limit of the quotas, and delete some again."""

    def __init__(self, real: RealCluster, namespaces: dict[str, str], seed: int, count: int) -> None:
        self._cluster = connect(str(real.kubeconfig)).with_timeout(15)
        self._namespaces, self._seed, self._count = namespaces, seed, count
        # Guards the number of creations that are left, and the results of the others.
        self._lock = threading.Lock()
        self.results: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(CLIENTS)
        ]

    def start(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _count_down(self) -> int:
        with self._lock:
            self._count -= 1
            return self._count

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        while (left := self._count_down()) >= 0:
            kind = rng.choice(list(self._namespaces))
            try:
                self._create(kind, f"p-{number}-{left}", rng)
                result = "created"
            except ApiError as error:
                result = "refused" if "short by" in str(error) else f"other: {str(error)[:160]}"
            except Unavailable:
                result = "unavailable"
                time.sleep(0.2)
            with self._lock:
                self.results[result] += 1
            if result == "refused" or rng.random() < 0.2:
                self._delete(kind, rng)
            if result == "refused":
                # While both controllers are killed or paused, for up to half a minute, no room is released: refusals
                # alone must not use up all attempts.
                time.sleep(rng.uniform(0, 1.5))

    def _create(self, kind: str, name: str, rng: random.Random) -> None:
        models = rng.choice([("A100",), ("T4",), ("A100", "T4"), ()]) if kind == "several" else ("A100",)
        annotations = {NAMES.use_models: ",".join(models)} if models and kind != "total" else {}
        made = pod(gpu(core=str(rng.choice([10, 25, 50])), memory=str(rng.choice([1, 4]))), annotations=annotations)
        made["metadata"] |= {"name": name, "namespace": self._namespaces[kind]}
        self._cluster.create(PODS, made)

    def _delete(self, kind: str, rng: random.Random) -> None:
        namespace = self._namespaces[kind]
        try:
            pods = self._cluster.list(PODS, namespace).items
            for each in rng.sample(pods, min(2, len(pods))):
                self._cluster.delete(PODS, each.metadata.name, namespace, grace_s=0)
        except (ApiError, Unavailable):
            time.sleep(0.2)


class Chaos:
    """Kills and pauses processes, drawn from a seed; a pause may last while the next fault begins."""

    def __init__(
        self,
        real: RealCluster,
        replicas: list[RunningWebhook],
        controllers: list[RunningController],
        seed: int,
        long_pause_s: float,
    ) -> None:
        self._real, self._replicas, self._controllers = real, replicas, controllers
        self._rng, self._long_pause_s = random.Random(seed), long_pause_s
        self.faults: Counter[str] = Counter()
        self._paused: dict[Running, float] = {}
        self._weighted_faults: list[tuple[int, Callable[[], None]]] = [
            (5, lambda: self._kill(self._rng.choice(self._replicas), "replica")),
            (1, lambda: self._kill(self._rng.choice(self._controllers), "controller")),
            (3, lambda: self._pause(self._rng.choice(self._replicas), "replica", 3)),
            (1, lambda: self._pause(self._rng.choice(self._controllers), "controller", 18)),
            (1, lambda: self._pause(self._rng.choice(self._replicas), "replica for long", self._long_pause_s)),
            (1, self._kill_api),
            (1, lambda: self._pause_api(4)),
        ]

    def step(self) -> None:
        """End the pauses that are over, and cause one fault."""
        self._resume(lambda until: time.monotonic() >= until)
        weights, faults = zip(*self._weighted_faults, strict=True)
        self._rng.choices(faults, weights)[0]()

    def stop(self) -> None:
        """Resume every paused process."""
        self._resume(lambda _: True)

    def _resume(self, is_over: Callable[[float], bool]) -> None:
        for paused in [each for each, until in self._paused.items() if is_over(until)]:
            del self._paused[paused]
            paused.send(signal.SIGCONT)

    def _kill(self, victim: Running, kind: str) -> None:
        if victim in self._paused:
            return
        self.faults[f"{kind} killed"] += 1
        victim.stop(signal.SIGKILL)
        victim.start(ready=False)

    def _pause(self, victim: Running, kind: str, seconds: float) -> None:
        running = [each for each in self._replicas if each not in self._paused]
        if victim in self._paused or (victim in running and len(running) < 2):
            return
        self.faults[f"{kind} paused"] += 1
        victim.send(signal.SIGSTOP)
        self._paused[victim] = time.monotonic() + seconds

    def _kill_api(self) -> None:
        self.faults["API server killed"] += 1
        self._real.restart(API)

    def _pause_api(self, seconds: float) -> None:
        self.faults["API server paused"] += 1
        self._real.kill(API, signal.SIGSTOP)
        time.sleep(seconds)
        self._real.kill(API, signal.SIGCONT)

    def pause_api(self, seconds: float) -> None:
        """Pause the API server, for longer than a reservation lives."""
        self._pause_api(seconds)


@pytest.fixture
def alone(real_cluster_possible: None) -> Iterator[RealCluster]:
    """A cluster of its own for one test, which kills its API server."""
    real = RealCluster.start(node=False)
    yield real
    real.stop()


def is_ledger_exact(real: RealCluster, namespace: str) -> bool:
    """Whether a ledger charges exactly the pods that exist, and has no reservation."""
    cluster = connect(str(real.kubeconfig))
    try:
        ledger = decode_ledger(cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM).data[LEDGER_KEY])
        pods = cluster.list(PODS, namespace).items
    except (ApiError, Unavailable):
        return False
    return set(ledger.pods()) == {pack_uid(each.metadata.uid) for each in pods} and not list(ledger.reservations())


def survive(real: RealCluster, folder: Path, seed: int, count: int, long_pause_s: float, api_pause_s: float) -> Checker:
    """Create pods while processes are killed and paused; returns the checker with what it found."""
    authority = Authority(folder / "tls")
    cluster = connect(str(real.kubeconfig))
    namespaces = {kind: f"{kind}-{seed % 1000}" for kind in QUOTAS}
    with ExitStack() as stack:
        first = stack.enter_context(run_controller(real, folder))
        second = stack.enter_context(RunningController(real.kubeconfig, folder))
        replicas = [stack.enter_context(RunningWebhook(authority, real.kubeconfig)) for _ in range(3)]
        service = stack.enter_context(Service(*replicas))
        eventually(lambda: len(service.ready) == 3, "the replicas")
        register(real, Configuration(), service.port, authority)
        for kind, name in namespaces.items():
            new_namespace(cluster, name)
            metadata = {"name": "q", "namespace": name, "labels": {NAMES.quota_label: "true"}}
            cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": QUOTAS[kind][0]}})
        for name in namespaces.values():
            eventually(lambda name=name: is_ledger_exact(real, name), "the first ledger")  # type: ignore[misc]
        checker = Checker(cluster, {name: QUOTAS[kind][1] for kind, name in namespaces.items()}).start()
        chaos = Chaos(real, replicas, [first, second], seed, long_pause_s)
        load = Load(real, namespaces, seed, count).start()
        rng = random.Random(seed)
        if api_pause_s:
            chaos.pause_api(api_pause_s)
        while not load.is_over:
            chaos.step()
            time.sleep(rng.uniform(0.5, 3.0))
            print(f"{dict(load.results)} {dict(chaos.faults)} states {checker.states}", flush=True)
        chaos.stop()
        for name in namespaces.values():
            eventually(lambda name=name: is_ledger_exact(real, name), "the ledger to be exact again", 100)  # type: ignore[misc]
        checker.stop()
        print(
            f"results {dict(load.results)}; faults {dict(chaos.faults)}; {checker.states} states checked, "
            f"{checker.checked_late} of them late, {checker.unchecked} not checked"
        )
        assert load.results["created"] > count // 20
    return checker


@pytest.mark.timeout(300)
def test_quotas_hold_while_processes_are_killed_and_paused(
    alone: RealCluster, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    """500 creations at the limit of several quotas; afterwards usage equals the pods that exist."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    record_property("seed", seed)
    checker = survive(alone, tmp_path, seed, 500, long_pause_s=20, api_pause_s=0)
    assert checker.violations == []
    assert checker.states > 300


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_quotas_hold_through_many_and_long_faults(
    alone: RealCluster, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    """10,000 creations, with pauses longer than every deadline."""
    seed = random.SystemRandom().randrange(10**6)
    record_property("seed", seed)
    checker = survive(alone, tmp_path, seed, 10_000, long_pause_s=50, api_pause_s=50)
    record_property("states", checker.states)
    assert checker.violations == []
    assert checker.unchecked == 0
