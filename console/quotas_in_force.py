"""The quotas that are in force in a cluster, from its ConfigMaps: as its webhook reads them.

Tenants write these ConfigMaps, so an invalid one is left out with a warning, and the others count nevertheless.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from console.manifests import Document, mapping_at
from console.offline_admission import quotas_in_document
from console.quota_files import SourcedDocument, has_quota_label
from settings.configuration import Configuration
from vcuda.decision import printable
from vcuda.ledger import decode_ledger
from vcuda.names import LEDGER_KEY, LEDGER_LABEL, LEDGER_PREFIX
from vcuda.quota import Quota, QuotaError
from webhook.service import admission_config_of

# The quotas of ledgers by their name, each with the namespace it applies to.
LedgerQuotas = Mapping[str, Sequence[tuple[str, Quota]]]


class QuotasInForce(Struct, frozen=True):
    """The quotas by namespace, and the default of all other namespaces but Quotient's own."""

    by_namespace: Mapping[str, tuple[Quota, ...]] = {}
    default: tuple[Quota, ...] = ()
    system_namespace: str = ""
    # About quotas that are invalid.
    warnings: tuple[str, ...] = ()

    def of(self, namespace: str) -> tuple[Quota, ...]:
        """Return the quotas that apply to a namespace; pods of Quotient's own are not charged."""
        return () if namespace == self.system_namespace else self.by_namespace.get(namespace, self.default)


def quotas_in_force(documents: Iterable[SourcedDocument], configuration: Configuration) -> QuotasInForce:
    """Find the quotas among the objects of a cluster: labelled ConfigMaps, and the legacy one."""
    scheme = admission_config_of(configuration).scheme
    config_maps = [(file, each) for file, each in documents if each.get("kind") == "ConfigMap"]
    stored: LedgerQuotas | None = None
    found: dict[str, list[Quota]] = {}
    warnings: list[str] = []
    for file, document in config_maps:
        if not has_quota_label(document, scheme):
            continue
        try:
            quotas = list(quotas_in_document(document, file, configuration.memory_unit_mib))
        except QuotaError as error:
            if stored is None:
                stored = ledger_quotas((each for _, each in config_maps), configuration.system_namespace)
            quotas = list(stored.get(title_of(document), ()))
            warnings.append(invalid_quota(document, error, is_known=bool(quotas)))
        for namespace, quota in quotas:
            found.setdefault(namespace or "default", []).append(quota)
    default = configuration.parse_default_quota()
    by_namespace = {name: tuple(sorted(each, key=lambda quota: quota.name)) for name, each in found.items()}
    return QuotasInForce(by_namespace, (default,) if default else (), configuration.system_namespace, tuple(warnings))


def title_of(document: Document) -> str:
    metadata = mapping_at(document, "metadata")
    return f"{metadata.get('namespace') or ''}/{metadata.get('name') or ''}".lstrip("/")


def invalid_quota(document: Document, error: QuotaError, *, is_known: bool) -> str:
    counts = "its last valid version counts" if is_known else "it does not count"
    return (
        f"the quota {printable(title_of(document))} is invalid, and {counts}: {error.mistakes[0]}; "
        "see all mistakes with: quotient quota lint"
    )


def ledger_quotas(config_maps: Iterable[Document], system_namespace: str) -> LedgerQuotas:
    """Return the quotas that ledgers hold: the last valid ones. Only those of Quotient's own namespace are ledgers."""
    by_name: dict[str, list[tuple[str, Quota]]] = {}
    for document in config_maps:
        for namespace, quota in quotas_in_ledger(document, system_namespace):
            by_name.setdefault(quota.name, []).append((namespace, quota))
    return by_name


def quotas_in_ledger(document: Document, system_namespace: str) -> Iterator[tuple[str, Quota]]:
    metadata = mapping_at(document, "metadata")
    name, labels = str(metadata.get("name") or ""), mapping_at(metadata, "labels")
    if metadata.get("namespace") != system_namespace or LEDGER_LABEL not in labels:
        return
    try:
        ledger = decode_ledger(str(mapping_at(document, "data").get(LEDGER_KEY, "")))
    except ValueError:
        return
    yield from ((name.removeprefix(LEDGER_PREFIX), quota) for quota in ledger.quotas)
