"""How the mutating webhook rewrites GPU pods, and that it changes nothing else."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, annotation_in, container, gpu, limits_in, pod
from tests.webhook.reviews import Caller, MakeCaller, caller
from vcuda.names import Names
from vcuda.namespace_policy import CoreLimitPolicy, NamespacePolicy
from vcuda.vocabulary import VocabularyOptions

HAMI = VocabularyOptions(hami=True)

VOCABULARIES = {
    "canonical": ({CORE: "50", MEMORY: "30"}, {}, ("50", "30"), None),
    "memory in bytes, rounded up": ({CORE: "50", MEMORY: "7681Mi"}, {}, ("50", "31"), None),
    "a thousand units as the API server stores them": ({CORE: "10", MEMORY: "1k"}, {}, ("10", "1k"), None),
    "whole cards, with a token per card": ({CORE: "200"}, {}, ("200", "2"), None),
    "whole cards with a minimum of memory": ({CORE: "200", MEMORY: "64"}, {}, ("200", "64"), None),
    "Tencent's": ({"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}, {}, ("30", "30"), None),
    "NVIDIA's, in MiB": ({"nvidia.com/vcuda-core": "30", "nvidia.com/vcuda-memory": "7680"}, {}, ("30", "30"), None),
    "part of a card, for people": ({CARDS: "300m"}, {}, ("30", "1"), "c0"),
    "cards, for people": ({CARDS: "2"}, {}, ("200", "2"), None),
    "AWS tenths": ({"k8s.amazonaws.com/vgpu": "3"}, {}, ("30", "1"), "c0"),
    "older AWS tenths": ({"eks.amazonaws.com/vgpu": "10"}, {}, ("100", "1"), None),
    "nano-gpu's percent": ({"nano-gpu/gpu-percent": "25"}, {}, ("25", "1"), "c0"),
    "HAMi's": (
        {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"},
        {"dialects": HAMI},
        ("30", "12"),
        None,
    ),
    "HAMi's memory without cores": (
        {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"},
        {"dialects": HAMI},
        ("1", "12"),
        None,
    ),
    "HAMi's percentage of memory without cores": (
        {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "30", "nvidia.com/priority": "1"},
        {"dialects": HAMI},
        ("30", "1"),
        "c0",
    ),
    "NVIDIA's cards": ({"nvidia.com/gpu": "2"}, {"dialects": VocabularyOptions(nvidia_gpu=True)}, ("200", "2"), None),
}


@pytest.mark.parametrize(("amounts", "config", "expected", "follows"), VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_every_vocabulary_is_rewritten_to_the_canonical_one(
    make_caller: MakeCaller,
    amounts: dict[str, str],
    config: dict[str, Any],
    expected: tuple[str, str],
    follows: str | None,
) -> None:
    """In limits and requests, with both resources, and no key of another vocabulary left."""
    api = make_caller(**config)
    written = pod(container(limits={**amounts, "cpu": "2"}))
    patched = api.mutate(written).patched()
    for part in ("limits", "requests"):
        assert limits_in(patched, part=part) == {CORE: expected[0], MEMORY: expected[1], "cpu": "2"}
    assert annotation_in(patched, NAMES.memory_follows_core) == follows
    assert patched["spec"]["schedulerName"] == "quotient-scheduler"
    assert api.create(written).allowed


def test_the_domain_is_configurable(make_caller: MakeCaller) -> None:
    """An ancestor's domain can be the canonical one; the default domain then means nothing."""
    api = make_caller(names=Names("tencent.com"))
    patched = api.mutate(
        pod(container(limits={"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "30"}))
    ).patched()
    assert limits_in(patched) == {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "30"}
    assert (
        json.loads(patched["metadata"]["annotations"]["tencent.com/vcuda-limits"])["containers"]["c0"]["memoryMiB"]
        == 7680
    )
    assert api.mutate(pod(gpu())).patch == []


@pytest.mark.parametrize(("highest", "limit"), [(100, 100), (60, 60)])
def test_a_pod_for_hami_without_cores_may_use_all_that_are_free(
    make_caller: MakeCaller, highest: int, limit: int
) -> None:
    """As under HAMi, up to the maximum of the namespace; no other container of the pod is slowed down by that."""
    api = make_caller(dialects=HAMI, policy=NamespacePolicy(core_limit=CoreLimitPolicy(max=highest)))
    memory_only = container("a", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
    larger = container("b", {"nvidia.com/gpucores": "80", "nvidia.com/gpumem": "3000"})
    for containers, limits in (([memory_only], [limit]), ([memory_only, larger], [limit, max(limit, 80)])):
        written = pod(*containers)
        answer = api.create(written)
        assert answer.allowed
        written_limits = annotation_in(api.mutate(written).patched(), NAMES.limits)["containers"]
        assert [each["coreLimit"] for each in written_limits.values()] == limits
        # The annotation, and so the limit, is one for the whole pod: its author has to know.
        assert [warning.partition(":")[0] for warning in api.mutate(written).warnings] == [
            "spec.containers[1].resources" for _ in containers[1:] if limits[-1] > 80
        ]


def test_a_core_limit_of_the_user_is_kept_for_pods_for_hami_without_cores(make_caller: MakeCaller) -> None:
    """Under the domain of an ancestor as well, and if the manifest is applied again."""
    api = make_caller(dialects=HAMI)
    amounts = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
    written = pod(container("a", amounts), annotations={"nvidia.com/vcuda-core-limit": "40"})
    patched = api.mutate(written).patched()
    assert annotation_in(patched, NAMES.limits)["containers"]["a"]["coreLimit"] == 40
    assert patched["metadata"]["annotations"][NAMES.core_limit] == "40"
    assert api.validate(patched).allowed


@pytest.mark.parametrize(
    ("amounts", "is_warned"),
    [
        ({"nvidia.com/gpu": "1", "nvidia.com/gpucores": "30"}, True),
        ({"nvidia.com/gpucores": "30", "nvidia.com/gpumem-percentage": "30"}, False),
        ({"nvidia.com/gpucores": "30", "nvidia.com/gpumem": "3000"}, False),
        ({"nvidia.com/gpucores": "100"}, False),
    ],
    ids=str,
)
def test_cores_for_hami_without_memory_cause_a_warning(
    make_caller: MakeCaller, amounts: dict[str, str], *, is_warned: bool
) -> None:
    """HAMi gives such a container all memory of its GPU."""
    warnings = make_caller(dialects=HAMI).mutate(pod(container("a", amounts))).warnings
    assert [
        "nvidia.com/gpucores without nvidia.com/gpumem: the container gets 30 % of its GPU's memory too" in each
        for each in warnings
    ] == [True] * is_warned


def test_the_priority_of_pods_for_hami_is_removed_with_a_warning(make_caller: MakeCaller) -> None:
    """No node has the resource, so the pod would stay pending."""
    api = make_caller(dialects=HAMI)
    answer = api.mutate(pod(container("a", {"nvidia.com/gpu": "1", "nvidia.com/priority": "1"})))
    assert "nvidia.com/priority is removed: containers that share a GPU have no priorities" in answer.warnings[0]
    assert "nvidia.com/priority" not in str(answer.patched()["spec"])


def test_requests_without_limits_become_limits(api: Caller) -> None:
    """The API server would reject them: extended resources cannot be overcommitted."""
    patched = api.mutate(
        pod({"name": "c0", "image": "i", "resources": {"requests": {CORE: "50", MEMORY: "30"}}})
    ).patched()
    assert limits_in(patched) == limits_in(patched, part="requests") == {CORE: "50", MEMORY: "30"}


def test_limits_without_requests_become_requests(api: Caller) -> None:
    patched = api.mutate(pod({"name": "c0", "image": "i", "resources": {"limits": {CORE: "200"}}})).patched()
    assert limits_in(patched, part="requests") == {CORE: "200", MEMORY: "2"}


def test_a_pod_without_gpus_is_not_changed(api: Caller) -> None:
    """Whatever its other fields and annotations are."""
    other = pod(
        container(limits={"cpu": "1", "amd.com/gpu": "1"}, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
        annotations={"inspur.com/use-gputype": "???", "inspur.com/vcuda-core-limit": "x"},
        hostIPC=True,
        nodeName="n",
        schedulerName="volcano",
    )
    assert api.mutate(other).patch == []
    assert api.validate(other).allowed
    assert api.validate(other).warnings == []


LIMITS = {
    "the cores by default": (
        [gpu()],
        {},
        None,
        {"c0": {"cores": 50, "coreLimit": 50, "limitSource": "default", "memoryMiB": 7680}},
        "50",
    ),
    "the user's core limit": (
        [gpu()],
        {NAMES.core_limit: "80"},
        None,
        {"c0": {"cores": 50, "coreLimit": 80, "limitSource": "user", "memoryMiB": 7680}},
        "80",
    ),
    "a user's core limit that equals the default": (
        [gpu()],
        {NAMES.core_limit: "50"},
        None,
        {"c0": {"cores": 50, "coreLimit": 50, "limitSource": "user", "memoryMiB": 7680}},
        "50",
    ),
    "the namespace's policy": (
        [gpu()],
        {},
        CoreLimitPolicy(default=90),
        {"c0": {"cores": 50, "coreLimit": 90, "limitSource": "policy", "memoryMiB": 7680}},
        "90",
    ),
    "a policy below the cores": (
        [gpu()],
        {},
        CoreLimitPolicy(default=20),
        {"c0": {"cores": 50, "coreLimit": 50, "limitSource": "policy", "memoryMiB": 7680}},
        "50",
    ),
    "a user's core limit that the policy lowers for the smaller of two containers": (
        [gpu("a", "70", "8"), gpu("b", "20", "8")],
        {NAMES.core_limit: "70"},
        CoreLimitPolicy(max=60),
        {
            "a": {"cores": 70, "coreLimit": 70, "limitSource": "user", "memoryMiB": 2048},
            "b": {"cores": 20, "coreLimit": 60, "limitSource": "policy", "memoryMiB": 2048},
        },
        "70",
    ),
    "fractions with different limits": (
        [gpu("a", "50", "8"), gpu("b", "20", "8")],
        {},
        None,
        {
            "a": {"cores": 50, "coreLimit": 50, "limitSource": "default", "memoryMiB": 2048},
            "b": {"cores": 20, "coreLimit": 20, "limitSource": "default", "memoryMiB": 2048},
        },
        None,
    ),
    "whole cards": (
        [gpu(core="200", memory=None)],
        {},
        None,
        {"c0": {"cores": 200, "coreLimit": 200, "limitSource": "default", "memoryPercent": 100}},
        None,
    ),
    "a share whose memory follows": (
        [container(limits={CARDS: "300m"})],
        {},
        None,
        {"c0": {"cores": 30, "coreLimit": 30, "limitSource": "default", "memoryPercent": 30}},
        "30",
    ),
}


@pytest.mark.parametrize(
    ("containers", "annotations", "policy", "expected", "core_limit"), LIMITS.values(), ids=LIMITS.keys()
)
def test_limits_are_computed_for_every_gpu_container(
    make_caller: MakeCaller,
    containers: list[dict[str, Any]],
    annotations: dict[str, str],
    policy: CoreLimitPolicy | None,
    expected: dict[str, Any],
    core_limit: str | None,
) -> None:
    """With their source; the core limit is injected if all fractional containers have the same."""
    api = make_caller(policy=NamespacePolicy(core_limit=policy or CoreLimitPolicy()))
    written = pod(*containers, annotations=dict(annotations))
    patched = api.mutate(written).patched()
    assert annotation_in(patched, NAMES.limits) == {"v": 1, "models": [], "containers": expected}
    assert annotation_in(patched, NAMES.core_limit) == core_limit
    assert api.create(written).allowed


def test_options_under_the_domain_of_an_ancestor_are_renamed(api: Caller) -> None:
    """Their values do not change."""
    annotations = {
        "tencent.com/vcuda-core-limit": "80",
        "nvidia.com/use-gputype": "Tesla V100-SXM2-16GB, a100",
        "nvidia.com/nouse-gputype": "T4",
    }
    patched = api.mutate(pod(gpu(), annotations=annotations)).patched()
    kept = patched["metadata"]["annotations"]
    assert kept[NAMES.core_limit] == "80"
    assert kept[NAMES.use_models] == annotations["nvidia.com/use-gputype"]
    assert not any(key in kept for key in annotations)
    limits = annotation_in(patched, NAMES.limits)
    assert limits["models"] == ["V100-SXM2-16GB", "a100"]
    assert limits["avoidModels"] == ["T4"]


def test_annotations_that_only_quotient_may_write_are_removed_or_computed(api: Caller) -> None:
    """With a warning for each."""
    forged = {
        NAMES.placement: '{"v":1}',
        NAMES.limits: '{"v":1,"models":[],"containers":{"c0":{"cores":1}}}',
        "tencent.com/predicate-gpu-idx-0": "0",
        "inspur.com/predicate-node": "n",
        "nvidia.com/predicate-time": "1",
        "tencent.com/gpu-assigned": "true",
    }
    answer = api.mutate(pod(gpu(), annotations={**forged, "mine": "stays"}))
    kept = answer.patched()["metadata"]["annotations"]
    assert sorted(kept) == sorted([NAMES.limits, NAMES.core_limit, "mine"])
    assert annotation_in(answer.patched(), NAMES.limits)["containers"]["c0"]["cores"] == 50
    for key in forged.keys() - {NAMES.limits}:
        why = (
            "only Quotient may write it"
            if key == NAMES.placement
            else "it belongs to gpu-manager's scheduler, which Quotient replaces"
        )
        assert f"metadata.annotations[{key}] is removed: {why}" in answer.warnings


def test_a_pod_without_gpus_cannot_carry_a_placement_either(api: Caller) -> None:
    """It would look like a pod that was placed."""
    answer = api.mutate(pod(container(), annotations={NAMES.placement: "{}", NAMES.limits: "{}"}))
    assert answer.patched()["metadata"]["annotations"] == {}


def test_variables_that_select_gpus_are_removed(api: Caller) -> None:
    """Duplicates too; the other variables keep their order."""
    environment = [
        {"name": "FIRST", "value": "1"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp/nvidia-mps"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "1"},
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
    ]
    answer = api.mutate(pod(gpu(env=environment), container("side", env=environment)))
    gpu_container, side = answer.patched()["spec"]["containers"]
    assert gpu_container["env"] == [environment[0], environment[5]]
    assert side["env"] == [environment[0], environment[5], {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert sum("NVIDIA_VISIBLE_DEVICES" in warning for warning in answer.warnings) == 2


def test_containers_without_gpu_see_no_gpu(api: Caller) -> None:
    """Init containers too. Without a warning, because nothing of the user's is changed."""
    answer = api.mutate(pod(gpu(), container("side"), init=[container("init", env=[])]))
    spec = answer.patched()["spec"]
    void = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert spec["containers"][1]["env"] == void
    assert spec["initContainers"][0]["env"] == void
    assert "env" not in spec["containers"][0]
    assert answer.warnings == []


@pytest.mark.parametrize(
    "path", ["/tmp/nvidia-mps", "/tmp//nvidia-mps/", "/tmp/x/../nvidia-mps", "//tmp/nvidia-mps/pipe"]
)
def test_node_access_for_the_aws_device_plugin_is_removed(api: Caller, path: str) -> None:
    """The pod still runs: the volume becomes an emptyDir."""
    volumes = [{"name": "data", "hostPath": {"path": "/data"}}, {"name": "mps", "hostPath": {"path": path}}]
    mounts = [{"name": "mps", "mountPath": "/tmp/nvidia-mps"}]
    written = pod(container(limits={"k8s.amazonaws.com/vgpu": "1"}, volumeMounts=mounts), hostIPC=True, volumes=volumes)
    answer = api.mutate(written)
    spec = answer.patched()["spec"]
    assert "hostIPC" not in spec
    assert spec["volumes"] == [volumes[0], {"name": "mps", "emptyDir": {}}]
    assert len(answer.warnings) == 2


def test_pools_are_added_to_the_node_affinity_of_the_pod(make_caller: MakeCaller) -> None:
    """To each of its terms; an empty term, which matches no node, stays empty."""
    api = make_caller(policy=NamespacePolicy(pools=("training", "public")))
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = [
        {"matchExpressions": [zone]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]},
        {},
    ]
    preferred = [{"weight": 1, "preference": {"matchExpressions": [zone]}}]
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms},
            "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        },
        "podAntiAffinity": {"x": "stays"},
    }
    patched = api.mutate(pod(gpu(), affinity=affinity)).patched()["spec"]["affinity"]
    restricted = patched["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    labels = (NAMES.pool_label, "gaia.tencent.com/gpu-pool", "tkestack.io/gpu-pool")
    wanted = [{"key": label, "operator": "In", "values": ["training", "public"]} for label in labels]
    assert [term["matchExpressions"] for term in restricted[:3]] == [[zone, each] for each in wanted]
    assert [term["matchExpressions"] for term in restricted[3:6]] == [[each] for each in wanted]
    assert restricted[6] == {}
    assert patched["podAntiAffinity"] == {"x": "stays"}
    assert patched["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
    assert api.create(pod(gpu(), affinity=affinity)).allowed


@pytest.mark.parametrize("affinity", [None, {}, {"nodeAffinity": {}}, {"nodeAffinity": None}], ids=str)
def test_pools_are_added_to_an_absent_or_incomplete_affinity(make_caller: MakeCaller, affinity: Any) -> None:
    api = make_caller(policy=NamespacePolicy(pools=("training",)))
    written = pod(gpu(), affinity=affinity)
    patched = api.mutate(written).patched()["spec"]["affinity"]["nodeAffinity"]
    assert len(patched["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]) == 3
    assert api.create(written).allowed


def test_configured_tolerations_are_added_once(make_caller: MakeCaller) -> None:
    """A toleration that the pod has in another spelling is not added."""
    wanted = ({"key": "a", "operator": "Exists", "effect": "NoSchedule"}, {"key": "b", "value": "c"})
    api = make_caller(tolerations=wanted)
    own = {"key": "b", "operator": "Equal", "value": "c"}
    assert api.mutate(pod(gpu(), tolerations=[own])).patched()["spec"]["tolerations"] == [own, wanted[0]]
    assert api.mutate(pod(gpu())).patched()["spec"]["tolerations"] == list(wanted)


@pytest.mark.parametrize("name", [None, "", "default-scheduler", "gpu-scheduler"])
def test_default_and_alias_schedulers_are_replaced(api: Caller, name: str | None) -> None:
    """Pods for the ancestors have one of these names."""
    assert api.mutate(pod(gpu(), schedulerName=name)).patched()["spec"]["schedulerName"] == "quotient-scheduler"


def test_unknown_fields_survive(api: Caller) -> None:
    """Decoding into typed structs and encoding them again would lose them."""
    newer = gpu(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}], brandNewField={"a": [1, {"b": None}]})
    written = pod(newer, fieldOfTheFuture={"deep": [1, 2]}, volumes=[{"name": "v", "newKind": {"x": 1}}])
    written["metadata"]["somethingElse"] = {"x": "y"}
    before = copy.deepcopy(written)
    patched = api.mutate(written).patched()
    assert patched["spec"]["fieldOfTheFuture"] == before["spec"]["fieldOfTheFuture"]
    assert patched["spec"]["containers"][0]["brandNewField"] == before["spec"]["containers"][0]["brandNewField"]
    assert patched["spec"]["volumes"] == before["spec"]["volumes"]
    assert patched["metadata"]["somethingElse"] == {"x": "y"}


def test_patches_are_minimal(api: Caller) -> None:
    """Annotations one by one, the scheduler's name, and nothing for fields that are right already."""
    patch = api.mutate(pod(gpu(), annotations={"mine": "x"})).patch
    assert sorted(operation["path"] for operation in patch) == [
        "/metadata/annotations/inspur.com~1vcuda-core-limit",
        "/metadata/annotations/inspur.com~1vcuda-limits",
        "/spec/schedulerName",
    ]


def test_gpus_are_hidden_from_a_sidecar_that_another_webhook_adds(api: Caller) -> None:
    """In the second call, which changes nothing else."""
    patched = api.mutate(pod(gpu())).patched()
    patched["spec"]["containers"].append(container("proxy"))
    again = api.mutate(patched)
    assert [operation["path"] for operation in again.patch] == ["/spec/containers/1/env"]
    assert api.mutate(again.patched()).patch == []
    assert api.validate(again.patched()).allowed


def test_limits_are_computed_again_if_another_webhook_adds_a_gpu_container(api: Caller) -> None:
    """The core limit that the first call injected is not taken for the user's."""
    patched = api.mutate(pod(gpu())).patched()
    patched["spec"]["containers"].append(gpu("helper", "80", "8"))
    again = api.mutate(patched)
    final = again.patched()
    assert annotation_in(final, NAMES.core_limit) is None
    assert annotation_in(final, NAMES.limits)["containers"]["helper"]["coreLimit"] == 80
    assert api.mutate(final).patch == []
    assert api.validate(final).allowed


amounts = st.one_of(
    st.builds(lambda core, memory: {CORE: str(core), MEMORY: str(memory)}, st.integers(1, 99), st.integers(1, 400)),
    st.builds(lambda cards: {CORE: str(cards * 100)}, st.integers(1, 8)),
    st.builds(lambda cores: {CARDS: f"{cores * 10}m"}, st.integers(1, 99)),
    st.builds(lambda tenths: {"k8s.amazonaws.com/vgpu": str(tenths)}, st.integers(1, 10)),
    st.builds(lambda mib: {"nvidia.com/vcuda-core": "10", "nvidia.com/vcuda-memory": str(mib)}, st.integers(1, 90000)),
    st.builds(lambda mib: {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(mib)}, st.integers(1, 90000)),
    st.builds(lambda percent: {"nvidia.com/gpumem-percentage": str(percent)}, st.integers(1, 100)),
    st.just({"cpu": "1"}),
    st.none(),
)
environments = st.lists(
    st.builds(
        lambda name, value: {"name": name, "value": value},
        st.sampled_from(["A", "NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_X", "NVIDIA_GPU_MEMORY_LIMIT"]),
        st.sampled_from(["void", "all", "0"]),
    ),
    max_size=4,
)


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    """Valid pods with any mixture of containers, variables and annotations."""

    def some(prefix: str, min_count: int) -> list[dict[str, Any]]:
        count = draw(st.integers(min_count, 3))
        return [container(f"{prefix}{i}", draw(amounts), env=draw(environments)) for i in range(count)]

    annotations = draw(
        st.dictionaries(
            st.sampled_from([NAMES.limits, NAMES.placement, "x/y~z", "tencent.com/predicate-node", NAMES.use_models]),
            st.sampled_from(["A100", "T4, V100"]),
        )
    )
    return pod(
        *some("c", 1),
        init=some("i", 0),
        annotations=draw(st.sampled_from([annotations, None])),
        hostIPC=draw(st.booleans()),
    )


@given(pods(), st.sampled_from([None, ("a", "b")]))
def test_mutation_is_idempotent_and_its_result_valid(written: dict[str, Any], pools: tuple[str, ...] | None) -> None:
    api = caller("short", policy=NamespacePolicy(pools=pools), dialects=HAMI)
    patched = api.mutate(written).patched()
    assert api.mutate(patched).patch == []
    answer = api.validate(patched)
    assert answer.allowed, answer.message
