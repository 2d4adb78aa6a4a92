"""The configured registry of a cluster: its resource names, annotations, memory unit and vocabularies.

Every component builds one `Scheme` from its configuration at start and passes it to whatever reads pods.
"""

from collections.abc import Hashable

from msgspec import Struct

from vcuda.memory_units import DEFAULT_UNIT_MIB
from vcuda.names import ANCESTOR_DOMAINS, Names
from vcuda.vocabulary import Share, Vocabulary, VocabularyOptions, build_vocabularies


class Scheme(Struct, frozen=True, eq=False, kw_only=True):
    """The registry. Build it with `build_scheme`."""

    names: Names
    unit_mib: int
    vocabularies: tuple[Vocabulary, ...]
    # Resource name -> the one vocabulary it belongs to.
    by_key: dict[str, Vocabulary]
    # The names under every domain whose annotations are read, the configured domain first.
    all_names: tuple[Names, ...]
    # Annotation key of a pod option, under every domain -> its precedence: lower wins. Modulo their number it is the
    # position of the option in `option_keys`.
    option_precedence: dict[str, int]
    # Annotation key under an ancestor's domain -> the same annotation under the configured domain.
    canonical_keys: dict[str, str]
    # Container resources -> the share and the vocabulary they were read as. Used by `request.read_container` only; the
    # dict is mutable although the struct is frozen.
    read_cache: dict[Hashable, tuple[Share, str]]


def build_scheme(
    names: Names | None = None, unit_mib: int = DEFAULT_UNIT_MIB, vocabulary_options: VocabularyOptions | None = None
) -> Scheme:
    names = names or Names()
    vocabularies = build_vocabularies(names, unit_mib, vocabulary_options)
    all_names = (names, *(Names(domain) for domain in ANCESTOR_DOMAINS if domain != names.domain))
    return Scheme(
        names=names,
        unit_mib=unit_mib,
        vocabularies=vocabularies,
        by_key={key: vocabulary for vocabulary in vocabularies for key in vocabulary.keys},
        all_names=all_names,
        option_precedence={
            key: precedence for precedence, key in enumerate(key for each in all_names for key in option_keys(each))
        },
        canonical_keys={
            key: canonical
            for each in all_names[1:]
            for key, canonical in zip(option_keys(each), option_keys(names), strict=True)
        },
        read_cache={},
    )


def option_keys(names: Names) -> tuple[str, ...]:
    """Return the annotation keys of the pod options under one domain, in the order of `pod_options.READERS`."""
    return (
        names.core_limit,
        names.use_models,
        names.avoid_models,
        names.use_uuids,
        names.avoid_uuids,
        names.min_isolation,
        names.spread_members,
        names.placement_policy,
    )
