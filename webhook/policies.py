"""The quotas of all namespaces, followed in the cluster: what admission needs of them, always at hand.

A quota that does not parse is refused where it is written; if it got in anyway, the last good one stays in force.
"""

import threading
from collections.abc import Mapping, Sequence

import structlog

from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, ConfigMap
from vcuda.amounts import Amounts
from vcuda.decision import Unavailable
from vcuda.language import Language
from vcuda.policy import Policy, joined
from vcuda.quota import Quota, QuotaError, parse_legacy, parse_quota

QUOTA_KEY = "quota.yaml"
LEGACY_NAMESPACE, LEGACY_NAME, LEGACY_KEY = "kube-system", "gpuquota", "gpu_quota"
NO_POLICY = Policy()

Name = tuple[str, str]


class NoPolicies:
    """Namespaces without quotas."""

    def policy(self, namespace: str) -> Policy:  # noqa: ARG002
        """Give the same policy for every namespace."""
        return NO_POLICY

    def quotas(self, namespace: str) -> Sequence[Quota]:  # noqa: ARG002
        """Give no quota."""
        return ()

    def used(self, namespace: str) -> Amounts:  # noqa: ARG002
        """Nothing is charged."""
        return Amounts()


class FixedPolicies(NoPolicies):
    """Quotas that are known beforehand: from files, or in a test."""

    def __init__(self, quotas: dict[str, list[Quota]], used: Mapping[str, Amounts]) -> None:
        self._quotas, self._used = quotas, used

    def policy(self, namespace: str) -> Policy:
        """Give what the namespace's quotas say together."""
        return joined([quota.policy for quota in self.quotas(namespace)])

    def quotas(self, namespace: str) -> Sequence[Quota]:
        """Give the namespace's quotas."""
        return self._quotas.get(namespace, ())

    def used(self, namespace: str) -> Amounts:
        """Give what was charged so far."""
        return self._used.get(namespace, Amounts())


class ClusterPolicies:
    """The quotas of a cluster, from its ConfigMaps."""

    def __init__(self, cluster: Cluster, spoken: Language) -> None:
        self._unit_mib = spoken.unit_mib
        label = Selector(labels=f"{spoken.names.quota_label}=true")
        legacy = Selector(fields=f"metadata.name={LEGACY_NAME}")
        self._informers = (
            Informer(cluster, CONFIG_MAPS, selector=label),
            Informer(cluster, CONFIG_MAPS, LEGACY_NAMESPACE, legacy),
        )
        # Guards the maps below, which two informers write; readers take whole values out of `_policies`.
        self._lock = threading.Lock()
        self._good: dict[Name, dict[str, Quota]] = {}
        self._bad: set[Name] = set()
        self._quotas: dict[str, list[Quota]] = {}
        self._policies: dict[str, Policy] = {}
        self._known = False
        self._log = structlog.get_logger()
        for informer in self._informers:
            informer.on_change(self._changed)

    def start(self) -> "ClusterPolicies":
        """Begin to follow."""
        for informer in self._informers:
            informer.start()
        return self

    def stop(self) -> None:
        """End."""
        for informer in self._informers:
            informer.stop()

    @property
    def synced(self) -> bool:
        """Whether all quotas are known."""
        return all(informer.synced for informer in self._informers)

    @property
    def invalid(self) -> int:
        """How many quotas do not parse."""
        return len(self._bad)

    def policy(self, namespace: str) -> Policy:
        """Give what the namespace's quotas say together."""
        # Once known, quotas stay known: informers never forget them, they only grow old.
        self._known = self._known or self.synced
        if not self._known:
            raise Unavailable("quotas are not yet known")
        return self._policies.get(namespace, NO_POLICY)

    def quotas(self, namespace: str) -> Sequence[Quota]:
        """Give the namespace's quotas."""
        return self._quotas.get(namespace, ())

    def used(self, namespace: str) -> Amounts:  # noqa: ARG002
        """Give what is charged: nothing yet, until there is a ledger."""
        return Amounts()

    def _changed(self, before: ConfigMap | None, after: ConfigMap | None) -> None:
        found = after or before
        if found is None:
            return
        name = found.metadata.namespace, found.metadata.name
        with self._lock:
            touched = set(self._good.get(name, ()))
            self._read(name, after)
            touched |= set(self._good.get(name, ()))
            for namespace in touched:
                self._join(namespace)

    def _read(self, name: Name, found: ConfigMap | None) -> None:
        """Take a quota over, or keep the last good one."""
        self._bad.discard(name)
        if found is None:
            self._good.pop(name, None)
            return
        try:
            self._good[name] = self._parse(name, found)
        except QuotaError as wrong:
            self._bad.add(name)
            kept = "the last good one stays in force" if name in self._good else "it is not in force"
            self._log.error("quota_invalid", namespace=name[0], name=name[1], wrong=list(wrong.mistakes), kept=kept)

    def _parse(self, name: Name, found: ConfigMap) -> dict[str, Quota]:
        where = f"{name[0]}/{name[1]}"
        if name == (LEGACY_NAMESPACE, LEGACY_NAME) and LEGACY_KEY in found.data:
            return parse_legacy(found.data[LEGACY_KEY], where)
        if QUOTA_KEY not in found.data:
            raise QuotaError([f"{where}: data: has no key {QUOTA_KEY}; write the quota under it"])
        return {name[0]: parse_quota(found.data[QUOTA_KEY], where, self._unit_mib)}

    def _join(self, namespace: str) -> None:
        """Put a namespace's quotas together anew."""
        found = [quotas[namespace] for _, quotas in sorted(self._good.items()) if namespace in quotas]
        if found:
            self._quotas[namespace] = found
            self._policies[namespace] = joined([quota.policy for quota in found])
        else:
            self._quotas.pop(namespace, None)
            self._policies.pop(namespace, None)
