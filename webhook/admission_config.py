"""What the cluster is configured to hold pods to, put together once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vcuda.names import ANCESTOR_ANNOTATIONS, DEFAULT_SCHEDULER, DEFAULT_SYSTEM_NAMESPACE, Names
from vcuda.namespace_policy import Mode
from vcuda.scheme import Scheme

KUBE_SCHEDULER = "system:kube-scheduler"


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """The rules of a cluster. `cluster_mode` counts where a namespace's quotas say nothing."""

    scheme: Scheme
    cluster_mode: Mode = Mode.ENFORCE
    system_namespace: str = DEFAULT_SYSTEM_NAMESPACE
    scheduler_aliases: tuple[str, ...] = ("gpu-scheduler",)
    tolerations: tuple[dict[str, Any], ...] = ()
    binders: tuple[str, ...] = ()

    @cached_property
    def names(self) -> Names:
        """The names under the configured domain."""
        return self.scheme.names

    @cached_property
    def _owned(self) -> frozenset[str]:
        under_all = (f"{names.domain}/{key}" for names in self.scheme.all_names for key in ANCESTOR_ANNOTATIONS)
        return frozenset((self.names.limits, self.names.placement, *under_all))

    @cached_property
    def _owned_prefixes(self) -> tuple[str, ...]:
        return tuple(f"{names.domain}/{ANCESTOR_ANNOTATIONS[0]}" for names in self.scheme.all_names)

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """The annotations that a pod keeps as it was admitted with."""
        return (*sorted(self.scheme.option_precedence), self.names.memory_follows_core)

    def replaces_scheduler(self, name: str | None) -> bool:
        """Tell whether a pod that names this scheduler is one for ours."""
        return not name or name == DEFAULT_SCHEDULER or name in self.scheduler_aliases

    def is_quotient(self, user: str) -> bool:
        """Tell whether a user is one of our own service accounts."""
        return user.startswith(f"system:serviceaccount:{self.system_namespace}:")

    def may_bind(self, user: str) -> bool:
        """Tell whether a user may put GPU pods on nodes."""
        return self.is_quotient(user) or user == KUBE_SCHEDULER or user in self.binders

    def owns(self, key: str) -> bool:
        """Tell whether an annotation is one that only Quotient, or an ancestor's scheduler, may write."""
        return key in self._owned or key.startswith(self._owned_prefixes)
