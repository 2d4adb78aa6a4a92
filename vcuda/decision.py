"""What Quotient says about an operation: allowed or not, and why, in terms its author can act on."""

from enum import StrEnum
from typing import Any

from msgspec import Struct

MAX_VALUE_SHOWN = 120


class Code(StrEnum):
    """Why something is refused. Programs match on these, so a code never changes its meaning."""

    QUANTITY_INVALID = "QuantityInvalid"
    CORE_INVALID = "CoreInvalid"
    MEMORY_INVALID = "MemoryInvalid"
    MEMORY_MISSING = "MemoryMissing"
    CORE_MISSING = "CoreMissing"
    REQUEST_DIFFERS = "RequestDiffersFromLimit"
    LIMIT_MISSING = "LimitMissing"
    VOCABULARIES_MIXED = "VocabulariesMixed"
    CONTAINER_UNKNOWN = "ContainerUnknown"
    CORE_LIMIT_INVALID = "CoreLimitInvalid"
    MODEL_INVALID = "ModelInvalid"
    NODE_CHOSEN = "NodeChosen"
    SCHEDULER_FOREIGN = "SchedulerForeign"
    ANNOTATION_OWNED = "AnnotationOwned"
    ANNOTATION_FROZEN = "AnnotationFrozen"
    REQUEST_FROZEN = "RequestFrozen"
    NOT_REWRITTEN = "NotRewritten"
    MIRROR_FORGED = "MirrorForged"
    BINDING_FOREIGN = "BindingForeign"
    QUOTA_EXCEEDED = "QuotaExceeded"
    QUOTA_INVALID = "QuotaInvalid"
    CARD_UNKNOWN = "CardUnknown"
    LEDGER_NOT_OPEN = "LedgerNotOpen"
    MODEL_NOT_GRANTED = "ModelNotGranted"
    POOL_NOT_GRANTED = "PoolNotGranted"
    TEXT_EXPECTED = "TextExpected"
    API_VERSION_GONE = "ApiVersionGone"
    OBJECT_INVALID = "ObjectInvalid"


class Reason(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One mistake or one limit reached: where, what stands there, what is wrong, and what to do."""

    code: Code
    field: str
    value: str
    message: str
    remedy: str
    numbers: dict[str, int] = {}

    def __str__(self) -> str:
        return f"{self.field}: {self.value!r}: {self.message}; {self.remedy}"


class Decision(Struct, frozen=True):
    """The answer to one operation. Refused exactly when there are reasons: one cannot forget the other."""

    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def allowed(self) -> bool:
        """Whether the operation may go on."""
        return not self.reasons

    def __add__(self, other: "Decision") -> "Decision":
        """Join two answers about one operation; it is allowed if both allow it."""
        return Decision(self.reasons + other.reasons, self.warnings + other.warnings)

    def __str__(self) -> str:
        return "allowed" if self.allowed else "\n".join(str(reason) for reason in self.reasons)


class BadRequest(Exception):  # noqa: N818 - a root of errors, named for what happened
    """The caller broke the protocol: a malformed review, a truncated body. Answered with 4xx."""


class Denied(Exception):  # noqa: N818
    """The user's operation is refused. Carries every reason at once."""

    def __init__(self, *reasons: Reason) -> None:
        super().__init__("\n".join(str(reason) for reason in reasons))
        self.reasons = reasons


class Unavailable(Exception):  # noqa: N818
    """We cannot decide now, through no fault of the caller. Retryable; never turned into a denial."""


def printable(value: Any) -> str:  # noqa: ANN401 - whatever the user wrote
    """Show a user's value in a message, without letting it flood logs or terminals."""
    text = value if isinstance(value, str) else str(value)
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return clean if len(clean) <= MAX_VALUE_SHOWN else clean[: MAX_VALUE_SHOWN - 1] + "…"
