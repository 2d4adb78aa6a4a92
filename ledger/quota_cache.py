"""The quotas of all namespaces, followed in the cluster: always at hand, for whoever holds pods to them.

A quota that does not parse is refused where it is written; if it got in anyway, the last good one stays in force.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import structlog
from msgspec import Struct

from cluster.errors import ApiError
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, ConfigMap
from ledger.ledger_store import LedgerStore
from vcuda.decision import Unavailable
from vcuda.names import LEGACY_KEY, LEGACY_NAME, LEGACY_NAMESPACE, QUOTA_KEY
from vcuda.namespace_policy import NamespacePolicy, combine_policies
from vcuda.quota import Quota, QuotaError, QuotaMistake, parse_legacy_quotas, parse_quota
from vcuda.scheme import Scheme

NO_POLICY = NamespacePolicy()

Name = tuple[str, str]


class ParsedConfigMap(Struct, frozen=True):
    """A ConfigMap that was read: the quotas it holds, by namespace, and its version."""

    quotas: dict[str, Quota]
    version: int


class NamespaceQuotas(Struct, frozen=True):
    """What one namespace is held to: its quotas, with the version of each; the default one has none."""

    quotas: tuple[Quota, ...] = ()
    policy: NamespacePolicy = NO_POLICY
    versions: Mapping[str, int] = {}
    mistakes: Mapping[str, tuple[str, ...]] = {}


def is_quota(namespace: str, name: str, labels: Mapping[str, str], scheme: Scheme) -> bool:
    """Tell a quota from other ConfigMaps: by its label under any domain, or as the ancestors' one."""
    if (namespace, name) == (LEGACY_NAMESPACE, LEGACY_NAME):
        return True
    return any(labels.get(names.quota_label) == "true" for names in scheme.all_names)


def quotas_in(namespace: str, name: str, data: dict[str, str], unit_mib: int) -> dict[str, Quota]:
    """Read a ConfigMap of either form, by namespace; a QuotaError says what is wrong with it."""
    where = f"{namespace}/{name}".lstrip("/")
    if (namespace, name) == (LEGACY_NAMESPACE, LEGACY_NAME) and (LEGACY_KEY in data or QUOTA_KEY not in data):
        if LEGACY_KEY not in data:
            raise QuotaError(QuotaMistake(where, "data", "", f"has no key {LEGACY_KEY}; write the quotas under it"))
        return parse_legacy_quotas(data[LEGACY_KEY], where)
    if QUOTA_KEY not in data:
        raise QuotaError(QuotaMistake(where, "data", "", f"has no key {QUOTA_KEY}; write the quota under it"))
    return {namespace: parse_quota(data[QUOTA_KEY], where, unit_mib)}


