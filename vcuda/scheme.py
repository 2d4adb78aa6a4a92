"""What a cluster speaks: its names, its unit of memory and its vocabularies, put together once."""

from collections.abc import Hashable

from msgspec import Struct

from vcuda.memory_units import DEFAULT_UNIT_MIB
from vcuda.names import ANCESTOR_DOMAINS, Names
from vcuda.vocabulary import Share, Vocabulary, VocabularyOptions, vocabularies


class Scheme(Struct, frozen=True, eq=False, kw_only=True):
    """The configured names and vocabularies. Build it with `language`."""

    names: Names
    unit_mib: int
    vocabularies: tuple[Vocabulary, ...]
    # Each resource name belongs to one vocabulary; a container is read by looking its few keys up here.
    by_key: dict[str, Vocabulary]
    # The names under every domain whose annotations count, the canonical one first.
    all_names: tuple[Names, ...]
    # The annotations by which a pod's author wishes, under every domain, in the order of precedence.
    options: dict[str, int]
    # An ancestor's annotations, and what they are called here.
    renamed: dict[str, str]
    # How sizes were read before; see `vcuda.request.read_container`, which alone uses it.
    remembered: dict[Hashable, tuple[Share, str]]


def build_scheme(
    names: Names | None = None, unit_mib: int = DEFAULT_UNIT_MIB, dialects: VocabularyOptions | None = None
) -> Scheme:
    """Put a cluster's language together."""
    names = names or Names()
    scheme = vocabularies(names, unit_mib, dialects)
    all_names = (names, *(Names(domain) for domain in ANCESTOR_DOMAINS if domain != names.domain))
    return Scheme(
        names=names,
        unit_mib=unit_mib,
        vocabularies=scheme,
        by_key={key: vocabulary for vocabulary in scheme for key in vocabulary.keys},
        all_names=all_names,
        options={key: place for place, key in enumerate(key for each in all_names for key in option_keys(each))},
        renamed={
            key: canonical
            for each in all_names[1:]
            for key, canonical in zip(option_keys(each), option_keys(names), strict=True)
        },
        remembered={},
    )


def option_keys(names: Names) -> tuple[str, str, str]:
    """List the annotations by which an author wishes, under one domain: core limit, models, models to avoid."""
    return names.core_limit, names.use_models, names.avoid_models
