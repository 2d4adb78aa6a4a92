"""What an API server fills in and forbids before an object is stored, as far as components can tell."""

import copy
import re
from typing import Any, TypeVar

import msgspec

from cluster.errors import Refused
from cluster.objects import PODS, Kind, Object, Raw
from vcuda.quantity import QuantityError, canonical, parse

T = TypeVar("T", bound=Object)

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
MAX_NAME = 253
INVALID = 422
# Of a pod's spec only these may change once it is stored (and, by the binding alone, its node).
MUTABLE_SPEC = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates")


def check_name(kind: Kind[T], name: str) -> str:
    """Hold a name to what the API takes."""
    if not name:
        raise Refused(f"{kind.name} is invalid: name or generateName is required", code=INVALID, reason="Invalid")
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise Refused(f"{kind.name} {name!r} is invalid: not a DNS name in lower case", code=INVALID, reason="Invalid")
    return name


def well_formed(kind: Kind[T], obj: Raw) -> Raw:
    """Refuse what has not the shape of its kind, before anything else looks at it."""
    try:
        msgspec.convert(obj, kind.type)
    except msgspec.ValidationError as wrong:
        raise Refused(
            f"{kind.name} in version {kind.api_version} cannot be handled: {wrong}", code=400, reason="BadRequest"
        ) from None
    if kind.plural == PODS.plural and not (obj.get("spec") or {}).get("containers"):
        raise Refused(f"{kind.name} is invalid: spec.containers: Required value", code=INVALID, reason="Invalid")
    return obj | {"metadata": dict(obj.get("metadata") or {})}


def defaulted(kind: Kind[T], obj: Raw) -> Raw:
    """Fill in what the API server would; quantities become canonical, limits are copied to requests."""
    if kind.plural != PODS.plural or "spec" not in obj:
        return obj
    pod = copy.deepcopy(obj)
    spec = pod["spec"]
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    pod.setdefault("status", {}).setdefault("phase", "Pending")
    for part in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(part) or ()):
            settle_resources(container.get("resources") or {}, f"spec.{part}[{index}].resources")
    return pod


def settle_resources(resources: dict[str, Any], path: str) -> None:
    """Write quantities canonically and let requests follow limits, in place."""
    for part in ("limits", "requests"):
        for key, written in (resources.get(part) or {}).items():
            try:
                resources[part][key] = canonical(parse(written))
            except QuantityError as wrong:
                message = f"Pod in version v1 cannot be handled: {path}.{part}[{key}]: {written!r}: {wrong}"
                raise Refused(message, code=400, reason="BadRequest") from None
    if resources.get("limits"):
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


def immutable_fields(kind: Kind[T], old: Raw, new: Raw) -> None:
    """Refuse a change of what cannot change: a stored pod's spec."""
    if kind.plural != PODS.plural:
        return

    def fixed(obj: Raw) -> Raw:
        spec = {key: value for key, value in obj["spec"].items() if key not in MUTABLE_SPEC}
        for part in ("containers", "initContainers"):
            spec[part] = [{**container, "image": ""} for container in spec.get(part) or ()]
        return spec

    if fixed(old) != fixed(new):
        name = new["metadata"]["name"]
        raise Refused(f'Pod "{name}" is invalid: spec: pod updates may not change it', code=INVALID, reason="Invalid")
