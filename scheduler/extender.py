"""The decisions of the extender: which nodes fit a pod, in which order they are preferred, and which GPUs it claims."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from scheduler.cluster_state import ClusterState
from scheduler.extender_api import ExtenderArgs, ExtenderPod, ExtenderPodSpec, FilterResult
from scheduler.ledgers import Grant, LedgerCache
from scheduler.pods import SchedulerPod, reduce_pod
from scheduler.reporting import UNCHARGED, Reporter
from scheduler.waiting_pods import WaitingPod, WaitingPods
from settings.configuration import SchedulerSettings
from vcuda.decision import Unavailable
from vcuda.fit_query import FitQuery, merged_shortage
from vcuda.fit_summary import Problems, count_problems
from vcuda.gpu_table import Columns, Flags, Numbers
from vcuda.json_names import encode_names
from vcuda.node_fit import NodeFits
from vcuda.node_problem import NodeProblem
from vcuda.placement import InsufficientGpus
from vcuda.placement_strategies import PlacementStrategy
from vcuda.recent import keep_recent
from vcuda.scheme import Scheme

# Into how many levels of preference nodes are divided for pods that have preferences of their own: kube-scheduler's
# scores decide among the nodes of a level.
LEVELS = 10
# Orders are kept from filter to prioritize, which follows at once. A few more, for requests that were given up.
MAX_ORDERS = 16
MAX_REFUSED = 10_000
# How long a refusal is held back until our watch has caught up, if few pods wait: all others are held back as well.
CATCH_UP_S, MAX_CAUGHT_UP = 0.25, 16
# If more pods wait, kube-scheduler is spared the search for pods to evict where there are none of a lower priority: it
# takes most of the time for a refused pod, and all pods that fit wait behind those that do not.
MANY_WAITING = 100


class NodeOrder(Struct, frozen=True):
    """The order of the nodes that fit a pod: their positions, best first. `asked` is the answer to filter, as JSON."""

    asked: bytes
    fits: NodeFits
    order: Columns


class Extender:
    """Answers filter and prioritize."""

    def __init__(
        self,
        scheme: Scheme,
        settings: SchedulerSettings,
        *,
        state: ClusterState,
        ledgers: LedgerCache,
        waiting: WaitingPods,
        reporter: Reporter,
    ) -> None:
        self._scheme, self._settings = scheme, settings
        self._state, self._ledgers, self._waiting, self._reporter = state, ledgers, waiting, reporter
        self._orders: dict[str, NodeOrder] = {}
        # Called when a pod may fit although it was just refused.
        self.on_missed_event: Callable[[], None] = lambda: None
        # Called with every pod that is filtered, before it is.
        self.on_pod: Callable[[SchedulerPod], None] = lambda _: None
        # Called with a pod that fits nowhere as it is, and the nodes on which evictions may help.
        self.on_refused: Callable[[SchedulerPod, Sequence[str]], None] = lambda *_: None
        # Models that a ledger refused when a pod was about to be bound, with the version of that ledger.
        self._refused: dict[str, tuple[str, set[str]]] = {}

    def filter(self, args: ExtenderArgs) -> FilterResult:
        """Return the nodes that fit, and a reason for each of the others; claim GPUs on the best one."""
        names = args.names()
        pod = self.read_pod(args.pod)
        if pod is None:
            return FilterResult(names)
        spec = args.pod.spec
        self.check_unbound(pod)
        self._state.void_group(pod.uid, spec.group)
        # About a nominated node kube-scheduler asks alone, before it asks about all others.
        is_nominated = len(names) == 1 and names[0] == args.pod.status.nominated_node_name
        if not is_nominated and self._waiting.note_asked(pod.uid, names.__contains__):
            self.on_missed_event()
        self._state.release_claim(pod.uid)
        self.on_pod(pod)
        before = self._waiting.get(pod.uid)
        result, events = self._filter(pod, spec, names, args.names_json)
        # kube-scheduler tries a pod again because something ended. If nothing did as far as we know, its watch is ahead
        # of ours. A refusal now would be repeated only after the pod's backoff. The first time it asks about a pod, it
        # may have tried it before: as long as counting resources excludes every node, it does not ask.
        is_behind = before.asked_at == events if before is not None else bool(pod.scheduling_failure)
        is_short = len(self._waiting) <= MAX_CAUGHT_UP
        if is_behind and is_short and not result.fitting and self._waiting.await_room(pod.uid, CATCH_UP_S):
            result, _ = self._filter(pod, spec, names, args.names_json)
        return result

    def _filter(
        self, pod: SchedulerPod, spec: ExtenderPodSpec, names: Sequence[str], names_json: bytes
    ) -> tuple[FilterResult, int]:
        """Return the answer, and the number of the last room event that it is based on."""
        # Read before anything else: what becomes free from now on counts as new.
        events = self._waiting.events
        grant = self.grant(pod)
        timeout_s = self._settings.volume_timeout_s if spec.waits_before_binding else self._settings.claim_timeout_s
        with self._state.lock:
            # With the lock: what a pod claims or waits for ends when the watch shows its end.
            self.check_unbound(pod)
            if not grant.is_charged:
                self._wait(WaitingPod(pod, events, UNCHARGED, reads_ledger=True))
                self._reporter.report_uncharged(pod)
                return FilterResult(unresolvable={NodeProblem.UNCHARGED.text: [names]}), events
            query = self.query(pod, grant)
            fits, order = self._fit_and_claim(pod, query, names, timeout_s, spec.group)
            if order is None:
                return self._refuse(pod, query, fits, grant, events), events
        # If all nodes fit, which is common, the answer is the question: encoding 5,000 names takes half a millisecond.
        do_all_fit = bool(names_json) and not fits.problems.any()
        result = FilterResult(names, fitting_json=names_json) if do_all_fit else result_of(fits)
        keep_recent(self._orders, pod.uid, NodeOrder(result.fitting_json, fits, order), MAX_ORDERS)
        self._waiting.remove(pod.uid)
        return result, events

    def _fit_and_claim(
        self, pod: SchedulerPod, query: FitQuery, names: Sequence[str], timeout_s: float, group: str
    ) -> tuple[NodeFits, Columns | None]:
        """Return how the pod fits, and the order of nodes; None if it claimed nothing.

        GPUs for which pods of lower priority are nominated are only taken if there are no others.
        """
        with self._state.without_nominations([pod.uid]):
            fits = self._state.fit(query, names)
            order = self._claim_best(pod, query, fits, timeout_s, group)
        if order is None and (outranked := self._state.outranked_by(pod.priority)):
            with self._state.without_nominations([pod.uid, *outranked]):
                fits = self._state.fit(query, names)
                order = self._claim_best(pod, query, fits, timeout_s, group)
        return fits, order

    def explain(self, pod: SchedulerPod) -> None:
        """Report why a pod fits on no node, as filter does; nothing if it fits on one, or was filtered."""
        if self._state.claim(pod.uid) is not None or self._waiting.get(pod.uid) is not None:
            return
        grant = self.grant(pod)
        if not grant.is_charged:
            self._reporter.report_uncharged(pod)
            return
        query = self.query(pod, grant)
        with self._state.lock:
            fits = self._state.fit(query, self._state.node_names())
            summary = self._state.summarize(query, fits, grant.refusals)
        if len(fits.names) and fits.problems.all():
            self._reporter.report_refused(pod, summary, count_problems(fits))

    def read_pod(self, pod: ExtenderPod) -> SchedulerPod | None:
        return reduce_pod(pod.metadata, pod.spec, pod.status, self._scheme)

    def check_unbound(self, pod: SchedulerPod) -> None:
        """Raise Unavailable if the pod cannot be filtered now: kube-scheduler then tries again later."""
        if self._state.is_gone(pod.uid):
            raise Unavailable(f"pod {pod.title} has ended or was deleted")
        known, claim = self._state.pod(pod.uid), self._state.claim(pod.uid)
        if known is not None and known.node:
            raise Unavailable(f"pod {pod.title} is already bound to node {known.node}")
        if claim is not None:
            claim.check_not_binding()

    def grant(self, pod: SchedulerPod, *, waits: bool = True) -> Grant:
        """Return what the quota allows a pod, without models that were refused for it since its ledger last changed.

        `waits` for a charge that may be on its way.
        """
        namespace, cards = pod.metadata.namespace, self._state.card_sizes_mib()
        grant = self._ledgers.grant(namespace, pod.key, pod.request, self._scheme.unit_mib, cards, waits=waits)
        version, refused = self._refused.get(pod.uid, ("", set()))
        if not refused:
            return grant
        if version != self._ledgers.version(namespace):
            self._refused.pop(pod.uid, None)
            return grant
        models = grant.models if grant.models is not None else frozenset(cards)
        return replace(grant, models=models - refused)

    def refuse_model(self, pod: SchedulerPod, model: str) -> None:
        """Leave out a model for a pod until its ledger changes: it was refused when the pod was about to be bound."""
        version = self._ledgers.version(pod.metadata.namespace)
        before = self._refused.get(pod.uid, ("", set()))
        models = {model} | (before[1] if before[0] == version else set())
        if len(self._refused) > MAX_REFUSED:
            self._refused.clear()
        self._refused[pod.uid] = version, models

    def query(self, pod: SchedulerPod, grant: Grant) -> FitQuery:
        strategy = pod.options.placement_policy or grant.placement or self._settings.policy
        return FitQuery(
            request=pod.request,
            unit_mib=self._scheme.unit_mib,
            options=pod.options,
            granted=grant.models,
            pools=grant.pools,
            excluded=self._state.excluded_by_members(pod),
            strategy=strategy,
            host=pod.host,
            seed=pod.uid if strategy is PlacementStrategy.RANDOM else "",
            avoids_busy=self._settings.load_aware,
        )

    def _claim_best(
        self, pod: SchedulerPod, query: FitQuery, fits: NodeFits, timeout_s: float, group: str
    ) -> Columns | None:
        """Claim GPUs on the best node, and return the positions of all that fit, best first; None if none does."""
        order = fits.ranked()
        for position in order:
            node = fits.names[position]
            try:
                placed = self._state.place(query, node, pod.uid)
            except InsufficientGpus:
                # Not found within the search's limit of steps.
                fits.problems[position] = NodeProblem.COMBINATION
                continue
            self._state.take_claim(pod, node, placed, timeout_s=timeout_s, group=group)
            fitting: Columns = order[fits.problems[order] == NodeProblem.NONE]
            return fitting
        return None

    def _refuse(self, pod: SchedulerPod, query: FitQuery, fits: NodeFits, grant: Grant, events: int) -> FilterResult:
        """Have the pod wait, and say why. The caller has held the lock since the fit."""
        problems, before = count_problems(fits), self._waiting.get(pod.uid)
        summary = self._waiting.recent_summary(pod.uid, problems)
        waiting = WaitingPod(
            pod,
            events,
            summary or self._state.summarize(query, fits, grant.refusals),
            reads_ledger=NodeProblem.QUOTA in problems,
            is_incomplete=NodeProblem.NOT_SEARCHED in problems,
            problems=problems,
            is_merged=before is not None and (before.is_merged or has_other_shortages(before.problems, problems)),
        )
        # Decided once: kube-scheduler's text tells whether eviction would help, and it writes each new text to the pod.
        waiting.is_one_of_many = len(self._waiting) > MANY_WAITING if before is None else before.is_one_of_many
        may_evict = not waiting.is_one_of_many or self._state.has_lower_priority(pod.priority)
        self._wait(waiting)
        if pod.may_preempt and self._state.has_lower_priority(pod.priority):
            self.on_refused(pod, fits.names[is_resolvable(fits.problems)].tolist())
        shortage = merged_shortage(query) if waiting.is_merged else None
        self._reporter.report_refused(pod, waiting.summary, problems, shortage)
        return result_of(fits, shortage, may_evict=may_evict)

    def _wait(self, waiting: WaitingPod) -> None:
        self._waiting.add(waiting)
        # What happened since the decision was not for this pod, as it did not wait yet.
        if waiting.is_incomplete or self._waiting.events > waiting.filtered_at:
            self.on_missed_event()

    def prioritize(self, args: ExtenderArgs) -> tuple[Sequence[str], Numbers]:
        """Return the nodes, best first, and the score of each: its rank, or its level for pods with preferences."""
        known = self._orders.pop(args.pod.metadata.uid, None)
        if known is None:
            # Asked without filter: by another scheduler, or after a restart.
            pod, every = self.read_pod(args.pod), args.names()
            if pod is None:
                return every, np.zeros(len(every), np.int64)
            fits = self._state.fit(self.query(pod, self.grant(pod)), every)
            known = NodeOrder(args.names_json, fits, fits.ranked())
        order = known.order
        if known.asked != args.names_json:
            # Fewer nodes than filter returned, or in another order.
            order = order[np.isin(known.fits.names[order].astype(str), list(args.names()))]
        names = known.fits.nodes.take(order)
        if args.pod.spec.has_preferences:
            return names, levels_of(known.fits.keys[order])
        return names, np.arange(len(names))[::-1]


def is_resolvable(problems: Numbers) -> Flags:
    """Return which of these problems evictions could solve."""
    flags: Flags = np.isin(problems, [each for each in NodeProblem if each.is_resolvable])
    return flags


def levels_of(keys: Numbers) -> Numbers:
    """Return the level of each key, of ascending ones; the highest is best."""
    if not len(keys):
        return keys
    # How many different keys come before each.
    better = np.concatenate(([0], np.cumsum(keys[1:] != keys[:-1])))
    levels: Numbers = LEVELS - 1 - better * LEVELS // max(int(better[-1]) + 1, LEVELS)
    return levels


def has_other_shortages(before: Problems, now: Problems) -> bool:
    """Whether nodes lack something else than before: memory instead of cores, say.

    On a busy cluster that changes with every pod that ends. kube-scheduler would write a changed text to the pod, which
    requeues it, so from then on the pod gets one text for all of them.
    """
    short_before, short_now = ({each: count for each, count in of.items() if each.is_shortage} for of in (before, now))
    return len(short_before | short_now) > 1 and short_before != short_now


def result_of(fits: NodeFits, shortage: NodeProblem | None = None, *, may_evict: bool = True) -> FilterResult:
    """Return the answer; `shortage` stands for all problems of nodes that lack something free."""
    nodes = fits.by_problem()
    fitting = nodes.pop(NodeProblem.NONE, ())
    failed: dict[str, list[Sequence[str]]] = {}
    unresolvable: dict[str, list[Sequence[str]]] = {}
    for problem, names in nodes.items():
        told = shortage if shortage is not None and problem.is_shortage else problem
        (failed if may_evict and problem.is_resolvable else unresolvable).setdefault(told.text, []).append(names)
    return FilterResult(
        fitting=fitting,
        fitting_json=encode_names(fitting),
        failed=failed,
        unresolvable=unresolvable,
    )
