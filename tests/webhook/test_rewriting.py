"""What becomes of a pod with GPUs: canonical, complete, harmless, and nothing else touched."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, container, gpu, limits_in, note, pod
from tests.webhook.reviews import Caller, MakeCaller, caller
from vcuda.names import Names
from vcuda.namespace_policy import CoreLimitPolicy, NamespacePolicy
from vcuda.vocabulary import VocabularyOptions

HAMI = VocabularyOptions(hami=True)

WRITTEN_AS = {
    "the canonical one": ({CORE: "50", MEMORY: "30"}, {}, ("50", "30"), None),
    "memory in bytes, rounded up": ({CORE: "50", MEMORY: "7681Mi"}, {}, ("50", "31"), None),
    "a thousand units as the API server writes them": ({CORE: "10", MEMORY: "1k"}, {}, ("10", "1k"), None),
    "whole cards, with a token per card": ({CORE: "200"}, {}, ("200", "2"), None),
    "whole cards that must have memory": ({CORE: "200", MEMORY: "64"}, {}, ("200", "64"), None),
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
    "NVIDIA's cards": ({"nvidia.com/gpu": "2"}, {"dialects": VocabularyOptions(nvidia_gpu=True)}, ("200", "2"), None),
}


@pytest.mark.parametrize(("amounts", "rules", "expected", "follows"), WRITTEN_AS.values(), ids=WRITTEN_AS.keys())
def test_every_vocabulary_becomes_the_canonical_one(
    make_caller: MakeCaller,
    amounts: dict[str, str],
    rules: dict[str, Any],
    expected: tuple[str, str],
    follows: str | None,
) -> None:
    """In limits and requests, with both resources, and in no other words."""
    api = make_caller(**rules)
    written = pod(container(limits={**amounts, "cpu": "2"}))
    made = api.mutate(written).patched()
    for part in ("limits", "requests"):
        assert limits_in(made, part=part) == {CORE: expected[0], MEMORY: expected[1], "cpu": "2"}
    assert note(made, NAMES.memory_follows_core) == follows
    assert made["spec"]["schedulerName"] == "quotient-scheduler"
    assert api.create(written).allowed


def test_another_domain_is_a_matter_of_configuration(make_caller: MakeCaller) -> None:
    """Then the usual one means nothing, and an ancestor's own domain is canonical."""
    api = make_caller(names=Names("tencent.com"))
    made = api.mutate(
        pod(container(limits={"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "30"}))
    ).patched()
    assert limits_in(made) == {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "30"}
    assert (
        json.loads(made["metadata"]["annotations"]["tencent.com/vcuda-limits"])["containers"]["c0"]["memoryMiB"] == 7680
    )
    assert api.mutate(pod(gpu())).patch == []


def test_requests_alone_are_taken_for_limits(api: Caller) -> None:
    """The API server would refuse them: such resources are not overcommitted."""
    made = api.mutate(
        pod({"name": "c0", "image": "i", "resources": {"requests": {CORE: "50", MEMORY: "30"}}})
    ).patched()
    assert limits_in(made) == limits_in(made, part="requests") == {CORE: "50", MEMORY: "30"}


def test_a_template_may_have_limits_alone(api: Caller) -> None:
    """The requests follow."""
    made = api.mutate(pod({"name": "c0", "image": "i", "resources": {"limits": {CORE: "200"}}})).patched()
    assert limits_in(made, part="requests") == {CORE: "200", MEMORY: "2"}


def test_a_pod_without_gpus_is_left_alone(api: Caller) -> None:
    """Whatever it looks like otherwise."""
    other = pod(
        container(limits={"cpu": "1", "nvidia.com/gpu": "1"}, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
        annotations={"inspur.com/use-gputype": "???", "inspur.com/vcuda-core-limit": "x"},
        hostIPC=True,
        nodeName="n",
        schedulerName="volcano",
    )
    assert api.mutate(other).patch == []
    assert api.validate(other).allowed
    assert api.validate(other).warnings == []


LIMITS = {
    "a hard limit at the core by default": (
        [gpu()],
        {},
        None,
        {"c0": {"cores": 50, "coreLimit": 50, "limitSource": "default", "memoryMiB": 7680}},
        "50",
    ),
    "the author's limit": (
        [gpu()],
        {NAMES.core_limit: "80"},
        None,
        {"c0": {"cores": 50, "coreLimit": 80, "limitSource": "user", "memoryMiB": 7680}},
        "80",
    ),
    "an author who says what is the default": (
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
    "a policy below the core": (
        [gpu()],
        {},
        CoreLimitPolicy(default=20),
        {"c0": {"cores": 50, "coreLimit": 50, "limitSource": "policy", "memoryMiB": 7680}},
        "50",
    ),
    "fractions that do not agree": (
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


@pytest.mark.parametrize(("containers", "notes", "burst", "expected", "core_limit"), LIMITS.values(), ids=LIMITS.keys())
def test_limits_are_written_for_every_gpu_container(
    make_caller: MakeCaller,
    containers: list[dict[str, Any]],
    notes: dict[str, str],
    burst: CoreLimitPolicy | None,
    expected: dict[str, Any],
    core_limit: str | None,
) -> None:
    """With who set them; the annotation is injected where all fractions agree."""
    api = make_caller(policy=NamespacePolicy(core_limit=burst or CoreLimitPolicy()))
    written = pod(*containers, annotations=dict(notes))
    made = api.mutate(written).patched()
    assert note(made, NAMES.limits) == {"v": 1, "models": [], "containers": expected}
    assert note(made, NAMES.core_limit) == core_limit
    assert api.create(written).allowed


def test_wishes_of_an_ancestor_move_to_the_canonical_names(api: Caller) -> None:
    """Their values stay as they were written."""
    notes = {
        "tencent.com/vcuda-core-limit": "80",
        "nvidia.com/use-gputype": "Tesla V100-SXM2-16GB, a100",
        "nvidia.com/nouse-gputype": "T4",
    }
    made = api.mutate(pod(gpu(), annotations=notes)).patched()
    kept = made["metadata"]["annotations"]
    assert kept[NAMES.core_limit] == "80"
    assert kept[NAMES.use_models] == notes["nvidia.com/use-gputype"]
    assert not any(key in kept for key in notes)
    limits = note(made, NAMES.limits)
    assert limits["models"] == ["V100-SXM2-16GB", "a100"]
    assert limits["avoidModels"] == ["T4"]


def test_what_only_quotient_may_write_is_stripped_or_computed(api: Caller) -> None:
    """A tenant must not speak for it; each is told of."""
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
    assert note(answer.patched(), NAMES.limits)["containers"]["c0"]["cores"] == 50
    assert all(any(key in warning for warning in answer.warnings) for key in forged)


def test_a_pod_without_gpus_cannot_carry_a_placement_either(api: Caller) -> None:
    """Or it would look placed."""
    answer = api.mutate(pod(container(), annotations={NAMES.placement: "{}", NAMES.limits: "{}"}))
    assert answer.patched()["metadata"]["annotations"] == {}


def test_variables_that_decide_over_gpus_are_taken_out(api: Caller) -> None:
    """Wherever they stand and however often; others stay in their order."""
    environment = [
        {"name": "FIRST", "value": "1"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp/nvidia-mps"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "1"},
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
    ]
    answer = api.mutate(pod(gpu(env=environment), container("side", env=environment)))
    ours, side = answer.patched()["spec"]["containers"]
    assert ours["env"] == [environment[0], environment[5]]
    assert side["env"] == [environment[0], environment[5], {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert sum("NVIDIA_VISIBLE_DEVICES" in warning for warning in answer.warnings) == 2


def test_containers_without_gpu_see_none(api: Caller) -> None:
    """Init containers too, and without a warning: nobody asked for anything."""
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
def test_what_aws_has_its_users_write_is_neutralised(api: Caller, path: str) -> None:
    """The pod still runs: its mount finds an empty folder."""
    volumes = [{"name": "data", "hostPath": {"path": "/data"}}, {"name": "mps", "hostPath": {"path": path}}]
    mounts = [{"name": "mps", "mountPath": "/tmp/nvidia-mps"}]
    written = pod(container(limits={"k8s.amazonaws.com/vgpu": "1"}, volumeMounts=mounts), hostIPC=True, volumes=volumes)
    answer = api.mutate(written)
    spec = answer.patched()["spec"]
    assert "hostIPC" not in spec
    assert spec["volumes"] == [volumes[0], {"name": "mps", "emptyDir": {}}]
    assert len(answer.warnings) == 2


def test_pools_become_node_affinity_beside_the_pods_own(make_caller: MakeCaller) -> None:
    """Every alternative is narrowed; one that matches nothing goes on to match nothing."""
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
    made = api.mutate(pod(gpu(), affinity=affinity)).patched()["spec"]["affinity"]
    found = made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    labels = (NAMES.pool_label, "gaia.tencent.com/gpu-pool", "tkestack.io/gpu-pool")
    wanted = [{"key": label, "operator": "In", "values": ["training", "public"]} for label in labels]
    assert [term["matchExpressions"] for term in found[:3]] == [[zone, each] for each in wanted]
    assert [term["matchExpressions"] for term in found[3:6]] == [[each] for each in wanted]
    assert found[6] == {}
    assert made["podAntiAffinity"] == {"x": "stays"}
    assert made["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
    assert api.create(pod(gpu(), affinity=affinity)).allowed


@pytest.mark.parametrize("affinity", [None, {}, {"nodeAffinity": {}}, {"nodeAffinity": None}], ids=str)
def test_pools_find_their_place_whatever_is_there(make_caller: MakeCaller, affinity: Any) -> None:
    """Patches put in only what is missing."""
    api = make_caller(policy=NamespacePolicy(pools=("training",)))
    written = pod(gpu(), affinity=affinity)
    made = api.mutate(written).patched()["spec"]["affinity"]["nodeAffinity"]
    assert len(made["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]) == 3
    assert api.create(written).allowed


def test_configured_tolerations_are_added_once(make_caller: MakeCaller) -> None:
    """One that the pod has already, however spelled, is not added."""
    wanted = ({"key": "a", "operator": "Exists", "effect": "NoSchedule"}, {"key": "b", "value": "c"})
    api = make_caller(tolerations=wanted)
    own = {"key": "b", "operator": "Equal", "value": "c"}
    assert api.mutate(pod(gpu(), tolerations=[own])).patched()["spec"]["tolerations"] == [own, wanted[0]]
    assert api.mutate(pod(gpu())).patched()["spec"]["tolerations"] == list(wanted)


@pytest.mark.parametrize("name", [None, "", "default-scheduler", "gpu-scheduler"])
def test_pods_for_the_usual_schedulers_are_given_to_ours(api: Caller, name: str | None) -> None:
    """The ancestors' pods name one of these."""
    assert api.mutate(pod(gpu(), schedulerName=name)).patched()["spec"]["schedulerName"] == "quotient-scheduler"


def test_fields_that_quotient_does_not_know_survive(api: Caller) -> None:
    """A round trip through anybody's types would lose them."""
    odd = gpu(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}], brandNewField={"a": [1, {"b": None}]})
    written = pod(odd, fieldOfTheFuture={"deep": [1, 2]}, volumes=[{"name": "v", "newKind": {"x": 1}}])
    written["metadata"]["somethingElse"] = {"x": "y"}
    before = copy.deepcopy(written)
    made = api.mutate(written).patched()
    assert made["spec"]["fieldOfTheFuture"] == before["spec"]["fieldOfTheFuture"]
    assert made["spec"]["containers"][0]["brandNewField"] == before["spec"]["containers"][0]["brandNewField"]
    assert made["spec"]["volumes"] == before["spec"]["volumes"]
    assert made["metadata"]["somethingElse"] == {"x": "y"}


def test_patches_touch_only_what_is_ours(api: Caller) -> None:
    """The fewest operations: annotations one by one, the scheduler's name, nothing for what is right already."""
    patch = api.mutate(pod(gpu(), annotations={"mine": "x"})).patch
    assert sorted(operation["path"] for operation in patch) == [
        "/metadata/annotations/inspur.com~1vcuda-core-limit",
        "/metadata/annotations/inspur.com~1vcuda-limits",
        "/spec/schedulerName",
    ]


def test_a_foreign_sidecar_between_two_calls_is_blinded_in_the_second(api: Caller) -> None:
    """And nothing else changes."""
    made = api.mutate(pod(gpu())).patched()
    made["spec"]["containers"].append(container("proxy"))
    again = api.mutate(made)
    assert [operation["path"] for operation in again.patch] == ["/spec/containers/1/env"]
    assert api.mutate(again.patched()).patch == []
    assert api.validate(again.patched()).allowed


def test_a_foreign_gpu_container_between_two_calls_changes_the_limits(api: Caller) -> None:
    """The limit that was injected for one fraction is none that the author wished for."""
    made = api.mutate(pod(gpu())).patched()
    made["spec"]["containers"].append(gpu("helper", "80", "8"))
    again = api.mutate(made)
    final = again.patched()
    assert note(final, NAMES.core_limit) is None
    assert note(final, NAMES.limits)["containers"]["helper"]["coreLimit"] == 80
    assert api.mutate(final).patch == []
    assert api.validate(final).allowed


amounts = st.one_of(
    st.builds(lambda core, memory: {CORE: str(core), MEMORY: str(memory)}, st.integers(1, 99), st.integers(1, 400)),
    st.builds(lambda cards: {CORE: str(cards * 100)}, st.integers(1, 8)),
    st.builds(lambda cores: {CARDS: f"{cores * 10}m"}, st.integers(1, 99)),
    st.builds(lambda tenths: {"k8s.amazonaws.com/vgpu": str(tenths)}, st.integers(1, 10)),
    st.builds(lambda mib: {"nvidia.com/vcuda-core": "10", "nvidia.com/vcuda-memory": str(mib)}, st.integers(1, 90000)),
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
    """Pods with any mixture of containers."""

    def some(prefix: str, least: int) -> list[dict[str, Any]]:
        count = draw(st.integers(least, 3))
        return [container(f"{prefix}{i}", draw(amounts), env=draw(environments)) for i in range(count)]

    notes = draw(
        st.dictionaries(
            st.sampled_from([NAMES.limits, NAMES.placement, "x/y~z", "tencent.com/predicate-node", NAMES.use_models]),
            st.sampled_from(["A100", "T4, V100"]),
        )
    )
    return pod(
        *some("c", 1), init=some("i", 0), annotations=draw(st.sampled_from([notes, None])), hostIPC=draw(st.booleans())
    )


@given(pods(), st.sampled_from([None, ("a", "b")]))
def test_doing_it_twice_is_doing_it_once(written: dict[str, Any], pools: tuple[str, ...] | None) -> None:
    """For any pod, and what is so made is valid."""
    api = caller("short", policy=NamespacePolicy(pools=pools))
    made = api.mutate(written).patched()
    assert api.mutate(made).patch == []
    answer = api.validate(made)
    assert answer.allowed, answer.message
