"""What a pod's author wishes beyond amounts: how far it may burst, and on which models it may run.

The annotations mean the same under the configured domain and under the ancestors'.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from msgspec import Struct

from vcuda.decision import Code, Reason, printable
from vcuda.gpu_model import MAX_LABEL, matches, names_no_card, parse_model
from vcuda.scheme import Scheme
from vcuda.vocabulary import CORES_PER_CARD

CORE_LIMIT = re.compile(r"[0-9]{1,3}", re.ASCII)
MAX_MODELS = 64
MAX_TEXT = MAX_MODELS * (MAX_LABEL + 2)
# Core limit, models, models to avoid.
KINDS = 3


class PodOptions(Struct, frozen=True):
    """The author's wishes; nothing wished means the defaults."""

    core_limit: int | None = None
    models: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()


NO_OPTIONS = PodOptions()


def annotation_field(key: str) -> str:
    """Name the field in which an annotation stands."""
    return f"metadata.annotations[{key}]"


def read_pod_options(annotations: Mapping[str, str], scheme: Scheme, least: int = 1) -> tuple[PodOptions, list[Reason]]:
    """Read the annotations of a pod whose largest fraction is `least`; all mistakes come back at once."""
    written = [each for each in annotations.items() if each[0] in scheme.options]
    if not written:
        return NO_OPTIONS, []
    reasons: list[Reason] = []
    found: list[tuple[str, str] | None] = [None, None, None]
    for each in written:
        place = scheme.options[each[0]]
        first = found[place % KINDS]
        if first is not None:
            each, first = (first, each) if place > scheme.options[first[0]] else (each, first)  # noqa: PLW2901
            if each[1].strip() != first[1].strip():
                reasons.append(differing(first, each))
        found[place % KINDS] = each
    limit, use, avoid = found
    core_limit = read_core_limit(*limit, least, reasons.append) if limit else None
    models = read_models(*use, reasons.append) if use else ()
    avoided = read_models(*avoid, reasons.append) if avoid else ()
    if use and avoid and models and all(any(matches(no, parse_model(yes)) for no in avoided) for yes in models):
        reasons.append(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_field(use[0]),
                value=printable(use[1]),
                message=f"all of these models are excluded again by {avoid[0]}",
                remedy="name a model in only one of the two annotations",
            )
        )
    return PodOptions(core_limit, models, avoided), reasons


def differing(this: tuple[str, str], other: tuple[str, str]) -> Reason:
    """Say that the same wish stands under two domains with two values."""
    return Reason(
        code=Code.VOCABULARIES_MIXED,
        field=annotation_field(this[0]),
        value=printable(this[1]),
        message=f"contradicts {other[0]}: {printable(other[1])!r}",
        remedy=f"remove {this[0]}, or {other[0]}",
    )


def read_core_limit(key: str, text: str, least: int, wrong: Callable[[Reason], None]) -> int | None:
    """Read how far containers may burst; whether it is enough depends on what they ask for."""
    bare = text.strip()
    if CORE_LIMIT.fullmatch(bare) and 1 <= int(bare) <= CORES_PER_CARD:
        return int(bare)
    wrong(core_limit_invalid(key, text, least))
    return None


def core_limit_invalid(key: str, text: str, least: int) -> Reason:
    """Say what a limit may be."""
    return Reason(
        code=Code.CORE_LIMIT_INVALID,
        field=annotation_field(key),
        value=printable(text),
        message=f"not a whole number from {least}, the largest fraction this pod asks for, to {CORES_PER_CARD}"
        if least > 1
        else f"not a whole number up to {CORES_PER_CARD}",
        remedy=f'write "{least}" to "{CORES_PER_CARD}", in quotes, or leave the annotation out',
    )


def read_models(key: str, text: str, wrong: Callable[[Reason], None]) -> tuple[str, ...]:
    """Read a list of models, separated by commas; an empty list says nothing."""
    if text.count(",") >= MAX_MODELS or len(text) > MAX_TEXT:
        wrong(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_field(key),
                value=printable(text),
                message=f"more than {MAX_MODELS} models, or {MAX_TEXT} characters",
                remedy="name families, such as A100, instead of their products",
            )
        )
        return ()
    models, unknown = models_in(text)
    for word in unknown:
        wrong(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_field(key),
                value=printable(word),
                message="names no GPU model",
                remedy="name models or families such as A100, T4 or RTX-3090, separated by commas",
            )
        )
    return models


@lru_cache(maxsize=1024)  # pods of a cluster name the same few lists
def models_in(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a list into models and what names none."""
    models: dict[str, None] = {}
    unknown: list[str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            model = parse_model(word[: MAX_LABEL + 1])
        except ValueError:
            unknown.append(word)
            continue
        # A list that was separated otherwise, or a series, which is no model yet, would match nothing for ever.
        if any(mark in word for mark in ";|") or names_no_card(model.name):
            unknown.append(word)
        else:
            models[model.name] = None
    return tuple(models), tuple(unknown)
