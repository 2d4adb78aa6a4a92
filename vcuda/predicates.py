"""The annotations in which gpu-manager's scheduler recorded the GPUs of a pod: `<domain>/predicate-gpu-idx-<index>`."""

from collections.abc import Mapping

from vcuda.names import ANCESTOR_ANNOTATIONS
from vcuda.pod import PodSpec
from vcuda.scheme import Scheme

PREDICATE = ANCESTOR_ANNOTATIONS[0]
# NVIDIA's minor numbers end at 255, which is nvidiactl's.
MAX_MINOR_DIGITS = 3
# The containers whose annotations are read: the webhook is registered for changes of so many.
MAX_PREDICATES = 64


def predicate_minors(spec: PodSpec, annotations: Mapping[str, str], scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Return the minor numbers of the cards that each container got, by container name."""
    minors: dict[str, tuple[int, ...]] = {}
    # The annotations end with the container's index, not with its name.
    for index, container in enumerate((spec.containers or ())[:MAX_PREDICATES]):
        for names in scheme.all_names:
            text = annotations.get(f"{names.domain}/{PREDICATE}{index}", "")
            parts = [part.strip() for part in text.split(",")]
            if text and all(part.isdecimal() and len(part) <= MAX_MINOR_DIGITS for part in parts):
                minors[container.name] = tuple(map(int, parts))
    return minors
