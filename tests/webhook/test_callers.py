"""Who is served by which path, what callers learn who are not known, and how a replica notices that a call failed."""

import asyncio
import json
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from cluster.in_memory import InMemoryCluster
from cluster.objects import MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS, ClientConfig, RegisteredWebhook, ServiceReference
from ledger.in_memory_ledgers import InMemoryLedgers
from settings.configuration import Configuration, WebhookSettings
from tests.vcuda.demands import quota
from tests.waiting import eventually
from tests.webhook.in_process import Client, connect_client, new_worker, run_loop_until
from tests.webhook.load import request
from tests.webhook.pods import gpu, pod
from tests.webhook.reviews import UniformQuotaSource, caller, review
from vcuda.ledger import ChargeResult, Ledger, LedgerState, pack_uid
from vcuda.names import PATHS_ANNOTATION
from vcuda.quota_usage import Charge, Holder
from vcuda.scheme import build_scheme
from vcuda.webhook_paths import PLAIN, PathRecord, digest_of, encode_record, with_next, with_registered
from webhook.admission import Admission
from webhook.admission_config import AdmissionConfig
from webhook.asgi_app import UNKNOWN_PATH_WAIT_S
from webhook.callers import Caller, CallerPaths, RegisteredPaths, is_in_networks, path_of, registered_paths
from webhook.metrics import Metrics
from webhook.registration import registration
from webhook.registration_cache import RegistrationCache
from webhook.responding import Responder
from webhook.service import admission_config_of

CURRENT, NEXT, FORMER, UNKNOWN = ("0" * 32, "1" * 32, "2" * 32, "3" * 32)
NOW = 1_000_000
RECORD = with_next(with_registered(PathRecord(), CURRENT, {FORMER}, NOW), NEXT)
BODY = json.dumps(review(pod(gpu()))).encode()
TARGET = "quotient-system/quotient-webhook"
KINDS = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)

BOTH_PATHS = pytest.mark.parametrize("short_path", [True, False], ids=["short path", "gunicorn"])


def registered(secret: str = CURRENT, record: PathRecord = RECORD) -> RegisteredPaths:
    return RegisteredPaths(
        registered=frozenset((digest_of(secret),)),
        expected=frozenset(digest for digest in (record.current, record.next) if digest),
        former=record.former,
    )


def caller_paths(paths: RegisteredPaths | None = None, **options: Any) -> CallerPaths:
    made = CallerPaths(now=lambda: NOW, **options)
    made.update(paths or registered())
    return made


def register(
    cluster: InMemoryCluster, target: str = TARGET, record: PathRecord = RECORD, secret: str = CURRENT
) -> None:
    """Create webhook configurations as the chart and the controller make them."""
    for each, kind in zip(registration(admission_config_of(Configuration()), target), KINDS, strict=False):
        each["metadata"]["annotations"] = {PATHS_ANNOTATION: encode_record(record)}
        for hook in each["webhooks"]:
            for field, prefix in (("service", "path"), ("", "url")):
                fields = hook["clientConfig"].get(field, hook["clientConfig"])
                if prefix in fields:
                    fields[prefix] += f"/{secret}" if secret else ""
        cluster.create(kind, each)


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        (CURRENT, Caller.KNOWN),
        (NEXT, Caller.ANONYMOUS),
        (FORMER, Caller.ANONYMOUS),
        (UNKNOWN, Caller.REFUSED),
        (PLAIN, Caller.REFUSED),
    ],
)
def test_only_the_registered_secret_is_trusted(secret: str, expected: Caller) -> None:
    """The next one is known to nobody yet, and a former one may have been printed to a tenant."""
    assert caller_paths().identify(secret) is expected


def test_plain_paths_are_served_without_a_secret_only() -> None:
    """Their callers are never known: everybody knows these paths."""
    assert CallerPaths().identify(PLAIN) is Caller.ANONYMOUS
    assert CallerPaths().identify(UNKNOWN) is Caller.REFUSED
    assert caller_paths(registered(PLAIN)).identify(PLAIN) is Caller.ANONYMOUS


