"""Admission: what each call is sent, and what its response does. Our webhook relies on these rules."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import Conflict, NotFound, Rejected
from cluster.in_memory_admission import InMemoryWebhook, Review
from cluster.objects import PODS
from tests.cluster.conftest import Implementation
from tests.cluster.hooks import respond
from tests.cluster.objects import gpu_pod, pod
from vcuda.decision import Unavailable

DENIAL = {"code": 403, "message": "short by 50 cores"}


class RecordingWebhook:
    """A webhook that records the requests it gets and responds with a given patch or denial."""

    def __init__(self, *, patch: list[dict[str, Any]] | None = None, denial: dict[str, Any] | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self._patch, self._denial = patch, denial

    def __call__(self, review: Review) -> Review:
        request = review["request"]
        self.requests.append(request)
        response: dict[str, Any] = {"allowed": self._denial is None}
        if self._patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(self._patch).encode()).decode()}
        if self._denial:
            response["status"] = self._denial
        return respond(review, **response)


def test_the_mutating_call_sees_no_identity_and_the_validating_call_sees_all(
    implementation: Implementation, namespace: str
) -> None:
    """So a charge can be keyed by uid at validation only."""
    mutating, validating = RecordingWebhook(), RecordingWebhook()
    implementation.add_webhook(InMemoryWebhook("mutate.quotient.test", mutating, mutating=True))
    implementation.add_webhook(InMemoryWebhook("validate.quotient.test", validating))
    made = implementation.cluster.create(PODS, pod(namespace))
    before, after = mutating.requests[0], validating.requests[0]
    assert not before["object"]["metadata"].keys() & {"name", "uid", "creationTimestamp"}
    assert before.get("name", "") == ""
    assert after["object"]["metadata"]["uid"] == made.metadata.uid
    assert after["object"]["metadata"]["name"] == after["name"] == made.metadata.name
    for request in (before, after):
        assert (request["namespace"], request["operation"]) == (namespace, "CREATE")
        assert request["resource"] == {"group": "", "version": "v1", "resource": "pods"}
        assert not request.get("dryRun")


def test_webhooks_get_canonical_quantities_and_requests_copied_from_limits(
    implementation: Implementation, namespace: str
) -> None:
    """A fraction of an extended resource reaches the mutating call, which may still replace it by a whole number."""
    hook = RecordingWebhook(
        patch=[
            {"op": "replace", "path": f"/spec/containers/0/resources/{part}", "value": {"example.com/gpu": "30"}}
            for part in ("limits", "requests")
        ]
    )
    implementation.add_webhook(InMemoryWebhook("mutate.quotient.test", hook, mutating=True))
    made = implementation.cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": 0.3}))
    seen = hook.requests[0]["object"]["spec"]["containers"][0]["resources"]
    assert seen["limits"] == seen["requests"] == {"example.com/gpu": "300m"}
    resources = (made.spec.containers or [])[0].resources
    assert resources is not None
    assert resources.limits == {"example.com/gpu": "30"}


def test_a_denial_reaches_the_user_with_its_own_message(implementation: Implementation, namespace: str) -> None:
    """And the object is not stored."""
    implementation.add_webhook(InMemoryWebhook("validate.quotient.test", RecordingWebhook(denial=DENIAL)))
    with pytest.raises(
        Rejected, match=r'admission webhook "validate\.quotient\.test" denied the request: short by 50 cores'
    ):
        implementation.cluster.create(PODS, pod(namespace, "p"))
    with pytest.raises(NotFound):
        implementation.cluster.get(PODS, "p", namespace)


DENIALS = {404: NotFound, 409: Conflict, 422: Rejected, 429: Unavailable, 500: Unavailable}


@pytest.mark.parametrize(("code", "error"), DENIALS.items())
def test_the_code_of_a_denial_decides_which_error_the_client_gets(
    implementation: Implementation, namespace: str, code: int, error: type[Exception]
) -> None:
    """A denial with a 5xx code makes clients retry: our webhook must not use one."""
    implementation.add_webhook(
        InMemoryWebhook("validate.quotient.test", RecordingWebhook(denial={"code": code, "message": "no"}))
    )
    with pytest.raises(error):
        implementation.cluster.create(PODS, pod(namespace, "p"))


INVALID_RESPONSES: dict[str, tuple[bool, Callable[[Review], Review]]] = {
    "another review's uid": (False, lambda review: respond(review, uid="other")),
    "no kind": (False, lambda review: {"response": respond(review)["response"]}),
    "a patch from a validating hook": (False, lambda review: respond(review, patch="W10=", patchType="JSONPatch")),
    "a patch without its type": (True, lambda review: respond(review, patch="W10=")),
    "a patch that does not apply": (True, RecordingWebhook(patch=[{"op": "remove", "path": "/spec/no/such"}])),
    "a patch that is not a list": (True, lambda review: respond(review, patch="e30=", patchType="JSONPatch")),
}


@pytest.mark.parametrize(("mutating", "hook"), INVALID_RESPONSES.values(), ids=INVALID_RESPONSES.keys())
def test_a_response_that_breaks_the_protocol_counts_as_a_failed_call(
    implementation: Implementation,
    namespace: str,
    mutating: bool,  # noqa: FBT001
    hook: Callable[[Review], Review],
) -> None:
    """It neither allows nor denies."""
    implementation.add_webhook(InMemoryWebhook("invalid.quotient.test", hook, mutating=mutating))
    with pytest.raises(Unavailable):
        implementation.cluster.create(PODS, pod(namespace, "p"))


def test_a_webhook_may_change_a_binding(implementation: Implementation, namespace: str) -> None:
    """The annotations that it adds reach the pod."""
    patch = [{"op": "add", "path": "/metadata/annotations/from", "value": "hook"}]
    made = implementation.cluster.create(PODS, pod(namespace, "p"))
    hook = RecordingWebhook(patch=patch)

    def bindings_only(review: Review) -> Review:
        return hook(review) if review["request"]["kind"]["kind"] == "Binding" else respond(review)

    implementation.add_webhook(
        InMemoryWebhook("bind.quotient.test", bindings_only, mutating=True, resources=("pods/binding", "pods"))
    )
    implementation.cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={"a": "b"})
    assert implementation.cluster.get(PODS, "p", namespace).metadata.annotations == {"a": "b", "from": "hook"}


def test_webhooks_are_told_of_a_dry_run(implementation: Implementation, namespace: str) -> None:
    """So that nothing is charged."""
    hook = RecordingWebhook()
    implementation.add_webhook(InMemoryWebhook("validate.quotient.test", hook))
    implementation.cluster.create(PODS, pod(namespace, "p"), dry_run=True)
    assert hook.requests[0]["dryRun"] is True


def test_with_failure_policy_fail_a_failed_call_rejects_the_pod(implementation: Implementation, namespace: str) -> None:
    """As unavailable, not as denied: the client may retry."""

    def crash(_: Review) -> Review:
        raise RuntimeError("boom")

    implementation.add_webhook(InMemoryWebhook("validate.quotient.test", crash))
    with pytest.raises(Unavailable, match="failed calling webhook"):
        implementation.cluster.create(PODS, pod(namespace, "p"))


def test_with_failure_policy_ignore_a_failed_call_is_skipped(implementation: Implementation, namespace: str) -> None:
    def crash(_: Review) -> Review:
        raise RuntimeError("boom")

    implementation.add_webhook(InMemoryWebhook("validate.quotient.test", crash, fail_closed=False))
    assert implementation.cluster.create(PODS, pod(namespace, "p")).metadata.uid


def test_an_update_is_reviewed_with_the_old_and_the_new_object(implementation: Implementation, namespace: str) -> None:
    """So that only the difference has to be checked."""
    hook = RecordingWebhook()
    implementation.cluster.create(PODS, pod(namespace, "p"))
    implementation.add_webhook(InMemoryWebhook("validate.quotient.test", hook, operations=("CREATE", "UPDATE")))
    implementation.cluster.patch(PODS, "p", namespace, {"metadata": {"annotations": {"a": "b"}}})
    request = hook.requests[-1]
    assert request["operation"] == "UPDATE"
    assert "annotations" not in request["oldObject"]["metadata"]
    assert request["object"]["metadata"]["annotations"] == {"a": "b"}


def test_a_binding_is_reviewed_without_the_pod_itself(implementation: Implementation, namespace: str) -> None:
    """The review has the names of pod and node, and the annotations."""
    hook = RecordingWebhook(denial=DENIAL)
    made = implementation.cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": "1"}))
    implementation.add_webhook(InMemoryWebhook("bind.quotient.test", hook, resources=("pods/binding", "pods")))
    with pytest.raises(Rejected):
        implementation.cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={"a": "b"})
    request = next(request for request in hook.requests if request["kind"]["kind"] == "Binding")
    assert (request["subResource"], request["name"], request["namespace"]) == ("binding", "p", namespace)
    assert request["object"]["target"]["name"] == "node-x"
    assert request["object"]["metadata"]["annotations"] == {"a": "b"}
    assert "spec" not in request["object"]


def test_a_webhook_is_called_again_if_another_one_changed_the_pod_after_it(
    implementation: Implementation, namespace: str
) -> None:
    """So ours has to be idempotent: it gets its own result, and a sidecar that was injected after it."""
    sidecar = {"name": "injected", "image": "example/sidecar"}
    ours = RecordingWebhook()
    implementation.add_webhook(InMemoryWebhook("a-ours.quotient.test", ours, mutating=True))
    injector = RecordingWebhook(patch=[{"op": "add", "path": "/spec/containers/-", "value": sidecar}])
    implementation.add_webhook(InMemoryWebhook("b-injector.quotient.test", injector, mutating=True, reinvoke=False))
    implementation.cluster.create(PODS, pod(namespace, "p"))
    assert [len(request["object"]["spec"]["containers"]) for request in ours.requests] == [1, 2]
    assert len(injector.requests) == 1
