"""What a pod's author sets by annotation: how far containers may burst, and on which GPU models the pod may run.

The annotations are read under the configured domain and under the ancestors' domains.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from msgspec import Struct, field

from vcuda.decision import Code, Reason, printable
from vcuda.gpu_model import MAX_LABEL, matches, never_matches, parse_model
from vcuda.scheme import Scheme
from vcuda.vocabulary import CORES_PER_CARD

CORE_LIMIT = re.compile(r"[0-9]{1,3}", re.ASCII)
# An annotation may have 256 KiB; every model is compared with every model of the cluster.
MAX_MODELS = 64
MAX_TEXT = MAX_MODELS * (MAX_LABEL + 2)
# The options of `scheme.option_keys`: core limit, models, models to avoid.
OPTION_COUNT = 3


class PodOptions(Struct, frozen=True):
    """The options of one pod. No core limit means the namespace's default, no models any model."""

    core_limit: int | None = None
    models: tuple[str, ...] = ()
    # The node plugin stores options in pods.json; this is the key there.
    avoided_models: tuple[str, ...] = field(default=(), name="avoided")


NO_OPTIONS = PodOptions()


def annotation_field(key: str) -> str:
    """Return the field path of an annotation, for a Reason."""
    return f"metadata.annotations[{key}]"


def read_pod_options(
    annotations: Mapping[str, str], scheme: Scheme, min_core_limit: int = 1
) -> tuple[PodOptions, list[Reason]]:
    """Read the options of a pod, with a reason for every mistake.

    `min_core_limit` is the most cores that a container sharing a card requests; it is used in messages only.
    """
    written = [each for each in annotations.items() if each[0] in scheme.option_precedence]
    if not written:
        return NO_OPTIONS, []
    reasons: list[Reason] = []
    # One annotation for each option: the one of the domain with the highest precedence.
    chosen: list[tuple[str, str] | None] = [None] * OPTION_COUNT
    for each in written:
        precedence = scheme.option_precedence[each[0]]
        option = precedence % OPTION_COUNT
        other = chosen[option]
        if other is None:
            chosen[option] = each
            continue
        first, second = (other, each) if precedence > scheme.option_precedence[other[0]] else (each, other)
        if first[1].strip() != second[1].strip():
            reasons.append(options_differ(second, first))
        chosen[option] = first
    limit, use, avoid = chosen
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
    return PodOptions(core_limit, models, avoided), reasons


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
