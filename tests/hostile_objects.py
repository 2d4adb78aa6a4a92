"""Objects that a tenant may send to make Quotient work: each is legal JSON of about the size that is asked for."""

import json
from collections.abc import Callable
from typing import Any

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, Obj, container, gpu, pod, workload
from tests.webhook.reviews import review
from vcuda.names import LAST_APPLIED_ANNOTATION, MIRROR_ANNOTATION

UID = "705ab4f5-6393-11e8-b7cc-42010a800002"
PREDICATE = "tencent.com/predicate-gpu-idx-"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
EPHEMERAL = {"subresource": "ephemeralcontainers"}

MakeReview = Callable[[int], bytes]


def fill(size: int, item: Callable[[int], Any]) -> list[Any]:
    """Return as many items as have this size together."""
    return [item(index) for index in range(max(1, size // (len(encode(item(size))) + 1)))]


def encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def names(size: int, prefix: str = "x") -> str:
    return ",".join(fill(size, lambda index: f"{prefix}{index}"))


def created(obj: Obj) -> bytes:
    obj["metadata"]["uid"] = UID
    return encode(review(obj))


def updated(old: Obj, new: Obj, **request: Any) -> bytes:
    return encode(review(new, "UPDATE", old, **request))


def admitted(*containers: Obj, annotations: dict[str, str] | None = None, **spec: Any) -> Obj:
    """Return a pod as the webhook has rewritten it."""
    return pod(*containers, annotations={NAMES.limits: "{}", **(annotations or {})}, **spec)


def annotated(key: str, value: str, *containers: Obj) -> bytes:
    return created(pod(*(containers or (gpu(),)), annotations={key: value}))


def with_env(*variables: Obj) -> Obj:
    return gpu(env=list(variables))


def variable(name: str, value: str = "1") -> Obj:
    return {"name": name, "value": value}


def cards(name: str = "c0") -> Obj:
    return container(name, {CARDS: "300m"})


def terms(each: list[Obj]) -> Obj:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": each}}
    return {"nodeAffinity": required}


def with_metadata(obj: Obj, **metadata: Any) -> Obj:
    obj["metadata"].update(metadata)
    return obj


def quota(text: str) -> bytes:
    metadata = {"name": "q", "labels": {NAMES.quota_label: "true"}}
    return created({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}})


def nested(size: int) -> bytes:
    """Return a pod in which JSON is nested as deeply as its size allows."""
    depth = size // 6
    deep = '{"a":' * depth + "1" + "}" * depth
    return created(pod(with_env({"name": "a", "valueFrom": "HERE"}))).replace(b'"HERE"', deep.encode())


REVIEWS: dict[str, MakeReview] = {
    "a record of rewritten cards without an entry": lambda size: created(
        workload(pod(cards(), annotations={NAMES.cards_rewritten: "a" * size}))
    ),
    "a record of rewritten cards with many entries": lambda size: created(
        workload(pod(cards(), annotations={NAMES.cards_rewritten: ",".join(fill(size, lambda i: f"c{i}=30"))}))
    ),
    "a stored record of rewritten cards": lambda size: updated(
        workload(pod(gpu(), annotations={NAMES.cards_rewritten: "a" * size})), workload(pod(cards()))
    ),
    "a manifest with many containers, in an annotation": lambda size: created(
        with_metadata(
            workload(pod(gpu(), annotations={NAMES.cards_rewritten: "c0=50"})),
            annotations={
                LAST_APPLIED_ANNOTATION: encode(workload(pod(*fill(size, lambda i: container(f"c{i}"))))).decode()
            },
        )
    ),
    "parts of cards in many containers of a template": lambda size: created(
        workload(pod(*fill(size, lambda i: cards(f"c{i}"))))
    ),
    "a large template with part of a card": lambda size: created(
        workload(pod(cards(), volumes=fill(size, lambda _: {"a": {}})))
    ),
    "variables that are removed": lambda size: created(pod(with_env(*fill(size, lambda i: variable(f"CUDA_MPS_{i}"))))),
    "one variable many times": lambda size: created(pod(with_env(*fill(size, lambda _: variable(VISIBLE, "all"))))),
    "hidden devices many times": lambda size: created(
        pod(gpu(), container("x", env=fill(size, lambda _: variable(VISIBLE, "void"))))
    ),
    "empty variables": lambda size: created(pod(with_env(*fill(size, lambda _: {})))),
    "sources of variables": lambda size: created(pod(gpu(envFrom=fill(size, lambda _: {"prefix": "A_"})))),
    "mounts": lambda size: created(pod(gpu(volumeMounts=fill(size, lambda _: {"mountPath": "/a"})))),
    "containers without GPUs": lambda size: created(pod(gpu(), *fill(size, lambda i: {"name": f"c{i}"}))),
    "containers without a name": lambda size: created(pod(gpu(), *fill(size, lambda _: {}))),
    "containers with GPUs": lambda size: created(pod(*fill(size, lambda i: gpu(f"c{i}")))),
    "containers with mistakes": lambda size: created(pod(*fill(size, lambda i: gpu(f"c{i}", core="150")))),
    "containers with parts of cards": lambda size: created(
        pod(*fill(size, lambda i: cards(f"c{i}")), annotations={NAMES.memory_follows_core: names(size)})
    ),
    "init containers": lambda size: created(pod(gpu(), init=fill(size, lambda i: gpu(f"i{i}")))),
    "many resources": lambda size: created(
        pod(container(limits={CORE: "50", MEMORY: "30", **dict.fromkeys(names(size, "inspur.com/g").split(","), "1")}))
    ),
    "a list of containers whose memory follows": lambda size: annotated(
        NAMES.memory_follows_core, names(size), gpu(), cards("c1")
    ),
    "a list of models": lambda size: annotated(NAMES.use_models, names(size)),
    "the longest lists of models that are read": lambda _: created(
        pod(gpu(), annotations={NAMES.use_models: names(270), NAMES.avoid_models: names(270, "y")})
    ),
    "the name of a model": lambda size: annotated(NAMES.use_models, "a" * size),
    "the UUID of a GPU": lambda size: annotated(NAMES.use_uuids, "a" * size),
    "a core limit": lambda size: annotated(NAMES.core_limit, "1" * size),
    "a core limit of spaces": lambda size: annotated(NAMES.core_limit, " " * size),
    "limits of many containers": lambda size: annotated(
        NAMES.limits,
        encode({"v": 1, "models": [], "containers": {key: {"cores": 1} for key in names(size).split(",")}}).decode(),
    ),
    "limits that are nested": lambda size: annotated(NAMES.limits, "[" * size),
    "annotations of another scheduler": lambda size: created(
        pod(gpu(), annotations=dict.fromkeys(names(size, PREDICATE).split(","), "1"))
    ),
    "an annotation with a long key": lambda size: annotated(PREDICATE + "1" * size, "1"),
    "annotations": lambda size: created(pod(gpu(), annotations=dict.fromkeys(names(size, "a/").split(","), ""))),
    "misspelled annotations": lambda size: created(
        pod(gpu(), annotations=dict.fromkeys(names(size, "inspur.com/vcuda-core-limi").split(","), ""))
    ),
    "a forged mirror pod": lambda size: annotated(MIRROR_ANNOTATION, "\x01" * size),
    "volumes that are replaced": lambda size: created(
        pod(gpu(), volumes=fill(size, lambda i: {"name": f"v{i}", "hostPath": {"path": "/tmp/nvidia-mps"}}))
    ),
    "the path of a volume": lambda size: created(
        pod(gpu(), volumes=[{"name": "v", "hostPath": {"path": "/a/.." * (size // 5)}}])
    ),
    "tolerations": lambda size: created(pod(gpu(), tolerations=fill(size, lambda _: {}))),
    "tolerations with a key": lambda size: created(pod(gpu(), tolerations=fill(size, lambda _: {"key": "a"}))),
    "values of a toleration": lambda size: created(pod(gpu(), tolerations=[{"a": fill(size, lambda _: [])}])),
    "host aliases of a template with part of a card": lambda size: created(
        workload(pod(cards(), hostAliases=fill(size, lambda _: {"ip": ""})))
    ),
    "node selector terms": lambda size: created(
        pod(gpu(), affinity=terms(fill(size, lambda i: {"matchFields": [{"key": str(i)}]})))
    ),
    "expressions": lambda size: created(
        pod(gpu(), affinity=terms([{"matchExpressions": fill(size, lambda _: {"key": "a"})}]))
    ),
    "resource claims": lambda size: created(pod(gpu(), resourceClaims=fill(size, lambda _: {"a": {}}))),
    "owners": lambda size: created(with_metadata(pod(gpu()), ownerReferences=fill(size, lambda _: {}))),
    "the name of an owner": lambda size: created(
        with_metadata(pod(gpu()), ownerReferences=[{"kind": "Job", "name": "a" * size, "controller": True}])
    ),
    "labels": lambda size: created(with_metadata(pod(gpu()), labels=dict.fromkeys(names(size).split(","), ""))),
    "a node selector": lambda size: created(pod(gpu(), nodeSelector=dict.fromkeys(names(size).split(","), ""))),
    "the name of a node": lambda size: created(pod(gpu(), nodeName="a" * size)),
    "the name of a scheduler": lambda size: created(pod(gpu(), schedulerName="\x01" * size)),
    "the name of a container": lambda size: created(pod(gpu("a" * size))),
    "an amount": lambda size: created(pod(gpu(core="1" * size))),
    "nested JSON": nested,
    "ephemeral containers": lambda size: updated(
        admitted(), admitted(ephemeralContainers=fill(size, lambda i: {"name": f"e{i}"})), **EPHEMERAL
    ),
    "variables of an ephemeral container": lambda size: updated(
        admitted(),
        admitted(
            ephemeralContainers=[
                {"name": "e", "env": fill(size, lambda i: variable(VISIBLE, "void" if i % 2 else "all"))}
            ]
        ),
        **EPHEMERAL,
    ),
    "stored node selector terms": lambda size: updated(
        admitted(affinity=terms(fill(size, lambda i: {"matchFields": [{"key": str(i)}]}))),
        admitted(affinity=terms([{"matchFields": []}])),
    ),
    "annotations of another scheduler, added": lambda size: updated(
        admitted(), admitted(annotations=dict.fromkeys(names(size, PREDICATE).split(","), "1"))
    ),
    "variables, added": lambda size: updated(
        admitted(), admitted(with_env(*fill(size, lambda i: variable(f"CUDA_MPS_{i}"))))
    ),
    "containers, changed": lambda size: updated(
        admitted(*fill(size // 2, lambda i: gpu(f"c{i}"))), admitted(*fill(size // 2, lambda i: gpu(f"c{i}", "40")))
    ),
    "a manifest with many annotations": lambda size: updated(
        admitted(annotations={"a": "b"}),
        admitted(
            annotations={
                LAST_APPLIED_ANNOTATION: encode(
                    {"metadata": {"annotations": dict.fromkeys(names(size).split(","), "")}}
                ).decode()
            }
        ),
    ),
    "a binding that writes annotations": lambda size: created(
        {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": "p", "annotations": dict.fromkeys(names(size, PREDICATE).split(","), "1")},
        }
    ),
    "lines of a quota": lambda size: quota("types:\n" + "".join(fill(size, lambda i: f"  A{i}: {{cores: 1}}\n"))),
    "unknown fields of a quota": lambda size: quota("".join(fill(size, lambda i: f"type{i}: 1\n"))),
    "a quota that is no YAML at its end": lambda size: quota("pools: [" + "a," * (size // 2) + "a]]"),
    "pools of a quota": lambda size: quota(f"pools: [{names(size)}]"),
    "a quota that is nested": lambda size: quota("types: " + "[" * size),
    "a long key in a quota": lambda size: quota(f"types: {{? {'a' * size} : {{cores: 1}}}}"),
    "a long number in a quota": lambda size: quota(f"types: {{A100: {{cores: {'1' * size}}}}}"),
    "misspelled dimensions in a quota": lambda size: quota(
        "types: {A100: {" + ",".join(fill(size, lambda i: f"core{i}: 1")) + "}}"
    ),
}
