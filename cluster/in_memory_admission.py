"""Admission in the in-memory cluster: which webhooks are called, with what, and what their responses do.

A webhook is a function from an AdmissionReview to an AdmissionReview, so a test can pass a function, and
`quotient local` a call over HTTPS.
"""

import base64
import copy
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jsonpatch
from msgspec import Struct

from cluster.errors import api_error
from cluster.objects import Raw
from vcuda.decision import Unavailable

Review = dict[str, Any]
# The status code of a denial that names none.
DENIED_BY_DEFAULT = 403


class InMemoryWebhook(Struct, frozen=True):
    """One webhook, with the fields of a webhook configuration; `resources` may name subresources (`pods/binding`)."""

    name: str
    call: Callable[[Review], Review]
    mutating: bool = False
    resources: tuple[str, ...] = ("pods",)
    operations: tuple[str, ...] = ("CREATE",)
    # failurePolicy Fail, else Ignore.
    fail_closed: bool = True
    # reinvocationPolicy IfNeeded, else Never.
    reinvoke: bool = True


class Operation(Struct, frozen=True):
    """A request to the API, with what a review says about it."""

    operation: str
    api_version: str
    kind: str
    plural: str
    namespace: str
    name: str
    subresource: str = ""
    old: Raw | None = None
    dry_run: bool = False
    user: str = "system:admin"

    @property
    def resource(self) -> str:
        """The resource as rules write it: `pods` or `pods/binding`."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def matching_webhooks(
    hooks: Sequence[InMemoryWebhook], operation: Operation, *, mutating: bool
) -> list[InMemoryWebhook]:
    return [
        hook
        for hook in hooks
        if hook.mutating is mutating and operation.resource in hook.resources and operation.operation in hook.operations
    ]


def mutate(hooks: Sequence[InMemoryWebhook], operation: Operation, obj: Raw) -> Raw:
    """Return the object as the mutating webhooks leave it.

    A webhook is called once more if others changed the object after its call, as with reinvocationPolicy IfNeeded.
    """
    matching = matching_webhooks(hooks, operation, mutating=True)
    results: dict[str, Raw] = {}
    for hook in matching:
        obj = call_webhook(hook, operation, obj)
        results[hook.name] = obj
    for hook in matching:
        if hook.reinvoke and results[hook.name] != obj:
            obj = call_webhook(hook, operation, obj)
    return obj


def validate(hooks: Sequence[InMemoryWebhook], operation: Operation, obj: Raw | None) -> None:
    """Call the validating webhooks; the first denial is raised."""
    for hook in matching_webhooks(hooks, operation, mutating=False):
        call_webhook(hook, operation, obj or {})


def call_webhook(hook: InMemoryWebhook, operation: Operation, obj: Raw) -> Raw:
    """Return the object as one webhook leaves it; raises its denial, or Unavailable if it failed and fails closed."""
    request = build_review(operation, obj)
    try:
        # A copy: a webhook in this process could change the object that it is sent.
        response = check_response(hook, request, hook.call(copy.deepcopy(request)))
        changed = apply_patch(obj, response["patch"]) if response.get("patch") and response["allowed"] else obj
    except Exception as error:  # whatever the failure, the failure policy decides
        if not hook.fail_closed:
            return obj
        raise Unavailable(f'failed calling webhook "{hook.name}": {error}') from error
    if not response["allowed"]:
        status = response.get("status") or {}
        message = (
            f'admission webhook "{hook.name}" denied the request: {status.get("message") or "without explanation"}'
        )
        raise api_error(status.get("code") or DENIED_BY_DEFAULT, status.get("reason") or "Forbidden", message)
    return changed


def apply_patch(obj: Raw, encoded: str) -> Raw:
    operations = json.loads(base64.b64decode(encoded))
    if not isinstance(operations, list):
        raise TypeError("a JSON patch is a list of operations")
    changed: Raw = jsonpatch.apply_patch(obj, operations)
    return changed


def check_response(hook: InMemoryWebhook, request: Review, review: Review) -> dict[str, Any]:
    """Return the response of a review; ValueError or KeyError if it breaks the protocol, as an API server checks it."""
    if (review.get("apiVersion"), review.get("kind")) != (request["apiVersion"], request["kind"]):
        raise ValueError(f"expected an AdmissionReview of {request['apiVersion']}, got {review.get('kind')!r}")
    response: dict[str, Any] = review["response"]
    if response["uid"] != request["request"]["uid"]:
        raise ValueError(f"expected response.uid={request['request']['uid']!r}, got {response['uid']!r}")
    if bool(response.get("patch")) != bool(response.get("patchType")):
        raise ValueError("patch and patchType must be set together")
    if response.get("patch") and not hook.mutating:
        raise ValueError("a validating webhook must not return a patch")
    # A response without a decision is a denial.
    return {"allowed": False, **response}


def build_review(operation: Operation, obj: Raw) -> Review:
    group, _, version = operation.api_version.rpartition("/")
    request = {
        "uid": str(uuid.uuid4()),
        "kind": {"group": group, "version": version, "kind": operation.kind},
        "resource": {"group": group, "version": version, "resource": operation.plural},
        "subResource": operation.subresource,
        "name": operation.name,
        "namespace": operation.namespace,
        "operation": operation.operation,
        "userInfo": {"username": operation.user, "groups": ["system:masters", "system:authenticated"]},
        "object": copy.deepcopy(obj) or None,
        "oldObject": copy.deepcopy(operation.old),
        "dryRun": operation.dry_run,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
