"""Builds all parts of a scheduler process from the configuration, and starts and stops them."""

import gc
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import structlog
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cluster.authorization import CachedAuthorizer
from cluster.events import EventRecorder
from cluster.gpu_nodes import GpuNode, gpu_node_of
from cluster.informer import Informer
from cluster.interface import Cluster
from cluster.objects import NODES, PODS, Kind
from ledger.committing import LedgerCommitter
from ledger.ledger_store import LedgerStore
from scheduler.binding import Binder, BindFailed
from scheduler.cluster_state import ClusterState
from scheduler.decisions import PATH, PlacementLog, list_decisions
from scheduler.disruption_budgets import DisruptionBudgets
from scheduler.dry_run import DryRun
from scheduler.evicting import Evictor
from scheduler.explaining import explanation_queue
from scheduler.extender import Extender
from scheduler.extender_api import (
    BindingResult,
    FilterResult,
    PreemptionResult,
    decode_args,
    decode_binding,
    decode_preemption,
    encode_filter_result,
    encode_priorities,
)
from scheduler.http_server import ExtenderServer, Reply
from scheduler.leadership import LeaseObserver
from scheduler.ledgers import LedgerCache
from scheduler.load_polling import LoadPoller
from scheduler.metrics import Metrics
from scheduler.pod_events import PodEvents
from scheduler.pods import OtherPod, SchedulerPod, cached_pod_of
from scheduler.preemption import PreemptionPlanner
from scheduler.reporting import Reporter
from scheduler.requeuing import Requeuer
from scheduler.waiting_pods import WaitingPods
from scheduler.workload_learning import WorkloadLearning
from scheduler.workload_store import WorkloadStore
from settings.configuration import Configuration, SchedulerSettings
from settings.probes import TEXT, Probes
from vcuda.decision import BadRequest, Unavailable
from vcuda.learning import WorkloadLearner
from vcuda.names import SCHEDULER, TRUSTED_CAS, names_for
from vcuda.scheme import build_scheme

# Under the prefix of kube-scheduler's configuration; `predicates` and `priorities` are the names of the Policy file.
FILTER_PATHS = ("/scheduler/filter", "/scheduler/predicates")
PRIORITIZE_PATHS = ("/scheduler/prioritize", "/scheduler/priorities")
BIND_PATH, PREEMPT_PATH = "/scheduler/bind", "/scheduler/preempt"
TICK_S = 0.5
# Nominations of an earlier process that are tried at a time, and how long.
MAX_RESTORED, RESTORED_WITHIN_S = 100, 60.0
# A filter must not wait 5 ms, Python's default, for a thread that decodes a list of pods.
SWITCH_INTERVAL_S = 0.0005
# The caches are long-lived: with Python's defaults, traversing them again and again delays answers by tens of ms.
GC_THRESHOLDS = (50_000, 20, 100)