def test_authenticated_callers_need_the_path_as_well() -> None:
    paths = caller_paths(is_authenticated=True)
    assert {paths.identify(secret) for secret in (CURRENT, NEXT, FORMER)} == {Caller.KNOWN}
    assert paths.identify(PLAIN) is Caller.REFUSED
    assert CallerPaths(is_authenticated=True).identify(PLAIN) is Caller.KNOWN


@pytest.mark.parametrize("target", [TARGET, "https://webhook.example:8443", "https://proxy.example/to/quotient"])
@pytest.mark.parametrize("secret", [CURRENT, PLAIN])
def test_paths_are_read_from_the_webhook_configurations(target: str, secret: str) -> None:
    """Whoever wrote them; behind a Service, and at a URL."""
    cluster, paths = InMemoryCluster(), CallerPaths(now=lambda: NOW)
    cache = RegistrationCache(cluster, paths.update)
    cache.start()
    try:
        eventually(lambda: cache.synced, "the first list")
        register(cluster, target, secret=secret)
        expected = Caller.KNOWN if secret else Caller.ANONYMOUS
        eventually(lambda: paths.identify(secret) is expected, "the path to be accepted")
        eventually(lambda: paths.identify(NEXT) is Caller.ANONYMOUS, "the record to be read")
        for kind in KINDS:
            cluster.delete(kind, "quotient")
        eventually(lambda: paths.identify(PLAIN) is Caller.ANONYMOUS, "the plain path to be accepted")
        assert paths.identify(UNKNOWN) is Caller.REFUSED
    finally:
        cache.stop()


@pytest.mark.parametrize(
    ("policies", "fails_closed"), [(["Fail", "Fail"], True), (["Fail", "Ignore"], False), ([], False)]
)
def test_whether_the_api_server_refuses_what_is_not_decided(*, policies: list[str], fails_closed: bool) -> None:
    cluster = InMemoryCluster()
    for kind, policy in zip(KINDS, policies, strict=False):
        hook = {"name": "a.b.c", "failurePolicy": policy, "clientConfig": {"url": "https://h/mutate"}}
        cluster.create(kind, {"metadata": {"name": "quotient"}, "webhooks": [hook]})
    configurations = [each for kind in KINDS for each in cluster.list(kind).items]
    assert registered_paths(configurations).fails_closed is fails_closed


def test_a_path_without_a_route_is_no_path_of_the_webhook() -> None:
    hook = RegisteredWebhook("a", ClientConfig(ServiceReference("a", "b", "/else")))
    assert path_of(hook) == "/else"


@BOTH_PATHS
def test_other_paths_do_not_exist(*, short_path: bool) -> None:
    """Neither the plain one, nor one with a wrong secret; the answers do not tell them apart, or repeat them."""

    async def run() -> None:
        worker = new_worker(paths=caller_paths(), settings=WebhookSettings(short_path=short_path))
        answers = []
        for path in ("/mutate", f"/mutate/{UNKNOWN}"):
            async with connect_client(worker) as client:
                await client.send(request(BODY, path))
                answers.append(await client.read_answer())
        (head, body), other = answers
        assert head.startswith(b"http/1.1 404")
        assert (body, UNKNOWN.encode() in other[1]) == (other[1], False)
        async with connect_client(worker) as client:
            for secret in (CURRENT, FORMER, NEXT):
                await client.send(request(BODY, f"/mutate/{secret}?timeout=10s"))
                assert (await client.read_answer())[0].startswith(b"http/1.1 200")

    asyncio.run(run())


