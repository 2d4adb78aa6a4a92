"""GPU models and families, from the names that drivers, node labels, quotas and users write.

Names are compared word by word, ignoring case and brand: `A100` is a family and matches `A100-SXM4-40GB`; `a10` does
not match an A100, as it would by substring. Cards need no registration: most families are the first word after the
brand. A new GPU whose name does not fit that rule needs a word in one of the tables below, and a line in
tests/vcuda/test_gpu_model.py.
"""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

# Words before the model that do not identify a card: `NVIDIA A100` and `A100` are the same. A new vendor name or
# product line goes here.
BRANDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "grid"})
# First words that identify a card only together with the next word, which is then part of the family: in `RTX 3090` the
# family is `RTX-3090`, while in `A100 PCIe` it is `A100`. A new line whose names are a word and a number goes here.
SERIES = frozenset({"rtx", "gtx", "gts", "gt", "titan", "cmp"})
# Words after the number of a SERIES card that make it another family: an `RTX 3090 Ti` is no `RTX 3090`. Words that do
# not, such as a form factor or a memory size, are left out. A new variant with different performance goes here.
EDITIONS = frozenset({"ti", "super", "ada", "blackwell", "d"})
MIG = "mig"
SEPARATORS = re.compile(r"[^0-9A-Za-z.+]+", re.ASCII)
# A series and its number in one word, as in RTX4090.
JOINED_SERIES = re.compile(rf"({'|'.join(sorted(SERIES))})([0-9].*)", re.ASCII | re.IGNORECASE)
# A number and its edition in one word, as in 3090Ti. Other letters are part of the number, as in 170HX.
JOINED_EDITION = re.compile(rf"([0-9]+)({'|'.join(sorted(EDITIONS))})", re.ASCII | re.IGNORECASE)
MIG_PROFILE = re.compile(r"[1-9][0-9]?(c\.[1-9])?g\.[0-9]+gb([.+][a-z.+]+)?", re.ASCII | re.IGNORECASE)
# Model names are also label values and ledger keys: the maximum length of a label value applies.
MAX_LABEL = 63
NOT_IN_A_LABEL = re.compile(r"[^0-9A-Za-z._-]+", re.ASCII)


class GpuModel(Struct, frozen=True):
    """One product: its name without the brand, its family, and the profile if it is a MIG slice."""

    name: str
    family: str
    mig_profile: str = ""


def tokenize(name: str) -> tuple[str, ...]:
    """Split a name into words without leading brands; a driver's name and its node label give the same words."""
    words = [word.strip(".") for word in SEPARATORS.split(name.replace("+", "."))]
    model = [part for word in words if word for part in split_joined(word)]
    # The last word stays: a brand alone must not become an empty name.
    while len(model) > 1 and model[0].lower() in BRANDS:
        model.pop(0)
    return tuple(model)


def split_joined(word: str) -> Sequence[str]:
    with_series = JOINED_SERIES.fullmatch(word)
    series, number = ([with_series[1]], with_series[2]) if with_series else ([], word)
    with_edition = JOINED_EDITION.fullmatch(number)
    return [*series, *(with_edition.groups() if with_edition else [number])]


@lru_cache(maxsize=1024)  # a cluster has a handful of models, and every pod may name them
def parse_model(name: str) -> GpuModel:
    """Parse a product name, such as NVML's or GPU feature discovery's; ValueError if it is empty or only a brand."""
    words = tokenize(name)
    if not words or words[0].lower() in BRANDS:
        raise ValueError(f"{name!r} does not name a GPU model: write one such as A100, T4 or RTX-3090")
    return GpuModel("-".join(words), "-".join(words[: family_length(words)]), mig_profile_in(words))


def is_model(name: str) -> bool:
    try:
        parse_model(name)
    except ValueError:
        return False
    return True


def never_matches(name: str) -> bool:
    """Whether a name can match no card: a series without its number, or longer than a model's name can be."""
    return len(name) > MAX_LABEL or name.lower() in SERIES


def family_length(words: tuple[str, ...]) -> int:
    """Return how many words make the family: one, or those from the series, or a bare number, to its last edition."""
    if words[0].isdecimal():
        length = 1
    elif words[0].lower() in SERIES:
        length = 3 if len(words) > 2 and words[1].lower() == "pro" else 2  # noqa: PLR2004 - RTX PRO 6000
    else:
        return 1
    # Up to the last edition, as it may follow a form factor: RTX 4000 SFF Ada Generation.
    editions = [index for index, word in enumerate(words) if index >= length and word.lower() in EDITIONS]
    return min(editions[-1] + 1 if editions else length, len(words))


def mig_profile_in(words: tuple[str, ...]) -> str:
    """Return the MIG profile, as in `A100-SXM4-40GB-MIG-1g.5gb`; empty for a whole card."""
    for word, following in pairwise(words):
        if word.lower() == MIG and MIG_PROFILE.fullmatch(following):
            return following.lower()
    return ""


def matches(pattern: str, model: GpuModel) -> bool:
    """Whether a pattern (a family, a product, or some of its words in order) names this model.

    The pattern has to contain the whole family: `RTX` matches nothing, `RTX-3090` does not match the 3090 Ti, and
    `A100-80GB` matches every A100 with 80 GB, such as the SXM4 and the PCIe card. Only the series before a number may
    be left out: `3090` matches the RTX 3090. A MIG slice is no card: `A100-MIG` and `A100-MIG-1g.5gb` match one.
    """
    wanted, family = lower_words(pattern), lower_words(model.family)
    if model.mig_profile and MIG not in wanted:
        return False
    # `in` advances the iterator, so the words have to appear in this order.
    rest = iter(lower_words(model.name)[len(family) :])
    # A model may be named by its number alone too: in a quota, or in a pod, before a node has such a card.
    if is_bare(wanted) or is_bare(family):
        wanted, family = without_series(wanted), without_series(family)
    return wanted[: len(family)] == family and all(word in rest for word in wanted[len(family) :])


@lru_cache(maxsize=4096)  # a charge compares a few hundred names, many times
def lower_words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in tokenize(name))


def similar_names(names: tuple[str, ...], name: str) -> AbstractSet[str]:
    """Return those of `names` that may match a model, or that a pattern may match: a few of hundreds."""
    index = index_by_word(names)
    return frozenset(each for word in leading_words(name) for each in index.get(word, ()))


@lru_cache(maxsize=256)
def index_by_word(names: tuple[str, ...]) -> dict[str, list[str]]:
    index: dict[str, list[str]] = {}
    for name in names:
        for word in leading_words(name):
            index.setdefault(word, []).append(name)
    return index


def leading_words(name: str) -> tuple[str, ...]:
    """Return the first word of a name, and of a series its number: names that match have one of these in common."""
    words = lower_words(name)
    return words[:2] if words and words[0] in SERIES else words[:1]


def is_bare(words: Sequence[str]) -> bool:
    """Whether the words name a card without its series, such as `3090` or `A6000`."""
    return bool(words) and words[0] not in SERIES


def without_series(words: tuple[str, ...]) -> tuple[str, ...]:
    """Drop the series if the number of a card follows, as it does not in `TITAN X`."""
    number = "".join(words[1:3])
    return words[1:] if words and words[0] in SERIES and any(map(str.isdigit, number)) else words


def product_label(nvml_name: str) -> str:
    """Return a driver's product name as a label value, as GPU feature discovery writes it."""
    return NOT_IN_A_LABEL.sub("-", nvml_name.replace("+", ".")).lstrip("._-")[:MAX_LABEL].rstrip("._-")
