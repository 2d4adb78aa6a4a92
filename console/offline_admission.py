"""Admission without a cluster: the webhook's own code on documents from files."""

import base64
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import jsonpatch
from msgspec import Struct

from console.schema_checks import repaired_document, schema_problems
from ledger.in_memory_ledgers import InMemoryLedgers
from ledger.quota_config_maps import parse_quota_config_map
from vcuda.decision import BadRequest, Code, Reason, printable
from vcuda.ledger import Ledger, mark_used
from vcuda.quota import Quota, QuotaError, QuotaMistake, parse_legacy_quotas, parse_quota
from vcuda.strict_yaml import DocumentError, parse_documents
from vcuda.workload_kinds import BY_GROUP_KIND
from webhook.admission import Admission, encode_outcome
from webhook.admission_config import AdmissionConfig
from webhook.quota_sources import FixedQuotaSource
from webhook.review import Request, decode_review

# The decoder's own words, which name a place in the review.
WHERE = re.compile(r"^(?P<message>.*?)(?: - at `(?:key in )?`?\$(?P<path>[^`]*)`)?$", re.DOTALL)
# What it begins with: the object, or a template in it.
ROOT = re.compile(r"^(?:request\.)?object(?P<root>\S*) is not a \w+: ")
EVERYWHERE = ""


class AdmissionResult(Struct, frozen=True):
    """What admission says about one document, and what becomes of it."""

    allowed: bool
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]
    patch: list[dict[str, Any]]
    object: dict[str, Any]


class OfflineQuotas:
    """Quotas from files, and what was charged to them so far."""

    def __init__(self, by_namespace: dict[str, list[Quota]] | None = None) -> None:
        self._by_namespace = by_namespace or {}
        self._ledgers = InMemoryLedgers(self.of)

    def of(self, namespace: str) -> list[Quota]:
        """Give those of a namespace; a quota without one is for all."""
        return [*self._by_namespace.get(namespace, ()), *self._by_namespace.get(EVERYWHERE, ())]

    @property
    def namespaces(self) -> list[str]:
        """Which namespaces have quotas."""
        return list(self._by_namespace)

    def ledger(self, namespace: str) -> Ledger:
        """Give the ledger of a namespace, with what was charged for the documents before."""
        return self._ledgers.ledger(namespace)


def expand(document: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - whatever a file holds
    """Give the objects of a document: itself, or the items of a list."""
    if isinstance(document, dict) and str(document.get("kind", "")).endswith("List") and "items" in document:
        items = document["items"] or []
        if not isinstance(items, list):
            raise DocumentError(f"{printable(items)!r} is no list of items")
        for item in items:
            yield from expand(item)
    elif isinstance(document, dict):
        yield document
    else:
        raise DocumentError(f"{printable(document)!r} is no object: a mapping with apiVersion and kind is needed")


def objects_of(text: str) -> list[dict[str, Any]]:
    """Read all objects of a text."""
    return [each for document in parse_documents(text) for each in expand(document)]


def admit_offline(
    document: dict[str, Any], rules: AdmissionConfig, quotas: OfflineQuotas, namespace: str, user: str
) -> AdmissionResult:
    """Say what would become of a document that is applied."""
    early = [found.reason for found in schema_problems(document)]
    if not is_judged(document):
        return AdmissionResult(allowed=True, reasons=(), warnings=(), patch=[], object=document)
    meant = repaired_document(document)
    metadata = meant.get("metadata")
    namespace = str((metadata.get("namespace") if isinstance(metadata, dict) else "") or namespace)
    admission = Admission(rules, FixedQuotaSource({namespace: quotas.of(namespace)}))
    try:
        rewritten, patch, refused, warnings = mutate(admission, meant, namespace, user)
        if not refused:
            refused, more = validate(admission, rewritten, quotas.ledger(namespace), user)
            warnings += more
    except BadRequest as wrong:
        return AdmissionResult(
            allowed=False, reasons=(*early, invalid(str(wrong))), warnings=(), patch=[], object=document
        )
    reasons = (*early, *refused)
    if reasons:
        return AdmissionResult(allowed=False, reasons=reasons, warnings=tuple(warnings), patch=[], object=document)
    return AdmissionResult(allowed=True, reasons=(), warnings=tuple(warnings), patch=patch, object=rewritten)


def mutate(
    admission: Admission, document: dict[str, Any], namespace: str, user: str
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Reason], list[str]]:
    """Ask the one question, and apply the answer as an API server does."""
    request = review(document, namespace, user)
    outcome = admission.mutate(request)
    response = json.loads(encode_outcome(request, outcome))["response"]
    patch = json.loads(base64.b64decode(response.get("patch", "W10=")))
    changed = jsonpatch.apply_patch(document, patch)
    return changed, patch, list(outcome.decision.reasons), list(outcome.decision.warnings)


