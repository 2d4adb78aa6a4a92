"""What would give a container GPUs beyond its request: variables of a ConfigMap, privileges, and mounts."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.webhook.pods import container, gpu, pod, workload
from tests.webhook.reviews import Caller, MakeCaller, Obj
from vcuda.namespace_policy import Mode, NamespacePolicy, PrivilegedPolicy

VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
ALLOWED = NamespacePolicy(privileged=PrivilegedPolicy.ALLOW)
DENIED = NamespacePolicy(privileged=PrivilegedPolicy.DENY)
PRIVILEGED: Obj = {"securityContext": {"privileged": True}}


def from_config_map(prefix: str | None = None) -> Obj:
    source: Obj = {"configMapRef": {"name": "settings"}}
    return source if prefix is None else {**source, "prefix": prefix}


OPEN_PREFIXES = {"no prefix": None, "an empty one": "", "the beginning of the variable": "NVIDIA_", "a short one": "N"}


@pytest.mark.parametrize("prefix", OPEN_PREFIXES.values(), ids=OPEN_PREFIXES.keys())
@pytest.mark.parametrize("injection", ["auto", "native", "cdi"])
def test_an_explicit_variable_wins_over_those_of_a_config_map(
    make_caller: MakeCaller, injection: str, prefix: str | None
) -> None:
    """In containers with GPUs, init containers and sidecars; Quotient's own injection does not need the variable."""
    api = make_caller(injection=injection)
    sources = [from_config_map("APP_"), from_config_map(prefix)]
    sidecar = gpu("side", envFrom=sources, env=[{"name": "A", "value": "1"}], restartPolicy="Always")
    answer = api.create(pod(gpu(envFrom=sources), init=[gpu("first", envFrom=sources), sidecar]))
    assert answer.allowed
    spec = api.mutate(pod(gpu(envFrom=sources), init=[gpu("first", envFrom=sources), sidecar])).patched()["spec"]
    assert spec["containers"][0]["env"] == [VOID]
    assert [each["env"] for each in spec["initContainers"]] == [[VOID], [{"name": "A", "value": "1"}, VOID]]


def test_a_users_own_value_is_replaced_in_a_container_with_a_config_map(api: Caller) -> None:
    """An entry that Quotient wrote before stays."""
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "1"}]
    patched = api.mutate(pod(gpu(envFrom=[from_config_map()], env=env))).patched()
    assert patched["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}, VOID]


@pytest.mark.parametrize("sources", [{}, {"envFrom": []}, {"envFrom": [from_config_map("APP_")]}])
def test_a_container_whose_variables_are_known_is_left_alone(api: Caller, sources: Obj) -> None:
    """With a prefix, no key can make the variable."""
    patched = api.mutate(pod(gpu(**sources))).patched()
    assert "env" not in patched["spec"]["containers"][0]


def test_applying_the_manifest_again_restores_the_variable(api: Caller) -> None:
    """As it is stored: pods from before this rule have none, and their variables are immutable."""
    written = pod(gpu(envFrom=[from_config_map()], env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]))
    stored = api.mutate(written).patched()
    applied = {**stored, "spec": {**stored["spec"], "containers": written["spec"]["containers"]}}
    applied["spec"]["containers"][0]["resources"] = stored["spec"]["containers"][0]["resources"]
    assert api.mutate(applied, "UPDATE", stored).patched() == stored
    older = {**stored, "spec": {**stored["spec"], "containers": [{**stored["spec"]["containers"][0], "env": []}]}}
    assert api.mutate(applied, "UPDATE", older).patched() == older


@pytest.mark.parametrize("prefix", [*OPEN_PREFIXES.values(), "CUDA_MPS_", "NVIDIA_GPU_MEMORY_LIM", "C"])
def test_nvidias_runtime_must_not_read_a_config_map(make_caller: MakeCaller, prefix: str | None) -> None:
    """There the variable gives a container its GPUs, so the webhook cannot set it."""
    api = make_caller(injection="nvidia-runtime")
    sources = [from_config_map("APP_"), from_config_map(prefix)]
    answer = api.create(pod(gpu(envFrom=sources)))
    assert (answer.codes, answer.fields) == (["EnvFromSelectsGpus"], ["spec.containers[0].envFrom[1].prefix"])
    assert "set a prefix such as APP_, or list the variables in env" in answer.message
    assert api.create(pod(gpu(envFrom=sources[:1]), container("side", envFrom=sources))).allowed


def test_nvidias_runtime_gets_no_void_in_audit_mode(make_caller: MakeCaller) -> None:
    """The pod is only warned about, and must still get its GPUs."""
    api = make_caller(injection="nvidia-runtime", policy=NamespacePolicy(mode=Mode.AUDIT))
    answer = api.mutate(pod(gpu(envFrom=[from_config_map()])))
    assert "env" not in answer.patched()["spec"]["containers"][0]


PLACES: dict[str, tuple[Callable[[Obj], Obj], str]] = {
    "a container": (lambda more: pod(gpu(**more)), "spec.containers[0]"),
    "a container without GPU": (lambda more: pod(gpu(), container("side", **more)), "spec.containers[1]"),
    "an init container": (lambda more: pod(gpu(), init=[container("i", **more)]), "spec.initContainers[0]"),
}


