"""The time to read a tenant's object grows with its size, and no faster.

Every webhook worker decides on one event loop, so an object that takes seconds holds up the pods of all tenants. What
counts here is processor time, which other processes on the machine do not use up: four times the size may take eight
times as long, where quadratic work takes sixteen times.
"""

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cluster.objects import Pod as ClusterPod
from controller.pod_usage import pod_usage_of
from nodeplugin.pods import parse_bound_pod
from scheduler.extender_api import decode_args
from scheduler.pods import scheduler_pod_of
from tests.hostile_objects import PREDICATE, REVIEWS, MakeReview, fill, names, with_metadata
from tests.webhook.pods import NAMES, Obj, container, gpu, pod
from tests.webhook.reviews import Caller, caller
from vcuda.amounts import Amounts
from vcuda.catalogue import CardModel
from vcuda.charging import fit_charge
from vcuda.decision import printable
from vcuda.decode_errors import describe_decode_error
from vcuda.decoding import decoder_for
from vcuda.dimensions import CORES
from vcuda.limits import decode_limits
from vcuda.names import MIRROR_ANNOTATION
from vcuda.namespace_policy import NamespacePolicy
from vcuda.placement_annotation import decode_placement
from vcuda.pod_options import PodOptions
from vcuda.quota import MAX_LINES, QuotaError, parse_legacy_quotas, parse_quota
from vcuda.quota_usage import QuotaUsage
from vcuda.scheme import build_scheme
from vcuda.strict_yaml import DocumentError, parse_documents
from webhook.admission_config import AdmissionConfig
from webhook.mutating import clean_environment, merge_names
from webhook.objects import AdmittedContainer, AdmittedMetadata, EnvVar
from webhook.objects import Pod as AdmittedPod
from webhook.patching import PatchBuilder
from webhook.reapplying import restore_terms
from webhook.short_path import parse_head
from webhook.template_fractions import read_record
from webhook.validating import exposing_variables

SIZE = 100_000
FACTOR, MAX_GROWTH = 4, 8
# What the machine itself adds, and no attack: a garbage collection, a page fault.
NOISE_S = 0.02
ATTEMPTS = 5
SCHEME = build_scheme()
CONFIG = AdmissionConfig(scheme=SCHEME, tolerations=({"key": "gpu", "operator": "Exists"},))

Work = Callable[[], Any]


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def api() -> Caller:
    """A webhook of a namespace with pools and a quota of many lines."""
    lines = "".join(f"  B{index}: {{cores: 1}}\n" for index in range(256))
    return caller(
        "short",
        policy=NamespacePolicy(pools=("a", "b")),
        tolerations=CONFIG.tolerations,
        cards=[CardModel("A100", 40960), CardModel("T4", 16384)],
        quotas=[parse_quota(f"types:\n{lines}", "team/q")],
    )


def cost_s(work: Work) -> float:
    costs = []
    for _ in range(2):
        before = time.thread_time()
        work()
        costs.append(time.thread_time() - before)
    return min(costs)


def check_growth(make: Callable[[int], Work]) -> None:
    small, large = make(SIZE), make(FACTOR * SIZE)
    for _ in range(ATTEMPTS):
        before, after = cost_s(small), cost_s(large)
        if after <= MAX_GROWTH * before + NOISE_S:
            return
    pytest.fail(f"{FACTOR} times the size took {after / before:.1f} times as long: {after:.3f} s")


@pytest.mark.parametrize("route", ["mutate", "validate"])
@pytest.mark.parametrize("make", REVIEWS.values(), ids=REVIEWS.keys())
def test_the_time_to_decide_grows_with_the_size_of_the_object(api: Caller, make: MakeReview, route: str) -> None:
    def work(size: int) -> Work:
        body = make(size)
        return lambda: api.send(route, body)

    check_growth(work)


