"""Resource names and annotations that a pod's author probably meant for Quotient, and that it does not read.

A misspelled resource keeps a pod pending, because no node has it. A resource of a vocabulary that is not enabled gets
GPUs that no quota counts. The webhook is not called for such pods, unless they also request GPUs under a name that it
reads; `quotient admit` and `quotient lint` check all.
"""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from functools import lru_cache

from vcuda.decision import printable
from vcuda.names import NVIDIA_GPU, Names
from vcuda.pod import PodSpec
from vcuda.request import iter_containers, resources_of
from vcuda.scheme import Scheme
from vcuda.vocabulary import VocabularyOptions, build_vocabularies

# How similar a name is that was probably misspelled: `vcuda-cores` and `vcuda-core` are 0.95, `gpu` and `mig` 0.33.
MIN_SIMILARITY = 0.8
# Comparing names takes time that grows with their product; valid names of resources are shorter.
MAX_LENGTH = 80
# Distinctive enough to be recognized under any domain; `gpu` is not.
DISTINCTIVE = ("vcuda-core", "vcuda-memory")
EVERY_VOCABULARY = VocabularyOptions(nvidia_gpu=True, hami=True)
MAX_NAMES = 64


def unread_resources(spec: PodSpec, scheme: Scheme) -> Iterator[str]:
    """Yield a warning for each resource that is not read; at most MAX_NAMES are looked at."""
    written: dict[str, str] = {}
    for path, _, container in iter_containers(spec):
        for amounts in resources_of(container):
            written |= {key: path for key in amounts if "/" in key and key not in scheme.by_key and key not in written}
    known = readable_names(scheme.names) if written else ()
    for key, path in list(written.items())[:MAX_NAMES]:
        if key in known:
            option = "nvidiaGpu" if key == NVIDIA_GPU else "hami"
            remedy = f"set vocabularies.{option} in Quotient's configuration"
            yield f"{path}.resources: GPUs under {key} are not charged to any quota; to charge them, {remedy}"
        elif meant := similar_name(key, known):
            yield f"{path}.resources: {printable(key)} is not a resource of Quotient; {meant} is"


@lru_cache(maxsize=8)
def readable_names(names: Names) -> tuple[str, ...]:
    """Return all resource names that can be enabled."""
    return tuple(key for vocabulary in build_vocabularies(names, options=EVERY_VOCABULARY) for key in vocabulary.keys)


def unread_annotations(annotations: Iterable[str], scheme: Scheme) -> Iterator[str]:
    """Yield a warning for each annotation whose key resembles one of a pod option; at most MAX_NAMES are looked at."""
    prefixes = tuple(f"{names.domain}/" for names in scheme.all_names)
    own = [key for key in annotations if key.startswith(prefixes) and key not in scheme.option_precedence]
    known = (*scheme.option_precedence, scheme.names.memory_follows_core) if own else ()
    for key in sorted(own)[:MAX_NAMES]:
        if meant := similar_name(key, known):
            yield f"metadata.annotations[{printable(key)}] is not read by Quotient; {meant} is"


def similar_name(key: str, known: tuple[str, ...]) -> str:
    """Return the known name that was probably meant; empty if there is none."""
    # Before the cache, which would keep a tenant's long keys.
    return "" if len(key) > MAX_LENGTH else similar_short_name(key, known)


@lru_cache(maxsize=1024)
def similar_short_name(key: str, known: tuple[str, ...]) -> str:
    domain, _, name = key.partition("/")
    if key in known:
        return ""
    if name in DISTINCTIVE and (meant := next((each for each in known if each.endswith(f"/{name}")), "")):
        return meant
    candidates = [each for each in known if each.partition("/")[0] == domain]
    rated = [(similarity_of(name, each.partition("/")[2]), each) for each in candidates]
    similarity, meant = max(rated, default=(0.0, ""))
    return meant if similarity >= MIN_SIMILARITY else ""


def similarity_of(first: str, second: str) -> float:
    return SequenceMatcher(None, first.lower(), second.lower()).ratio()
