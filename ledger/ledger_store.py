"""Reads and writes ledgers: one ConfigMap per namespace, all of them in Quotient's own namespace.

Every write is a compare-and-swap of the whole ledger on its resourceVersion: of two writers that read the same
version, one gets a Conflict.
"""

from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from cluster.errors import AlreadyExists, NotFound, Rejected
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, ConfigMap, Metadata, Owners
from vcuda.decision import Unavailable
from vcuda.ledger import Ledger, LedgerState, decode_ledger, encode_ledger
from vcuda.names import LEDGER_KEY, LEDGER_LABEL, LEDGER_PREFIX
from vcuda.quota import Quota

LEDGER_SELECTOR = Selector(labels=LEDGER_LABEL)
# The API server's limit for all values of a ConfigMap.
MAX_CONFIG_MAP = 1 << 20


class UnreadableLedger(Unavailable):
    """A ledger ConfigMap that does not decode: edited by hand, or written by an unknown version of Quotient."""

    def __init__(self, config_map: ConfigMap, error: ValueError) -> None:
        self.config_map = config_map
        super().__init__(
            f"ledger {config_map.metadata.namespace}/{config_map.metadata.name} is not valid: {error}; "
            "the controller rebuilds it"
        )


class StoredLedger(Struct, frozen=True):
    """A ledger, and the ConfigMap it was read from: its resourceVersion is what a write is compared with."""

    ledger: Ledger
    config_map: ConfigMap


def ledger_namespace(config_map: ConfigMap) -> str:
    """Return the namespace that a ledger is about, not the one it is stored in."""
    return config_map.metadata.name.removeprefix(LEDGER_PREFIX)


def read_ledger(config_map: ConfigMap) -> StoredLedger:
    """Decode a ledger; raises UnreadableLedger."""
    try:
        return StoredLedger(decode_ledger(config_map.data.get(LEDGER_KEY, "")), config_map)
    except ValueError as error:
        raise UnreadableLedger(config_map, error) from None


class LedgerStore:
    """The ledgers of a cluster. Ledgers it writes get the owner references that `owners` returns."""

    def __init__(self, cluster: Cluster, system_namespace: str, owners: Owners = list) -> None:
        self._cluster, self._system_namespace, self._owners = cluster, system_namespace, owners

    def bounded(self, timeout_s: float) -> "LedgerStore":
        """Return the same store, with a timeout on each call to the API server."""
        return LedgerStore(self._cluster.with_timeout(timeout_s), self._system_namespace, self._owners)

    def read(self, namespace: str) -> StoredLedger | None:
        """Read a namespace's ledger from the API server; None if it has none, UnreadableLedger if it is not valid."""
        try:
            return read_ledger(self._cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, self._system_namespace))
        except NotFound:
            return None

    def find_quota(self, name: str, namespace: str = "") -> dict[str, tuple[Quota, int]]:
        """Return a quota and its version as ledgers record it, by namespace.

        Without `namespace` all ledgers are searched. Ledgers that are not valid are skipped.
        """
        quotas: dict[str, tuple[Quota, int]] = {}
        fields = f"metadata.name={LEDGER_PREFIX}{namespace}" if namespace else ""
        selector = Selector(labels=LEDGER_LABEL, fields=fields)
        for config_map in self._cluster.list(CONFIG_MAPS, self._system_namespace, selector).items:
            with suppress(UnreadableLedger):
                ledger = read_ledger(config_map).ledger
                matching = [quota for quota in ledger.quotas if quota.name == name]
                version = ledger.versions.get(name, 0)
                quotas |= {ledger_namespace(config_map): (quota, version) for quota in matching}
        return quotas

    def write(self, stored: StoredLedger, ledger: Ledger) -> StoredLedger:
        """Replace a ledger; raises Conflict if it changed since it was read."""
        metadata = stored.config_map.metadata
        # The webhook, which creates the first version, does not know the owner: the controller adds it.
        owned = replace(metadata, owner_references=metadata.owner_references or self._owners())
        changed = replace(stored.config_map, metadata=owned, data=ledger_data(ledger))
        return StoredLedger(ledger, self._cluster.update(CONFIG_MAPS, changed))

    def create(self, namespace: str, ledger: Ledger) -> StoredLedger:
        """Create a ledger; raises AlreadyExists."""
        metadata = Metadata(
            name=LEDGER_PREFIX + namespace,
            namespace=self._system_namespace,
            labels={LEDGER_LABEL: "true"},
            owner_references=self._owners(),
        )
        return StoredLedger(
            ledger, self._cluster.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data=ledger_data(ledger)))
        )

    def request(self, namespace: str) -> None:
        """Ask the controller for a ledger, which it fills with the pods that the namespace already has."""
        with suppress(AlreadyExists):
            self.create(namespace, Ledger(state=LedgerState.REQUESTED))

    def delete(self, config_map: ConfigMap) -> None:
        """Delete exactly this ledger: one that was created again under the same name stays."""
        metadata = config_map.metadata
        self._cluster.delete(CONFIG_MAPS, metadata.name, metadata.namespace, uid=metadata.uid)


def ledger_data(ledger: Ledger) -> dict[str, str]:
    """Return the content of a ledger's ConfigMap; raises Rejected if it is larger than a ConfigMap can be."""
    text = encode_ledger(ledger)
    size = len(text.encode())
    if size > MAX_CONFIG_MAP:
        raise Rejected(
            f"the ledger would have {size} bytes, {ledger.quotas_size()} of them quotas, and a ConfigMap holds "
            f"{MAX_CONFIG_MAP}; delete or shorten quotas of this namespace, or wait until some of its {len(ledger)} "
            "pods have ended",
            code=413,
        )
    return {LEDGER_KEY: text}
