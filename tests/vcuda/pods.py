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


def container(name: str = "c0", **kinds: dict[str, Any]) -> dict[str, Any]:
    """Make a container with `limits` and `requests` as given; `always=True` makes it a sidecar."""
    return {"name": name, "resources": kinds}


def asking(name: str = "c0", **amounts: Any) -> dict[str, Any]:
    """Make a container that asks in the canonical vocabulary: core, memory, cards."""
    keys = {"core": CORE, "memory": MEMORY, "cards": CARDS}
    return container(name, limits={keys[key]: amount for key, amount in amounts.items()})


def sidecar(made: dict[str, Any]) -> dict[str, Any]:
    """Make an init container that keeps running."""
    return {**made, "restartPolicy": "Always"}


def read(
    *containers: dict[str, Any],
    init: list[dict[str, Any]] | None = None,
    annotations: dict[str, str] | None = None,
    dialects: VocabularyOptions | None = None,
    unit_mib: int = 256,
) -> ParsedRequest:
    """Read a pod made of these containers."""
    spec = msgspec.convert({"containers": list(containers), "initContainers": init or []}, PodSpec)
    return parse_request(spec, annotations or {}, build_scheme(NAMES, unit_mib, dialects))