@pytest.mark.parametrize(("build", "field"), PLACES.values(), ids=PLACES.keys())
def test_privileged_containers_of_gpu_pods_are_refused(api: Caller, build: Callable[[Obj], Obj], field: str) -> None:
    """They could use every GPU of the node. In workloads as well."""
    answer = api.create(build(PRIVILEGED))
    assert (answer.codes, answer.fields) == (["PrivilegedNotGranted"], [f"{field}.securityContext.privileged"])
    assert "privileged: allow in the namespace's quota" in answer.message
    refused = api.validate(workload(build(PRIVILEGED)))
    assert refused.fields == [f"spec.template.{field}.securityContext.privileged"]
    assert api.create(build({"securityContext": {"privileged": False}})).allowed
    assert api.create(pod(container(**PRIVILEGED))).allowed  # not a pod with GPUs


GRANTS = {
    "by the namespace": (ALLOWED, PrivilegedPolicy.DENY, True),
    "by the cluster": (NamespacePolicy(), PrivilegedPolicy.ALLOW, True),
    "not by the namespace": (DENIED, PrivilegedPolicy.ALLOW, False),
}


@pytest.mark.parametrize(("policy", "cluster", "allowed"), GRANTS.values(), ids=GRANTS.keys())
def test_privileged_containers_can_be_allowed(
    make_caller: MakeCaller, policy: NamespacePolicy, cluster: PrivilegedPolicy, *, allowed: bool
) -> None:
    """With a warning. The namespace's quota decides, then the configuration."""
    answer = make_caller(policy=policy, cluster_privileged=cluster).create(pod(gpu(**PRIVILEGED)))
    assert answer.allowed is allowed
    if allowed:
        assert any("can access every GPU of its node" in warning for warning in answer.warnings)


def test_privileged_containers_are_warned_of_in_audit_mode(make_caller: MakeCaller) -> None:
    answer = make_caller(policy=NamespacePolicy(mode=Mode.AUDIT)).create(pod(gpu(**PRIVILEGED)))
    assert answer.allowed
    assert any("would be refused: spec.containers[0].securityContext.privileged" in each for each in answer.warnings)


FOLDER = "/var/run/nvidia-container-devices"
SELECTING = {
    "all GPUs": f"{FOLDER}/all",
    "the folder": FOLDER,
    "its name goes on": f"{FOLDER}all",
    "a path to be cleaned": "//var/./run/x/../nvidia-container-devices/0",
    "a relative path, which the kubelet completes": f"{FOLDER[1:]}/0",
    "the target of /var/run": "/run/nvidia-container-devices/GPU-1",
}


@pytest.mark.parametrize("path", SELECTING.values(), ids=SELECTING.keys())
def test_mounts_that_select_gpus_are_refused(api: Caller, path: str) -> None:
    """Whatever is mounted: NVIDIA's runtime reads the paths. In init containers and workloads as well."""
    mounts: Obj = {"volumeMounts": [{"name": "a", "mountPath": "/data"}, {"name": "b", "mountPath": path}]}
    for written, field in (
        (pod(gpu(**mounts)), "spec.containers[0]"),
        (pod(gpu(), init=[container("i", **mounts)]), "spec.initContainers[0]"),
    ):
        answer = api.create(written)
        assert (answer.codes, answer.fields) == (["MountSelectsGpus"], [f"{field}.volumeMounts[1].mountPath"])
        assert api.validate(workload(written)).codes == ["MountSelectsGpus"]
    on_host = pod(gpu(), volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": path}}])
    assert api.create(on_host).fields == ["spec.volumes[1].hostPath.path"]


@pytest.mark.parametrize("path", ["/var/run", "/", "/var/run/nvidia", "/data/var/run/nvidia-container-devices"])
def test_other_mounts_are_allowed(api: Caller, path: str) -> None:
    """A parent folder selects nothing: the runtime reads the paths of mounts, not what is in them."""
    mounts = [{"name": "a", "mountPath": path}]
    volumes = [{"name": "a", "hostPath": {"path": path}}]
    assert api.create(pod(gpu(volumeMounts=mounts), volumes=volumes)).allowed


EPHEMERAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "privileged": (PRIVILEGED, ["PrivilegedNotGranted"]),
    "with a mount that selects GPUs": (
        {"volumeMounts": [{"name": "a", "mountPath": f"{FOLDER}/all"}]},
        ["MountSelectsGpus"],
    ),
    "with variables of a ConfigMap": ({"envFrom": [from_config_map()]}, []),
}


@pytest.mark.parametrize(("more", "codes"), EPHEMERAL.values(), ids=EPHEMERAL.keys())
def test_ephemeral_containers_get_no_access_either(api: Caller, more: Obj, codes: list[str]) -> None:
    """Their variable is set explicitly, so a ConfigMap cannot change it."""
    stored = api.mutate(pod(gpu())).patched()
    after = {**stored, "spec": {**stored["spec"], "ephemeralContainers": [container("debug", **more)]}}
    patched = api.mutate(after, "UPDATE", stored, subresource="ephemeralcontainers").patched()
    assert patched["spec"]["ephemeralContainers"][0]["env"] == [VOID]
    assert api.validate(patched, "UPDATE", stored, subresource="ephemeralcontainers").codes == codes