class QuotaCache:
    """The quotas of a cluster, from its ConfigMaps; `default` is for namespaces that have none.

    A last good quota that this process has not seen itself stands in the ledgers, if it has `books` to look it up.
    """

    def __init__(
        self, cluster: Cluster, scheme: Scheme, default: Quota | None = None, ledger_store: LedgerStore | None = None
    ) -> None:
        self._unit_mib, self._ledger_store = scheme.unit_mib, ledger_store
        self._default = NamespaceQuotas((default,), default.policy) if default else NamespaceQuotas()
        labels = [Selector(labels=f"{names.quota_label}=true") for names in scheme.all_names]
        legacy = Selector(fields=f"metadata.name={LEGACY_NAME}")
        self._informers = [
            *(Informer(cluster, CONFIG_MAPS, selector=label) for label in labels),
            Informer(cluster, CONFIG_MAPS, LEGACY_NAMESPACE, legacy),
        ]
        # Guards the maps below, which several informers write; readers take whole values out of `_governed`.
        self._lock = threading.Lock()
        self._good: dict[tuple[int, Name], ParsedConfigMap] = {}
        self._bad: dict[tuple[int, Name], tuple[str, ...]] = {}
        self._admission: dict[str, NamespaceQuotas] = {}
        # Which ConfigMaps are about a namespace: to put one together, not all of a large cluster are looked through.
        self._about: dict[str, set[tuple[int, Name]]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._known = False
        self._log = structlog.get_logger()
        for index, informer in enumerate(self._informers):
            informer.on_change(partial(self._changed, index))

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Be told of namespaces whose quotas changed; to be called before `start`."""
        self._listeners.append(listener)

    def start(self) -> "QuotaCache":
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
    def version(self) -> int:
        """The version up to which all quotas are known, under whatever label."""
        return min(informer.version for informer in self._informers)

    @property
    def invalid(self) -> int:
        """How many quotas do not parse."""
        return len({name for _, name in self._bad})

    @property
    def unreadable(self) -> frozenset[str]:
        """Which quotas do not parse, as they are named in ledgers: there the last good ones may still stand."""
        return frozenset(f"{namespace}/{name}" for _, (namespace, name) in list(self._bad))

    def mistakes_of(self, name: str, held: Iterable[Quota]) -> dict[str, tuple[str, ...]]:
        """Give what is wrong with a quota that a namespace is held to, wherever that is written."""
        if all(quota.name != name for quota in held):
            return {}
        found = [told for (_, key), told in list(self._bad.items()) if f"{key[0]}/{key[1]}" == name]
        return {name: found[0]} if found else {}

    def namespace_quotas(self, namespace: str) -> NamespaceQuotas:
        """Give what a namespace is held to; Unavailable while that is not known."""
        # Once known, quotas stay known: informers never forget them, they only grow old.
        self._known = self._known or self.synced
        if not self._known:
            raise Unavailable("quotas are not yet known")
        return self._admission.get(namespace, self._default)

    def policy(self, namespace: str) -> NamespacePolicy:
        """Give what the namespace's quotas say together."""
        return self.namespace_quotas(namespace).policy

    def _changed(self, index: int, before: ConfigMap | None, after: ConfigMap | None) -> None:
        found = after or before
        if found is None:
            return
        key = index, (found.metadata.namespace, found.metadata.name)
        with self._lock:
            touched = self._namespaces_of(key)
            for namespace in touched:
                self._about[namespace].discard(key)
            self._read(key, after)
            for namespace in self._namespaces_of(key):
                self._about.setdefault(namespace, set()).add(key)
                touched.add(namespace)
            for namespace in touched:
                self._join(namespace)
        for namespace in touched:
            for listener in self._listeners:
                listener(namespace)

    def _namespaces_of(self, key: tuple[int, Name]) -> set[str]:
        found = set(self._good[key].quotas) if key in self._good else set()
        return found | ({key[1][0]} if key in self._bad else set())

    def _read(self, key: tuple[int, Name], found: ConfigMap | None) -> None:
        """Take a quota over, or keep the last good one."""
        self._bad.pop(key, None)
        namespace, name = key[1]
        if found is None:
            self._good.pop(key, None)
            return
        try:
            quotas = quotas_in(namespace, name, found.data, self._unit_mib)
            self._good[key] = ParsedConfigMap(quotas, int(found.metadata.resource_version))
        except QuotaError as wrong:
            self._bad[key] = tuple(map(str, wrong.mistakes))
            if key not in self._good and (last := self._last_good(namespace, name)):
                self._good[key] = last
            kept = "the last good one stays in force" if key in self._good else "it is not in force"
            self._log.error("quota_invalid", namespace=namespace, name=name, wrong=list(self._bad[key]), kept=kept)

    def _last_good(self, namespace: str, name: str) -> ParsedConfigMap | None:
        """Look a quota up in the ledgers that are held to it."""
        if self._ledger_store is None:
            return None
        is_legacy = (namespace, name) == (LEGACY_NAMESPACE, LEGACY_NAME)
        try:
            found = self._ledger_store.quotas_named(f"{namespace}/{name}", "" if is_legacy else namespace)
        except (ApiError, Unavailable) as away:
            self._log.warning("last_quota_not_found", namespace=namespace, name=name, cause=str(away))
            return None
        if not found:
            return None
        return ParsedConfigMap({each: quota for each, (quota, _) in found.items()}, max(at for _, at in found.values()))

    def _join(self, namespace: str) -> None:
        """Put a namespace's quotas together anew; a ConfigMap may be seen under several labels, and counts once."""
        about = self._about[namespace]
        by_name: dict[Name, ParsedConfigMap] = {}
        for key in about:
            written, name = self._good.get(key), key[1]
            # Each label has a watch of its own, and they are not equally fast: the newest copy counts.
            if (
                written is not None
                and namespace in written.quotas
                and (name not in by_name or by_name[name].version < written.version)
            ):
                by_name[name] = written
        bad = [key for key in about if key in self._bad and key[1][0] == namespace]
        mistakes = {f"{key[1][0]}/{key[1][1]}": self._bad[key] for key in bad}
        if not by_name and not mistakes:
            self._admission.pop(namespace, None)
            del self._about[namespace]
            return
        quotas = tuple(written.quotas[namespace] for _, written in sorted(by_name.items()))
        self._admission[namespace] = NamespaceQuotas(
            quotas=quotas or self._default.quotas,
            policy=combine_policies([quota.policy for quota in quotas]) if quotas else self._default.policy,
            versions={f"{name[0]}/{name[1]}": written.version for name, written in by_name.items()},
            mistakes=dict(sorted(mistakes.items())),
        )
