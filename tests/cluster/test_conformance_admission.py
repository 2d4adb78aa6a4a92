"""Admission: which call sees what, and what its answer does. The rules our webhook will live by."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import Conflict, NotFound, Rejected
from cluster.in_memory_admission import InMemoryWebhook, Review
from cluster.objects import PODS
from tests.cluster.conftest import Tenant
from tests.cluster.hooks import answered
from tests.cluster.objects import gpu_pod, pod
from vcuda.decision import Unavailable

DENIAL = {"code": 403, "message": "short by 50 cores"}


class Recorded:
    """A hook that remembers its reviews and answers as it was told."""

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
        return answered(review, **response)


def test_the_mutating_call_sees_no_identity_and_the_validating_call_sees_all(tenant: Tenant, namespace: str) -> None:
    """A charge can be keyed by uid only at validation."""
    mutating, validating = Recorded(), Recorded()
    tenant.add_hook(InMemoryWebhook("mutate.quotient.test", mutating, mutating=True))
    tenant.add_hook(InMemoryWebhook("validate.quotient.test", validating))
    made = tenant.cluster.create(PODS, pod(namespace))
    before, after = mutating.requests[0], validating.requests[0]
    assert not before["object"]["metadata"].keys() & {"name", "uid", "creationTimestamp"}
    assert before.get("name", "") == ""
    assert after["object"]["metadata"]["uid"] == made.metadata.uid
    assert after["object"]["metadata"]["name"] == after["name"] == made.metadata.name
    for request in (before, after):
        assert (request["namespace"], request["operation"]) == (namespace, "CREATE")
        assert request["resource"] == {"group": "", "version": "v1", "resource": "pods"}
        assert not request.get("dryRun")


def test_quantities_arrive_canonical_and_limits_as_requests(tenant: Tenant, namespace: str) -> None:
    """A fraction of an extended resource reaches the mutating call, which may still make it whole."""
    hook = Recorded(
        patch=[
            {"op": "replace", "path": f"/spec/containers/0/resources/{part}", "value": {"example.com/gpu": "30"}}
            for part in ("limits", "requests")
        ]
    )
    tenant.add_hook(InMemoryWebhook("mutate.quotient.test", hook, mutating=True))
    made = tenant.cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": 0.3}))
    seen = hook.requests[0]["object"]["spec"]["containers"][0]["resources"]
    assert seen["limits"] == seen["requests"] == {"example.com/gpu": "300m"}
    resources = (made.spec.containers or [])[0].resources
    assert resources is not None
    assert resources.limits == {"example.com/gpu": "30"}


def test_a_denial_reaches_the_user_in_its_own_words(tenant: Tenant, namespace: str) -> None:
    """And nothing is stored."""
    tenant.add_hook(InMemoryWebhook("validate.quotient.test", Recorded(denial=DENIAL)))
    with pytest.raises(
        Rejected, match=r'admission webhook "validate\.quotient\.test" denied the request: short by 50 cores'
    ):
        tenant.cluster.create(PODS, pod(namespace, "p"))
    with pytest.raises(NotFound):
        tenant.cluster.get(PODS, "p", namespace)


DENIALS = {404: NotFound, 409: Conflict, 422: Rejected, 429: Unavailable, 500: Unavailable}


@pytest.mark.parametrize(("code", "family"), DENIALS.items())
def test_a_denials_code_decides_what_the_user_is_told(
    tenant: Tenant, namespace: str, code: int, family: type[Exception]
) -> None:
    """A hook that denies with a server's code makes a client try again: ours must not."""
    tenant.add_hook(InMemoryWebhook("validate.quotient.test", Recorded(denial={"code": code, "message": "no"})))
    with pytest.raises(family):
        tenant.cluster.create(PODS, pod(namespace, "p"))


BROKEN: dict[str, tuple[bool, Callable[[Review], Review]]] = {
    "another review's uid": (False, lambda review: answered(review, uid="other")),
    "no kind": (False, lambda review: {"response": answered(review)["response"]}),
    "a patch from a validating hook": (False, lambda review: answered(review, patch="W10=", patchType="JSONPatch")),
    "a patch without its type": (True, lambda review: answered(review, patch="W10=")),
    "a patch that does not apply": (True, Recorded(patch=[{"op": "remove", "path": "/spec/no/such"}])),
    "a patch that is none": (True, lambda review: answered(review, patch="e30=", patchType="JSONPatch")),
}


@pytest.mark.parametrize(("mutating", "hook"), BROKEN.values(), ids=BROKEN.keys())
def test_an_answer_that_breaks_the_protocol_is_no_answer(
    tenant: Tenant,
    namespace: str,
    mutating: bool,  # noqa: FBT001
    hook: Callable[[Review], Review],
) -> None:
    """Neither an allowance nor a denial."""
    tenant.add_hook(InMemoryWebhook("broken.quotient.test", hook, mutating=mutating))
    with pytest.raises(Unavailable):
        tenant.cluster.create(PODS, pod(namespace, "p"))


