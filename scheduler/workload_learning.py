"""Learns from the pods that arrive which ones are likely to come, see `vcuda.workload`.

A new estimate changes what every node is expected to take. That is computed on a thread of its own, for all nodes and
the kinds of pods that were asked about, so that no request waits for it. What was learned is stored in a ConfigMap.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from cluster.errors import AlreadyExists, ApiError, Conflict
from scheduler.cluster_state import ClusterState
from scheduler.pods import OtherPod, SchedulerPod
from scheduler.workload_store import WorkloadStore
from vcuda.compiled_workload import CompiledWorkload
from vcuda.decision import Unavailable
from vcuda.learning import WorkloadLearner
from vcuda.node_fit import NodeFitter
from vcuda.placement_costs import WorkloadEstimate
from vcuda.recent import keep_recent
from vcuda.task_shapes import task_shape
from vcuda.workload import TaskShape, TypicalTask

IDLE_S = 1.0
STORE_EVERY_S = 60.0
# Pods that were counted: kube-scheduler asks about those that fit nowhere again and again.
MAX_COUNTED = 50_000
# Kinds of pods for which results are computed beforehand: that takes up to 0.1 s each on 5,000 nodes.
MAX_PREPARED = 64
JOIN_TIMEOUT_S = 10.0


class WorkloadLearning:
    """Counts pods for the estimate, and keeps it up to date while `is_active` returns true."""

    def __init__(
        self,
        learner: WorkloadLearner,
        state: ClusterState,
        store: WorkloadStore,
        unit_mib: int,
        is_active: Callable[[], bool],
    ) -> None:
        self.learner, self._state, self._store, self._unit_mib = learner, state, store, unit_mib
        self._is_active = is_active
        # Guarded by the state's lock, like the learner.
        self._counted: dict[str, None] = {}
        # The typical tasks from which an estimate is to be prepared, and then that estimate.
        self._begun: tuple[TypicalTask, ...] | None = None
        self._prepared: tuple[CompiledWorkload, NodeFitter] | None = None
        self._is_loaded = False
        self._stored_at, self._stored_arrivals = 0.0, 0
        self._due, self._stopping = threading.Event(), threading.Event()
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="workload", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_learning(self) -> bool:
        """Whether what was stored is still to be loaded, or an estimate is being computed."""
        return self._is_active() and (not self._is_loaded or self._begun is not None)

    @property
    def is_prepared(self) -> bool:
        """Whether there is an estimate that takes effect some arrivals later."""
        return self._prepared is not None

    @property
    def is_loaded(self) -> bool:
        """Whether it continues what was stored."""
        return self._is_loaded

    def store_soon(self) -> None:
        """Store what was learned without waiting for the next time that is due."""
        self._stored_at = 0.0
        self._due.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def note_pod(self, pod: SchedulerPod) -> None:
        """Count a pod when it is filtered for the first time."""
        with self._state.lock:
            if pod.uid not in self._counted:
                self._note(task_shape(pod.request, pod.options, pod.host, self._unit_mib), pod.host.mib)
            keep_recent(self._counted, pod.uid, None, MAX_COUNTED)

    def note_other_pod(self, pod: OtherPod) -> None:
        """Count a pod without GPUs that was bound to a node with GPUs."""
        with self._state.lock:
            if pod.node in self._state.table:
                self._note(TaskShape(pod.host.cpu_milli, 0, 0), pod.host.mib)

    def note_departure(self) -> None:
        with self._state.lock:
            self.learner.note_departure()

    def _note(self, shape: TaskShape, host_mib: int) -> None:
        self.learner.note_arrival(shape, host_mib)
        self._take_over()
        # Begun here and not on the thread, so that it does not depend on when that gets its turn.
        if self._is_loaded and self._prepared is None and self._begun is None and self.learner.is_due:
            self._begin()

    def _begin(self) -> None:
        self._begun = self.learner.begin()
        self._due.set()

    def _take_over(self) -> None:
        if self._prepared is not None and self.learner.is_effective:
            workload, fitter = self._prepared
            self._prepared = None
            self.learner.replace_workload(workload)
            self._state.fitter.adopt(fitter)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._is_active():
                    self.step()
                else:
                    self._note_inactive()
            except (Conflict, AlreadyExists):
                # Another replica was active meanwhile, and has stored what it learned.
                self._note_inactive()
            except (ApiError, Unavailable) as error:
                self._log.warning("workload_not_stored", error=str(error))
                self._stopping.wait(IDLE_S)
            except Exception:  # the outermost frame of the thread: it has to continue
                self._log.exception("learning_failed")
                self._stopping.wait(IDLE_S)
            self._due.wait(IDLE_S)
            self._due.clear()
        # What is not stored now is learned again.
        with suppress(ApiError, Unavailable):
            self._store_now()

    def step(self) -> None:
        """Do what is due: read what was stored, prepare an estimate, store what was learned."""
        if not self._is_loaded:
            self._load()
        if (begun := self._begun) is not None:
            try:
                self._prepare(begun)
            finally:
                # One that cannot be prepared must not be tried forever: the next one is due some arrivals later.
                self._begun = None
            self.store_soon()
        if time.monotonic() >= self._stored_at + STORE_EVERY_S:
            self._store_now()

    def _note_inactive(self) -> None:
        """Have the stored history loaded again when this replica is active: another one continues it meanwhile."""
        with self._state.lock:
            self._is_loaded, self._begun, self._prepared = False, None, None

    def _load(self) -> None:
        history = self._store.load()
        with self._state.lock:
            if history is not None:
                self.learner.restart(history)
                self._stored_arrivals = history.arrivals
            else:
                for pod in self._state.bound_pods():
                    self.note_pod(pod)
            self._is_loaded = True
            if self.learner.is_due:
                self._begin()

    def _prepare(self, tasks: tuple[TypicalTask, ...]) -> None:
        state = self._state
        with state.lock:
            table, queries = state.table.copy(), state.fitter.queries()
            arrivals, turnover = self.learner.estimate.arrivals, self.learner.estimate.turnover
        workload = CompiledWorkload(tasks)
        fitter = NodeFitter(table, WorkloadEstimate(workload, arrivals, turnover))
        for query in queries[:MAX_PREPARED]:
            began = time.monotonic()
            fitter.prepare(query)
            # As long a pause: on a machine with few processors, requests must not wait for one.
            self._stopping.wait(time.monotonic() - began)
        with state.lock:
            self._prepared, self._begun = (workload, fitter), None
            self._take_over()
        self._log.info("workload_learned", arrivals=arrivals, typical_tasks=len(tasks))

    def _store_now(self) -> None:
        if not self._is_loaded or not self._is_active():
            return
        with self._state.lock:
            arrivals, text = self.learner.history.arrivals, self.learner.history.encode()
        if arrivals != self._stored_arrivals:
            self._store.store(text, creates=not self._stopping.is_set())
            self._stored_arrivals = arrivals
        self._stored_at = time.monotonic()