class Service:
    """The parts of a scheduler process. Any number of replicas may run; the one beside the leader answers."""

    def __init__(
        self, configuration: Configuration, cluster: Cluster, clock: Callable[[], float] = time.monotonic
    ) -> None:
        settings = configuration.scheduler
        scheme = build_scheme(
            names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies
        )
        self._clock, self._log = clock, structlog.get_logger()
        learner = WorkloadLearner()
        self.state = ClusterState(scheme.unit_mib, clock, learner.estimate)
        store = WorkloadStore(cluster, configuration.system_namespace)
        self.learning = WorkloadLearning(learner, self.state, store, scheme.unit_mib, self.is_active)
        self.waiting = WaitingPods(clock, settings.max_backoff_s)
        self.ledgers = LedgerCache(cluster, configuration.system_namespace, configuration.mode, clock)
        self.decisions = PlacementLog()
        self.events = PodEvents(EventRecorder(cluster, SCHEDULER), clock)
        reporter = Reporter(self.decisions, self.events)
        self.extender = Extender(
            scheme, settings, state=self.state, ledgers=self.ledgers, waiting=self.waiting, reporter=reporter
        )
        self.committer = LedgerCommitter(LedgerStore(cluster, configuration.system_namespace))
        self.binder = Binder(
            cluster,
            scheme,
            extender=self.extender,
            state=self.state,
            ledgers=self.ledgers,
            ledger_writer=self.committer,
            reporter=reporter,
            is_active=self.is_active,
            cluster_mode=configuration.mode,
            timeout_s=settings.bind_timeout_s,
            clock=clock,
        )
        self.requeuer = Requeuer(
            cluster,
            scheme.names,
            state=self.state,
            waiting=self.waiting,
            extender=self.extender,
            ledgers=self.ledgers,
            is_active=self.is_active,
        )
        self._build_preemption(cluster, settings, reporter)
        self.dry_run = DryRun(scheme, self.extender, self.state)
        self.load = self._load_poller(configuration)
        self.explanations = explanation_queue(self.extender, self.is_active)
        # The casts: an informer with `convert` caches other objects than the API server sends for its kind.
        self.pods: Informer[SchedulerPod | OtherPod] = Informer(
            cluster, cast("Kind[SchedulerPod | OtherPod]", PODS), convert=lambda pod: cached_pod_of(pod, scheme)
        )
        self.nodes: Informer[GpuNode] = Informer(
            cluster, cast("Kind[GpuNode]", NODES), convert=lambda node: gpu_node_of(node, scheme)
        )
        self.lease = (
            LeaseObserver(
                cluster, settings.lease, configuration.system_namespace, settings.identity or socket.gethostname()
            )
            if settings.lease
            else None
        )
        self.metrics = Metrics(self._gauges)
        self.probes = Probes(
            settings.ops_address,
            settings.ops_port,
            self.metrics.registry,
            self.not_live,
            self.not_ready,
            routes={PATH: partial(list_decisions, self.decisions, CachedAuthorizer(cluster))},
        )
        self.server = self._extender_server(settings)
        # Until when it is tried to restore the nomination of a pod for a node: its victims may not be evicted yet.
        self._restored_until: dict[tuple[str, str], float] = {}
        self._wire()
        self.ending = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="claims", daemon=True)

    def _build_preemption(self, cluster: Cluster, settings: SchedulerSettings, reporter: Reporter) -> None:
        self.budgets = DisruptionBudgets(cluster)
        self.planner = PreemptionPlanner(self.extender, self.state, self.budgets, self.waiting)
        self.evictor = Evictor(
            cluster,
            planner=self.planner,
            state=self.state,
            extender=self.extender,
            waiting=self.waiting,
            reporter=reporter,
            is_active=self.is_active,
            is_enabled=settings.evicts,
        )

    def _load_poller(self, configuration: Configuration) -> LoadPoller | None:
        settings = configuration.scheduler
        if not settings.load_aware:
            return None
        return LoadPoller(
            self.state,
            port=configuration.monitor.port,
            server_name=configuration.monitor_names()[0],
            ca_file=None if configuration.monitor.open else Path(configuration.monitor.certificates) / TRUSTED_CAS,
            busy_percent=settings.busy_percent,
            interval_s=settings.load_interval_s,
            is_active=self.is_active,
        )

    def _extender_server(self, settings: SchedulerSettings) -> ExtenderServer:
        return ExtenderServer(
            settings.address,
            settings.port,
            {"/healthz": self._health, "/metrics": self._metrics, "/version": lambda: Reply(200, b"quotient\n", TEXT)},
            {
                **dict.fromkeys(FILTER_PATHS, lambda body: self._answer("filter", self._filter, body)),
                **dict.fromkeys(PRIORITIZE_PATHS, lambda body: self._answer("prioritize", self._prioritize, body)),
                BIND_PATH: lambda body: self._answer("bind", self._bind, body),
                PREEMPT_PATH: lambda body: self._answer("preempt", self._preempt, body),
            },
            dict.fromkeys(FILTER_PATHS, lambda body: self._answer("dry-run", self._dry_run, body)),
        )

    def _wire(self) -> None:
        self.state.on_room = self.requeuer.note_room
        self.extender.on_refused = self.evictor.note_refused
        self.extender.on_missed_event = self.requeuer.wake
        self.requeuer.on_requeued = self.metrics.requeued.inc
        self.state.on_gone = self._forget
        self.state.on_unschedulable = self._explain
        self.ledgers.on_change = self.requeuer.note_ledger
        self.nodes.on_change(self.state.handle_node)
        self.pods.on_change(self._handle_pod)
        self.extender.on_pod = self.learning.note_pod
        self.state.on_departure = self.learning.note_departure

    def start(self) -> "Service":
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.set_threshold(*GC_THRESHOLDS)
        self.probes.start()
        self.events.queue.start()
        self.committer.start()
        if self.lease is not None:
            self.lease.start()
        for informer in (self.nodes, self.ledgers.informer, self.pods, self.budgets.informer):
            informer.start()
        self.evictor.start()
        if self.load is not None:
            self.load.start()
        self.requeuer.start()
        self.learning.start()
        self.explanations.start()
        self._ticker.start()
        self.server.start()
        self._log.info("scheduler_started", port=self.server.port, ops_port=self.probes.port)
        return self

    def stop(self) -> None:
        self.ending.set()
        self.server.stop()
        self.binder.stop()
        self.requeuer.stop()
        self.evictor.stop()
        if self.load is not None:
            self.load.stop()
        self.learning.stop()
        self.explanations.stop()
        if self.lease is not None:
            self.lease.stop()
        for informer in (self.pods, self.nodes, self.ledgers.informer, self.budgets.informer):
            informer.stop()
        self.committer.stop()
        self.events.queue.stop()
        self.probes.stop()
        if self._ticker.is_alive():
            self._ticker.join(5)

    def run(self) -> None:
        """Serve until `ending` is set."""
        self.start()
        self.ending.wait()
        self.stop()

    @property
    def synced(self) -> bool:
        informers = (self.nodes, self.pods, self.ledgers.informer, self.budgets.informer)
        return all(informer.synced for informer in informers)

    def is_active(self) -> bool:
        """Whether this replica answers: it knows the cluster, and the kube-scheduler of its pod leads."""
        return self.synced and (self.lease is None or self.lease.is_active())

    def not_live(self) -> list[str]:
        """Return why the process should be restarted; empty if it should not."""
        parts = {
            "an informer": all(
                each.alive for each in (self.nodes, self.pods, self.ledgers.informer, self.budgets.informer)
            ),
            "the ledger committer": self.committer.alive,
            "the requeuer": self.requeuer.alive,
            "the evictor": self.evictor.alive,
            "the load poller": self.load is None or self.load.alive,
            "the workload learning": self.learning.alive,
            "the lease observer": self.lease is None or self.lease.alive,
            "the events": self.events.queue.alive,
            "the explainer": self.explanations.alive,
            "the claim timer": self._ticker.is_alive(),
            "the extender": self.server.alive,
        }
        return [f"a thread of {name} has stopped" for name, is_alive in parts.items() if not is_alive]

    def not_ready(self) -> list[str]:
        """Return what is missing until this replica could answer; a standby is ready, too."""
        return [] if self.synced else ["the caches are not synced yet"]

    def _handle_pod(self, old: SchedulerPod | OtherPod | None, new: SchedulerPod | OtherPod | None) -> None:
        if isinstance(new or old, SchedulerPod):
            self.state.handle_pod(cast("SchedulerPod | None", old), cast("SchedulerPod | None", new))
            return
        before, after = cast("OtherPod | None", old), cast("OtherPod | None", new)
        self.state.handle_other_pod(before, after)
        # Those of the first list were counted by the process before this one.
        if self.pods.synced and before is None and after is not None:
            self.learning.note_other_pod(after)
        elif before is not None and after is None and before.node in self.state.table:
            self.learning.note_departure()

    def _forget(self, uid: str) -> None:
        self.waiting.remove(uid)
        self.requeuer.wake()
        self.events.forget(uid)

    def _explain(self, pod: SchedulerPod) -> None:
        if pod.scheduler == SCHEDULER:
            self.explanations.enqueue(pod, pod=pod.title)

    def _tick(self) -> None:
        while not self.ending.wait(TICK_S):
            try:
                for claim in self.state.expire_claims():
                    self._log.warning("claim_expired", pod=claim.pod.title, node=claim.node)
                self._restore_nominations()
                for nomination in self.state.expire_nominations():
                    self._log.warning("nomination_expired", pod=nomination.pod.title, node=nomination.node)
                self.binder.settle()
            except Exception:  # the outermost frame of the thread: it has to continue
                self._log.exception("tick_failed")

    def _restore_nominations(self) -> None:
        """Nominate pods again for which a process before this one made room."""
        if not self.is_active():
            return
        pods, now = self.state.unrestored()[:MAX_RESTORED], self._clock()
        keys = [(pod.uid, pod.nominated_node) for pod in pods]
        self._restored_until = {key: self._restored_until.get(key, now + RESTORED_WITHIN_S) for key in keys}
        for pod, key in zip(pods, keys, strict=True):
            if self.planner.restore(pod) or now >= self._restored_until[key]:
                self.state.note_restored(*key)

    def _gauges(self) -> dict[str, float]:
        return {
            "quotient_scheduler_active": float(self.is_active()),
            "quotient_scheduler_nodes": float(len(self.state.table)),
            "quotient_scheduler_claims": float(len(self.state.claims())),
            "quotient_scheduler_waiting_pods": float(len(self.waiting)),
            "quotient_scheduler_longest_wait_seconds": self.waiting.longest_wait_s(),
            "quotient_scheduler_free_cores": float(self.state.free_cores()),
            "quotient_scheduler_learning": float(self.learning.is_learning),
        }

    def _health(self) -> Reply:
        problems = self.not_live() + self.not_ready()
        return Reply(503 if problems else 200, "".join(f"{each}\n" for each in problems or ["ok"]).encode(), TEXT)

    def _metrics(self) -> Reply:
        return Reply(200, generate_latest(self.metrics.registry), CONTENT_TYPE_LATEST)

    def _answer(self, verb: str, handle: Callable[[bytes], bytes], body: bytes) -> Reply:
        """Answer a request of kube-scheduler; whatever is not a decision is an error that it retries."""
        started = self._clock()
        reply, result = self._decide(handle, body)
        self.metrics.requests.labels(verb, result).inc()
        self.metrics.seconds.labels(verb).observe(self._clock() - started)
        return reply

    def _decide(self, handle: Callable[[bytes], bytes], body: bytes) -> tuple[Reply, str]:
        if not self.is_active():
            holder = self.lease.holder if self.lease else ""
            text = f"not active: the Lease is held by {holder or 'no replica'}" if self.synced else "not synced yet"
            return Reply(503, f"{text}\n".encode(), TEXT), "inactive"
        try:
            return Reply(200, handle(body)), "answered"
        except BadRequest as error:
            return Reply(400, f"{error}\n".encode(), TEXT), "invalid"
        except Unavailable as error:
            return Reply(503, f"{error}\n".encode(), TEXT), "unavailable"

    def _filter(self, body: bytes) -> bytes:
        args = decode_args(body)
        try:
            result = self.extender.filter(args)
        except Unavailable as error:
            result = FilterResult(error=str(error))
        return encode_filter_result(result, args.whole_nodes)

    def _dry_run(self, body: bytes) -> bytes:
        args = decode_args(body)
        return encode_filter_result(self.dry_run.filter(args), args.whole_nodes)

    def _prioritize(self, body: bytes) -> bytes:
        return encode_priorities(*self.extender.prioritize(decode_args(body)))

    def _preempt(self, body: bytes) -> bytes:
        return msgspec.json.encode(PreemptionResult(self.planner.answer(decode_preemption(body))))

    def _bind(self, body: bytes) -> bytes:
        try:
            self.binder.bind(decode_binding(body))
        except (BindFailed, Unavailable) as error:
            return msgspec.json.encode(BindingResult(str(error)))
        return msgspec.json.encode(BindingResult())
