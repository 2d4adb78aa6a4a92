"""Admission without a cluster: the webhook's own code, run on documents from files."""

import base64
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonpatch
from msgspec import Struct

from cluster.object_schema import Steps
from console.manifests import Document, mapping_at, parse_objects
from console.schema_checks import repaired_document, schema_problems
from console.yaml_locations import parse_field
from ledger.in_memory_ledgers import InMemoryLedgers
from ledger.quota_config_maps import is_quota_config_map, parse_quota_config_map
from vcuda.decision import BadRequest, Code, Reason, printable
from vcuda.ledger import Ledger, mark_used
from vcuda.quota import Quota, QuotaError, QuotaMistake, parse_legacy_quotas, parse_quota
from vcuda.scheme import Scheme
from vcuda.strict_yaml import DocumentError
from vcuda.workload_kinds import BY_GROUP_KIND
from webhook.admission import CONFIG_MAP, POD, Admission, encode_outcome
from webhook.admission_config import AdmissionConfig
from webhook.quota_sources import FixedQuotaSource
from webhook.review import MalformedObject, Request, decode_review

ALL_NAMESPACES = ""
DEFAULT_USER = "user"
OBJECT = "request.object"
# What decoders call the value under any key of `limits` or `requests`.
AMOUNTS = re.compile(r"(?P<mapping>.*\.resources\.(?:limits|requests))\[\.\.\.\]")
INDEX = re.compile(r"\[[^\]]*\]")


class AdmissionResult(Struct, frozen=True):
    """The decision on one document, and the document as it would be stored."""

    allowed: bool
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]
    patch: list[dict[str, Any]]
    object: Document
    # False for kinds that Quotient does not decide on.
    checked: bool = True


class OfflineQuotas:
    """Quotas from files, with ledgers in memory for what was charged to them so far."""

    def __init__(self, by_namespace: dict[str, list[Quota]] | None = None) -> None:
        self._by_namespace = by_namespace or {}
        self._ledgers = InMemoryLedgers(self.of)

    def of(self, namespace: str) -> list[Quota]:
        """Return the quotas of a namespace; one that names no namespace applies to all."""
        return [
            quota for name in dict.fromkeys((namespace, ALL_NAMESPACES)) for quota in self._by_namespace.get(name, ())
        ]

    @property
    def namespaces(self) -> list[str]:
        return list(self._by_namespace)

    def ledger(self, namespace: str) -> Ledger:
        return self._ledgers.ledger(namespace)


def admit_offline(
    document: Document,
    config: AdmissionConfig,
    quotas: OfflineQuotas,
    namespace: str,
    user: str = DEFAULT_USER,
    *,
    sources: Mapping[Steps, str] | None = None,
) -> AdmissionResult:
    """Decide on the creation of a document, and charge it if it is allowed.

    What the API server would reject before any webhook is reported and repaired first, so that the rest of the
    document is checked in the same run. `sources` has values as they are written in the file, where it is known.
    """
    early = [problem.reason for problem in schema_problems(document, sources)]
    if not early and not is_checked(document, config.scheme, namespace):
        return AdmissionResult(allowed=True, reasons=(), warnings=(), patch=[], object=document, checked=False)
    repaired = repaired_document(document, sources)
    namespace = str(mapping_at(repaired, "metadata").get("namespace") or namespace)
    admission = Admission(config, FixedQuotaSource({namespace: quotas.of(namespace)}))
    try:
        rewritten, patch, refused, warnings = mutate(admission, repaired, namespace, user)
        if not refused:
            refused, more = validate(admission, rewritten, quotas.ledger(namespace), user)
            warnings += more
    except BadRequest as error:
        reasons = unique_fields(early, [object_invalid(error, repaired)])
        return AdmissionResult(allowed=False, reasons=reasons, warnings=(), patch=[], object=document)
    reasons = unique_fields(early, refused)
    if reasons:
        return AdmissionResult(allowed=False, reasons=reasons, warnings=tuple(warnings), patch=[], object=document)
    return AdmissionResult(allowed=True, reasons=(), warnings=tuple(warnings), patch=patch, object=rewritten)


def unique_fields(early: Sequence[Reason], later: Sequence[Reason]) -> tuple[Reason, ...]:
    """Combine reasons; of the same field, what the API server rejects first is the more precise."""
    named = {each.field for each in early}
    return (*early, *(each for each in later if each.field not in named))


def mutate(
    admission: Admission, document: Document, namespace: str, user: str
) -> tuple[Document, list[dict[str, Any]], list[Reason], list[str]]:
    """Return the document as the mutating webhook leaves it, with the patch, the refusals and the warnings."""
    request = creation_review(document, namespace, user)
    outcome = admission.mutate(request)
    # Encoded and decoded as on the wire, so that this path cannot differ from the served one.
    response = json.loads(encode_outcome(request, outcome))["response"]
    patch = json.loads(base64.b64decode(response.get("patch", "W10=")))
    patched = jsonpatch.apply_patch(document, patch)
    return patched, patch, list(outcome.decision.reasons), list(outcome.decision.warnings)