def test_a_body_that_came_by_another_path_is_not_read() -> None:
    """Eight threads could otherwise be given megabytes by anybody."""

    async def run() -> None:
        async with connect_client(new_worker(paths=caller_paths())) as client:
            await client.send(request(BODY, "/mutate")[:-10])
            assert (await client.read_answer())[0].startswith(b"http/1.1 404")

    asyncio.run(run())


@BOTH_PATHS
def test_a_path_that_is_registered_a_moment_later_is_served(*, short_path: bool) -> None:
    """An API server may learn of it before this replica does; the connection stays on its path."""
    assert UNKNOWN_PATH_WAIT_S >= 0.5

    async def run() -> None:
        paths = caller_paths()
        async with connect_client(new_worker(paths=paths, settings=WebhookSettings(short_path=short_path))) as client:
            await client.send(request(BODY, f"/mutate/{UNKNOWN}?timeout=10s"))
            await run_loop_until(lambda: not client.server_side.is_idle)
            paths.update(registered(UNKNOWN))
            assert (await client.read_answer())[0].startswith(b"http/1.1 200")
            await run_loop_until(lambda: client.server_side._is_on_gunicorn_path is not short_path)

    asyncio.run(run())


class SlowLedgers(InMemoryLedgers):
    """Ledgers that answer when they may."""

    def __init__(self) -> None:
        super().__init__(lambda _: ())
        self.may_answer = threading.Event()

    def submit(self, *arguments: Any, **options: Any) -> None:
        threading.Thread(target=self._submit_later, args=arguments, kwargs=options, daemon=True).start()

    def _submit_later(self, *arguments: Any, **options: Any) -> None:
        assert self.may_answer.wait(10)
        super().submit(*arguments, **options)

    def apply(self, *arguments: Any, **options: Any) -> Any:
        assert self.may_answer.wait(10)
        return super().apply(*arguments, **options)


def validation() -> bytes:
    mutated = caller("flask").mutate(pod(gpu())).patched()
    mutated["metadata"]["uid"] = str(uuid.uuid4())
    return json.dumps(review(mutated)).encode()


def responder_on(ledgers: InMemoryLedgers, **options: Any) -> Responder:
    admission = Admission(AdmissionConfig(scheme=build_scheme(None, 256, None)), UniformQuotaSource())
    return Responder(admission, lambda *_: None, ledgers, Metrics(), 8.0, **options)


Hang = Callable[[Client], Any]


async def send_half(client: Client) -> None:
    await client.send(request(validation(), f"/validate/{CURRENT}?timeout=10s")[:-10])
    await run_loop_until(lambda: client.server_side._secret or client.server_side._current_request)


async def send_all(client: Client) -> None:
    await client.send(request(validation(), f"/validate/{CURRENT}?timeout=10s"))
    await run_loop_until(lambda: not client.server_side.is_idle)


@BOTH_PATHS
@pytest.mark.parametrize("send", [send_half, send_all])
def test_a_call_without_an_answer_is_reported(*, short_path: bool, send: Hang) -> None:
    """The API server closed the connection at its timeout, and has printed the path to a tenant."""

    async def run() -> None:
        paths, ledgers = caller_paths(), SlowLedgers()
        worker = new_worker(
            responder=responder_on(ledgers), paths=paths, settings=WebhookSettings(short_path=short_path)
        )
        async with connect_client(worker) as client:
            await send(client)
            assert paths.report().failed == ()
        assert paths.report().failed == (digest_of(CURRENT),)
        ledgers.may_answer.set()
        await run_loop_until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(run())


@BOTH_PATHS
def test_answered_calls_and_calls_by_other_paths_are_not_reported(*, short_path: bool) -> None:
    """Else anybody could have the secret replaced all the time."""

    async def run() -> None:
        paths = caller_paths()
        worker = new_worker(paths=paths, settings=WebhookSettings(short_path=short_path))
        async with connect_client(worker) as client:
            await client.send(request(BODY, f"/mutate/{CURRENT}?timeout=10s"))
            await client.read_answer()
            await run_loop_until(lambda: client.server_side.is_idle)
        for path in (f"/mutate/{UNKNOWN}", f"/mutate/{FORMER}"):
            async with connect_client(worker) as client:
                await client.send(request(BODY, path)[:-10])
        assert paths.report().failed == ()

    asyncio.run(run())


