"""Coverage-guided fuzzing with atheris: `make fuzz`, or `python -m tests.fuzz TARGET [-runs=N] [libFuzzer options]`.

Targets: `review` (bytes to both routes), `object` (a pod of random shape to both routes), `quantity`. The property is
the same for all: a decision or a client error; never a server error, never an exception.
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
    from vcuda.quantity import QuantityError, format_quantity, parse_quantity

API = caller("short", policy=NamespacePolicy(pools=("p",)))
EXPECTED_STATUS = (200, 400)
KEYS = [
    CORE,
    "inspur.com/vcuda-memory",
    "inspur.com/gpu",
    "nvidia.com/vcuda-core",
    "nano-gpu/gpu-percent",
    "k8s.amazonaws.com/vgpu",
]
ANNOTATIONS = [
    "inspur.com/vcuda-limits",
    "inspur.com/vcuda-core-limit",
    "tencent.com/use-gputype",
    "inspur.com/memory-follows-core",
]
VALID_REVIEW = json.dumps(review(pod(gpu()))).encode()


def fuzz_review(data: bytes) -> None:
    """Send bytes, alone or in the middle of a valid review."""
    offset = len(VALID_REVIEW) * (data[0] if data else 0) // 256
    for body in (data, VALID_REVIEW[:offset] + data[1:] + VALID_REVIEW[offset + len(data) :]):
        for route in ("mutate", "validate"):
            reply = API.send(route, body)
            assert reply.status in EXPECTED_STATUS, (reply, body)


def fuzz_object(data: bytes) -> None:
    """Send a pod whose amounts, annotations and environment variables are random texts."""
    provider = atheris.FuzzedDataProvider(data)

    def text() -> str:
        drawn: str = provider.ConsumeUnicodeNoSurrogates(12)
        return drawn

    def random_container() -> dict[str, Any]:
        return container(
            text(),
            {
                KEYS[provider.ConsumeIntInRange(0, len(KEYS) - 1)]: text()
                for _ in range(provider.ConsumeIntInRange(0, 3))
            },
            env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": text()}] if provider.ConsumeBool() else None,
        )

    sent = pod(
        *(random_container() for _ in range(provider.ConsumeIntInRange(1, 3))),
        annotations={
            ANNOTATIONS[provider.ConsumeIntInRange(0, len(ANNOTATIONS) - 1)]: text()
            for _ in range(provider.ConsumeIntInRange(0, 3))
        },
        schedulerName=text(),
    )
    answer = API.mutate(sent)
    assert answer.status in EXPECTED_STATUS
    if answer.status == EXPECTED_STATUS[0] and answer.patch:
        patched = answer.patched()
        assert API.mutate(patched).patch == [], sent
        assert API.mutate(patched, "UPDATE", sent).status in EXPECTED_STATUS
        assert API.validate(patched).status in EXPECTED_STATUS


def fuzz_quantity(data: bytes) -> None:
    """Parse a text, format the quantity and parse it again."""
    text = data.decode(errors="replace")
    try:
        quantity = parse_quantity(text)
    except QuantityError:
        return
    assert parse_quantity(format_quantity(quantity)).nanos == quantity.nanos, text


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
