"""What a cluster speaks: its names, its unit of memory and its vocabularies, put together once."""

from msgspec import Struct

from vcuda.memory import DEFAULT_UNIT_MIB
from vcuda.names import ANCESTOR_DOMAINS, Names
from vcuda.vocabulary import Dialects, Vocabulary, vocabularies


class Language(Struct, frozen=True, eq=False):
    """The configured names and vocabularies. Build it with `language`."""

    names: Names
    unit_mib: int
    vocabularies: tuple[Vocabulary, ...]
    # Each resource name belongs to one vocabulary; a container is read by looking its few keys up here.
    by_key: dict[str, Vocabulary]

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains whose annotations count, the canonical one first."""
        return (self.names.domain, *(domain for domain in ANCESTOR_DOMAINS if domain != self.names.domain))


def language(
    names: Names | None = None, unit_mib: int = DEFAULT_UNIT_MIB, dialects: Dialects | None = None
) -> Language:
    """Put a cluster's language together."""
    names = names or Names()
    spoken = vocabularies(names, unit_mib, dialects)
    return Language(names, unit_mib, spoken, {key: vocabulary for vocabulary in spoken for key in vocabulary.keys})
