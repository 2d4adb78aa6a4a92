"""What an API server fills in and forbids before an object is stored, as far as components can tell."""

import copy
import re
from typing import Any, TypeVar

import msgspec

from cluster.errors import Rejected
from cluster.objects import CONFIG_MAPS, NAMESPACES, PODS, Kind, Object, Raw
from vcuda.decoding import convert
from vcuda.quantity import QuantityError, format_quantity, parse_quantity

T = TypeVar("T", bound=Object)

DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME = re.compile(rf"{DNS_LABEL}(\.{DNS_LABEL})*", re.ASCII)
NAMESPACE_NAME = re.compile(DNS_LABEL, re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?", re.ASCII)
MAX_NAME, MAX_LABEL = 253, 63
MAX_ANNOTATIONS, MAX_CONFIG_MAP = 256 * 1024, 1024 * 1024
NAME_LABEL = "kubernetes.io/metadata.name"
# Of a pod's spec only these may change once it is stored (and, by the binding alone, its node).
MUTABLE_SPEC = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates")
PODS_CONTAINERS = ("initContainers", "containers")


def invalid(kind: Kind[T], what: str) -> Rejected:
    """Refuse an object that has its shape but not its sense."""
    return Rejected(f"{kind.name} is invalid: {what}", code=422, reason="Invalid")


def check_name(kind: Kind[T], name: str) -> str:
    """Hold a name to what the API takes."""
    if not name:
        raise invalid(kind, "metadata.name: Required value: name or generateName is required")
    plain = NAMESPACE_NAME if kind.plural == NAMESPACES.plural else NAME
    if len(name) > (MAX_LABEL if plain is NAMESPACE_NAME else MAX_NAME) or not plain.fullmatch(name):
        raise invalid(kind, f"metadata.name: {name!r} is not a DNS name in lower case")
    return name


def well_formed(kind: Kind[T], obj: Raw) -> Raw:
    """Refuse what has not the shape of its kind, before anything else looks at it; nulls count as absent."""
    plain: Raw = without_nulls(obj)
    try:
        convert(plain, kind.type)
    except msgspec.ValidationError as wrong:
        message = f"{kind.name} in version {kind.api_version} cannot be handled: {wrong}"
        raise Rejected(message, code=400, reason="BadRequest") from None
    if kind.plural == PODS.plural and not plain.get("spec", {}).get("containers"):
        raise invalid(kind, "spec.containers: Required value")
    return plain | {"metadata": plain.get("metadata", {})}


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Copy a value, leaving out what is null in mappings."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def defaulted(kind: Kind[T], obj: Raw) -> Raw:
    """Fill in what the API server would; quantities become canonical, limits are copied to requests."""
    filled = copy.deepcopy(obj)
    if kind.plural == NAMESPACES.plural:
        filled["metadata"]["labels"] = {
            **filled["metadata"].get("labels", {}),
            NAME_LABEL: filled["metadata"].get("name", ""),
        }
        filled.setdefault("status", {}).setdefault("phase", "Active")
    if kind.plural == PODS.plural:
        spec = filled["spec"]
        spec.setdefault("schedulerName", "default-scheduler")
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        filled.setdefault("status", {}).setdefault("phase", "Pending")
        for part in PODS_CONTAINERS:
            for index, container in enumerate(spec.get(part, ())):
                settle_resources(container.get("resources", {}), f"spec.{part}[{index}].resources")
    return filled


def settle_resources(resources: dict[str, Any], path: str) -> None:
    """Write quantities canonically and let requests follow limits, in place."""
    for part in ("limits", "requests"):
        for key, written in resources.get(part, {}).items():
            try:
                resources[part][key] = format_quantity(parse_quantity(written))
            except QuantityError as wrong:
                message = f"Pod in version v1 cannot be handled: {path}.{part}[{key}]: {written!r}: {wrong}"
                raise Rejected(message, code=400, reason="BadRequest") from None
    if resources.get("limits"):
        resources["requests"] = {**resources["limits"], **resources.get("requests", {})}


def check_object(kind: Kind[T], obj: Raw) -> None:
    """Refuse what the API server's validation would, after admission has had its say."""
    metadata = obj["metadata"]
    for key, value in metadata.get("labels", {}).items():
        if len(value) > MAX_LABEL or not LABEL_VALUE.fullmatch(value):
            raise invalid(kind, f"metadata.labels[{key}]: {value!r} is not a label value")
    annotations = metadata.get("annotations", {})
    if sum(len(key) + len(value) for key, value in annotations.items()) > MAX_ANNOTATIONS:
        raise invalid(kind, f"metadata.annotations: Too long: may not be more than {MAX_ANNOTATIONS} bytes")
    if kind.plural == CONFIG_MAPS.plural and len(msgspec.json.encode(obj.get("data", {}))) > MAX_CONFIG_MAP:
        raise invalid(kind, f"data: Too long: may not be more than {MAX_CONFIG_MAP} bytes")
    if kind.plural == PODS.plural:
        check_containers(kind, obj["spec"])


def check_containers(kind: Kind[T], spec: Raw) -> None:
    """Hold containers to different names, and extended resources to whole numbers without overcommitment."""
    found = [
        (f"spec.{part}[{index}]", each) for part in PODS_CONTAINERS for index, each in enumerate(spec.get(part, ()))
    ]
    names = [container.get("name", "") for _, container in found]
    if len(set(names)) != len(names):
        raise invalid(kind, "spec.containers: Duplicate value: names must differ")
    for path, container in found:
        resources = container.get("resources", {})
        limits, requests = resources.get("limits", {}), resources.get("requests", {})
        for key in sorted(key for key in {**limits, **requests} if "/" in key and "kubernetes.io/" not in key):
            where = f"{path}.resources.requests[{key}]"
            if (
                key not in limits
                or parse_quantity(limits[key]).nanos != parse_quantity(requests.get(key, limits[key])).nanos
            ):
                raise invalid(kind, f"{where}: must be equal to the limit of {key}")
            if not parse_quantity(limits[key]).is_whole:
                raise invalid(kind, f"{where}: {limits[key]!r}: must be an integer")


def check_change(kind: Kind[T], old: Raw, new: Raw) -> None:
    """Refuse a change of what cannot change: names, a stored pod's spec, an immutable ConfigMap, late finalizers."""
    before, after = old["metadata"], new["metadata"]
    if (after.get("name"), after.get("namespace")) != (before.get("name"), before.get("namespace")):
        raise Rejected("the name of the object does not match the name on the URL", code=400, reason="BadRequest")
    if before.get("deletionTimestamp") and set(after.get("finalizers", ())) - set(before.get("finalizers", ())):
        raise invalid(
            kind, "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted"
        )
    if old.get("immutable") and (old.get("data"), True) != (new.get("data"), new.get("immutable")):
        raise invalid(kind, "data: Forbidden: field is immutable when `immutable` is set")
    if kind.plural == PODS.plural and fixed_spec(old) != fixed_spec(new):
        raise invalid(kind, f"spec: Forbidden: updates of pod {after['name']} may not change it")


def fixed_spec(obj: Raw) -> Raw:
    """Give the part of a pod's spec that stays as it is."""
    spec = {key: value for key, value in obj["spec"].items() if key not in MUTABLE_SPEC}
    for part in PODS_CONTAINERS:
        spec[part] = [{**container, "image": ""} for container in spec.get(part, ())]
    return spec
