"""The answer to an operation: allowed or not, and why, in terms that its author can act on.

A rejected operation is a `Decision` with reasons, not an exception. Exceptions are for calls without a decision: there
are two roots, `BadRequest` (the caller's fault) and `Unavailable` (ours, retryable).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

MAX_VALUE_SHOWN = 120
# The longest key that Kubernetes accepts for an annotation or a label: a domain, a slash and a name.
MAX_KEY_LENGTH = 317


class Code(StrEnum):
    """Why something is rejected. Programs match on these, so a code never changes its meaning."""

    QUANTITY_INVALID = "QuantityInvalid"
    CORE_INVALID = "CoreInvalid"
    MEMORY_INVALID = "MemoryInvalid"
    MEMORY_MISSING = "MemoryMissing"
    CORE_MISSING = "CoreMissing"
    REQUEST_DIFFERS = "RequestDiffersFromLimit"
    LIMIT_MISSING = "LimitMissing"
    VOCABULARIES_MIXED = "VocabulariesMixed"
    TOO_MANY_CONTAINERS = "TooManyContainers"
    TOO_LARGE = "TooLarge"
    CONTAINER_DUPLICATE = "ContainerDuplicate"
    CONTAINER_UNKNOWN = "ContainerUnknown"
    CORE_LIMIT_INVALID = "CoreLimitInvalid"
    MODEL_INVALID = "ModelInvalid"
    OPTION_INVALID = "OptionInvalid"
    NODE_CHOSEN = "NodeChosen"
    SCHEDULER_FOREIGN = "SchedulerForeign"
    ANNOTATION_OWNED = "AnnotationOwned"
    ANNOTATION_FROZEN = "AnnotationFrozen"
    REQUEST_FROZEN = "RequestFrozen"
    PRIVILEGED_NOT_GRANTED = "PrivilegedNotGranted"
    MOUNT_SELECTS_GPUS = "MountSelectsGpus"
    ENV_FROM_SELECTS_GPUS = "EnvFromSelectsGpus"
    NOT_REWRITTEN = "NotRewritten"
    MIRROR_FORGED = "MirrorForged"
    BINDING_FOREIGN = "BindingForeign"
    QUOTA_EXCEEDED = "QuotaExceeded"
    QUOTA_INVALID = "QuotaInvalid"
    CARD_UNKNOWN = "CardUnknown"
    LEDGER_NOT_OPEN = "LedgerNotOpen"
    TOO_MANY_UNCONFIRMED = "TooManyUnconfirmed"
    MODEL_NOT_GRANTED = "ModelNotGranted"
    POOL_NOT_GRANTED = "PoolNotGranted"
    TEXT_EXPECTED = "TextExpected"
    API_VERSION_GONE = "ApiVersionGone"
    OBJECT_INVALID = "ObjectInvalid"


class Reason(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One mistake or one exceeded limit: the field, its value, what is wrong, and what to do."""

    code: Code
    field: str
    value: str
    message: str
    remedy: str
    numbers: dict[str, int] = {}

    @property
    def problem(self) -> str:
        """The reason without its remedy, for warnings: their length is limited."""
        # A reason about something that is missing has no value.
        value = f"{self.value!r}: " if self.value else ""
        return f"{self.field}: {value}{self.message}"

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


class Decision(Struct, frozen=True):
    """The answer to one operation. `allowed` is derived from the reasons, so that the two cannot contradict."""

    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def allowed(self) -> bool:
        return not self.reasons

    def __add__(self, other: "Decision") -> "Decision":
        """Combine two answers to one operation: it is allowed if both allow it."""
        return Decision(self.reasons + other.reasons, self.warnings + other.warnings)

    def __str__(self) -> str:
        return "allowed" if self.allowed else "\n".join(str(reason) for reason in self.reasons)


class BadRequest(Exception):  # noqa: N818 - a root of errors, named for what happened
    """The call is invalid: a malformed review, a truncated body. Answered with 4xx."""


class Unavailable(Exception):  # noqa: N818
    """No decision is possible now, for example because the API server does not answer. Retryable; never a rejection."""


def printable(value: Any, length: int = MAX_VALUE_SHOWN) -> str:  # noqa: ANN401 - whatever the user wrote
    """Return a user's value for a message: shortened, and without control characters that would reach a terminal."""
    # Shortened first: a value may have megabytes.
    text = shorten(value if isinstance(value, str) else str(value), length)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def enumerate_some(names: Sequence[str], most: int) -> str:
    """Join the first names, and say how many more there are."""
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