def validate(
    admission: Admission, document: dict[str, Any], ledger: Ledger, user: str
) -> tuple[list[Reason], list[str]]:
    """Ask the other question, and charge what is allowed; the documents before have been charged already."""
    named = document | {"metadata": document["metadata"] | {"uid": str(uuid.uuid4())}}
    outcome = admission.validate(review(named, ledger.namespace, user))
    if outcome.ledger_request is not None:
        outcome = outcome.with_charge(admission.apply(outcome.ledger_request, ledger))
        for key, _ in list(ledger.reservations()):
            mark_used(ledger, key)
    return list(outcome.decision.reasons), list(outcome.decision.warnings)


def review(document: dict[str, Any], namespace: str, user: str) -> Request:
    """Write the review of a document's creation, and read it as the webhook does."""
    group, _, version = str(document.get("apiVersion", "")).rpartition("/")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise BadRequest("is missing, or no mapping - at `$.metadata`")
    body = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": str(uuid.UUID(int=0)),
            "kind": {"group": group, "version": version, "kind": str(document.get("kind", ""))},
            "name": str(metadata.get("name") or ""),
            "namespace": namespace,
            "operation": "CREATE",
            "userInfo": {"username": user, "groups": ["system:authenticated"]},
            "object": document,
        },
    }
    try:
        text = json.dumps(body, default=str, allow_nan=False)
    except ValueError:
        raise BadRequest("holds a number that is none, such as .inf or .nan") from None
    return decode_review(text.encode())


def is_judged(document: dict[str, Any]) -> bool:
    """Tell whether a document is of a kind that admission looks at."""
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    return (group, document.get("kind")) in (("", "Pod"), *BY_GROUP_KIND) or bool(list(schema_problems(document)))


def invalid(told: str) -> Reason:
    """Say that a document is not shaped as its kind is."""
    found = WHERE.match(told)
    message, path = (found["message"], found["path"] or "") if found else (told, "")
    root = ROOT.match(message)
    field = f"{root['root'] if root else ''}{path}".lstrip(".")
    return Reason(
        code=Code.OBJECT_INVALID,
        field=field or "object",
        value="",
        message=message[root.end() :] if root else message,
        remedy="write the field as the Kubernetes API has it",
    )


def read_quotas(text: str, source: str, unit_mib: int) -> OfflineQuotas:
    """Read quotas: ConfigMaps of either form, or what would stand in one."""
    by_namespace: dict[str, list[Quota]] = {}
    try:
        documents = objects_of(text)
    except DocumentError as wrong:
        raise QuotaError(QuotaMistake(source, "", "", str(wrong))) from None
    for document in documents:
        for namespace, quota in quotas_in(document, source, unit_mib):
            by_namespace.setdefault(namespace, []).append(quota)
    return OfflineQuotas(by_namespace)


def quotas_in(document: dict[str, Any], source: str, unit_mib: int) -> Iterator[tuple[str, Quota]]:
    """Give the quotas of one document, with the namespace each is for."""
    if document.get("kind") == "ConfigMap":
        metadata, data = document.get("metadata") or {}, document.get("data") or {}
        if not isinstance(metadata, dict) or not isinstance(data, dict):
            raise QuotaError(QuotaMistake(source, "data", "", "is no mapping; write it as a ConfigMap has it"))
        name, namespace = str(metadata.get("name") or ""), str(metadata.get("namespace") or EVERYWHERE)
        yield from parse_quota_config_map(namespace, name, {key: str(data[key]) for key in data}, unit_mib).items()
    elif document and all(isinstance(entry, dict) and "quota" in entry for entry in document.values()):
        yield from parse_legacy_quotas(json.dumps(document), source).items()
    else:
        yield EVERYWHERE, parse_quota(json.dumps(document), source, unit_mib)
