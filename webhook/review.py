"""Decodes AdmissionReview v1 requests and encodes the responses.

The objects under review stay undecoded until their kind is known.
"""

from binascii import b2a_base64
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from vcuda.decision import BadRequest, Code, Decision, printable, shorten
from vcuda.decode_errors import DECODE_ERRORS, describe_decode_error
from vcuda.decoding import decoder_for
from webhook.value_limit import check_values

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
NULL = Raw(b"null")
# Reasons or warnings in one response, and characters of one reason. The API server ignores warnings beyond 4096
# characters in all, which include those of other webhooks.
MAX_SHOWN, MAX_REASON, MAX_WARNINGS = 20, 2000, 3000
RETRY_AFTER_S = 5
# The start of every response, encoded once.
OPENING = b'{"apiVersion":"%s","kind":"%s","response":{"uid":' % (API_VERSION.encode(), KIND.encode())
encode = msgspec.json.encode

T = TypeVar("T")


class MalformedObject(BadRequest):
    """A review, or an object in it, does not have the structure of its kind."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class GroupVersionKind(Struct, frozen=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class User(Struct, frozen=True):
    username: str = ""
    groups: tuple[str, ...] = ()


class Request(Struct, frozen=True, rename="camel", kw_only=True):
    """The request of a review. `object` is null on DELETE, `old_object` on CREATE."""

    uid: str
    kind: GroupVersionKind
    sub_resource: str = ""
    name: str = ""
    namespace: str = ""
    operation: str
    user_info: User = User()
    object: Raw = NULL
    old_object: Raw = NULL
    dry_run: bool | None = None


class Review(Struct, frozen=True, rename="camel"):
    api_version: str = ""
    kind: str = ""
    request: Request | None = None


DECODER = decoder_for(Review)


def decode_review(body: bytes) -> Request:
    """Return the request of a review; raises BadRequest if the body is no valid AdmissionReview."""
    try:
        review = DECODER.decode(body)
    except DECODE_ERRORS as error:
        raise malformed(KIND, error) from None
    if (review.api_version, review.kind) != (API_VERSION, KIND):
        raise BadRequest(
            f"apiVersion {printable(review.api_version)!r}, kind {printable(review.kind)!r} is not supported: "
            f"send {API_VERSION}, {KIND}"
        )
    if review.request is None or not review.request.uid:
        raise BadRequest("request.uid is missing: send the review with its request")
    return review.request


def decode_object(raw: Raw, kind: type[T], field: str) -> T:
    """Decode the object in a field of the review; raises BadRequest if it is malformed, or too large."""
    check_values(raw, field)
    try:
        return decoder_for(kind).decode(raw)
    except DECODE_ERRORS as error:
        raise malformed(field, error) from None


def malformed(field: str, error: Exception) -> "MalformedObject":
    problem = describe_decode_error(error)
    return MalformedObject(f"{field}.{problem.path}" if problem.path else field, problem.message)


def encode_answer(uid: str, decision: Decision, operations: list[dict[str, Any]] | None = None) -> bytes:
    """Encode the response to a review. A patch is included only if the object is allowed and something changes."""
    # Joined from encoded parts: as one struct, the patch would be copied twice more.
    allowed = not decision.reasons
    parts = [OPENING, encode(uid), b',"allowed":true' if allowed else b',"allowed":false']
    if not allowed:
        parts += (b',"status":', encode(refusal_status(decision)))
    elif operations:
        parts += (b',"patchType":"JSONPatch","patch":"', b2a_base64(encode(operations), newline=False), b'"')
    if decision.warnings:
        parts += (b',"warnings":', encode(limit_warnings(decision.warnings)))
    parts.append(b"}}")
    return b"".join(parts)


def limit_decision(decision: Decision) -> Decision:
    """Return a decision with as many reasons and warnings as are shown."""
    return Decision(decision.reasons[:MAX_SHOWN], tuple(limit_warnings(decision.warnings)))


def encode_undecided(uid: str, message: str) -> bytes:
    """Encode the response that refuses an object because no decision is possible now."""
    status = {
        "status": "Failure",
        "code": 503,
        "reason": "ServiceUnavailable",
        "message": message,
        "details": {"retryAfterSeconds": RETRY_AFTER_S},
    }
    return b"".join((OPENING, encode(uid), b',"allowed":false,"status":', encode(status), b"}}"))


def limit_warnings(warnings: tuple[str, ...]) -> list[str]:
    """Return the first warnings, and how many more there are."""
    lengths = accumulate(map(len, warnings[:MAX_SHOWN]))
    shown = list(warnings[: sum(length <= MAX_WARNINGS for length in lengths)])
    more = len(warnings) - len(shown)
    return [*shown, f"and {more} more warnings"] if more else shown


def refusal_status(decision: Decision) -> dict[str, Any]:
    """Return the Status of a refusal: a message for users, and causes for programs."""
    reasons, count = decision.reasons[:MAX_SHOWN], len(decision.reasons)
    texts = [shorten(str(reason), MAX_REASON) for reason in reasons]
    lines = [f"{count} problems:", *(f"- {text}" for text in texts)]
    if count > MAX_SHOWN:
        lines.append(f"- and {count - MAX_SHOWN} more")
    # A ledger opens within a minute: 503 with retryAfterSeconds makes clients try again, where 403 is final.
    is_temporary = all(reason.code is Code.LEDGER_NOT_OPEN for reason in reasons)
    return {
        "status": "Failure",
        "code": 503 if is_temporary else 403,
        "reason": "ServiceUnavailable" if is_temporary else "Forbidden",
        "message": texts[0] if count == 1 else "\n".join(lines),
        "details": ({"retryAfterSeconds": RETRY_AFTER_S} if is_temporary else {})
        | {
            "causes": [
                {"reason": reason.code, "field": shorten(reason.field, MAX_REASON), "message": text}
                for reason, text in zip(reasons, texts, strict=True)
            ]
        },
    }
