"""Builds AdmissionReviews, sends them to a webhook in this process, and reads the answers."""

import base64
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jsonpatch

from ledger.in_memory_ledgers import InMemoryLedgers
from tests.waiting import eventually
from vcuda.catalogue import CardModel
from vcuda.names import Names
from vcuda.namespace_policy import NamespacePolicy
from vcuda.quota import Quota
from vcuda.scheme import build_scheme
from vcuda.vocabulary import VocabularyOptions
from webhook.admission import Admission
from webhook.admission_config import AdmissionConfig
from webhook.flask_app import create_app
from webhook.metrics import Metrics
from webhook.responding import Deferred, HttpReply, Responder
from webhook.short_path import HEAD_END, encode_reply, parse_head
from webhook.validating import PodToBind

MIB = 2**20
NAMES = Names()
ALICE = "alice"
PLURALS = {"Pod": "pods", "Binding": "bindings", "Deployment": "deployments", "CronJob": "cronjobs", "Job": "jobs"}

Obj = dict[str, Any]


class UniformQuotaSource:
    """The same policy and quotas for every namespace."""

    def __init__(
        self, policy: NamespacePolicy | None = None, quotas: Sequence[Quota] = (), cards: Sequence[CardModel] = ()
    ) -> None:
        self._policy, self._quotas, self.cards = policy or NamespacePolicy(), quotas, cards

    def policy(self, namespace: str) -> NamespacePolicy:  # noqa: ARG002
        return self._policy

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], dict[str, int]]:  # noqa: ARG002
        return self._quotas, {}


def review(obj: Obj | None, operation: str = "CREATE", old: Obj | None = None, **request: Any) -> Obj:
    """Return a review as an API server sends it.

    Keywords set fields of the request; `user`, `groups` and `subresource` are short names.
    """
    about = obj or old or {}
    group, _, version = str(about.get("apiVersion", "v1")).rpartition("/")
    kind = str(about.get("kind", "Pod"))
    user, groups = request.pop("user", ALICE), request.pop("groups", ["system:authenticated"])
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": group, "version": version, "kind": kind},
            "resource": {"group": group, "version": version, "resource": PLURALS.get(kind, kind.lower() + "s")},
            "subResource": request.pop("subresource", ""),
            "name": about.get("metadata", {}).get("name", ""),
            "namespace": "default",
            "operation": operation,
            "userInfo": {"username": user, "groups": groups},
            "object": obj,
            "oldObject": old,
            "dryRun": False,
            **request,
        },
    }


class Answer:
    """The response to one review, and the review itself."""

    def __init__(self, reply: HttpReply, sent: Obj | None = None) -> None:
        self.status, self.body, self._review = reply.status, reply.body, sent or {}
        self.response: Obj = json.loads(reply.body)["response"] if reply.status == 200 else {}

    @property
    def allowed(self) -> bool:
        allowed: bool = self.response["allowed"]
        return allowed

    @property
    def patch(self) -> list[Obj]:
        operations: list[Obj] = json.loads(base64.b64decode(self.response.get("patch", "W10=")))
        return operations

    @property
    def warnings(self) -> list[str]:
        return list(self.response.get("warnings", []))

    @property
    def message(self) -> str:
        return str(self.response.get("status", {}).get("message", ""))

    @property
    def codes(self) -> list[str]:
        causes = self.response.get("status", {}).get("details", {}).get("causes", [])
        return [cause["reason"] for cause in causes]

    @property
    def fields(self) -> list[str]:
        causes = self.response.get("status", {}).get("details", {}).get("causes", [])
        return [cause["field"] for cause in causes]

    def patched(self) -> Obj:
        """Return the object under review with the patch applied."""
        copied = json.loads(json.dumps(self._review["request"]["object"]))
        patched: Obj = jsonpatch.apply_patch(copied, self.patch)
        return patched


