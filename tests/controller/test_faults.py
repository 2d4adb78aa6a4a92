"""Three replicas, two controllers and an API server, killed and paused at random: the quotas hold at every instant."""

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
from tests.webhook.running import Authority, RunningWebhook, controlled, register
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
    """Clients that create pods at the edge of the quotas, and delete some again."""

    def __init__(self, real: RealCluster, namespaces: dict[str, str], seed: int, count: int) -> None:
        self._cluster = connect(str(real.kubeconfig)).with_timeout(15)
        self._namespaces, self._seed, self._count = namespaces, seed, count
        # Guards the number of creations that are left, and what became of the others.
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
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

    def _take(self) -> int:
        with self._lock:
            self._count -= 1
            return self._count

    def _run(self, number: int) -> None:
        chance = random.Random(f"{self._seed}-{number}")
        while (left := self._take()) >= 0:
            kind = chance.choice(list(self._namespaces))
            try:
                self._create(kind, f"p-{number}-{left}", chance)
                answer = "created"
            except ApiError as refused:
                answer = "refused" if "short by" in str(refused) else f"other: {str(refused)[:160]}"
            except Unavailable:
                answer = "unavailable"
                time.sleep(0.2)
            with self._lock:
                self.answers[answer] += 1
            if answer == "refused" or chance.random() < 0.2:
                self._delete(kind, chance)
            if answer == "refused":
                time.sleep(chance.uniform(0, 0.5))

    def _create(self, kind: str, name: str, chance: random.Random) -> None:
        models = chance.choice([("A100",), ("T4",), ("A100", "T4"), ()]) if kind == "several" else ("A100",)
        notes = {NAMES.use_models: ",".join(models)} if models and kind != "total" else {}
        made = pod(gpu(core=str(chance.choice([10, 25, 50])), memory=str(chance.choice([1, 4]))), annotations=notes)
        made["metadata"] |= {"name": name, "namespace": self._namespaces[kind]}
        self._cluster.create(PODS, made)

    def _delete(self, kind: str, chance: random.Random) -> None:
        namespace = self._namespaces[kind]
        try:
            pods = self._cluster.list(PODS, namespace).items
            for found in chance.sample(pods, min(2, len(pods))):
                self._cluster.delete(PODS, found.metadata.name, namespace, grace_s=0)
        except (ApiError, Unavailable):
            time.sleep(0.2)


class Chaos:
    """Kills and pauses, drawn from a seed, one after another; some of them go on while others begin."""

    def __init__(
        self,
        real: RealCluster,
        replicas: list[RunningWebhook],
        controllers: list[RunningController],
        seed: int,
        long_pause_s: float,
    ) -> None:
        self._real, self._replicas, self._controllers = real, replicas, controllers
        self._chance, self._long_pause_s = random.Random(seed), long_pause_s
        self.done: Counter[str] = Counter()
        self._paused: dict[Running, float] = {}
        self._ways: list[tuple[int, Callable[[], None]]] = [
            (5, lambda: self._kill(self._chance.choice(self._replicas), "replica")),
            (1, lambda: self._kill(self._chance.choice(self._controllers), "controller")),
            (3, lambda: self._pause(self._chance.choice(self._replicas), "replica", 3)),
            (1, lambda: self._pause(self._chance.choice(self._controllers), "controller", 18)),
            (1, lambda: self._pause(self._chance.choice(self._replicas), "replica for long", self._long_pause_s)),
            (1, self._kill_api),
            (1, lambda: self._pause_api(4)),
        ]

    def step(self) -> None:
        """Do something bad; end what has lasted long enough."""
        self._resume(lambda until: time.monotonic() >= until)
        weights, ways = zip(*self._ways, strict=True)
        self._chance.choices(ways, weights)[0]()

    def calm(self) -> None:
        """Let everybody go on."""
        self._resume(lambda _: True)

    def _resume(self, is_over: Callable[[float], bool]) -> None:
        for paused in [each for each, until in self._paused.items() if is_over(until)]:
            del self._paused[paused]
            paused.send(signal.SIGCONT)

    def _kill(self, victim: Running, kind: str) -> None:
        if victim in self._paused:
            return
        self.done[f"{kind} killed"] += 1
        victim.stop(signal.SIGKILL)
        victim.start(ready=False)

    def _pause(self, victim: Running, kind: str, seconds: float) -> None:
        running = [each for each in self._replicas if each not in self._paused]
        if victim in self._paused or (victim in running and len(running) < 2):
            return
        self.done[f"{kind} paused"] += 1
        victim.send(signal.SIGSTOP)
        self._paused[victim] = time.monotonic() + seconds

    def _kill_api(self) -> None:
        self.done["API server killed"] += 1
        self._real.restart(API)

    def _pause_api(self, seconds: float) -> None:
        self.done["API server paused"] += 1
        self._real.kill(API, signal.SIGSTOP)
        time.sleep(seconds)
        self._real.kill(API, signal.SIGCONT)

    def pause_api(self, seconds: float) -> None:
        """Pause the API server for longer than reservations live."""
        self._pause_api(seconds)


