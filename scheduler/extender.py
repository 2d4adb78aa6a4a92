"""The decisions of the extender: which nodes fit a pod, in which order they are preferred, and which GPUs it claims."""

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Struct

from scheduler.cluster_state import ClusterState
from scheduler.extender_api import ExtenderArgs, ExtenderPod, FilterResult, HostPriority
from scheduler.ledgers import Grant, LedgerCache
from scheduler.pods import SchedulerPod, reduce_pod
from scheduler.reporting import UNCHARGED, Reporter
from scheduler.waiting_pods import WaitingPods
from settings.configuration import SchedulerSettings
from vcuda.decision import Unavailable
from vcuda.fit_summary import count_problems, describe_fits
from vcuda.node_fit import FitQuery, NodeFits, NodeProblem
from vcuda.placement import InsufficientGpus
from vcuda.scheme import Scheme

# Into how many levels of preference nodes are divided for pods that have preferences of their own: kube-scheduler's
# scores decide among the nodes of a level.
LEVELS = 10
# Rankings are kept from filter to prioritize, which follows at once. A few more, for requests that were given up.
MAX_RANKINGS = 16
MAX_REFUSED = 10_000


# Whole Node objects by name; None if the scheduler sent names only.
WholeNodes = dict[str, msgspec.Raw] | None