def test_a_mutated_binding_is_what_is_bound(tenant: Tenant, namespace: str) -> None:
    """A hook may add to the annotations that reach the pod."""
    patch = [{"op": "add", "path": "/metadata/annotations/from", "value": "hook"}]
    made = tenant.cluster.create(PODS, pod(namespace, "p"))
    hook = Recorded(patch=patch)

    def bindings_only(review: Review) -> Review:
        return hook(review) if review["request"]["kind"]["kind"] == "Binding" else answered(review)

    tenant.add_hook(
        InMemoryWebhook("bind.quotient.test", bindings_only, mutating=True, resources=("pods/binding", "pods"))
    )
    tenant.cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={"a": "b"})
    assert tenant.cluster.get(PODS, "p", namespace).metadata.annotations == {"a": "b", "from": "hook"}


def test_a_dry_run_says_so_to_the_hooks(tenant: Tenant, namespace: str) -> None:
    """So that nothing is charged."""
    hook = Recorded()
    tenant.add_hook(InMemoryWebhook("validate.quotient.test", hook))
    tenant.cluster.create(PODS, pod(namespace, "p"), dry_run=True)
    assert hook.requests[0]["dryRun"] is True


def test_a_hook_that_must_answer_and_crashes_holds_the_pod_up(tenant: Tenant, namespace: str) -> None:
    """Fail closed: not a denial, but no pod either."""

    def crash(_: Review) -> Review:
        raise RuntimeError("boom")

    tenant.add_hook(InMemoryWebhook("validate.quotient.test", crash))
    with pytest.raises(Unavailable, match="failed calling webhook"):
        tenant.cluster.create(PODS, pod(namespace, "p"))


def test_a_hook_that_may_be_missed_and_crashes_is_passed_over(tenant: Tenant, namespace: str) -> None:
    """Fail open."""

    def crash(_: Review) -> Review:
        raise RuntimeError("boom")

    tenant.add_hook(InMemoryWebhook("validate.quotient.test", crash, fail_closed=False))
    assert tenant.cluster.create(PODS, pod(namespace, "p")).metadata.uid


def test_an_update_shows_both_states(tenant: Tenant, namespace: str) -> None:
    """Old and new, so that only what changed need be judged."""
    hook = Recorded()
    tenant.cluster.create(PODS, pod(namespace, "p"))
    tenant.add_hook(InMemoryWebhook("validate.quotient.test", hook, operations=("CREATE", "UPDATE")))
    tenant.cluster.patch(PODS, "p", namespace, {"metadata": {"annotations": {"a": "b"}}})
    request = hook.requests[-1]
    assert request["operation"] == "UPDATE"
    assert "annotations" not in request["oldObject"]["metadata"]
    assert request["object"]["metadata"]["annotations"] == {"a": "b"}


def test_a_binding_is_reviewed_without_the_pods_resources(tenant: Tenant, namespace: str) -> None:
    """What is seen is the Binding: pod, node and annotations."""
    hook = Recorded(denial=DENIAL)
    made = tenant.cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": "1"}))
    tenant.add_hook(InMemoryWebhook("bind.quotient.test", hook, resources=("pods/binding", "pods")))
    with pytest.raises(Rejected):
        tenant.cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={"a": "b"})
    request = next(request for request in hook.requests if request["kind"]["kind"] == "Binding")
    assert (request["subResource"], request["name"], request["namespace"]) == ("binding", "p", namespace)
    assert request["object"]["target"]["name"] == "node-x"
    assert request["object"]["metadata"]["annotations"] == {"a": "b"}
    assert "spec" not in request["object"]


def test_a_hook_is_asked_again_if_another_changed_the_pod_after_it(tenant: Tenant, namespace: str) -> None:
    """Which is why ours must be idempotent: it sees its own work, and a sidecar that came in between."""
    sidecar = {"name": "injected", "image": "example/sidecar"}
    ours = Recorded()
    tenant.add_hook(InMemoryWebhook("a-ours.quotient.test", ours, mutating=True))
    injector = Recorded(patch=[{"op": "add", "path": "/spec/containers/-", "value": sidecar}])
    tenant.add_hook(InMemoryWebhook("b-injector.quotient.test", injector, mutating=True, reinvoke=False))
    tenant.cluster.create(PODS, pod(namespace, "p"))
    assert [len(request["object"]["spec"]["containers"]) for request in ours.requests] == [1, 2]
    assert len(injector.requests) == 1
