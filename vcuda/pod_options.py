"""What a pod's author sets by annotation: how far containers may burst, and on which GPUs the pod may run.

The annotations are read under the configured domain and under the ancestors' domains.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

import msgspec
from msgspec import Struct

from vcuda.decision import MAX_KEY_LENGTH, Code, Reason, printable, shorten
from vcuda.gpu_model import MAX_LABEL, matches, never_matches, parse_model
from vcuda.isolation import NO_ISOLATION, Isolation, parse_minimum
from vcuda.placement_strategies import SETTABLE_STRATEGIES, PlacementStrategy
from vcuda.scheme import Scheme, option_keys
from vcuda.vocabulary import CORES_PER_CARD

CORE_LIMIT = re.compile(r"[0-9]{1,3}", re.ASCII)
# An annotation may have 256 KiB; every model is compared with every model of the cluster.
MAX_MODELS = 64
MAX_TEXT = MAX_MODELS * (MAX_LABEL + 2)
# A UUID of a GPU or MIG device, as NVML writes it; the form is not checked further, as there are several.
UUID = re.compile(r"[A-Za-z0-9/_.-]{1,64}", re.ASCII)
MAX_UUIDS = 64


class SpreadMembers(StrEnum):
    """Of what no two pods of the same workload share one."""

    GPU = "gpu"
    NODE = "node"


class PodOptions(Struct, frozen=True, omit_defaults=True):
    """The options of one pod. No core limit means the namespace's default, no models any model, no UUIDs any GPU."""

    core_limit: int | None = None
    models: tuple[str, ...] = ()
    # The node plugin stores options in pods.json; this is the key there.
    avoided_models: tuple[str, ...] = msgspec.field(default=(), name="avoided")
    uuids: tuple[str, ...] = ()
    avoided_uuids: tuple[str, ...] = ()
    # Under another key than in earlier releases, which stored one word there.
    min_isolation: Isolation = msgspec.field(default=NO_ISOLATION, name="isolation")
    spread_members: SpreadMembers | None = None
    # None means that of the namespace, or of the cluster.
    placement_policy: PlacementStrategy | None = None


NO_OPTIONS = PodOptions()

Choice = TypeVar("Choice", bound=StrEnum)


def annotation_field(key: str) -> str:
    """Return the field path of an annotation, for a Reason."""
    return f"metadata.annotations[{shorten(key, MAX_KEY_LENGTH)}]"


def read_pod_options(
    annotations: Mapping[str, str], scheme: Scheme, min_core_limit: int = 1
) -> tuple[PodOptions, list[Reason]]:
    """Read the options of a pod, with a reason for every mistake.

    `min_core_limit` is the most cores that a container sharing a card requests; it is used in messages only.
    """
    written = [each for each in annotations.items() if each[0] in scheme.option_precedence]
    if not written:
        return NO_OPTIONS, []
    chosen, reasons = choose_annotations(written, scheme)
    limit, use, avoid, uuids, avoided_uuids, isolation, spread, policy = chosen
    core_limit = read_core_limit(*limit, min_core_limit, reasons.append) if limit else None
    models = read_models(*use, reasons.append) if use else ()
    avoided = read_models(*avoid, reasons.append) if avoid else ()
    if use and avoid and models and all(any(matches(no, parse_model(yes)) for no in avoided) for yes in models):
        reasons.append(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_field(use[0]),
                value=printable(use[1]),
                message=f"every model listed here is excluded by the annotation {avoid[0]}",
                remedy="remove a model from one of the two annotations",
            )
        )
    options = PodOptions(
        core_limit,
        models,
        avoided,
        uuids=read_uuids(*uuids, reasons.append) if uuids else (),
        avoided_uuids=read_uuids(*avoided_uuids, reasons.append) if avoided_uuids else (),
        min_isolation=read_min_isolation(*isolation, reasons.append) if isolation else NO_ISOLATION,
        spread_members=read_choice(*spread, tuple(SpreadMembers), reasons.append) if spread else None,
        placement_policy=read_choice(*policy, SETTABLE_STRATEGIES, reasons.append) if policy else None,
    )
    return options, reasons


def choose_annotations(
    written: Sequence[tuple[str, str]], scheme: Scheme
) -> tuple[list[tuple[str, str] | None], list[Reason]]:
    """Return the annotation of each option, that of the domain with the highest precedence; None where it is not set.

    A reason for every annotation that differs from the same one under another domain.
    """
    count = len(option_keys(scheme.names))
    chosen: list[tuple[str, str] | None] = [None] * count
    reasons: list[Reason] = []
    for each in written:
        precedence = scheme.option_precedence[each[0]]
        option = precedence % count
        other = chosen[option]
        if other is None:
            chosen[option] = each
            continue
        first, second = (other, each) if precedence > scheme.option_precedence[other[0]] else (each, other)
        if first[1].strip() != second[1].strip():
            reasons.append(options_differ(second, first))
        chosen[option] = first
    return chosen, reasons


