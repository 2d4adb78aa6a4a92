"""What enforces a container's share of a GPU: a rung for its memory, and one for its compute.

The node plugin publishes an isolation for each card, and reports for each container by which rungs it was started. A
limit whose rung is `none` is only recorded and measured.
"""

from enum import StrEnum
from typing import Literal

from msgspec import Struct

MEMORY, COMPUTE = "memory", "compute"
# What a node plugin may use; `auto` is the strongest that a card offers.
IsolationSetting = Literal["auto", "none", "preload", "driver"]


class Rung(StrEnum):
    """The mechanisms, in order of strength; the values are those on the wire."""

    NONE = "none"
    # A library in the container's processes. Cooperative: a process that avoids the library has no limit.
    PRELOAD = "preload"
    MPS = "mps"
    # NVML's memory limit per cgroup, from driver r615 on. It has no counterpart for compute.
    DRIVER = "driver"
    # Whole cards: no other container shares them, so there is nothing to enforce.
    EXCLUSIVE = "exclusive"

    @classmethod
    def _missing_(cls, value: object) -> "Rung | None":
        # A newer node plugin may publish a mechanism that this version does not know. Its inventory must stay readable,
        # and "none" promises least.
        return cls.NONE if isinstance(value, str) else None

    @property
    def strength(self) -> int:
        return STRENGTH[self]

    def is_at_least(self, minimum: "Rung") -> bool:
        return self.strength >= minimum.strength


STRENGTH = {rung: strength for strength, rung in enumerate(Rung)}
# The rungs that can be required of each dimension. A pod that shares a card cannot require it to be exclusive.
RUNGS = {
    MEMORY: (Rung.NONE, Rung.PRELOAD, Rung.MPS, Rung.DRIVER),
    COMPUTE: (Rung.NONE, Rung.PRELOAD, Rung.MPS),
}


class Isolation(Struct, frozen=True):
    """A rung for memory and one for compute; true if there is any."""

    memory: Rung = Rung.NONE
    compute: Rung = Rung.NONE

    def __bool__(self) -> bool:
        return self.memory is not Rung.NONE or self.compute is not Rung.NONE

    def __str__(self) -> str:
        """Return the text of which `parse_isolation` reads the same."""
        rungs = {MEMORY: self.memory, COMPUTE: self.compute}
        return ",".join(f"{name}={rung}" for name, rung in rungs.items() if rung is not Rung.NONE) or Rung.NONE.value

    def is_at_least(self, minimum: "Isolation") -> bool:
        return self.memory.is_at_least(minimum.memory) and self.compute.is_at_least(minimum.compute)

    def strongest(self, other: "Isolation") -> "Isolation":
        """Return the stronger rung of the two, in each dimension."""
        return Isolation(
            max(self.memory, other.memory, key=STRENGTH.__getitem__),
            max(self.compute, other.compute, key=STRENGTH.__getitem__),
        )


# Fields whose default it is are left out of JSON only if they hold this very object: write `isolation or NO_ISOLATION`.
NO_ISOLATION = Isolation()
EXCLUSIVE = Isolation(Rung.EXCLUSIVE, Rung.EXCLUSIVE)


def isolation_from_word(word: str) -> Isolation:
    """Read the form of older releases: one word, which stood for both dimensions."""
    rung = Rung(word)
    return Isolation(rung, Rung.NONE if rung is Rung.DRIVER else rung)


def parse_isolation(text: str) -> Isolation:
    """Read the text of an isolation, which Quotient wrote; what is not known of it is read as none."""
    words = dict(part.partition("=")[::2] for part in text.split(","))
    return Isolation(Rung(words.get(MEMORY, "")), Rung(words.get(COMPUTE, "")))


class IsolationMistake(Struct, frozen=True):
    """A part of a text that requires no isolation, and what it must be."""

    value: str
    message: str


def parse_minimum(text: str) -> tuple[Isolation, tuple[IsolationMistake, ...]]:
    """Read what a pod or a quota requires: `preload` (of memory), or `memory=preload,compute=mps`."""
    if "=" not in text:
        rung, mistake = parse_rung(MEMORY, text)
        if mistake is not None:
            mistake = IsolationMistake(text, f"{mistake.message}, or name both as in memory=preload,compute=mps")
        return Isolation(rung), (mistake,) if mistake else ()
    if text.count(",") >= len(RUNGS):
        return NO_ISOLATION, (IsolationMistake(text, "must name memory and compute at most once each"),)
    rungs: dict[str, Rung] = {}
    mistakes: list[IsolationMistake] = []
    for part in text.split(","):
        name, _, word = part.partition("=")
        name = name.strip().lower()
        if name not in RUNGS:
            mistakes.append(IsolationMistake(part, f"must begin with {' or '.join(f'{each}=' for each in RUNGS)}"))
        elif name in rungs:
            mistakes.append(IsolationMistake(part, f"names {name} a second time"))
        else:
            rungs[name], mistake = parse_rung(name, word)
            if mistake is not None:
                mistakes.append(IsolationMistake(part, f"{name} {mistake.message}"))
    return Isolation(rungs.get(MEMORY, Rung.NONE), rungs.get(COMPUTE, Rung.NONE)), tuple(mistakes)


def parse_rung(dimension: str, word: str) -> tuple[Rung, IsolationMistake | None]:
    for rung in RUNGS[dimension]:
        if rung.value == word.strip().lower():
            return rung, None
    return Rung.NONE, IsolationMistake(word, f"must be one of {', '.join(RUNGS[dimension])}")
