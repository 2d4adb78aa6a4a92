"""A cluster on which pods are tried, for what-if questions and simulations.

They are admitted, charged and placed one after another, by the functions that webhook and scheduler use.
"""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from vcuda.charge_moves import move_problems
from vcuda.charging import PodDemand, count_fitting, fit_charge
from vcuda.decision import Reason
from vcuda.dimensions import CORES, MEMORY
from vcuda.fit_query import FitQuery, needs_search
from vcuda.fit_summary import Problems, count_problems, describe_fits
from vcuda.gpu_availability import GpuUsage
from vcuda.gpu_model import parse_model
from vcuda.gpu_table import GpuTable
from vcuda.host import Host
from vcuda.namespace_policy import Mode, NamespacePolicy, combine_policies
from vcuda.node_fit import NodeFits, NodeFitter
from vcuda.node_problem import NodeProblem
from vcuda.placement import InsufficientGpus, PlacedSlices, peak_usage, placed_model
from vcuda.placement_costs import WorkloadEstimate
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import NO_OPTIONS, PodOptions
from vcuda.quota import Quota
from vcuda.quota_usage import Charge, QuotaUsage
from vcuda.request import PodRequest

# How often a search for pods with several containers is continued, on one cluster in total: the scheduler searches once
# and leaves the rest to the next attempt, 15 milliseconds at most each time.
MAX_CONTINUED = 2000


class TrialPod(Struct, frozen=True):
    """A pod to be tried. `seed` is that of the strategy `random`; without a strategy that of its namespace applies."""

    request: PodRequest
    namespace: str = ""
    options: PodOptions = NO_OPTIONS
    host: Host = Host()
    strategy: PlacementStrategy | None = None
    seed: str = ""
    # Nodes, or some of their GPUs, that other members of its workload use; see FitQuery.
    excluded: Mapping[str, Sequence[str] | None] = {}


class PodPlacement(Struct, frozen=True):
    """What a pod got: its node, its GPUs by container, and its charge if its namespace has quotas.

    `audited` is why its quotas would refuse it, if they were enforced.
    """

    pod: TrialPod
    node: str
    placed: PlacedSlices
    usage: dict[str, GpuUsage]
    charge: Charge | None = None
    audited: tuple[Reason, ...] = ()


class TrialRefusal(Struct, frozen=True):
    """Why a pod got nothing: the reasons of its quota, or what is wrong with the nodes."""

    reasons: tuple[Reason, ...] = ()
    query: FitQuery | None = None
    fits: NodeFits | None = None
    audited: tuple[Reason, ...] = ()


