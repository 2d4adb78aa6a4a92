"""Binds pods: claims their GPUs on the chosen node, makes sure of their charge, and writes Binding and placement.

A pod is bound only with GPUs that are free and a charge that covers them. The Binding carries the placement as an
annotation and the pod's UID as a precondition, so it is one write, and repeating it is safe.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from cluster.backoff import Backoff
from cluster.errors import ApiError, Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import PODS, Pod
from ledger.committing import LedgerWriter
from scheduler.cluster_state import Claim, ClusterState
from scheduler.extender import Extender
from scheduler.extender_api import BindingArgs
from scheduler.ledgers import LedgerCache, charge_for
from scheduler.pods import SchedulerPod, scheduler_pod_of
from scheduler.reporting import Reporter
from vcuda.charge_moves import extend_charge, is_covered, revert_charge
from vcuda.charging import PodDemand
from vcuda.decision import Unavailable
from vcuda.fit_query import FitQuery
from vcuda.namespace_policy import Mode
from vcuda.placement import InsufficientGpus, PlacedSlices, placed_model, placement_problem
from vcuda.placement_annotation import encode_placement
from vcuda.scheme import Scheme

# One call to the API server; several of them fit into the time for a binding.
CALL_TIMEOUT_S = 5.0
MAX_CALLS = 24
RETRY = Backoff(first_s=0.05, max_s=1.0)
# After a binding, the watch should show the pod as bound within this time; otherwise the pod is read.
CONFIRM_S = 30.0
REVERT_TIMEOUT_S = 5.0
MIN_CALL_S = 0.1
# A request without an answer may take effect this much later: 34 s were measured for a create.
LATE_S = 40.0


class BindFailed(Exception):  # noqa: N818 - not an error of the program
    """A pod was not bound; the message says why."""


class OutcomeUnknown(Exception):  # noqa: N818
    """The API server did not answer in time, so the pod may have been bound."""


class Binder:
    """Answers bind, and finds out what became of bindings without an answer."""

    def __init__(
        self,
        cluster: Cluster,
        scheme: Scheme,
        *,
        extender: Extender,
        state: ClusterState,
        ledgers: LedgerCache,
        ledger_writer: LedgerWriter,
        reporter: Reporter,
        is_active: Callable[[], bool] = lambda: True,
        cluster_mode: Mode = Mode.ENFORCE,
        timeout_s: float = 20.0,
        late_s: float = LATE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._scheme, self._extender, self._state = cluster, scheme, extender, state
        self._is_active, self._late_s = is_active, late_s
        self._ledgers, self._ledger_writer, self._reporter = ledgers, ledger_writer, reporter
        self._cluster_mode, self._timeout_s, self._clock = cluster_mode, timeout_s, clock
        # kube-scheduler binds any number of pods at once; more calls than connections would only wait for each other.
        self._slots = threading.BoundedSemaphore(MAX_CALLS)
        self._stopping = threading.Event()
        self._log = structlog.get_logger()

    def stop(self) -> None:
        self._stopping.set()

    def bind(self, args: BindingArgs) -> None:
        """Bind a pod; raises BindFailed or Unavailable."""
        deadline = self._clock() + self._timeout_s
        pod = self._find_pod(args)
        if pod.node:
            if pod.node == args.node:
                return
            raise BindFailed(f"pod {pod.title} is already bound to node {pod.node}")
        claim = self._claim(pod, args.node)
        try:
            self._ensure_charge(pod, claim, deadline)
        except BaseException:
            self._state.release_claim(pod.uid)
            raise
        try:
            self._write_binding(pod, claim, deadline)
        except BindFailed as failure:
            self._give_up(claim)
            self._reporter.report_not_bound(pod, claim.node, str(failure))
            raise
        except OutcomeUnknown as error:
            self._mark_unsettled(claim)
            raise Unavailable(f"pod {pod.title}: binding to node {claim.node}: {error}") from None
        except BaseException:
            self._mark_unsettled(claim)
            raise
        claim.confirm_at = self._clock() + CONFIRM_S
        self._reporter.report_bound(pod, claim.node, claim.placed)

    def _mark_unsettled(self, claim: Claim) -> None:
        claim.is_unsettled, claim.settle_at = True, self._clock() + self._late_s

    def _find_pod(self, args: BindingArgs) -> SchedulerPod:
        pod = self._state.pod(args.pod_uid)
        if pod is None and (claim := self._state.claim(args.pod_uid)) is not None:
            pod = claim.pod
        if pod is not None:
            return pod
        try:
            read = self._cluster.with_timeout(CALL_TIMEOUT_S).get(PODS, args.pod_name, args.pod_namespace)
        except ApiError as error:
            raise BindFailed(f"pod {args.pod_namespace}/{args.pod_name}: {error}") from None
        pod = scheduler_pod_of(read, self._scheme)
        if pod is None:
            raise BindFailed(f"pod {args.pod_namespace}/{args.pod_name} requests no GPU of this scheduler")
        if args.pod_uid and pod.uid != args.pod_uid:
            raise BindFailed(f"pod {pod.title} was deleted and created again")
        return pod

    def _claim(self, pod: SchedulerPod, node: str) -> Claim:
        """Claim GPUs on the chosen node: those of the pod's claim if it is there, else others."""
        # Before the lock: it may wait for a ledger.
        grant = self._extender.grant(pod)
        with self._state.lock:
            query = self._extender.query(pod, grant)
            before = self._state.claim(pod.uid)
            if before is not None:
                before.check_not_binding()
            try:
                placed = self._placement(pod, query, node, before)
            except InsufficientGpus as error:
                self._state.release_claim(pod.uid)
                self._reporter.report_not_bound(pod, node, str(error))
                raise BindFailed(f"node {node}: {error}") from None
            return self._state.take_claim(pod, node, placed, timeout_s=None)

    def _placement(self, pod: SchedulerPod, query: FitQuery, node: str, claim: Claim | None) -> PlacedSlices:
        """Return the claimed GPUs if they are on this node and still usable, else others; InsufficientGpus if none."""
        if claim is not None and claim.node == node and not query.excludes(node, claim.placed):
            gpus = self._state.available_gpus(node, pod.uid)
            unit_mib, options = self._scheme.unit_mib, pod.options
            if not placement_problem(pod.request, claim.placed, gpus, unit_mib=unit_mib, options=options):
                return claim.placed
        return self._state.place(query, node, pod.uid)

    def _ensure_charge(self, pod: SchedulerPod, claim: Claim, deadline: float) -> None:
        """Make sure that the ledger holds a charge for the GPUs; raises BindFailed if the quota does not allow it."""
        namespace = pod.metadata.namespace
        snapshot = self._ledgers.snapshot(namespace)
        if not self._ledgers.needs_charge(namespace, snapshot):
            return
        try:
            model, card_mib = placed_model(claim.placed, self._state.table.gpus(claim.node))
        except KeyError:
            raise BindFailed(f"node {claim.node} does not have the claimed GPUs any more") from None
        wanted = charge_for(model, PodDemand(pod.request, self._scheme.unit_mib), card_mib)
        held = snapshot.charge(pod.key) if snapshot and snapshot.is_open else None
        # A cached charge that is being moved may have been reverted since: then the ledger itself has to be asked.
        if snapshot and held and held.moved_from is None and is_covered(snapshot.usage, held, wanted):
            return
        now_s = int(time.time())
        change = partial(extend_charge, pod=pod.key, charge=wanted, now_s=now_s, cluster_mode=self._cluster_mode)
        result = self._ledger_writer.apply(namespace, change, max(0.0, deadline - self._clock()))
        if result.reasons:
            self._extender.refuse_model(pod, model)
            raise BindFailed(self._reporter.report_charge_refused(pod, claim.node, result))
        # Not if an earlier attempt moved the charge: a Binding of another replica may depend on that.
        claim.extended = wanted if result.charge == wanted else None

    def _write_binding(self, pod: SchedulerPod, claim: Claim, deadline: float) -> None:
        """Write the Binding, until it succeeds, fails for good, or the deadline is over."""
        annotations = {self._scheme.names.placement: encode_placement(claim.placed)}
        metadata, failures = pod.metadata, 0
        while True:
            self._check_may_bind(deadline, is_first=not failures)
            cluster = self._cluster.with_timeout(min(CALL_TIMEOUT_S, deadline - self._clock()))
            try:
                cluster.bind(metadata.name, metadata.namespace, claim.node, uid=pod.uid, annotations=annotations)
            except Conflict as error:
                read = self._read(pod)
                if read is not None and read.spec.node_name == claim.node:
                    return
                if read is not None and read.spec.node_name:
                    claim.extended = None  # bound elsewhere, perhaps by this charge: the controller lowers it
                raise BindFailed(str(error)) from None
            except ApiError as error:
                raise BindFailed(str(error)) from None
            except Unavailable as error:
                failures += 1
                delay_s = RETRY.delay_s(failures)
                if self._clock() + delay_s >= deadline or self._stopping.wait(delay_s):
                    raise OutcomeUnknown(str(error)) from None
            else:
                return
            finally:
                self._slots.release()

    def _check_may_bind(self, deadline: float, *, is_first: bool) -> None:
        """Take a slot for a call, unless it is too late, or another replica leads by now."""
        failure: type[Exception] = BindFailed if is_first else OutcomeUnknown
        if not self._slots.acquire(timeout=max(0.0, deadline - self._clock())):
            raise failure("too many bindings at once")
        if self._clock() + MIN_CALL_S > deadline or not self._is_active():
            self._slots.release()
            raise failure("the time for the binding is over" if self._is_active() else "another replica leads")

    def _read(self, pod: SchedulerPod) -> Pod | None:
        """Read a pod from the API server; None if it is gone. Raises OutcomeUnknown if there is no answer."""
        try:
            read = self._cluster.with_timeout(CALL_TIMEOUT_S).get(PODS, pod.metadata.name, pod.metadata.namespace)
        except NotFound:
            return None
        except (ApiError, Unavailable) as error:
            raise OutcomeUnknown(str(error)) from None
        return read if read.metadata.uid == pod.uid else None

    def _give_up(self, claim: Claim) -> None:
        """Give back what was added to the charge of a pod that was not bound, and then release the claim."""
        pod = claim.pod
        if claim.extended is not None:
            change = partial(revert_charge, pod=pod.key, charge=claim.extended)
            try:
                # Waited for: the next binding of this pod must find what it is charged.
                self._ledger_writer.apply(pod.metadata.namespace, change, REVERT_TIMEOUT_S)
            except Unavailable as error:
                self._log.warning("charge_not_reverted", pod=pod.title, error=str(error))
        self._state.release_claim(pod.uid)

    def settle(self) -> None:
        """Read the pods whose binding has an unknown outcome, and end their claims accordingly."""
        for claim in self._state.claims():
            if claim.confirm_at is not None and claim.confirm_at <= self._clock():
                claim.is_unsettled = True
            if claim.is_unsettled:
                try:
                    self._settle(claim)
                except OutcomeUnknown as error:
                    # The API server does not answer, and each of the others would wait as long.
                    self._log.warning("binding_unsettled", pod=claim.pod.title, error=str(error))
                    return

    def _settle(self, claim: Claim) -> None:
        read = self._read(claim.pod)
        bound = scheduler_pod_of(read, self._scheme) if read is not None and read.spec.node_name else None
        if bound is not None and bound.node == claim.node:
            self._state.confirm_claim(claim, bound)
        elif read is None or bound is not None or self._clock() >= claim.settle_at:
            # While it is unbound, the Binding may still be under way.
            if bound is not None:
                claim.extended = None
            self._give_up(claim)
