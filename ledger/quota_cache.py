"""The quotas of all namespaces, cached from their ConfigMaps.

The webhook refuses a quota that does not parse. If one gets into the cluster without the webhook, the last valid
version of it stays in force.
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
from ledger.quota_config_maps import is_legacy, parse_quota_config_map
from vcuda.decision import Unavailable
from vcuda.names import LEGACY_NAME, LEGACY_NAMESPACE
from vcuda.namespace_policy import NamespacePolicy, combine_policies
from vcuda.quota import Quota, QuotaError
from vcuda.scheme import Scheme

NO_POLICY = NamespacePolicy()

Name = tuple[str, str]
# A ConfigMap as one of the informers sees it: one with several quota labels is seen by several.
Source = tuple[int, Name]


class ParsedConfigMap(Struct, frozen=True):
    """The quotas in one ConfigMap, by namespace, and its resourceVersion."""

    quotas: dict[str, Quota]
    version: int


class NamespaceQuotas(Struct, frozen=True):
    """The quotas of one namespace, and their combined policy.

    `versions` and `mistakes` are by quota name. The default quota has no version. A quota with mistakes may be in
    `quotas` as well, in its last valid version.
    """

    quotas: tuple[Quota, ...] = ()
    policy: NamespacePolicy = NO_POLICY
    versions: Mapping[str, int] = {}
    mistakes: Mapping[str, tuple[str, ...]] = {}


class QuotaCache:
    """The quotas of a cluster; `default` applies to namespaces without one.

    With a ledger store, the last valid version of an invalid quota is looked up in the ledgers, so that it stays in
    force over a restart of this process.
    """

    def __init__(
        self, cluster: Cluster, scheme: Scheme, default: Quota | None = None, ledger_store: LedgerStore | None = None
    ) -> None:
        self._unit_mib, self._ledger_store = scheme.unit_mib, ledger_store
        self._default = NamespaceQuotas((default,), default.policy) if default else NamespaceQuotas()
        # A label selector cannot express "any of these labels", so each quota label has an informer.
        labels = [Selector(labels=f"{names.quota_label}=true") for names in scheme.all_names]
        legacy = Selector(fields=f"metadata.name={LEGACY_NAME}")
        self._informers = [
            *(Informer(cluster, CONFIG_MAPS, selector=label) for label in labels),
            Informer(cluster, CONFIG_MAPS, LEGACY_NAMESPACE, legacy),
        ]
        # Guards the maps below: the informers' threads update them together. Readers take no lock; a value of
        # `_by_namespace` is immutable and replaced as a whole.
        self._lock = threading.Lock()
        self._valid: dict[Source, ParsedConfigMap] = {}
        self._mistakes: dict[Source, tuple[str, ...]] = {}
        self._by_namespace: dict[str, NamespaceQuotas] = {}
        # Which ConfigMaps concern a namespace: an update must not scan all ConfigMaps of a large cluster.
        self._sources: dict[str, set[Source]] = {}
        self._handlers: list[Callable[[str], None]] = []
        self._was_synced = False
        self._log = structlog.get_logger()
        for index, informer in enumerate(self._informers):
            informer.on_change(partial(self._on_change, index))

    def on_change(self, handler: Callable[[str], None]) -> None:
        """Call `handler` with each namespace whose quotas changed; to be registered before `start`."""
        self._handlers.append(handler)

    def start(self) -> "QuotaCache":
        for informer in self._informers:
            informer.start()
        return self

    def stop(self) -> None:
        for informer in self._informers:
            informer.stop()

    @property
    def synced(self) -> bool:
        return all(informer.synced for informer in self._informers)

    @property
    def version(self) -> int:
        """The resourceVersion up to which every informer has seen all changes."""
        return min(informer.version for informer in self._informers)

    @property
    def invalid(self) -> int:
        """How many ConfigMaps hold an invalid quota."""
        return len({name for _, name in self._mistakes})

    @property
    def invalid_names(self) -> frozenset[str]:
        """The names of invalid quotas, as ledgers record them."""
        return frozenset(f"{namespace}/{name}" for _, (namespace, name) in list(self._mistakes))

    def mistakes_in(self, name: str, applied: Iterable[Quota]) -> dict[str, tuple[str, ...]]:
        """Return the mistakes in the quota `name`, by its name, if it is among the applied quotas."""
        if all(quota.name != name for quota in applied):
            return {}
        mistakes = [each for (_, key), each in list(self._mistakes.items()) if f"{key[0]}/{key[1]}" == name]
        return {name: mistakes[0]} if mistakes else {}

    def namespace_quotas(self, namespace: str) -> NamespaceQuotas:
        """Return the quotas that apply to a namespace; raises Unavailable until the cache has synced once."""
        # An informer that lists again keeps its objects, so quotas that were known once stay known.
        self._was_synced = self._was_synced or self.synced
        if not self._was_synced:
            raise Unavailable("the quotas have not been listed yet")
        return self._by_namespace.get(namespace, self._default)

    def policy(self, namespace: str) -> NamespacePolicy:
        return self.namespace_quotas(namespace).policy

    def _on_change(self, index: int, old: ConfigMap | None, new: ConfigMap | None) -> None:
        config_map = new or old
        if config_map is None:
            return
        source = index, (config_map.metadata.namespace, config_map.metadata.name)
        with self._lock:
            affected = self._namespaces_of(source)
            for namespace in affected:
                self._sources[namespace].discard(source)
            self._parse(source, new)
            for namespace in self._namespaces_of(source):
                self._sources.setdefault(namespace, set()).add(source)
                affected.add(namespace)
            for namespace in affected:
                self._combine(namespace)
        # Outside the lock: handlers enqueue work, and may read this cache.
        for namespace in affected:
            for handler in self._handlers:
                handler(namespace)

    def _namespaces_of(self, source: Source) -> set[str]:
        """Return the namespaces a ConfigMap concerns; an invalid one concerns at least its own."""
        namespaces = set(self._valid[source].quotas) if source in self._valid else set()
        return namespaces | ({source[1][0]} if source in self._mistakes else set())

    def _parse(self, source: Source, config_map: ConfigMap | None) -> None:
        """Take over a ConfigMap; if it is invalid, its last valid version stays."""
        self._mistakes.pop(source, None)
        namespace, name = source[1]
        if config_map is None:
            self._valid.pop(source, None)
            return
        try:
            quotas = parse_quota_config_map(namespace, name, config_map.data, self._unit_mib)
            self._valid[source] = ParsedConfigMap(quotas, int(config_map.metadata.resource_version))
        except QuotaError as error:
            self._mistakes[source] = tuple(map(str, error.mistakes))
            # Calls the API server with `_lock` held, at the first sight of an invalid quota only: readers take no lock.
            if source not in self._valid and (last_valid := self._last_valid(namespace, name)):
                self._valid[source] = last_valid
            in_force = "last valid version" if source in self._valid else "none"
            self._log.error(
                "quota_invalid", namespace=namespace, name=name, error=list(self._mistakes[source]), in_force=in_force
            )

    def _last_valid(self, namespace: str, name: str) -> ParsedConfigMap | None:
        """Look up a quota in the ledgers of the namespaces it applies to."""
        if self._ledger_store is None:
            return None
        try:
            quotas = self._ledger_store.find_quota(
                f"{namespace}/{name}", "" if is_legacy(namespace, name) else namespace
            )
        except (ApiError, Unavailable) as error:
            self._log.warning("last_valid_quota_unknown", namespace=namespace, name=name, error=str(error))
            return None
        if not quotas:
            return None
        return ParsedConfigMap(
            {each: quota for each, (quota, _) in quotas.items()}, max(version for _, version in quotas.values())
        )

    def _combine(self, namespace: str) -> None:
        """Rebuild the quotas of a namespace. A ConfigMap that several informers see counts once."""
        sources = self._sources[namespace]
        by_name: dict[Name, ParsedConfigMap] = {}
        for source in sources:
            parsed, name = self._valid.get(source), source[1]
            # The watches of the informers are not equally fast: the newest copy counts.
            if (
                parsed is not None
                and namespace in parsed.quotas
                and (name not in by_name or by_name[name].version < parsed.version)
            ):
                by_name[name] = parsed
        invalid = [source for source in sources if source in self._mistakes and source[1][0] == namespace]
        mistakes = {f"{source[1][0]}/{source[1][1]}": self._mistakes[source] for source in invalid}
        if not by_name and not mistakes:
            self._by_namespace.pop(namespace, None)
            del self._sources[namespace]
            return
        quotas = tuple(parsed.quotas[namespace] for _, parsed in sorted(by_name.items()))
        self._by_namespace[namespace] = NamespaceQuotas(
            quotas=quotas or self._default.quotas,
            policy=combine_policies([quota.policy for quota in quotas]) if quotas else self._default.policy,
            versions={f"{name[0]}/{name[1]}": parsed.version for name, parsed in by_name.items()},
            mistakes=dict(sorted(mistakes.items())),
        )