def options_differ(this: tuple[str, str], other: tuple[str, str]) -> Reason:
    return Reason(
        code=Code.VOCABULARIES_MIXED,
        field=annotation_field(this[0]),
        value=printable(this[1]),
        message=f"conflicts with the annotation {other[0]}, which sets the same option to {printable(other[1])!r}",
        remedy=f"remove {this[0]} or {other[0]}",
    )


def read_core_limit(key: str, text: str, min_core_limit: int, add_reason: Callable[[Reason], None]) -> int | None:
    """Parse a core limit. Whether it is at least what containers request is checked by the webhook."""
    bare = text.strip()
    if CORE_LIMIT.fullmatch(bare) and 1 <= int(bare) <= CORES_PER_CARD:
        return int(bare)
    add_reason(core_limit_invalid(key, text, min_core_limit))
    return None


def core_limit_invalid(key: str, text: str, min_core_limit: int) -> Reason:
    minimum = "1"
    if min_core_limit > 1:
        minimum = f"{min_core_limit} (the largest request of a container that shares a GPU)"
    return Reason(
        code=Code.CORE_LIMIT_INVALID,
        field=annotation_field(key),
        value=printable(text),
        message=f"must be a whole number from {minimum} to {CORES_PER_CARD}",
        remedy=f'write "{min_core_limit}" to "{CORES_PER_CARD}", in quotes, or remove the annotation',
    )


def read_models(key: str, text: str, add_reason: Callable[[Reason], None]) -> tuple[str, ...]:
    """Parse a list of models separated by commas; an empty list sets nothing."""
    if text.count(",") >= MAX_MODELS or len(text) > MAX_TEXT:
        add_reason(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_field(key),
                value=printable(text),
                message=f"must have at most {MAX_MODELS} models and {MAX_TEXT} characters",
                remedy="list families such as A100 instead of products such as A100-SXM4-40GB",
            )
        )
        return ()
    models, invalid = split_models(text)
    for word in invalid:
        add_reason(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_field(key),
                value=printable(word),
                message="does not name a GPU model",
                remedy="list models or families such as A100, T4 or RTX-3090, separated by commas",
            )
        )
    return models


def read_uuids(key: str, text: str, add_reason: Callable[[Reason], None]) -> tuple[str, ...]:
    """Parse a list of UUIDs separated by commas; an empty list sets nothing."""
    if text.count(",") >= MAX_UUIDS:
        message, value = f"must have at most {MAX_UUIDS} UUIDs", text
    else:
        uuids = dict.fromkeys(filter(None, map(str.strip, text.split(","))))
        value = next((each for each in uuids if not UUID.fullmatch(each)), "")
        if not value:
            return tuple(uuids)
        message = "is not the UUID of a GPU"
    remedy = "list UUIDs as nvidia-smi -L shows them, separated by commas"
    add_reason(option_invalid(key, value, message, remedy))
    return ()


def read_min_isolation(key: str, text: str, add_reason: Callable[[Reason], None]) -> Isolation:
    minimum, mistakes = parse_minimum(text)
    for each in mistakes:
        remedy = 'write "preload", or "memory=preload,compute=preload", or remove the annotation'
        add_reason(option_invalid(key, each.value, each.message, remedy))
    return minimum or NO_ISOLATION


def read_choice(key: str, text: str, choices: Sequence[Choice], add_reason: Callable[[Reason], None]) -> Choice | None:
    """Parse an annotation with one of a few values; None if it has none of them."""
    chosen = next((each for each in choices if each.value == text.strip().lower()), None)
    if chosen is None:
        message = f"must be one of {', '.join(choices)}"
        add_reason(option_invalid(key, text, message, "write one of these, or remove the annotation"))
    return chosen


def option_invalid(key: str, value: str, message: str, remedy: str) -> Reason:
    field = annotation_field(key)
    return Reason(code=Code.OPTION_INVALID, field=field, value=printable(value), message=message, remedy=remedy)


@lru_cache(maxsize=1024)  # the pods of a cluster have few different lists
def split_models(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a list into the names of models, without duplicates, and entries that do not name a model."""
    models: dict[str, None] = {}
    invalid: list[str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            model = parse_model(word[: MAX_LABEL + 1])
        except ValueError:
            invalid.append(word)
            continue
        # A list with other separators, or a series without its number, would match no card and keep the pod pending.
        if any(mark in word for mark in ";|") or never_matches(model.name):
            invalid.append(word)
        else:
            models[model.name] = None
    return tuple(models), tuple(invalid)