def validate(admission: Admission, document: Document, ledger: Ledger, user: str) -> tuple[list[Reason], list[str]]:
    """Return the refusals and warnings of the validating webhook, and charge the ledger if the document is allowed."""
    named = document | {"metadata": document["metadata"] | {"uid": str(uuid.uuid4())}}
    outcome = admission.validate(creation_review(named, ledger.namespace, user))
    if outcome.ledger_request is not None:
        outcome = outcome.with_charge(admission.apply(outcome.ledger_request, ledger))
        # There is no controller here to turn reservations into usage.
        for each in list(ledger.reservations()):
            mark_used(ledger, each.pod)
    return list(outcome.decision.reasons), list(outcome.decision.warnings)


def creation_review(document: Document, namespace: str, user: str) -> Request:
    """Return the review of a document's creation, decoded as the webhook decodes it."""
    group, _, version = str(document.get("apiVersion", "")).rpartition("/")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise MalformedObject(f"{OBJECT}.metadata", "must be an object" if "metadata" in document else "is required")
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
        raise MalformedObject(OBJECT, "has a number that JSON does not have, such as .inf or .nan") from None
    return decode_review(text.encode())


def is_checked(document: Document, scheme: Scheme, namespace: str) -> bool:
    """Whether a document is of a kind that admission checks.

    Of ConfigMaps, only quotas are. `namespace` is for a document that names none.
    """
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    kind = (group, document.get("kind"))
    if kind in (POD, *BY_GROUP_KIND):
        return True
    metadata = mapping_at(document, "metadata")
    name, namespace = str(metadata.get("name") or ""), str(metadata.get("namespace") or namespace)
    return kind == CONFIG_MAP and is_quota_config_map(namespace, name, mapping_at(metadata, "labels"), scheme)


def object_invalid(error: BadRequest, document: Document) -> Reason:
    """Report a document that does not have the structure of its kind, with the field as users write it."""
    field, message = (error.field, error.message) if isinstance(error, MalformedObject) else ("", str(error))
    field = field.removeprefix(OBJECT).lstrip(".")
    if (amounts := AMOUNTS.fullmatch(field)) and (quantity := quantity_invalid(amounts["mapping"], document)):
        return quantity
    path = ".".join(filter(None, (printable(document.get("kind")).lower(), INDEX.sub("", field))))
    return Reason(
        code=Code.OBJECT_INVALID,
        field=field or "object",
        value="",
        message=message,
        remedy=f"check it with: kubectl explain {path}",
    )


def quantity_invalid(field: str, document: Document) -> Reason | None:
    """Report the first amount of `limits` or `requests` that is no quantity: the decoder does not name its key."""
    amounts: Any = document
    for step in parse_field(field):
        amounts = amounts[int(step)] if isinstance(amounts, list) else amounts[step]
    for key, value in amounts.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            return Reason(
                code=Code.OBJECT_INVALID,
                field=f"{field}[{key}]",
                value="" if isinstance(value, (dict, list)) else printable(json.dumps(value, default=str)),
                message="is not a quantity",
                remedy="write a number such as 50",
            )
    return None


def read_quotas(text: str, source: str, unit_mib: int) -> OfflineQuotas:
    """Read quotas from ConfigMaps of either form, or from the bare content of one."""
    by_namespace: dict[str, list[Quota]] = {}
    try:
        documents = parse_objects(text)
    except DocumentError as error:
        raise QuotaError(QuotaMistake(source, "", "", str(error))) from None
    for document in documents:
        for namespace, quota in quotas_in_document(document, source, unit_mib):
            by_namespace.setdefault(namespace, []).append(quota)
    return OfflineQuotas(by_namespace)


def quotas_in_document(document: Document, source: str, unit_mib: int) -> Iterator[tuple[str, Quota]]:
    """Yield the quotas of one document, each with the namespace it applies to."""
    if document.get("kind") == "ConfigMap":
        metadata, data = document.get("metadata") or {}, document.get("data") or {}
        if not isinstance(metadata, dict) or not isinstance(data, dict):
            raise QuotaError(QuotaMistake(source, "data", "", "not a mapping; write the quota under data.quota.yaml"))
        name, namespace = str(metadata.get("name") or ""), str(metadata.get("namespace") or ALL_NAMESPACES)
        yield from parse_quota_config_map(namespace, name, {key: str(data[key]) for key in data}, unit_mib).items()
    elif document and all(isinstance(entry, dict) and "quota" in entry for entry in document.values()):
        yield from parse_legacy_quotas(json.dumps(document), source).items()
    else:
        yield ALL_NAMESPACES, parse_quota(json.dumps(document), source, unit_mib)
