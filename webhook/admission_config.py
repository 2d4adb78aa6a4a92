"""The part of the configuration that decides on admission, with lookups derived from it once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vcuda.injection_modes import InjectionSetting
from vcuda.names import ANCESTOR_ANNOTATIONS, DEFAULT_SCHEDULER, DEFAULT_SYSTEM_NAMESPACE, Names
from vcuda.namespace_policy import Mode, PrivilegedPolicy
from vcuda.scheme import Scheme

KUBE_SCHEDULER = "system:kube-scheduler"


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """What admission needs of the configuration.

    `cluster_mode` and `cluster_privileged` apply where a namespace's quotas do not set their own. `binders` are the
    users, beside the schedulers, that may bind GPU pods.
    """

    scheme: Scheme
    cluster_mode: Mode = Mode.ENFORCE
    system_namespace: str = DEFAULT_SYSTEM_NAMESPACE
    scheduler_aliases: tuple[str, ...] = ("gpu-scheduler",)
    tolerations: tuple[dict[str, Any], ...] = ()
    binders: tuple[str, ...] = ()
    cluster_privileged: PrivilegedPolicy = PrivilegedPolicy.DENY
    # `auto` never chooses nvidia-runtime, so the setting tells whether a node may use it.
    injection: InjectionSetting = "auto"

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
        # `predicate-gpu-idx-` is followed by the index of a container.
        return tuple(f"{names.domain}/{ANCESTOR_ANNOTATIONS[0]}" for names in self.scheme.all_names)

    @cached_property
    def frozen_annotations(self) -> tuple[str, ...]:
        """The user's annotations that cannot change after a pod was charged, because the charge depends on them."""
        return (*sorted(self.scheme.option_precedence), self.names.memory_follows_core)

    @cached_property
    def read_annotations(self) -> frozenset[str]:
        """The annotations whose values are read when a pod is created."""
        return frozenset((*self.frozen_annotations, self.names.cards_rewritten, self.names.limits))

    def replaces_scheduler(self, name: str | None) -> bool:
        """Whether a GPU pod with this schedulerName is given to Quotient's scheduler instead."""
        # Absent only in offline checks: the API server sets the default name before it calls webhooks.
        return not name or name == DEFAULT_SCHEDULER or name in self.scheduler_aliases

    def is_own_service_account(self, user: str) -> bool:
        # With the colon: `quotient-system-2` is another namespace.
        return user.startswith(f"system:serviceaccount:{self.system_namespace}:")

    def may_bind(self, user: str) -> bool:
        """Whether a user may bind GPU pods."""
        return self.is_own_service_account(user) or user == KUBE_SCHEDULER or user in self.binders

    def owns_annotation(self, key: str) -> bool:
        """Whether only Quotient, or the scheduler of an ancestor, may write an annotation."""
        return key in self._owned or key.startswith(self._owned_prefixes)
