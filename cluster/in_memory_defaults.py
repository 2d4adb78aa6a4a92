"""Defaulting and validation of objects in the in-memory cluster, as far as components can tell the difference."""

import copy
import re
from typing import Any, TypeVar

import msgspec

from cluster.errors import Rejected
from cluster.objects import CONFIG_MAPS, NAMESPACES, PODS, Kind, Object, Raw
from vcuda.decode_errors import DECODE_ERRORS, describe_decode_error
from vcuda.decoding import convert
from vcuda.names import DEFAULT_SCHEDULER, NAMESPACE_NAME_LABEL
from vcuda.quantity import QuantityError, format_quantity, parse_quantity

T = TypeVar("T", bound=Object)

DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME = re.compile(rf"{DNS_LABEL}(\.{DNS_LABEL})*", re.ASCII)
NAMESPACE_NAME = re.compile(DNS_LABEL, re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?", re.ASCII)
MAX_NAME, MAX_LABEL = 253, 63
MAX_ANNOTATIONS, MAX_CONFIG_MAP = 256 * 1024, 1024 * 1024
# The fields of a stored pod's spec that may still change. Its node is set by a Binding alone.
MUTABLE_SPEC = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates")
PODS_CONTAINERS = ("initContainers", "containers")


def invalid_error(kind: Kind[T], problem: str) -> Rejected:
    """Return the error for an object that can be decoded but does not pass validation."""
    return Rejected(f"{kind.name} is invalid: {problem}", code=422, reason="Invalid")


def decode_error(kind: Kind[T], problem: str) -> Rejected:
    """Return the error for an object that cannot be decoded."""
    message = f"{kind.name} in version {kind.api_version} cannot be handled: {problem}"
    return Rejected(message, code=400, reason="BadRequest")


def check_name(kind: Kind[T], name: str) -> str:
    if not name:
        raise invalid_error(kind, "metadata.name: Required value: name or generateName is required")
    pattern = NAMESPACE_NAME if kind.plural == NAMESPACES.plural else NAME
    if len(name) > (MAX_LABEL if pattern is NAMESPACE_NAME else MAX_NAME) or not pattern.fullmatch(name):
        raise invalid_error(kind, f"metadata.name: {name!r} is not a DNS name in lower case")
    return name


def normalize(kind: Kind[T], obj: Raw) -> Raw:
    """Return an object without nulls and with metadata; Rejected if it cannot be decoded as its kind."""
    plain: Raw = drop_nulls(obj)
    try:
        convert(plain, kind.type)
    except DECODE_ERRORS as error:
        raise decode_error(kind, str(describe_decode_error(error))) from None
    # Everything below relies on a pod's spec.
    if kind.plural == PODS.plural and not plain.get("spec", {}).get("containers"):
        raise invalid_error(kind, "spec.containers: Required value")
    return plain | {"metadata": plain.get("metadata", {})}


def drop_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Copy a value without the nulls in its mappings: the API takes them for absent."""
    if isinstance(value, dict):
        return {key: drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def apply_defaults(kind: Kind[T], obj: Raw) -> Raw:
    """Return a copy with the API server's defaults, canonical quantities, and requests copied from limits."""
    filled = copy.deepcopy(obj)
    if kind.plural == NAMESPACES.plural:
        filled["metadata"]["labels"] = {
            **filled["metadata"].get("labels", {}),
            NAMESPACE_NAME_LABEL: filled["metadata"].get("name", ""),
        }
        filled.setdefault("status", {}).setdefault("phase", "Active")
    if kind.plural == PODS.plural:
        spec = filled["spec"]
        spec.setdefault("schedulerName", DEFAULT_SCHEDULER)
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        filled.setdefault("status", {}).setdefault("phase", "Pending")
        for part in PODS_CONTAINERS:
            for index, container in enumerate(spec.get(part, ())):
                normalize_resources(container.get("resources", {}), f"spec.{part}[{index}].resources")
    return filled


def normalize_resources(resources: dict[str, Any], path: str) -> None:
    """Make quantities canonical and copy limits to missing requests, in place."""
    for part in ("limits", "requests"):
        for key, written in resources.get(part, {}).items():
            try:
                resources[part][key] = format_quantity(parse_quantity(written))
            except QuantityError as error:
                raise decode_error(PODS, f"{path}.{part}[{key}]: {written!r}: {error}") from None
    if resources.get("limits"):
        resources["requests"] = {**resources["limits"], **resources.get("requests", {})}


def check_object(kind: Kind[T], obj: Raw) -> None:
    """Validate an object; called after admission, so webhooks may correct what would be rejected here."""
    metadata = obj["metadata"]
    for key, value in metadata.get("labels", {}).items():
        if len(value) > MAX_LABEL or not LABEL_VALUE.fullmatch(value):
            raise invalid_error(kind, f"metadata.labels[{key}]: {value!r} is not a label value")
    annotations = metadata.get("annotations", {})
    if sum(len(key) + len(value) for key, value in annotations.items()) > MAX_ANNOTATIONS:
        raise invalid_error(kind, f"metadata.annotations: Too long: may not be more than {MAX_ANNOTATIONS} bytes")
    if kind.plural == CONFIG_MAPS.plural and len(msgspec.json.encode(obj.get("data", {}))) > MAX_CONFIG_MAP:
        raise invalid_error(kind, f"data: Too long: may not be more than {MAX_CONFIG_MAP} bytes")
    if kind.plural == PODS.plural:
        check_containers(kind, obj["spec"])


def check_containers(kind: Kind[T], spec: Raw) -> None:
    """Check that names are unique, and that extended resources are whole numbers with requests equal to limits."""
    containers = [
        (f"spec.{part}[{index}]", each) for part in PODS_CONTAINERS for index, each in enumerate(spec.get(part, ()))
    ]
    names = [container.get("name", "") for _, container in containers]
    if len(set(names)) != len(names):
        raise invalid_error(kind, "spec.containers: Duplicate value: names must differ")
    for path, container in containers:
        resources = container.get("resources", {})
        limits, requests = resources.get("limits", {}), resources.get("requests", {})
        # Resources with a domain other than Kubernetes' own are extended resources.
        for key in sorted(key for key in {**limits, **requests} if "/" in key and "kubernetes.io/" not in key):
            where = f"{path}.resources.requests[{key}]"
            if (
                key not in limits
                or parse_quantity(limits[key]).nanos != parse_quantity(requests.get(key, limits[key])).nanos
            ):
                raise invalid_error(kind, f"{where}: must be equal to the limit of {key}")
            if not parse_quantity(limits[key]).is_whole:
                raise invalid_error(kind, f"{where}: {limits[key]!r}: must be an integer")


def check_change(kind: Kind[T], old: Raw, new: Raw) -> None:
    """Reject changes of a name, of a stored pod's spec, of an immutable ConfigMap, and finalizers added too late."""
    before, after = old["metadata"], new["metadata"]
    if (after.get("name"), after.get("namespace")) != (before.get("name"), before.get("namespace")):
        raise Rejected("the name of the object does not match the name on the URL", code=400, reason="BadRequest")
    if before.get("deletionTimestamp") and set(after.get("finalizers", ())) - set(before.get("finalizers", ())):
        raise invalid_error(
            kind, "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted"
        )
    # The field itself cannot be reset either.
    if old.get("immutable") and (old.get("data"), True) != (new.get("data"), new.get("immutable")):
        raise invalid_error(kind, "data: Forbidden: field is immutable when `immutable` is set")
    if kind.plural == PODS.plural and immutable_spec(old) != immutable_spec(new):
        raise invalid_error(kind, f"spec: Forbidden: updates of pod {after['name']} may not change it")


def immutable_spec(obj: Raw) -> Raw:
    """Return the part of a pod's spec that cannot change once it is stored; images can."""
    spec = {key: value for key, value in obj["spec"].items() if key not in MUTABLE_SPEC}
    for part in PODS_CONTAINERS:
        spec[part] = [{**container, "image": ""} for container in spec.get(part, ())]
    return spec
