"""What a pod's author wishes beyond amounts: how far it may burst, and on which models it may run.

The annotations mean the same under the configured domain and under the ancestors'.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from msgspec import Struct

from vcuda.decision import Code, Reason, shown
from vcuda.language import Language
from vcuda.model import matches, parse_model
from vcuda.vocabulary import WHOLE

CORE_LIMIT = re.compile(r"[0-9]{1,3}", re.ASCII)
MAX_MODELS = 64


class Wishes(Struct, frozen=True):
    """The author's wishes; nothing wished means the defaults."""

    core_limit: int | None = None
    models: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()


NOTHING = Wishes()


def annotation_at(key: str) -> str:
    """Name the field in which an annotation stands."""
    return f"metadata.annotations[{key}]"


def read_wishes(annotations: Mapping[str, str], spoken: Language) -> tuple[Wishes, list[Reason]]:
    """Read the annotations of a pod; all mistakes come back at once."""
    if annotations.keys().isdisjoint(spoken.wishes):
        return NOTHING, []
    reasons: list[Reason] = []
    found: list[tuple[str, str] | None] = []
    for keys in spoken.wish_kinds:
        if annotations.keys().isdisjoint(keys):
            found.append(None)
            continue
        written = [(key, annotations[key]) for key in keys if key in annotations]
        reasons += differing(written)
        found.append(written[0])
    limit, use, avoid = found
    core_limit = read_core_limit(*limit, reasons.append) if limit else None
    models = read_models(*use, reasons.append) if use else ()
    avoided = read_models(*avoid, reasons.append) if avoid else ()
    if use and avoid and models and all(any(matches(no, parse_model(yes)) for no in avoided) for yes in models):
        reasons.append(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_at(use[0]),
                value=shown(use[1]),
                message=f"all of these models are excluded again by {avoid[0]}",
                remedy="name a model in only one of the two annotations",
            )
        )
    return Wishes(core_limit, models, avoided), reasons


def differing(written: list[tuple[str, str]]) -> list[Reason]:
    """Say that the same wish stands under two domains with two values."""
    first, *others = written
    return [
        Reason(
            code=Code.VOCABULARIES_MIXED,
            field=annotation_at(key),
            value=shown(text),
            message=f"contradicts {first[0]}: {shown(first[1])!r}",
            remedy=f"remove {key}, or {first[0]}",
        )
        for key, text in others
        if text.strip() != first[1].strip()
    ]


def read_core_limit(key: str, text: str, wrong: Callable[[Reason], None]) -> int | None:
    """Read how far containers may burst; whether it is enough depends on what they ask for."""
    if CORE_LIMIT.fullmatch(text.strip()) and 1 <= int(text) <= WHOLE:
        return int(text)
    wrong(core_limit_invalid(key, text, 1))
    return None


def core_limit_invalid(key: str, text: str, least: int) -> Reason:
    """Say what a limit may be."""
    return Reason(
        code=Code.CORE_LIMIT_INVALID,
        field=annotation_at(key),
        value=shown(text),
        message=f"not a whole number from {least}, the largest fraction this pod asks for, to {WHOLE}"
        if least > 1
        else f"not a whole number up to {WHOLE}",
        remedy=f'write "{least}" to "{WHOLE}", in quotes, or leave the annotation out',
    )


def read_models(key: str, text: str, wrong: Callable[[Reason], None]) -> tuple[str, ...]:
    """Read a list of models, separated by commas; an empty list says nothing."""
    models, unknown = models_in(text)
    for word in unknown:
        wrong(
            Reason(
                code=Code.MODEL_INVALID,
                field=annotation_at(key),
                value=shown(word),
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
    for word in filter(None, map(str.strip, text.split(",", MAX_MODELS)[:MAX_MODELS])):
        try:
            models[parse_model(word).name] = None
        except ValueError:
            unknown.append(word)
    return tuple(models), tuple(unknown)