class Caller:
    """Calls the webhook through one of its HTTP paths; both must give the same answers."""

    def __init__(self, path: str, responder: Responder, metrics: Metrics) -> None:
        self._path, self._responder, self.metrics = path, responder, metrics
        self._client = create_app(responder, 8 * MIB).test_client()

    def send(
        self, route: str, body: bytes, content_type: str = "application/json", query: str = "timeout=10s"
    ) -> HttpReply:
        if self._path == "short" and (reply := self._short(route, body, content_type, query)) is not None:
            return reply
        response = self._client.post(f"/{route}?{query}", data=body, content_type=content_type)
        return HttpReply(response.status_code, response.data, response.content_type)

    def _short(self, route: str, body: bytes, content_type: str, query: str) -> HttpReply | None:
        head = (
            f"POST /{route}?{query} HTTP/1.1\r\nHost: h\r\nUser-Agent: kube-apiserver-admission\r\n"
            f"Content-Length: {len(body)}\r\nAccept: application/json, */*\r\nContent-Type: {content_type}\r\n\r\n"
        )
        parsed = parse_head(head.encode())
        assert parsed is not None
        assert parsed.length == len(body)
        replies: list[HttpReply] = []
        reply = self._responder.reply_soon(parsed.route, parsed.content_type, parsed.query, body, replies.append)
        if reply is Deferred.BLOCKING:
            return None  # as in the server, such a call goes through Flask
        if isinstance(reply, Deferred):
            eventually(lambda: bool(replies), "a reply")
            (reply,) = replies
        opening, _, rest = encode_reply(reply, 0.0, close=False).partition(HEAD_END)
        assert opening.startswith(b"HTTP/1.1 %d " % reply.status)
        assert rest == reply.body
        return reply

    def ask(self, route: str, sent: Obj) -> Answer:
        answer = Answer(self.send(route, json.dumps(sent).encode()), sent)
        assert answer.status != 200 or answer.response["uid"] == sent["request"]["uid"]
        return answer

    def mutate(self, obj: Obj | None, operation: str = "CREATE", old: Obj | None = None, **request: Any) -> Answer:
        return self.ask("mutate", review(obj, operation, old, **request))

    def validate(self, obj: Obj | None, operation: str = "CREATE", old: Obj | None = None, **request: Any) -> Answer:
        if obj is not None and operation == "CREATE" and obj.get("kind") == "Pod":
            # The API server sets the UID between the two calls.
            obj = {**obj, "metadata": {"uid": str(uuid.uuid4()), **obj.get("metadata", {})}}
        return self.ask("validate", review(obj, operation, old, **request))

    def create(self, obj: Obj, **request: Any) -> Answer:
        """Mutate and validate, as an API server does; also check that a second mutation changes nothing."""
        first = self.mutate(obj, **request)
        if first.status != 200 or not first.allowed:
            return first
        patched = first.patched()
        again = self.mutate(patched, **request)
        assert again.patch == [], "mutation must be idempotent"
        answer = self.validate(patched, **request)
        answer.response.setdefault("warnings", [])[:0] = first.warnings
        return answer


MakeCaller = Callable[..., Caller]


def caller(
    path: str,
    *,
    policy: NamespacePolicy | None = None,
    quotas: Sequence[Quota] = (),
    dialects: VocabularyOptions | None = None,
    names: Names | None = None,
    pods: dict[str, PodToBind] | None = None,
    cards: Sequence[CardModel] = (),
    **config: Any,
) -> Caller:
    """Return a caller of a webhook in this process, through the HTTP path `flask` or `short`.

    `pods` are the pods that Bindings can refer to, `cards` the models of the cluster; other keywords are fields of
    AdmissionConfig.
    """
    admission = Admission(
        AdmissionConfig(scheme=build_scheme(names, 256, dialects), **config), UniformQuotaSource(policy, quotas, cards)
    )
    metrics = Metrics()
    ledgers = InMemoryLedgers(lambda _: quotas)
    responder = Responder(admission, lambda _, name, __: (pods or {}).get(name), ledgers, metrics, 8.0)
    return Caller(path, responder, metrics)
