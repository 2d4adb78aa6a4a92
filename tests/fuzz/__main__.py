"""Coverage-guided fuzzing with atheris: `make fuzz`, or `python -m tests.fuzz TARGET [-runs=N] [libFuzzer options]`.

Targets: `review` (bytes to both routes), `object` (a pod of random shape to both routes), `quantity`. The property is
the same for all: a decision or the caller's fault; never a fault of ours, never an exception.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import atheris

with atheris.instrument_imports(include=["vcuda", "webhook"]):
    from tests.webhook.pods import CORE, container, gpu, pod
    from tests.webhook.reviews import caller, review
    from vcuda.namespace_policy import NamespacePolicy
    from vcuda.quantity import QuantityError, canonical, parse

API = caller("short", policy=NamespacePolicy(pools=("p",)))
FINE = (200, 400)
KEYS = [
    CORE,
    "inspur.com/vcuda-memory",
    "inspur.com/gpu",
    "nvidia.com/vcuda-core",
    "nano-gpu/gpu-percent",
    "k8s.amazonaws.com/vgpu",
]
NOTES = [
    "inspur.com/vcuda-limits",
    "inspur.com/vcuda-core-limit",
    "tencent.com/use-gputype",
    "inspur.com/memory-follows-core",
]
RIGHT = json.dumps(review(pod(gpu()))).encode()


def fuzz_review(data: bytes) -> None:
    """Send bytes, alone or in the middle of a right review."""
    place = len(RIGHT) * (data[0] if data else 0) // 256
    for sent in (data, RIGHT[:place] + data[1:] + RIGHT[place + len(data) :]):
        for route in ("mutate", "validate"):
            reply = API.send(route, sent)
            assert reply.status in FINE, (reply, sent)


def fuzz_object(data: bytes) -> None:
    """Send a pod whose amounts, annotations and variables are random texts."""
    take = atheris.FuzzedDataProvider(data)

    def text() -> str:
        found: str = take.ConsumeUnicodeNoSurrogates(12)
        return found

    def some() -> dict[str, Any]:
        return container(
            text(),
            {KEYS[take.ConsumeIntInRange(0, len(KEYS) - 1)]: text() for _ in range(take.ConsumeIntInRange(0, 3))},
            env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": text()}] if take.ConsumeBool() else None,
        )

    made = pod(
        *(some() for _ in range(take.ConsumeIntInRange(1, 3))),
        annotations={
            NOTES[take.ConsumeIntInRange(0, len(NOTES) - 1)]: text() for _ in range(take.ConsumeIntInRange(0, 3))
        },
        schedulerName=text(),
    )
    answer = API.mutate(made)
    assert answer.status in FINE
    if answer.status == FINE[0] and answer.patch:
        after = answer.patched()
        assert API.mutate(after).patch == [], made
        assert API.mutate(after, "UPDATE", made).status in FINE
        assert API.validate(after).status in FINE


def fuzz_quantity(data: bytes) -> None:
    """Read a text, and what is written of it again."""
    text = data.decode(errors="replace")
    try:
        found = parse(text)
    except QuantityError:
        return
    assert parse(canonical(found)).nanos == found.nanos, text


TARGETS: dict[str, Callable[[bytes], None]] = {
    "review": fuzz_review,
    "object": fuzz_object,
    "quantity": fuzz_quantity,
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(__doc__)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
