"""Reviews, and both ways in which they are answered."""

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


class GivenPolicies:
    """The same policy and quotas for every namespace."""

    def __init__(self, policy: NamespacePolicy | None = None, quotas: Sequence[Quota] = ()) -> None:
        self._policy, self._quotas = policy or NamespacePolicy(), quotas
        self.cards: Sequence[CardModel] = ()

    def policy(self, namespace: str) -> NamespacePolicy:  # noqa: ARG002
        return self._policy

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], dict[str, int]]:  # noqa: ARG002
        return self._quotas, {}


def review(obj: Obj | None, operation: str = "CREATE", old: Obj | None = None, **request: Any) -> Obj:
    """Write a review as an API server does; `user`, `groups`, `subresource` and others may be given."""
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
    """What came back from one call."""

    def __init__(self, reply: HttpReply, asked: Obj | None = None) -> None:
        self.status, self.body, self._asked = reply.status, reply.body, asked or {}
        self.response: Obj = json.loads(reply.body)["response"] if reply.status == 200 else {}

    @property
    def allowed(self) -> bool:
        allowed: bool = self.response["allowed"]
        return allowed

    @property
    def patch(self) -> list[Obj]:
        found: list[Obj] = json.loads(base64.b64decode(self.response.get("patch", "W10=")))
        return found

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
        """Give the object under review as the patch leaves it."""
        made: Obj = jsonpatch.apply_patch(json.loads(json.dumps(self._asked["request"]["object"])), self.patch)
        return made


class Caller:
    """Calls the webhook one way; both ways must answer alike."""

    def __init__(self, way: str, responder: Responder, metrics: Metrics) -> None:
        self._way, self._responder, self.metrics = way, responder, metrics
        self._client = create_app(responder, 8 * MIB).test_client()

    def send(
        self, route: str, body: bytes, content_type: str = "application/json", query: str = "timeout=10s"
    ) -> HttpReply:
        """Send bytes to a route."""
        if self._way == "short" and (reply := self._short(route, body, content_type, query)) is not None:
            return reply
        answered = self._client.post(f"/{route}?{query}", data=body, content_type=content_type)
        return HttpReply(answered.status_code, answered.data, answered.content_type)

    def _short(self, route: str, body: bytes, content_type: str, query: str) -> HttpReply | None:
        head = (
            f"POST /{route}?{query} HTTP/1.1\r\nHost: h\r\nUser-Agent: kube-apiserver-admission\r\n"
            f"Content-Length: {len(body)}\r\nAccept: application/json, */*\r\nContent-Type: {content_type}\r\n\r\n"
        )
        found = parse_head(head.encode())
        assert found is not None
        assert found.length == len(body)
        answers: list[HttpReply] = []
        reply = self._responder.reply_soon(found.route, found.content_type, found.query, body, answers.append)
        if reply is Deferred.BLOCKING:
            return None
        if isinstance(reply, Deferred):
            eventually(lambda: bool(answers), "an answer")
            (reply,) = answers
        opening, _, rest = encode_reply(reply, 0.0, close=False).partition(HEAD_END)
        assert opening.startswith(b"HTTP/1.1 %d " % reply.status)
        assert rest == reply.body
        return reply

    def ask(self, route: str, asked: Obj) -> Answer:
        """Send a review."""
        answer = Answer(self.send(route, json.dumps(asked).encode()), asked)
        assert answer.status != 200 or answer.response["uid"] == asked["request"]["uid"]
        return answer

    def mutate(self, obj: Obj | None, operation: str = "CREATE", old: Obj | None = None, **request: Any) -> Answer:
        """Ask what an object needs."""
        return self.ask("mutate", review(obj, operation, old, **request))

    def validate(self, obj: Obj | None, operation: str = "CREATE", old: Obj | None = None, **request: Any) -> Answer:
        """Ask whether an object may be."""
        if obj is not None and operation == "CREATE" and obj.get("kind") == "Pod":
            obj = {**obj, "metadata": {"uid": str(uuid.uuid4()), **obj.get("metadata", {})}}
        return self.ask("validate", review(obj, operation, old, **request))

    def create(self, obj: Obj, **request: Any) -> Answer:
        """Do both as an API server does: mutate, again on the result, then validate."""
        first = self.mutate(obj, **request)
        if first.status != 200 or not first.allowed:
            return first
        made = first.patched()
        again = self.mutate(made, **request)
        assert again.patch == [], "doing it twice must be doing it once"
        answer = self.validate(made, **request)
        answer.response.setdefault("warnings", [])[:0] = first.warnings
        return answer


MakeCaller = Callable[..., Caller]


def caller(
    way: str,
    *,
    policy: NamespacePolicy | None = None,
    quotas: Sequence[Quota] = (),
    dialects: VocabularyOptions | None = None,
    names: Names | None = None,
    pods: dict[str, PodToBind] | None = None,
    **rules: Any,
) -> Caller:
    """Build a webhook in this process, and a caller that goes one way."""
    admission = Admission(
        AdmissionConfig(scheme=build_scheme(names, 256, dialects), **rules), GivenPolicies(policy, quotas)
    )
    metrics = Metrics()
    drawer = InMemoryLedgers(lambda _: quotas)
    responder = Responder(admission, lambda _, name, __: (pods or {}).get(name), drawer, metrics, 8.0)
    return Caller(way, responder, metrics)
