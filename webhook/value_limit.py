"""Bounds how many values an object may have, before it is decoded: each takes far more memory than its text.

A pod of 6 MB with 600,000 tolerations took 170 MiB to decode, and only then its tolerations could be counted
(`size_limits`).
"""

import msgspec
from msgspec import Raw, Struct

from vcuda.decision import BadRequest, Code, Reason
from vcuda.decode_errors import DECODE_ERRORS
from vcuda.decoding import decoder_for

# Every value but the first has one of these before it. They are counted in texts as well, which makes no difference:
# an object at several of the other limits at once, with its managed fields, stays below the maximum.
SEPARATORS = (b",", b"{", b"[")
MAX_VALUES = 100_000
ABSENT = Raw(b"")


class Parts(Struct, frozen=True, rename="camel"):
    """The fields of all levels of an object in which most of its values may be."""

    metadata: Raw = ABSENT
    spec: Raw = ABSENT
    template: Raw = ABSENT
    job_template: Raw = ABSENT
    annotations: Raw = ABSENT
    labels: Raw = ABSENT
    managed_fields: Raw = ABSENT
    owner_references: Raw = ABSENT
    finalizers: Raw = ABSENT
    init_containers: Raw = ABSENT
    containers: Raw = ABSENT
    ephemeral_containers: Raw = ABSENT
    volumes: Raw = ABSENT
    tolerations: Raw = ABSENT
    affinity: Raw = ABSENT
    node_selector: Raw = ABSENT
    host_aliases: Raw = ABSENT
    image_pull_secrets: Raw = ABSENT
    topology_spread_constraints: Raw = ABSENT
    resource_claims: Raw = ABSENT
    data: Raw = ABSENT
    status: Raw = ABSENT


OUTER = ("metadata", "spec", "template", "jobTemplate")


class ObjectTooLarge(BadRequest):
    """An object in the review has more values than are decoded. A refusal where it is the object to be decided on."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def check_values(raw: Raw, field: str) -> None:
    """Raise ObjectTooLarge if the object in a field of the review has more than MAX_VALUES."""
    # A shorter one cannot have as many: one comparison for almost all objects.
    if memoryview(raw).nbytes <= MAX_VALUES or (count := count_values(raw)) <= MAX_VALUES:
        return
    path = field.removeprefix("request.").removeprefix("object").removeprefix("oldObject").removeprefix(".")
    raise ObjectTooLarge(
        Reason(
            code=Code.TOO_LARGE,
            field=largest_field(raw, path, count // 2),
            value=str(count),
            message=f"an object may have at most {MAX_VALUES} values in all, and most are here",
            remedy="remove some",
        )
    )


def count_values(raw: Raw) -> int:
    return sum(map(bytes(raw).count, SEPARATORS))


def largest_field(raw: Raw, path: str, least: int) -> str:
    """Return the path of the innermost known field that has at least so many values."""
    try:
        parts = msgspec.structs.asdict(decoder_for(Parts).decode(raw))
    except DECODE_ERRORS:
        return path
    counts = {name: count_values(part) for name, part in parts.items()}
    most = max(counts, key=counts.__getitem__)
    if counts[most] < least:
        return path
    shown = msgspec.structs.fields(Parts)[list(parts).index(most)].encode_name
    inner = f"{path}.{shown}".removeprefix(".")
    return largest_field(parts[most], inner, least) if shown in OUTER else inner
