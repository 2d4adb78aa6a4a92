"""Builders of pods: a test shows only what matters to it."""

from typing import Any

import msgspec

from vcuda.names import Names
from vcuda.pod import PodSpec
from vcuda.request import ParsedRequest, parse_request
from vcuda.scheme import build_scheme
from vcuda.vocabulary import VocabularyOptions

NAMES = Names()
CORE, MEMORY, CARDS = NAMES.core, NAMES.memory, NAMES.cards


def container(name: str = "c0", **resources: dict[str, Any]) -> dict[str, Any]:
    """Build a container with these `limits` and `requests`."""
    return {"name": name, "resources": resources}


def gpu_container(name: str = "c0", **amounts: Any) -> dict[str, Any]:
    """Build a container with limits in our own resources: core, memory, cards."""
    keys = {"core": CORE, "memory": MEMORY, "cards": CARDS}
    return container(name, limits={keys[key]: amount for key, amount in amounts.items()})


def sidecar(container: dict[str, Any]) -> dict[str, Any]:
    """Make an init container a sidecar."""
    return {**container, "restartPolicy": "Always"}


def parse_pod(
    *containers: dict[str, Any],
    init: list[dict[str, Any]] | None = None,
    annotations: dict[str, str] | None = None,
    vocabulary_options: VocabularyOptions | None = None,
    unit_mib: int = 256,
) -> ParsedRequest:
    """Parse the request of a pod with these containers."""
    spec = msgspec.convert({"containers": list(containers), "initContainers": init or []}, PodSpec)
    return parse_request(spec, annotations or {}, build_scheme(NAMES, unit_mib, vocabulary_options))