class Ranking(Struct, frozen=True):
    """The nodes that fit a pod, best first, and a level for each that is equal for equally good nodes."""

    names: Sequence[str]
    levels: Sequence[int]


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
        self._rankings: dict[str, Ranking] = {}
        # Models that a ledger refused when a pod was about to be bound, with the version of that ledger.
        self._refused: dict[str, tuple[str, set[str]]] = {}

    def filter(self, args: ExtenderArgs) -> FilterResult:
        """Return the nodes that fit, and a reason for each of the others; claim GPUs on the best one."""
        whole = args.nodes.by_name() if args.nodes is not None and args.node_names is None else None
        names: Sequence[str] = list(whole) if whole is not None else args.node_names or []
        pod = self.read_pod(args.pod)
        if pod is None:
            return filter_result(names, {}, {}, whole)
        spec = args.pod.spec if args.pod else ExtenderPod().spec
        self._check_unbound(pod)
        self._state.void_group(pod.uid, spec.group)
        self._waiting.note_asked(pod.uid, lambda node: node in names)
        self._state.release_claim(pod.uid)
        # Read before anything else: what becomes free from now on counts as new.
        events = self._waiting.events
        grant = self.grant(pod)
        if not grant.is_charged:
            self._waiting.add(pod, events, UNCHARGED, is_blocked_by_ledger=True)
            self._reporter.report_uncharged(pod)
            return filter_result([], {}, dict.fromkeys(names, NodeProblem.UNCHARGED.text), whole)
        timeout_s = self._settings.volume_timeout_s if spec.waits_before_binding else self._settings.claim_timeout_s
        query = self.query(pod, grant)
        with self._state.lock:
            fits = self._state.fit(query, names)
            order = self._claim_best(pod, query, fits, timeout_s, spec.group)
        if order is None:
            self._refuse(pod, query, fits, grant, events)
        else:
            self._remember(pod.uid, Ranking([names[at] for at in order], levels_of(fits, order)))
            self._waiting.remove(pod.uid)
        return self._result(fits, whole)

    def read_pod(self, pod: ExtenderPod | None) -> SchedulerPod | None:
        return reduce_pod(pod.metadata, pod.spec, pod.status, self._scheme) if pod else None

    def _check_unbound(self, pod: SchedulerPod) -> None:
        """Raise Unavailable if the pod cannot be filtered now: kube-scheduler then tries again later."""
        known, claim = self._state.pod(pod.uid), self._state.claim(pod.uid)
        if known is not None and known.node:
            raise Unavailable(f"pod {pod.title} is already bound to node {known.node}")
        if claim is not None and claim.is_unsettled:
            raise Unavailable(f"pod {pod.title}: it is not known yet whether it was bound to node {claim.node}")
        if claim is not None and claim.expires_at is None:
            raise Unavailable(f"pod {pod.title} is being bound to node {claim.node}")

    def grant(self, pod: SchedulerPod) -> Grant:
        """Return what the quota allows a pod, without models that were refused for it since its ledger last changed."""
        namespace, cards = pod.metadata.namespace, self._state.card_sizes_mib()
        grant = self._ledgers.grant(namespace, pod.key, pod.request, self._scheme.unit_mib, cards)
        version, refused = self._refused.get(pod.uid, ("", set()))
        if not refused:
            return grant
        if version != self._ledgers.version(namespace):
            del self._refused[pod.uid]
            return grant
        models = grant.models if grant.models is not None else frozenset(cards)
        return Grant(grant.is_charged, models - refused, grant.pools, grant.refusals)

    def refuse_model(self, pod: SchedulerPod, model: str) -> None:
        """Leave out a model for a pod until its ledger changes: it was refused when the pod was about to be bound."""
        version = self._ledgers.version(pod.metadata.namespace)
        before = self._refused.get(pod.uid, ("", set()))
        models = {model} | (before[1] if before[0] == version else set())
        if len(self._refused) > MAX_REFUSED:
            self._refused.clear()
        self._refused[pod.uid] = version, models

    def query(self, pod: SchedulerPod, grant: Grant) -> FitQuery:
        return FitQuery(
            request=pod.request,
            unit_mib=self._scheme.unit_mib,
            options=pod.options,
            granted=grant.models,
            pools=grant.pools,
            excluded=self._state.excluded_by_members(pod),
            strategy=self._settings.policy,
        )

    def _claim_best(
        self, pod: SchedulerPod, query: FitQuery, fits: NodeFits, timeout_s: float, group: str
    ) -> Sequence[int] | None:
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
            return [int(at) for at in order if fits.problems[at] == NodeProblem.NONE]
        return None

    def _refuse(self, pod: SchedulerPod, query: FitQuery, fits: NodeFits, grant: Grant, events: int) -> None:
        summary, problems = describe_fits(query, fits, grant.refusals), count_problems(fits)
        is_blocked_by_ledger = NodeProblem.QUOTA in problems and not any(each.is_resolvable for each in problems)
        self._waiting.add(pod, events, summary, is_blocked_by_ledger=is_blocked_by_ledger)
        self._reporter.report_refused(pod, summary, problems)

    def _remember(self, uid: str, ranking: Ranking) -> None:
        self._rankings.pop(uid, None)
        self._rankings[uid] = ranking
        while len(self._rankings) > MAX_RANKINGS:
            del self._rankings[next(iter(self._rankings))]

    def _result(self, fits: NodeFits, whole: WholeNodes) -> FilterResult:
        if not fits.problems.any():
            return filter_result(fits.names, {}, {}, whole)
        fitting: list[str] = []
        failed: dict[str, str] = {}
        unresolvable: dict[str, str] = {}
        for name, code in zip(fits.names, fits.problems.tolist(), strict=True):
            if not code:
                fitting.append(name)
            elif RESOLVABLE[code]:
                failed[name] = PROBLEM_TEXTS[code]
            else:
                unresolvable[name] = PROBLEM_TEXTS[code]
        return filter_result(fitting, failed, unresolvable, whole)

    def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Return a score for each node: its rank, or its level for pods that have preferences of their own."""
        names = args.node_names if args.node_names is not None else list(args.nodes.by_name() if args.nodes else ())
        pod = self.read_pod(args.pod)
        if pod is None or args.pod is None:
            return [HostPriority(name, 0) for name in names]
        ranking = self._rankings.pop(pod.uid, None)
        if ranking is None:
            # Asked without filter: by another scheduler, or after a restart.
            fits = self._state.fit(self.query(pod, self.grant(pod)), names)
            order = fits.ranked()
            ranking = Ranking([names[at] for at in order], levels_of(fits, [int(at) for at in order]))
        if args.pod.spec.has_preferences:
            scores = dict(zip(ranking.names, ranking.levels, strict=True))
        else:
            scores = dict(zip(ranking.names, range(len(ranking.names) - 1, -1, -1), strict=True))
        return [HostPriority(name, scores.get(name, 0)) for name in names]


# By number: looked up once for every node of a filter.
RESOLVABLE = [problem.is_resolvable for problem in NodeProblem]
PROBLEM_TEXTS = [problem.text for problem in NodeProblem]


def levels_of(fits: NodeFits, order: Sequence[int]) -> list[int]:
    """Return the level of each node in a ranking, the highest best; equally good nodes have the same."""
    if not order:
        return []
    _, dense = np.unique(fits.keys[order], return_inverse=True)
    count = int(dense.max()) + 1
    levels: list[int] = (LEVELS - 1 - dense * LEVELS // max(count, LEVELS)).tolist()
    return levels


def filter_result(
    fitting: Sequence[str],
    failed: dict[str, str],
    unresolvable: dict[str, str],
    whole: WholeNodes,
) -> FilterResult:
    if whole is None:
        return FilterResult(node_names=list(fitting), failed_nodes=failed, failed_and_unresolvable_nodes=unresolvable)
    nodes = {"items": [whole[name] for name in fitting]}
    return FilterResult(nodes=nodes, failed_nodes=failed, failed_and_unresolvable_nodes=unresolvable)
