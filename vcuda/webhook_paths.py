"""The paths of the webhook, `/mutate/<secret>` and `/validate/<secret>`, and the record of their secrets.

The secret stands in the webhook configurations only. Beside it, in an annotation, the controller records the SHA-256
digests of all secrets that the webhook accepts: the registered one, during a rotation the next one, and former ones
for as long as an API server may still use them. Digests suffice to recognize a secret, and do not reveal it.

The plain paths `/mutate` and `/validate` are those of the empty secret.
"""

import hashlib
import re
from collections.abc import Collection
from functools import lru_cache

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from vcuda.decode_errors import DECODE_ERRORS
from vcuda.decoding import decoder_for

MUTATE, VALIDATE = "mutate", "validate"
PLAIN = ""
# Hexadecimal, because Kubernetes accepts only DNS names as parts of a webhook's path. 128 bits cannot be guessed.
SECRET_BYTES = 16
SECRET = rf"[0-9a-f]{{{2 * SECRET_BYTES}}}"
PATH = re.compile(rf"/(?P<route>{MUTATE}|{VALIDATE})(?:/(?P<secret>{SECRET}))?", re.ASCII)
# API servers read a changed webhook configuration within seconds. A former secret is retired when it was not used for
# IDLE_S, and after MAX_FORMER_S even if it is still used: then not by an API server.
IDLE_S, MAX_FORMER_S = 600, 1800


class PathRecord(Struct, frozen=True, omit_defaults=True):
    """The annotation. Secrets are recorded by digest, times in seconds since 1970.

    `current` is registered `since` that time; `former` has when each was replaced.
    """

    v: int = 1
    current: str = ""
    since: int = 0
    next: str = ""
    former: dict[str, int] = {}


class PathReport(Struct, frozen=True):
    """What a replica of the webhook says about secrets, by digest.

    `instance` is another one for each process; `failed` are those that a call came by which got no answer in time.
    """

    instance: str
    accepted: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


# On the operations port of each replica.
REPORT_PATH = "/paths"
RECORDS, REPORTS = decoder_for(PathRecord), decoder_for(PathReport)
encode_report = msgspec.json.encode


def path_for(route: str, secret: str) -> str:
    return f"/{route}/{secret}" if secret else f"/{route}"


def parse_path(path: str) -> tuple[str, str] | None:
    """Return route and secret of a path of the webhook; None if it is another path."""
    match = PATH.fullmatch(path)
    return (match["route"], match["secret"] or PLAIN) if match else None


def secret_in(path: str) -> str | None:
    """Return the secret in a path of the webhook, which is empty for a plain path; None if it is another path."""
    parsed = parse_path(path)
    return parsed[1] if parsed else None


@lru_cache(maxsize=64)  # every call of an API server comes by the same secret
def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def encode_record(record: PathRecord) -> str:
    return msgspec.json.encode(record).decode()


def decode_record(text: str) -> PathRecord:
    """Read the annotation; one that is missing or unreadable records nothing."""
    try:
        return RECORDS.decode(text or "{}")
    except DECODE_ERRORS:
        return PathRecord()


def decode_report(body: bytes) -> PathReport | None:
    try:
        return REPORTS.decode(body)
    except DECODE_ERRORS:
        return None


def is_retired(replaced_at: float, last_used: float, now: float) -> bool:
    """Whether a former secret is not accepted any more."""
    return now - max(replaced_at, last_used) >= IDLE_S or now - replaced_at >= MAX_FORMER_S


def with_next(record: PathRecord, secret: str) -> PathRecord:
    """Return the record that announces the next secret."""
    return replace(record, next=digest_of(secret))


def with_registered(record: PathRecord, secret: str, replaced: Collection[str], now: int) -> PathRecord:
    """Return the record for a secret that takes the place of others. What was recorded as current is one of them."""
    current = digest_of(secret)
    before = {*map(digest_of, replaced), record.current} - {"", current}
    former = {digest: at for digest, at in record.former.items() if now - at < MAX_FORMER_S and digest != current}
    since = record.since if current == record.current else now
    return PathRecord(current=current, since=since, former=former | dict.fromkeys(sorted(before), now))