def cluster_pod(made: Obj) -> ClusterPod:
    """Return a pod as a watch delivers it."""
    stored = with_metadata(made, uid="705ab4f5-6393-11e8-b7cc-42010a800002")
    return decoder_for(ClusterPod).decode(json.dumps(stored).encode())


READERS: dict[str, Callable[[ClusterPod], Any]] = {
    "the controller": lambda each: pod_usage_of(each, SCHEME),
    "the scheduler": lambda each: scheduler_pod_of(each, SCHEME),
    "the node plugin": lambda each: parse_bound_pod(each, SCHEME),
    "an extender's request": lambda each: decode_args(msgspec.json.encode({"Pod": each, "NodeNames": []})),
}
POD_DIMENSIONS: dict[str, Callable[[int], Obj]] = {
    "containers": lambda size: pod(*fill(size, lambda i: gpu(f"c{i}")), nodeName="n"),
    "containers with mistakes": lambda size: pod(*fill(size, lambda i: gpu(f"c{i}", "150")), nodeName="n"),
    "containers without GPUs": lambda size: pod(gpu(), *fill(size, lambda i: container(f"c{i}"))),
    "a list of containers": lambda size: pod(gpu(), annotations={NAMES.memory_follows_core: names(size)}),
    "models": lambda size: pod(gpu(), annotations={NAMES.use_models: names(size)}),
    "limits": lambda size: pod(gpu(), annotations={NAMES.limits: "[" * size}),
    "a placement": lambda size: pod(
        gpu(),
        annotations={NAMES.placement: json.dumps({"v": 1, "containers": {key: [] for key in names(size).split(",")}})},
    ),
    "annotations of another scheduler": lambda size: pod(
        gpu(), nodeName="n", annotations=dict.fromkeys(names(size, PREDICATE).split(","), "1")
    ),
    "the cards of another scheduler": lambda size: pod(
        gpu(), nodeName="n", annotations={f"{PREDICATE}0": "1," * (size // 2)}
    ),
    "owners": lambda size: with_metadata(
        pod(gpu()),
        ownerReferences=fill(size, lambda i: {"apiVersion": "v1", "kind": "Job", "name": str(i), "uid": "u"}),
    ),
    "the name of an owner": lambda size: with_metadata(
        pod(gpu()),
        ownerReferences=[{"apiVersion": "v1", "kind": "Job", "name": "a" * size, "uid": "u", "controller": True}],
    ),
    "labels": lambda size: with_metadata(pod(gpu()), labels=dict.fromkeys(names(size).split(","), "")),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("make", POD_DIMENSIONS.values(), ids=POD_DIMENSIONS.keys())
def test_the_time_to_read_a_pod_of_the_cluster_grows_with_its_size(
    make: Callable[[int], Obj], read: Callable[[ClusterPod], Any]
) -> None:
    def work(size: int) -> Work:
        made = cluster_pod(make(size))
        return lambda: read(made)

    check_growth(work)


def attempt(parse: Callable[[str], Any], text: str) -> Work:
    """Return work that parses a text, valid or not."""

    def work() -> None:
        with contextlib.suppress(QuotaError, DocumentError):
            parse(text)

    return work


def with_variables(size: int) -> AdmittedContainer:
    """Return a container with as many variables that hide GPUs as such that expose them."""
    hiding = [EnvVar("NVIDIA_VISIBLE_DEVICES", "void")] * (size // 20)
    return AdmittedContainer(env=[*hiding, *(EnvVar(f"CUDA_MPS_{index}", "1") for index in range(size // 20))])


def exposed_variables(size: int) -> Work:
    read = with_variables(size)
    return lambda: exposing_variables(read)


def pod_with_terms(size: int) -> AdmittedPod:
    made = pod(affinity={"nodeAffinity": {}})
    terms = [{"matchFields": [{"key": str(index)}]} for index in range(size // 10)]
    made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": terms
    }
    return decoder_for(AdmittedPod).decode(json.dumps(made).encode())


def removed_warnings(size: int) -> Work:
    read = with_variables(size)
    return lambda: clean_environment("/spec/containers/0", read, PatchBuilder(), hides_gpus=False)


def restored_terms(size: int) -> Work:
    old, new = pod_with_terms(size), pod_with_terms(10)
    return lambda: restore_terms(new, old, CONFIG, PatchBuilder())


def rewritten_record(size: int) -> Work:
    metadata = AdmittedMetadata(annotations={NAMES.cards_rewritten: "a" * size})
    return lambda: read_record(metadata, CONFIG)


def decode_error(size: int) -> Work:
    error = ValueError(" - at `$" * (size // 8))
    wrapped = msgspec.ValidationError(str(error))
    return lambda: describe_decode_error(wrapped)


# Behind the bounds of the webhook, which would hide them above.
FUNCTIONS: dict[str, Callable[[int], Work]] = {
    "the record of rewritten cards": rewritten_record,
    "warnings about variables": removed_warnings,
    "variables that expose GPUs": exposed_variables,
    "merging lists of names": lambda size: lambda: merge_names(names(size), names(size, "y").split(",")),
    "node selector terms of an update": restored_terms,
    "a value in a message": lambda size: lambda: printable("\x01" * size),
    "limits": lambda size: lambda: decode_limits('{"v":1,"models":[' + '"a",' * (size // 4) + '"a"]}'),
    "a placement": lambda size: lambda: decode_placement("[" * size),
    "what a decoder raised": decode_error,
    "a quota": lambda size: attempt(lambda text: parse_quota(text, "q"), "pools: [" + "a," * (size // 2)),
    "a legacy quota": lambda size: attempt(
        lambda text: parse_legacy_quotas(text, "q"), json.dumps({name: {"x": 1} for name in names(size).split(",")})
    ),
    "quotas of many namespaces": lambda size: attempt(
        lambda text: parse_legacy_quotas(text, "q"),
        json.dumps({name: {"quota": {}} for name in names(size).split(",")}),
    ),
    "YAML that is nested": lambda size: attempt(parse_documents, "a: " + "[" * size),
    "the annotation of a mirror pod": lambda size: lambda: printable(MIRROR_ANNOTATION * (size // 20)),
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_the_time_of_a_function_grows_with_what_it_reads(make: Callable[[int], Work]) -> None:
    check_growth(make)


def test_a_head_is_rejected_in_a_time_that_grows_with_its_length() -> None:
    """With a pattern in which two parts can match the same space, the time doubles with each of up to 800 lines."""

    def work(lines: int) -> Work:
        head = b"POST /mutate HTTP/1.1\r\n" + b"a: \r\n" * lines + b"\0\r\n\r\n"
        return lambda: parse_head.__wrapped__(head)

    before = cost_s(work(10))
    assert cost_s(work(24)) <= 10 * before + NOISE_S


def test_the_time_to_refuse_a_pod_grows_with_the_lines_of_its_quota() -> None:
    """A pod that names no model is tried on the model of every line, and each of them is compared with all lines."""

    def work(lines: int) -> Work:
        text = "".join(f"  B{index}: {{cores: 1}}\n" for index in range(lines))
        usage = QuotaUsage([parse_quota(f"types:\n{text}", "team/q")])
        return lambda: fit_charge(usage, lambda _: Amounts({CORES: 50}), PodOptions(), {"A100": 40960})

    assert cost_s(work(MAX_LINES)) <= MAX_GROWTH * cost_s(work(MAX_LINES // FACTOR)) + NOISE_S


def test_merged_mappings_of_a_quota_do_not_multiply() -> None:
    """Each level refers nine times to the one before it."""
    levels = ["a0: &a0 {k: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 7))]
    with pytest.raises(DocumentError, match="merged ones included; merge fewer"):
        parse_documents("\n".join(levels))
    with pytest.raises(DocumentError, match="merges more than 64 mappings; use fewer"):
        parse_documents(f"a: &a {{k: 1}}\nb: {{<<: [{', '.join(['*a'] * 65)}]}}")
