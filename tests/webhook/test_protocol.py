"""The protocol: decided is 200, malformed is 4xx, undecidable is 5xx, and no input whatever is a fault."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webhook.pods import CORE, gpu, pod
from tests.webhook.reviews import Answer, Caller, MakeCaller, caller, review
from vcuda.catalogue import CardModel
from vcuda.decision import BadRequest, Unavailable
from vcuda.namespace_policy import NamespacePolicy
from vcuda.quota import Quota
from webhook.responding import timeout_in

ROUTES = ("mutate", "validate")


def body(**changes: Any) -> bytes:
    """Write a review of a right pod, with fields of the request changed; ... takes one away."""
    asked = review(pod(gpu()))
    asked["request"] |= changes
    asked["request"] = {key: value for key, value in asked["request"].items() if value is not ...}
    return json.dumps(asked).encode()


MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "cut off": body()[:-40],
    "no object": b"[]",
    "null": b"null",
    "not UTF-8": body().replace(b'"p"', b'"\xff"'),
    "another version": body().replace(b"admission.k8s.io/v1", b"admission.k8s.io/v1beta1"),
    "another kind": body().replace(b"AdmissionReview", b"TokenReview"),
    "no request": b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}',
    "no uid": body(uid=...),
    "an empty uid": body(uid=""),
    "a uid that is no text": body(uid=1),
    "no object under review": body(object=None),
    "an object that is a list": body(object=[]),
    "an object without metadata": body(object={"spec": {}}),
    "an object without spec": body(object={"metadata": {}}),
    "containers that are no list": body(object={"metadata": {}, "spec": {"containers": {}}}),
    "annotations that are no texts": body(object={"metadata": {"annotations": {"a": 1}}, "spec": {}}),
    "an update without the object before": body(operation="UPDATE"),
    "a deep nest": b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":' + b"[" * 100_000,
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("route", ROUTES)
def test_a_malformed_call_is_the_callers_fault(api: Caller, route: str, sent: bytes) -> None:
    """And is said so in words."""
    reply = api.send(route, sent)
    assert reply.status == 400
    assert reply.content_type.startswith("text/plain")
    assert reply.body.endswith(b"\n")
    assert len(reply.body) < 400


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/yaml", "application/jsonx"])
def test_another_content_type_is_not_read(api: Caller, content_type: str) -> None:
    """It may be anything."""
    assert api.send("mutate", body(), content_type).status == 415


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_read_however_it_is_spelled(api: Caller, content_type: str) -> None:
    """As HTTP has it."""
    assert api.send("mutate", body(), content_type).status == 200


def test_duplicate_keys_and_unknown_fields_do_no_harm(api: Caller) -> None:
    """The last one counts, as for Go."""
    doubled = body().replace(b'"dryRun": false', b'"dryRun": true, "dryRun": false, "newField": {"a": [1]}')
    assert api.send("mutate", doubled).status == 200


class Failing:
    """Policies that cannot be had."""

    def __init__(self, broken: Exception) -> None:
        self._broken = broken

    def policy(self, namespace: str) -> NamespacePolicy:  # noqa: ARG002
        raise self._broken

    def quotas(self, namespace: str) -> tuple[list[Quota], dict[str, int]]:  # noqa: ARG002
        raise self._broken

    @property
    def cards(self) -> list[CardModel]:
        raise self._broken


@pytest.mark.parametrize("route", ROUTES)
def test_what_cannot_be_decided_is_neither_allowed_nor_refused(api: Caller, route: str) -> None:
    """The failure policy says what follows."""
    api._responder.admission.quota_source = Failing(Unavailable("quotas are not yet known"))
    reply = api.send(route, body())
    assert reply.status == 503
    assert reply.body == b"cannot decide now: quotas are not yet known\n"


@pytest.mark.parametrize("route", ROUTES)
def test_a_fault_of_ours_is_told_without_details(api: Caller, route: str) -> None:
    """They are in the log."""
    api._responder.admission.quota_source = Failing(ZeroDivisionError("secret"))
    reply = api.send(route, body())
    assert reply.status == 500
    assert b"secret" not in reply.body
    failures = api.metrics.registry.get_sample_value(
        "quotient_admission_failures_total", {"route": route, "cause": "fault"}
    )
    assert failures == 1


def test_the_flask_application_answers_nothing_else(api: Caller) -> None:
    """Two routes, and POST only."""
    client = api._client
    assert client.get("/mutate").status_code == 405
    assert client.post("/other").status_code == 404
    assert client.post("/mutate/", data=b"").status_code == 404


@pytest.mark.parametrize(
    ("query", "seconds"),
    [
        ("timeout=10s", 10),
        ("a=b&timeout=1m30s", 90),
        ("timeout=500ms", 0.5),
        ("timeout=1.5s", 1.5),
        ("timeout=2h", 7200),
        ("", None),
        ("dryRun=All", None),
    ],
)
def test_the_deadline_is_read_as_go_writes_it(query: str, seconds: float | None) -> None:
    """The API server tells how long it will wait."""
    assert timeout_in(query) == seconds


@pytest.mark.parametrize(
    "query", ["timeout=", "timeout=10", "timeout=-1s", "timeout=s", "timeout=1e9s", "timeout=" + "1" * 99]
)
def test_a_deadline_that_is_none_is_malformed(api: Caller, query: str) -> None:
    """It was not an API server who wrote it."""
    with pytest.raises(BadRequest):
        timeout_in(query)
    assert api.send("mutate", body(), query=query).status == 400


def test_an_answer_leaves_time_for_its_way_back(make_caller: MakeCaller) -> None:
    """And never takes longer than configured."""
    responder = make_caller()._responder
    assert responder.budget_s("timeout=3s") == pytest.approx(2.8)
    assert responder.budget_s("timeout=30s") == 8
    assert responder.budget_s("") == 8


def test_a_binding_that_cannot_be_looked_up_in_time_is_undecided(api: Caller) -> None:
    """Rather than allowed or refused."""
    made = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"name": "n"}}
    sent = json.dumps(review(made, subresource="binding")).encode()
    assert api.send("validate", sent, query="timeout=100ms").status == 503


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
amounts = st.one_of(
    anything,
    st.from_regex(
        r"[+-]?[0-9]{0,20}(\.[0-9]{0,20})?(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?[0-9]{1,4})?", fullmatch=True
    ),
)
KEYS = [
    CORE,
    "inspur.com/vcuda-memory",
    "inspur.com/gpu",
    "tencent.com/vcuda-core",
    "nano-gpu/gpu-percent",
    "k8s.amazonaws.com/vgpu",
]
resources = st.dictionaries(st.sampled_from(KEYS), amounts, max_size=4)
strange_containers = st.fixed_dictionaries(
    {"name": st.text(max_size=5) | anything},
    optional={
        "resources": st.fixed_dictionaries({}, optional={"limits": resources, "requests": resources}) | anything,
        "env": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["NVIDIA_VISIBLE_DEVICES", "A"])}, optional={"value": anything}
            )
        )
        | anything,
        "restartPolicy": anything,
    },
)
strange_specs = st.fixed_dictionaries(
    {"containers": st.lists(strange_containers, max_size=3) | anything},
    optional={
        key: anything | st.just(value)
        for key, value in {
            "initContainers": [gpu("i")],
            "hostIPC": True,
            "volumes": [{"hostPath": {"path": "/tmp/nvidia-mps"}}],
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}
            },
            "tolerations": [{}],
            "nodeName": "n",
            "schedulerName": "",
            "ephemeralContainers": [{"name": "e"}],
        }.items()
    },
)
notes = st.dictionaries(
    st.sampled_from(
        [
            "inspur.com/vcuda-limits",
            "inspur.com/vcuda-core-limit",
            "inspur.com/use-gputype",
            "inspur.com/memory-follows-core",
        ]
    )
    | st.text(max_size=8),
    st.text(max_size=30),
    max_size=4,
)
strange_pods = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({}, optional={"annotations": notes | anything, "name": st.text(max_size=5)}),
        "spec": strange_specs,
    }
)
shapes = st.sampled_from(["pod", "deployment", "cronjob", "binding", "other"])


def shaped(shape: str, inner: Any) -> dict[str, Any]:
    """Put a strange pod into an object of a kind."""
    match shape:
        case "deployment":
            return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {}, "spec": {"template": inner}}
        case "cronjob":
            spec = {"jobTemplate": {"spec": {"template": inner}}}
            return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {}, "spec": spec}
        case "binding":
            return {"apiVersion": "v1", "kind": "Binding", **inner}
        case "other":
            return {"apiVersion": "x/v1", "kind": "Thing", **inner}
    return {"apiVersion": "v1", "kind": "Pod", **inner}


@given(
    shapes,
    strange_pods,
    strange_pods | st.none(),
    st.sampled_from(["CREATE", "UPDATE", "DELETE", "x"]),
    st.sampled_from(ROUTES),
)
def test_no_object_is_a_fault_of_ours(shape: str, new: Any, old: Any, operation: str, route: str) -> None:
    """However strange it is: decided, or the caller's fault; and what is decided can be applied and decided again."""
    api = caller("short", policy=NamespacePolicy(pools=("p",)))
    asked = review(shaped(shape, new), operation, shaped(shape, old) if old else None)
    answer = Answer(api.send(route, json.dumps(asked).encode()), asked)
    assert answer.status in (200, 400), answer.body
    if answer.status == 200 and answer.response.get("patch"):
        made = answer.patched()
        assert api.mutate(made, operation, asked["request"]["oldObject"]).patch == []


@given(st.binary(max_size=300), st.sampled_from(ROUTES), st.sampled_from(["flask", "short"]))
def test_no_bytes_are_a_fault_of_ours(sent: bytes, route: str, way: str) -> None:
    """Both ways."""
    assert caller(way).send(route, sent).status == 400


@given(st.data())
def test_no_damage_to_a_review_is_a_fault_of_ours(data: st.DataObject) -> None:
    """Bytes changed, taken out, doubled."""
    sent = bytearray(body())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(sent) - 1))
        sent[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for route in ROUTES:
        assert caller("short").send(route, bytes(sent)).status in (200, 400)
