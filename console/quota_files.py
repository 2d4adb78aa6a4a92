"""Quotas from files: found among manifests, and charged with the pods beside them as the webhook and controller do."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from console.errors import CommandError
from console.manifests import Document, decode_document, mapping_at, pods_of, read_objects
from console.offline_admission import DEFAULT_USER, OfflineQuotas, admit_offline, quotas_in_document
from console.quota_status_view import QuotaStatus
from ledger.quota_config_maps import is_quota_config_map
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import printable
from vcuda.ledger import Ledger, PodKey
from vcuda.names import LEGACY_KEY, QUOTA_KEY
from vcuda.quota import Quota, QuotaError, QuotaMistake
from vcuda.quota_lint import QuotaWarning
from vcuda.quota_usage import Holder
from vcuda.scheme import Scheme
from webhook.service import admission_config_of

if TYPE_CHECKING:
    from console.existing_pods import ExistingPods

SourcedDocument = tuple[str, Document]
RefusedPods = dict[str, dict[str, str]]


class QuotasInFiles(Struct):
    """The quotas of files by namespace, with the mistakes of those that are invalid and warnings about the others."""

    quotas: dict[str, list[Quota]] = {}
    mistakes: list[QuotaMistake] = []
    warnings: list[QuotaWarning] = []


def find_quotas(documents: Iterable[SourcedDocument], configuration: Configuration) -> QuotasInFiles:
    """Find the quotas among documents; other ConfigMaps are ignored."""
    scheme = admission_config_of(configuration).scheme
    result = QuotasInFiles()
    for file, document in documents:
        if document.get("kind", "ConfigMap") != "ConfigMap" or not may_be_quota(document, scheme):
            continue
        try:
            for namespace, quota in quotas_in_document(document, file, configuration.memory_unit_mib):
                result.quotas.setdefault(namespace or "default", []).append(quota)
                if document.get("kind") and not has_quota_label(document, scheme):
                    result.warnings.append(not_in_force(quota.name, document, scheme))
        except QuotaError as error:
            result.mistakes += error.mistakes
    return result


def not_in_force(quota: str, document: Document, scheme: Scheme) -> QuotaWarning:
    """Return the warning about a quota whose label is missing or has another value than "true"."""
    labels = mapping_at(mapping_at(document, "metadata"), "labels")
    key = next((names.quota_label for names in scheme.all_names if names.quota_label in labels), None)
    if key is None:
        remedy = f'add {scheme.names.quota_label}: "true"'
        return QuotaWarning(quota, "metadata.labels", "not in force without its label", remedy)
    value = printable(json.dumps(labels[key], default=str, ensure_ascii=False))
    message = f'not in force: the label {key} must be the text "true", not {value}'
    return QuotaWarning(quota, "metadata.labels", message, f'write {key}: "true"')


def has_quota_label(document: Document, scheme: Scheme) -> bool:
    metadata = mapping_at(document, "metadata")
    namespace, name = str(metadata.get("namespace") or ""), str(metadata.get("name") or "")
    return is_quota_config_map(namespace, name, mapping_at(metadata, "labels"), scheme)


def may_be_quota(document: Document, scheme: Scheme) -> bool:
    """Whether a document is a quota, or a ConfigMap that looks like one and lacks its label."""
    data = mapping_at(document, "data")
    return not document.get("kind") or has_quota_label(document, scheme) or QUOTA_KEY in data or LEGACY_KEY in data


def statuses_from_files(files: tuple[str, ...], loaded: Loaded) -> tuple[dict[str, QuotaStatus], RefusedPods]:
    """Charge the pods of files to the quotas in them, one after another, and return the status of each namespace.

    A status lists all pods that do not fit as `waiting`; the second value has those that would not even be created.
    """
    from controller.accounting import top_holders  # noqa: PLC0415 - only loaded by this command
    from controller.quota_status import status_of  # noqa: PLC0415

    configuration = loaded.configuration
    documents = read_objects(files)
    found = find_quotas(documents, configuration)
    if found.mistakes:
        raise CommandError("\n".join(map(str, found.mistakes)))
    charges = FileCharges(OfflineQuotas(found.quotas), documents, configuration)
    charges.charge_existing_pods()
    charges.charge_new_pods()
    for namespace, owners in charges.owners.items():
        ledger = charges.quotas.ledger(namespace)
        ledger.set_holders(top_holders(holders_of(ledger, owners)))
    statuses: dict[str, QuotaStatus] = {}
    for name in charges.owners:
        excess = charges.waiting[name] | charges.refused[name]
        statuses[name] = status_of(charges.quotas.ledger(name), configuration.mode, excess, {})
    return statuses, charges.refused


class FileCharges:
    """Ledgers that are charged with the pods of files. Keeps the owner of each charged pod, and who was refused why."""

    def __init__(self, quotas: OfflineQuotas, documents: list[SourcedDocument], configuration: Configuration) -> None:
        self.quotas, self._documents, self._configuration = quotas, documents, configuration
        self.owners: dict[str, dict[PodKey, str]] = {name: {} for name in quotas.namespaces}
        # Why pods do not fit, by namespace and name: existing ones wait, new ones are refused.
        self.waiting: dict[str, dict[str, str]] = {name: {} for name in quotas.namespaces}
        self.refused: RefusedPods = {name: {} for name in quotas.namespaces}
        self._existing = existing_pods(documents, configuration)

    def charge_existing_pods(self) -> None:
        """Charge pods that a cluster already runs: they are counted even where they exceed the quota."""
        for name in self.quotas.namespaces:
            pods = self._existing.of(name)
            waiting = self._existing.charge(self.quotas.ledger(name), name)
            self.owners[name] |= {key: pod.owner for key, pod in pods.items()}
            self.waiting[name] |= {pods[key].metadata.name: str(reasons[0]) for key, reasons in waiting.items()}

    def charge_new_pods(self) -> None:
        """Admit the pods of manifests, except those of workloads whose pods are among the existing ones."""
        config = admission_config_of(self._configuration)
        existing = self._existing
        known_owners = {(name, pod.owner) for name in existing.namespaces for pod in existing.of(name).values()}
        for _, document in self._documents:
            if is_existing_pod(document):
                continue
            for owner, pod in pods_of(document):
                namespace = str(pod["metadata"].get("namespace") or "default")
                if namespace not in self.owners or (namespace, owner) in known_owners:
                    continue
                ledger = self.quotas.ledger(namespace)
                before = set(ledger.pods())
                result = admit_offline(pod, config, self.quotas, namespace, DEFAULT_USER)
                self.owners[namespace] |= dict.fromkeys(ledger.pods() - before, owner)
                if result.reasons:
                    self.refused[namespace][str(pod["metadata"].get("name", owner))] = str(result.reasons[0])


def is_existing_pod(document: Document) -> bool:
    """Whether a Pod was read from a cluster, as opposed to a manifest that is yet to be applied."""
    has_status = mapping_at(document, "metadata").get("uid") and mapping_at(document, "status").get("phase")
    return document.get("kind") == "Pod" and bool(has_status)


def existing_pods(documents: Iterable[SourcedDocument], configuration: Configuration) -> "ExistingPods":
    from cluster.objects import Node, Pod  # noqa: PLC0415 - only loaded by commands that charge pods
    from console.existing_pods import ExistingPods  # noqa: PLC0415

    listed = [document for _, document in documents]
    pods = [decode_document(each, Pod) for each in listed if is_existing_pod(each)]
    nodes = [decode_document(each, Node) for each in listed if each.get("kind") == "Node"]
    return ExistingPods(pods, nodes, configuration)


def holders_of(ledger: Ledger, owners: Mapping[PodKey, str]) -> list[Holder]:
    """Return what each charged pod holds, under its owner's name."""
    holders = []
    for pod, owner in owners.items():
        if (entry := ledger.entry(pod)) is not None:
            charge = entry[0]
            holders.append(Holder(owner, charge.model, cores=charge.cores, pods=1, memory_mib=charge.memory_mib))
    return holders
