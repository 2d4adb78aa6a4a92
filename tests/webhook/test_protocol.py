"""The protocol: a decision is 200, a malformed request 4xx, no decision 5xx; no input causes an internal error."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.in_memory_ledgers import InMemoryLedgers
from tests.webhook.pods import CORE, gpu, pod
from tests.webhook.reviews import Answer, Caller, MakeCaller, caller, review
from vcuda.catalogue import CardModel
from vcuda.decision import BadRequest, Unavailable
from vcuda.namespace_policy import NamespacePolicy
from vcuda.quota import Quota
from webhook.responding import timeout_in

ROUTES = ("mutate", "validate")


def body(**changes: Any) -> bytes:
    """Encode a review of a valid pod, with fields of the request changed; `...` removes a field."""
    changed = review(pod(gpu()))
    changed["request"] |= changes
    changed["request"] = {key: value for key, value in changed["request"].items() if value is not ...}
    return json.dumps(changed).encode()


MALFORMED: dict[str, bytes] = {
    "an empty body": b"",
    "no JSON": b"{",
    "truncated": body()[:-40],
    "a list": b"[]",
    "null": b"null",
    "not UTF-8": body().replace(b'"p"', b'"\xff"'),
    "another version": body().replace(b"admission.k8s.io/v1", b"admission.k8s.io/v1beta1"),
    "another kind": body().replace(b"AdmissionReview", b"TokenReview"),
    "no request": b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}',
    "no uid": body(uid=...),
    "an empty uid": body(uid=""),
    "a uid that is a number": body(uid=1),
    "no object under review": body(object=None),
    "an object that is a list": body(object=[]),
    "an object without metadata": body(object={"spec": {}}),
    "an object without spec": body(object={"metadata": {}}),
    "containers that are not a list": body(object={"metadata": {}, "spec": {"containers": {}}}),
    "annotations that are not strings": body(object={"metadata": {"annotations": {"a": 1}}, "spec": {}}),
    "an update without the old object": body(operation="UPDATE"),
    "deep nesting": b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":' + b"[" * 100_000,
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("route", ROUTES)
def test_a_malformed_request_gets_400_and_a_short_message(api: Caller, route: str, sent: bytes) -> None:
    reply = api.send(route, sent)
    assert reply.status == 400
    assert reply.content_type.startswith("text/plain")
    assert reply.body.endswith(b"\n")
    assert len(reply.body) < 400


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/yaml", "application/jsonx"])
def test_another_content_type_gets_415(api: Caller, content_type: str) -> None:
    assert api.send("mutate", body(), content_type).status == 415


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_the_content_type_may_have_parameters_and_any_case(api: Caller, content_type: str) -> None:
    assert api.send("mutate", body(), content_type).status == 200


def test_unknown_fields_are_ignored_and_the_last_duplicate_key_wins(api: Caller) -> None:
    """As in Go's decoder."""
    doubled = body().replace(b'"dryRun": false', b'"dryRun": true, "dryRun": false, "newField": {"a": [1]}')
    assert api.send("mutate", doubled).status == 200


