"""Admission as an API server does it: which hooks are called, with what, and what their answers do.

Only the in-memory cluster needs it; a real one has its own. Hooks are functions from an AdmissionReview to
an AdmissionReview, so a test can pass a function and `quotient local` a call over HTTPS.
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
DENIED_BY_DEFAULT = 403


class InMemoryWebhook(Struct, frozen=True):
    """One webhook: what it is called for and how. `resources` may name subresources, as in `pods/binding`."""

    name: str
    call: Callable[[Review], Review]
    mutating: bool = False
    resources: tuple[str, ...] = ("pods",)
    operations: tuple[str, ...] = ("CREATE",)
    fail_closed: bool = True
    reinvoke: bool = True


class Operation(Struct, frozen=True):
    """What somebody wants to do to an object."""

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
        """The resource as rules name it."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def matching_webhooks(
    hooks: Sequence[InMemoryWebhook], operation: Operation, *, mutating: bool
) -> list[InMemoryWebhook]:
    """Pick the hooks that are called for an operation."""
    return [
        hook
        for hook in hooks
        if hook.mutating is mutating and operation.resource in hook.resources and operation.operation in hook.operations
    ]


def mutate(hooks: Sequence[InMemoryWebhook], operation: Operation, obj: Raw) -> Raw:
    """Let mutating hooks change an object; those that ran before a later change are called once more."""
    called = matching_webhooks(hooks, operation, mutating=True)
    seen: dict[str, Raw] = {}
    for hook in called:
        obj = call_webhook(hook, operation, obj)
        seen[hook.name] = obj
    for hook in called:
        if hook.reinvoke and seen[hook.name] != obj:
            obj = call_webhook(hook, operation, obj)
    return obj


def validate(hooks: Sequence[InMemoryWebhook], operation: Operation, obj: Raw | None) -> None:
    """Ask validating hooks; the first denial is raised."""
    for hook in matching_webhooks(hooks, operation, mutating=False):
        call_webhook(hook, operation, obj or {})


def call_webhook(hook: InMemoryWebhook, operation: Operation, obj: Raw) -> Raw:
    """Call one hook and give the object as it leaves it; a denial is raised, and so is no answer if one is needed."""
    asked = review(operation, obj)
    try:
        response = checked(hook, asked, hook.call(copy.deepcopy(asked)))
        changed = patched(obj, response["patch"]) if response.get("patch") and response["allowed"] else obj
    except Exception as broken:  # whatever a hook does wrong, its failure policy says what follows
        if not hook.fail_closed:
            return obj
        raise Unavailable(f'failed calling webhook "{hook.name}": {broken}') from broken
    if not response["allowed"]:
        status = response.get("status") or {}
        message = (
            f'admission webhook "{hook.name}" denied the request: {status.get("message") or "without explanation"}'
        )
        raise api_error(status.get("code") or DENIED_BY_DEFAULT, status.get("reason") or "Forbidden", message)
    return changed


def patched(obj: Raw, encoded: str) -> Raw:
    """Apply the patch of an answer."""
    operations = json.loads(base64.b64decode(encoded))
    if not isinstance(operations, list):
        raise TypeError("a JSON patch is a list of operations")
    changed: Raw = jsonpatch.apply_patch(obj, operations)
    return changed


def checked(hook: InMemoryWebhook, asked: Review, answer: Review) -> dict[str, Any]:
    """Hold an answer to the protocol, as the API server does."""
    if (answer.get("apiVersion"), answer.get("kind")) != (asked["apiVersion"], asked["kind"]):
        raise ValueError(f"expected an AdmissionReview of {asked['apiVersion']}, got {answer.get('kind')!r}")
    response: dict[str, Any] = answer["response"]
    if response["uid"] != asked["request"]["uid"]:
        raise ValueError("it answered another review")
    if bool(response.get("patch")) != bool(response.get("patchType")):
        raise ValueError("patch and patchType go together")
    if response.get("patch") and not hook.mutating:
        raise ValueError("a validating webhook must not return a patch")
    return {"allowed": False, **response}


def review(operation: Operation, obj: Raw) -> Review:
    """Write the AdmissionReview that a hook gets."""
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