def test_a_report_contains_no_secret() -> None:
    paths = caller_paths()
    paths.record_failure()
    report = paths.report()
    assert report.accepted == tuple(sorted(map(digest_of, (CURRENT, NEXT, FORMER))))
    assert report.failed == (digest_of(CURRENT),)
    assert not any(secret in str(report) for secret in (CURRENT, NEXT, FORMER))
    paths.update(registered(NEXT, with_registered(RECORD, NEXT, {CURRENT}, NOW)))
    assert digest_of(NEXT) not in paths.report().failed


@BOTH_PATHS
@pytest.mark.parametrize(("secret", "is_named"), [(CURRENT, True), (FORMER, False)])
def test_only_known_callers_learn_names(*, short_path: bool, secret: str, is_named: bool) -> None:
    """A refusal names the largest holders; to others it gives numbers."""
    full = quota("types: {A100: {cores: 100}}")
    ledgers = InMemoryLedgers(lambda _: (full,))
    ledgers.apply("default", fill, 1.0)
    admission = Admission(AdmissionConfig(scheme=build_scheme(None, 256, None)), UniformQuotaSource(quotas=(full,)))
    responder = Responder(admission, lambda *_: None, ledgers, Metrics(), 8.0)

    async def run() -> bytes:
        settings = WebhookSettings(short_path=short_path)
        async with connect_client(new_worker(responder=responder, paths=caller_paths(), settings=settings)) as client:
            await client.send(request(validation(), f"/validate/{secret}?timeout=10s"))
            return (await client.read_answer())[1]

    answer = asyncio.run(run()).decode()
    assert "used 100, reserved 0, hard 100" in answer
    assert ("largest holders: Deployment/secret-project (100)" in answer) is is_named
    assert ("secret-project" in answer) is is_named


@pytest.mark.parametrize("is_known", [True, False])
def test_only_known_callers_learn_names_from_warnings_about_workloads(*, is_known: bool) -> None:
    full = quota("types: {A100: {cores: 100}}")
    ledgers = InMemoryLedgers(lambda _: (full,))
    ledgers.apply("default", fill, 1.0)
    admission = Admission(AdmissionConfig(scheme=build_scheme(None, 256, None)), UniformQuotaSource(quotas=(full,)))
    responder = Responder(admission, lambda *_: None, ledgers, Metrics(), 8.0)
    template = {"metadata": {"labels": {"a": "b"}}, "spec": pod(gpu())["spec"]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"replicas": 2, "template": template},
    }
    body = json.dumps(review(deployment)).encode()
    answer = responder.reply("validate", "application/json", "", body, is_known=is_known).body.decode()
    assert "hard 100" in answer or "short by" in answer
    assert ("secret-project" in answer) is is_known


def fill(ledger: Ledger) -> ChargeResult:
    ledger.set_state(LedgerState.OPEN, "uid")
    ledger.put(pack_uid(str(uuid.uuid4())), Charge("A100", 100, 0), None)
    ledger.set_holders([Holder("Deployment/secret-project", "A100", cores=100, pods=1, memory_mib=0)])
    return ChargeResult()


@pytest.mark.parametrize(
    ("address", "is_inside"),
    [
        ("10.0.0.15", True),
        ("::ffff:10.0.0.15", True),
        ("10.0.0.16", False),
        ("fd00::1", True),
        ("fe80::1%eth0", True),
        ("fd01::1", False),
        ("unknown", False),
    ],
)
def test_addresses_of_peers(*, address: str, is_inside: bool) -> None:
    assert is_in_networks(address, ("10.0.0.0/28", "fd00::/64", "fe80::/10")) is is_inside
