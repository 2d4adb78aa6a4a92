"""GPU models and families, from the names that drivers, node labels, quotas and people use.

Names are compared token by token and without regard to case: `A100` is a family and matches
`A100-SXM4-40GB`; `a10` never matches an A100, as it would by substring.
"""

import re
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

# Words that say who sells a card, not which card it is.
BRANDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "grid"})
# Series whose first word alone names no card: the number belongs to the family, and so do these words after it.
SERIES = frozenset({"rtx", "gtx", "gts", "gt", "titan", "cmp"})
EDITIONS = frozenset({"ti", "super", "ada", "blackwell", "d"})
MIG = "mig"
SEPARATORS = re.compile(r"[^0-9A-Za-z.+]+", re.ASCII)
MIG_PROFILE = re.compile(r"[1-9][0-9]?(c\.[1-9])?g\.[0-9]+gb([.+][a-z.+]+)?", re.ASCII | re.IGNORECASE)
# A model's name stands in labels, ledgers and messages: none is longer than a label may be.
MAX_LABEL = 63
NOT_IN_A_LABEL = re.compile(r"[^0-9A-Za-z._-]+", re.ASCII)


class GpuModel(Struct, frozen=True):
    """One product: its name without the brand, the family it belongs to, and its slice if it is one."""

    name: str
    family: str
    mig_profile: str = ""


def tokens(name: str) -> tuple[str, ...]:
    """Split a name into its words, brands left out; the same for a driver's name and a node's label."""
    words = [word.strip(".") for word in SEPARATORS.split(name.replace("+", "."))]
    named = [word for word in words if word]
    while len(named) > 1 and named[0].lower() in BRANDS:
        named.pop(0)
    return tuple(named)


@lru_cache(maxsize=1024)  # a cluster has a handful of models, named in every pod
def parse_model(name: str) -> GpuModel:
    """Read a product name, such as NVML's or GPU feature discovery's; a ValueError if it names nothing."""
    words = tokens(name)
    if not words or words[0].lower() in BRANDS:
        raise ValueError(f"{name!r} names no GPU model: write one such as A100, T4 or RTX-3090")
    return GpuModel("-".join(words), "-".join(words[: family_length(words)]), profile_of(words))


def is_model(name: str) -> bool:
    """Tell whether a name, from wherever it comes, names a model."""
    try:
        parse_model(name)
    except ValueError:
        return False
    return True


def names_no_card(name: str) -> bool:
    """Tell whether no card can ever be called so: a series without its number, or something longer than a name."""
    return len(name) > MAX_LABEL or name.lower() in SERIES


def family_length(words: tuple[str, ...]) -> int:
    """Count the words that make the family: one, or the series, its number and its edition."""
    if words[0].lower() not in SERIES:
        return 1
    length = 3 if len(words) > 2 and words[1].lower() == "pro" else 2  # noqa: PLR2004 - RTX PRO 6000
    editions = [place for place, word in enumerate(words) if place >= length and word.lower() in EDITIONS]
    return min(editions[-1] + 1 if editions else length, len(words))


def profile_of(words: tuple[str, ...]) -> str:
    """Find the MIG profile, as in `A100-SXM4-40GB-MIG-1g.5gb`."""
    for word, following in pairwise(words):
        if word.lower() == MIG and MIG_PROFILE.fullmatch(following):
            return following.lower()
    return ""


def matches(pattern: str, model: GpuModel) -> bool:
    """Tell whether a pattern (a family, a product, or words of one in order) names this model.

    A pattern has to name the whole family: `RTX` matches nothing, `RTX-3090` does not match the 3090 Ti, and
    `A100-80GB` matches the A100 of 80 GB in every form.
    """
    wanted = [word.lower() for word in tokens(pattern)]
    family = [word.lower() for word in tokens(model.family)]
    rest = iter([word.lower() for word in tokens(model.name)][len(family) :])
    return wanted[: len(family)] == family and all(word in rest for word in wanted[len(family) :])


def product_label(nvml_name: str) -> str:
    """Write a driver's product name as a label value, as GPU feature discovery does."""
    return NOT_IN_A_LABEL.sub("-", nvml_name.replace("+", ".")).lstrip("._-")[:MAX_LABEL].rstrip("._-")
