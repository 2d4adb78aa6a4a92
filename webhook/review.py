"""AdmissionReview v1, in and out.

Only what decides is decoded; the objects under review stay raw until it is known what they are.
"""

from binascii import b2a_base64
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from vcuda.decision import BadRequest, Code, Decision
from vcuda.decoding import decoder_for

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
NULL = Raw(b"null")
MAX_TOLD = 20
RETRY_AFTER_S = 5
OPENING = b'{"apiVersion":"%s","kind":"%s","response":{"uid":' % (API_VERSION.encode(), KIND.encode())
encode = msgspec.json.encode

T = TypeVar("T")


class GroupKind(Struct, frozen=True):
    """What an object is."""

    group: str = ""
    version: str = ""
    kind: str = ""


class User(Struct, frozen=True):
    """Who wants something."""

    username: str = ""
    groups: tuple[str, ...] = ()


class Request(Struct, frozen=True, rename="camel", kw_only=True):
    """What somebody wants to do to an object."""

    uid: str
    kind: GroupKind
    sub_resource: str = ""
    name: str = ""
    namespace: str = ""
    operation: str
    user_info: User = User()
    object: Raw = NULL
    old_object: Raw = NULL
    dry_run: bool | None = None


class Review(Struct, frozen=True, rename="camel"):
    """The question."""

    api_version: str = ""
    kind: str = ""
    request: Request | None = None


DECODER = decoder_for(Review)


def decode_review(body: bytes) -> Request:
    """Read a review; a BadRequest says what is wrong with it."""
    try:
        review = DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as wrong:
        raise BadRequest(f"not an {KIND}: {wrong}") from None
    if (review.api_version, review.kind) != (API_VERSION, KIND):
        raise BadRequest(
            f"{review.api_version or 'no apiVersion'}, {review.kind or 'no kind'}: send a {KIND} of {API_VERSION}"
        )
    if review.request is None or not review.request.uid:
        raise BadRequest("request.uid is missing: send the review with its request")
    return review.request


def decode_object(raw: Raw, kind: type[T], where: str) -> T:
    """Read an object under review."""
    try:
        return decoder_for(kind).decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as wrong:
        raise BadRequest(f"{where} is not a {kind.__name__}: {wrong}") from None


def encode_answer(uid: str, decision: Decision, operations: list[dict[str, Any]] | None = None) -> bytes:
    """Write the answer to a review; a patch only with an allowance, and only if there is something to change."""
    # Put together from its parts: what a patch needs most is to be written once, not three times.
    allowed = not decision.reasons
    parts = [OPENING, encode(uid), b',"allowed":true' if allowed else b',"allowed":false']
    if not allowed:
        parts += (b',"status":', encode(refusal(decision)))
    elif operations:
        parts += (b',"patchType":"JSONPatch","patch":"', b2a_base64(encode(operations), newline=False), b'"')
    if decision.warnings:
        parts += (b',"warnings":', encode(told(decision.warnings)))
    parts.append(b"}}")
    return b"".join(parts)


def told(warnings: tuple[str, ...]) -> list[str]:
    """Give the first warnings, and how many there are more; the API server passes on only so much."""
    more = len(warnings) - MAX_TOLD
    return [*warnings[:MAX_TOLD], f"and {more} more warnings"] if more > 0 else list(warnings)


def refusal(decision: Decision) -> dict[str, Any]:
    """Write the Status of a refusal: for people as a message, for programs as causes."""
    reasons, count = decision.reasons[:MAX_TOLD], len(decision.reasons)
    lines = [f"{count} problems:", *(f"- {reason}" for reason in reasons)]
    if count > MAX_TOLD:
        lines.append(f"- and {count - MAX_TOLD} more")
    # What will be decided otherwise in a minute is told as such; clients know when to try again.
    postponed = all(reason.code is Code.LEDGER_NOT_OPEN for reason in reasons)
    return {
        "status": "Failure",
        "code": 503 if postponed else 403,
        "reason": "ServiceUnavailable" if postponed else "Forbidden",
        "message": str(reasons[0]) if count == 1 else "\n".join(lines),
        "details": ({"retryAfterSeconds": RETRY_AFTER_S} if postponed else {})
        | {"causes": [{"reason": reason.code, "field": reason.field, "message": str(reason)} for reason in reasons]},
    }