@pytest.fixture
def alone(real_cluster_possible: None) -> Iterator[RealCluster]:
    """A cluster for one test: its API server is going to be killed."""
    real = RealCluster.start(node=False)
    yield real
    real.stop()


def settled(real: RealCluster, namespace: str) -> bool:
    """Tell whether a ledger says exactly what exists."""
    cluster = connect(str(real.kubeconfig))
    try:
        ledger = decode_ledger(cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM).data[LEDGER_KEY])
        pods = cluster.list(PODS, namespace).items
    except (ApiError, Unavailable):
        return False
    return set(ledger.pods()) == {pack_uid(each.metadata.uid) for each in pods} and not list(ledger.reservations())


def survive(real: RealCluster, folder: Path, seed: int, count: int, long_pause_s: float, api_pause_s: float) -> Checker:
    """Create pods while everything breaks, and judge what the API server shows."""
    authority = Authority(folder / "tls")
    cluster = connect(str(real.kubeconfig))
    namespaces = {kind: f"{kind}-{seed % 1000}" for kind in QUOTAS}
    with ExitStack() as stack:
        first = stack.enter_context(controlled(real, folder))
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
            eventually(lambda name=name: settled(real, name), "the first ledger")  # type: ignore[misc]
        checker = Checker(cluster, {name: QUOTAS[kind][1] for kind, name in namespaces.items()}).start()
        chaos = Chaos(real, replicas, [first, second], seed, long_pause_s)
        load = Load(real, namespaces, seed, count).start()
        pause = random.Random(seed)
        if api_pause_s:
            chaos.pause_api(api_pause_s)
        while not load.is_over:
            chaos.step()
            time.sleep(pause.uniform(0.5, 3.0))
            print(f"{dict(load.answers)} {dict(chaos.done)} states {checker.states}", flush=True)
        chaos.calm()
        for name in namespaces.values():
            eventually(lambda name=name: settled(real, name), "the ledger to be right again", 100)  # type: ignore[misc]
        checker.stop()
        print(
            f"answers {dict(load.answers)}; faults {dict(chaos.done)}; {checker.states} states judged, "
            f"{checker.looked_up} looked up, {checker.passed_over} passed over"
        )
        assert load.answers["created"] > count // 20
    return checker


@pytest.mark.timeout(300)
def test_quotas_hold_whatever_dies(alone: RealCluster, tmp_path: Path, record_property: Callable[..., None]) -> None:
    """500 creations at the edge of several quotas; afterwards usage equals the pods."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    record_property("seed", seed)
    checker = survive(alone, tmp_path, seed, 500, long_pause_s=20, api_pause_s=0)
    assert checker.violations == []
    assert checker.states > 300


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_quotas_hold_in_the_long_run(alone: RealCluster, tmp_path: Path, record_property: Callable[..., None]) -> None:
    """10,000 creations, with pauses beyond every deadline there is."""
    seed = random.SystemRandom().randrange(10**6)
    record_property("seed", seed)
    checker = survive(alone, tmp_path, seed, 10_000, long_pause_s=50, api_pause_s=50)
    record_property("states", checker.states)
    assert checker.violations == []
    assert checker.passed_over == 0