class FailingQuotaSource:
    """Raises an error for every question."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def policy(self, namespace: str) -> NamespacePolicy:  # noqa: ARG002
        raise self._error

    def quotas(self, namespace: str) -> tuple[list[Quota], dict[str, int]]:  # noqa: ARG002
        raise self._error

    @property
    def cards(self) -> list[CardModel]:
        raise self._error


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_quotas_are_neither_allowed_nor_denied(api: Caller, route: str) -> None:
    """The failurePolicy applies."""
    api._responder.admission.quota_source = FailingQuotaSource(Unavailable("quotas are not yet known"))
    reply = api.send(route, body())
    assert reply.status == 503
    assert reply.body == b"cannot decide now: quotas are not yet known\n"


@pytest.mark.parametrize("route", ROUTES)
def test_a_user_is_told_why_there_is_no_decision_if_that_is_a_refusal_anyway(api: Caller, route: str) -> None:
    """With failurePolicy Fail the API server would say only that the call failed."""
    api._responder.admission.quota_source = FailingQuotaSource(Unavailable("quotas are not yet known"))
    api._responder._fails_closed = lambda: True
    answer = api.ask(route, review(pod(gpu())))
    assert not answer.allowed
    status = answer.response["status"]
    assert (status["code"], status["reason"]) == (503, "ServiceUnavailable")
    assert status["message"] == "cannot decide now: quotas are not yet known; try again"
    assert status["details"] == {"retryAfterSeconds": 5}
    failures = api.metrics.registry.get_sample_value(
        "quotient_admission_failures_total", {"route": route, "cause": "unavailable"}
    )
    assert failures == 1


@pytest.mark.parametrize("failure", [Unavailable("the API server does not answer"), ZeroDivisionError("bug")])
def test_a_failed_charge_is_refused_only_where_no_answer_is_a_refusal(api: Caller, failure: Exception) -> None:
    """A bug is never turned into a decision."""

    class FailingLedgers(InMemoryLedgers):
        def apply(self, *_: Any, **__: Any) -> Any:
            raise failure

    api._responder._ledgers = FailingLedgers(lambda _: ())
    created = api.mutate(pod(gpu())).patched()
    assert api.validate(created).status == (503 if isinstance(failure, Unavailable) else 500)
    api._responder._fails_closed = lambda: True
    answer = api.validate(created)
    assert answer.status == (200 if isinstance(failure, Unavailable) else 500)
    assert answer.message == ("cannot decide now: the API server does not answer; try again" if answer.response else "")


@pytest.mark.parametrize("route", ROUTES)
def test_the_details_of_an_internal_error_are_only_in_the_log(api: Caller, route: str) -> None:
    api._responder.admission.quota_source = FailingQuotaSource(ZeroDivisionError("secret"))
    reply = api.send(route, body())
    assert reply.status == 500
    assert b"secret" not in reply.body
    failures = api.metrics.registry.get_sample_value(
        "quotient_admission_failures_total", {"route": route, "cause": "fault"}
    )
    assert failures == 1


def test_the_flask_application_has_no_other_routes(api: Caller) -> None:
    client = api._client
    assert client.get("/mutate").status_code == 405
    other = client.post("/other")
    assert (other.status_code, other.data) == (404, b"POST /other: 404 Not Found\n")
    assert client.post("/mutate/", data=b"").status_code == 404
    assert client.get("/decisions").data == b"this server has no decision log\n"


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
def test_the_timeout_of_the_api_server_is_a_go_duration(query: str, seconds: float | None) -> None:
    assert timeout_in(query) == seconds


@pytest.mark.parametrize(
    "query", ["timeout=", "timeout=10", "timeout=-1s", "timeout=s", "timeout=1e9s", "timeout=" + "1" * 99]
)
def test_an_invalid_timeout_is_malformed(api: Caller, query: str) -> None:
    with pytest.raises(BadRequest):
        timeout_in(query)
    assert api.send("mutate", body(), query=query).status == 400


def test_a_decision_leaves_time_to_send_the_reply(make_caller: MakeCaller) -> None:
    """And never takes longer than webhook.answerWithinS."""
    responder = make_caller()._responder
    assert responder.budget_s("timeout=3s") == pytest.approx(2.8)
    assert responder.budget_s("timeout=30s") == 8
    assert responder.budget_s("") == 8


def test_a_binding_gets_no_decision_if_its_pod_cannot_be_read_in_time(api: Caller) -> None:
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"name": "n"}}
    sent = json.dumps(review(binding, subresource="binding")).encode()
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
annotations = st.dictionaries(
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
        "metadata": st.fixed_dictionaries(
            {}, optional={"annotations": annotations | anything, "name": st.text(max_size=5)}
        ),
        "spec": strange_specs,
    }
)
shapes = st.sampled_from(["pod", "deployment", "cronjob", "binding", "other"])


def wrap_pod(shape: str, inner: Any) -> dict[str, Any]:
    """Make an object of some kind from a pod, or from the template it becomes."""
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
def test_no_object_causes_an_internal_error(shape: str, new: Any, old: Any, operation: str, route: str) -> None:
    """It is decided or malformed; and a patched object is not patched again."""
    api = caller("short", policy=NamespacePolicy(pools=("p",)))
    sent = review(wrap_pod(shape, new), operation, wrap_pod(shape, old) if old else None)
    answer = Answer(api.send(route, json.dumps(sent).encode()), sent)
    assert answer.status in (200, 400), answer.body
    if answer.status == 200 and answer.response.get("patch"):
        patched = answer.patched()
        assert api.mutate(patched, operation, sent["request"]["oldObject"]).patch == []


@given(st.binary(max_size=300), st.sampled_from(ROUTES), st.sampled_from(["flask", "short"]))
def test_random_bytes_are_malformed_on_both_paths(sent: bytes, route: str, path: str) -> None:
    assert caller(path).send(route, sent).status == 400


@given(st.data())
def test_a_damaged_review_causes_no_internal_error(data: st.DataObject) -> None:
    """Bytes are changed, removed and inserted."""
    sent = bytearray(body())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(sent) - 1))
        sent[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for route in ROUTES:
        assert caller("short").send(route, bytes(sent)).status in (200, 400)