class TrialCluster:
    """Changes the table and the usages that it is given: callers keep copies of what they still need."""

    def __init__(
        self,
        table: GpuTable,
        estimate: WorkloadEstimate,
        *,
        unit_mib: int,
        strategy: PlacementStrategy,
        usages: Mapping[str, QuotaUsage] | None = None,
        cluster_mode: Mode = Mode.ENFORCE,
    ) -> None:
        self.table, self._estimate, self._unit_mib, self._strategy = table, estimate, unit_mib, strategy
        self._usages, self._cluster_mode = dict(usages or {}), cluster_mode
        self._policies = {name: policy_of(usage.quotas) for name, usage in self._usages.items()}
        self.fitter = NodeFitter(table, estimate)
        self._continued = 0

    def copy(self) -> "TrialCluster":
        # Shallow: amounts are values.
        usages = {name: copy.copy(usage) for name, usage in self._usages.items()}
        return TrialCluster(
            self.table.copy(),
            self._estimate,
            unit_mib=self._unit_mib,
            strategy=self._strategy,
            usages=usages,
            cluster_mode=self._cluster_mode,
        )

    def is_enforced(self, namespace: str) -> bool:
        """Whether the quotas of a namespace refuse anything; in audit mode they only count."""
        policy = self._policies.get(namespace, NamespacePolicy())
        return policy.effective_mode(self._cluster_mode) is Mode.ENFORCE

    def quota_problems(self, pod: TrialPod) -> tuple[Reason, ...]:
        """Return what of the quotas of its namespace a pod exceeds, whether they are enforced or not."""
        usage = self._usages.get(pod.namespace)
        if usage is None or not pod.request.containers:
            return ()
        return fit_charge(usage, PodDemand(pod.request, self._unit_mib), pod.options, self._cards()).reasons

    def count_admitted(self, pod: TrialPod, wanted: int) -> int:
        """Return how many of so many equal pods the quotas of their namespace would admit."""
        usage = self._usages.get(pod.namespace)
        if usage is None or not self.is_enforced(pod.namespace):
            return wanted
        return count_fitting(usage, PodDemand(pod.request, self._unit_mib), pod.options, self._cards(), wanted)

    def place(self, pod: TrialPod) -> PodPlacement | TrialRefusal:
        """Admit a pod, and place it on the best node, if it fits on one."""
        problems = self.quota_problems(pod)
        if problems and self.is_enforced(pod.namespace):
            return TrialRefusal(problems)
        result = self._place(pod)
        return replace(result, audited=problems) if problems else result

    def _place(self, pod: TrialPod) -> PodPlacement | TrialRefusal:
        query = self.query(pod)
        if not pod.request.containers or not (needs_search(query) or query.excluded):
            name = self.fitter.best_node(query)
            return self._take(pod, query, name) if name else TrialRefusal((), query)
        first = fits = self.fitter.fit(list(self.table.names()), query)
        while True:
            for position in fits.ranked().tolist():
                try:
                    return self._take(pod, query, fits.names[position])
                except InsufficientGpus:
                    continue
            unsearched = np.flatnonzero(first.problems == NodeProblem.NOT_SEARCHED)
            if not len(unsearched) or self._continued >= MAX_CONTINUED:
                return TrialRefusal((), query, first)
            self._continued += 1
            fits = self.fitter.fit(first.names[unsearched].tolist(), query)
            first.problems[unsearched] = fits.problems

    def explain(self, refusal: TrialRefusal) -> tuple[str, Problems]:
        """Return why a pod fits on no node, in a sentence with numbers, and how many nodes have each problem."""
        if refusal.query is None:
            return "", {}
        fits = refusal.fits or self.fitter.fit(list(self.table.names()), refusal.query)
        return describe_fits(refusal.query, fits, self.fitter.best_free(refusal.query, fits)), count_problems(fits)

    def remove(self, placement: PodPlacement) -> None:
        """Undo a placement."""
        self.table.give_back(placement.node, placement.usage)
        self._take_host(placement.node, placement.pod.host, -1)
        if placement.charge is not None:
            usage = self._usages[placement.pod.namespace]
            held = usage.charged_by_limit(placement.charge)
            usage.reserved, usage.taken = usage.reserved - held, usage.taken - held

    def query(self, pod: TrialPod) -> FitQuery:
        policy = self._policies.get(pod.namespace, NamespacePolicy())
        return FitQuery(
            pod.request,
            self._unit_mib,
            pod.options,
            granted=self._granted(pod),
            pools=policy.pools,
            strategy=pod.options.placement_policy or pod.strategy or policy.placement or self._strategy,
            host=pod.host,
            checks_host=True,
            seed=pod.seed,
            excluded=pod.excluded,
        )

    def _take(self, pod: TrialPod, query: FitQuery, name: str) -> PodPlacement:
        placed = self.fitter.place(query, name) if pod.request.containers else {}
        used = peak_usage(pod.request, placed)
        self.table.take(name, used)
        self._take_host(name, pod.host, 1)
        usage, charge = self._usages.get(pod.namespace), None
        if usage is not None and placed:
            charge = self._charge(pod, *placed_model(placed, self.table.gpus(name)))
            usage.reserve(parse_model(charge.model), charge.amounts)
        return PodPlacement(pod, name, placed, used, charge)

    def _take_host(self, name: str, host: Host, sign: int) -> None:
        cpu_milli, mib = self.table.host(name)
        self.table.set_host(name, cpu_milli - sign * host.cpu_milli, mib - sign * host.mib)

    def _granted(self, pod: TrialPod) -> frozenset[str] | None:
        """Return the models for which the quotas have room for a pod; None means all."""
        usage = self._usages.get(pod.namespace)
        if usage is None or not usage.quotas or not self.is_enforced(pod.namespace):
            return None
        charges = {model: self._charge(pod, model, mib) for model, mib in self._cards().items()}
        return frozenset(model for model, charge in charges.items() if not move_problems(usage, None, charge))

    def _charge(self, pod: TrialPod, model: str, card_mib: int) -> Charge:
        amounts = PodDemand(pod.request, self._unit_mib)(card_mib)
        return Charge(parse_model(model).name, amounts[CORES], amounts[MEMORY])

    def _cards(self) -> dict[str, int]:
        return {model: mib for model, mib in self.table.models() if model}


def policy_of(quotas: Sequence[Quota]) -> NamespacePolicy:
    return combine_policies([quota.policy for quota in quotas])
