"""`quotient what-if` against quotas: the same answers as admission in the cluster."""

from typing import Any

import pytest

from cluster.in_memory import InMemoryCluster
from cluster.objects import CONFIG_MAPS, NAMESPACES, ConfigMap
from console.cluster_snapshot import read_cluster_objects
from settings.configuration import Configuration
from tests.console.dumps import JSON, T4, answer, manifest, node, quota, running
from tests.scheduler.world import NAMES
from vcuda.decoding import convert
from vcuda.ledger import Ledger, LedgerState, encode_ledger
from vcuda.names import DEFAULT_SYSTEM_NAMESPACE, LEDGER_KEY, LEDGER_LABEL, LEDGER_PREFIX
from vcuda.quota import parse_quota

TIGHT = "types: {T4: {cores: 10}}"
INVALID = "types: {T4: {cores: -1}}"


@pytest.mark.parametrize(
    ("text", "configuration"),
    [(f"{TIGHT}\nmode: audit", ""), (TIGHT, "mode: audit")],
    ids=["of the quota", "of the configuration"],
)
def test_a_quota_in_audit_mode_refuses_nothing_and_says_so(
    ask: Any, configured: Any, text: str, configuration: str
) -> None:
    result = ask(manifest(60), T4, quota(text), options=JSON, config=configured(configuration))
    assert result.exit_code == 0, result.output
    assert "audit mode: the quota would refuse it" in answer(result)["notes"][0]


def test_a_quota_that_enforces_does_so_in_a_cluster_that_audits(ask: Any, configured: Any) -> None:
    result = ask(manifest(60), T4, quota(f"{TIGHT}\nmode: enforce"), options=JSON, config=configured("mode: audit"))
    assert answer(result)["missing"] == "quota"


@pytest.mark.parametrize(
    ("objects", "possible"),
    [
        ([], False),
        ([quota(TIGHT, "other")], False),
        ([quota("types: {T4: {cores: 100}}")], True),
        ([quota(INVALID)], False),
    ],
    ids=["no quota", "of another namespace", "its own quota", "only an invalid one"],
)
def test_the_default_quota_applies_to_namespaces_without_one(
    ask: Any, configured: Any, objects: list[dict[str, Any]], *, possible: bool
) -> None:
    config = configured(f'defaultQuota: "{TIGHT}"')
    assert answer(ask(manifest(60), T4, *objects, options=JSON, config=config))["possible"] is possible


def test_pods_of_a_namespace_without_a_quota_are_charged_to_the_default(ask: Any, configured: Any) -> None:
    config = configured('defaultQuota: "types: {T4: {cores: 100}}"')
    found = answer(ask(manifest(60), node("t", "T4", 4), running("p", "t", 50), options=JSON, config=config))
    assert "used 50" in found["message"]


def test_the_core_limit_of_the_namespace_counts(ask: Any) -> None:
    """As `quotient admit` decides."""
    policy = "types: {T4: {cores: 150}}\ncoreLimit: {default: request, max: 60}"
    result = ask(manifest(50, annotations={"vcuda-core-limit": "100"}), T4, quota(policy), options=JSON)
    assert result.exit_code == 1
    assert "exceeds 60, the maximum core limit in this namespace's quota" in answer(result)["message"]


@pytest.mark.parametrize(("cores", "possible"), [(50, False), (100, True)], ids=["a share", "a whole card"])
def test_the_isolation_that_the_namespace_requires_counts(ask: Any, cores: int, *, possible: bool) -> None:
    result = ask(manifest(cores), T4, quota("types: {T4: {cores: 150}}\nminIsolation: preload"), options=JSON)
    found = answer(result)
    assert found["possible"] is possible
    assert possible or (found["missing"], found["message"][-41:]) == (
        "isolation",
        "with isolation memory=preload or stronger",
    )


def test_an_invalid_quota_of_another_namespace_changes_no_answer(ask: Any) -> None:
    """One tenant must not be able to keep all others from an answer."""
    result = ask(manifest(50), T4, quota(), quota(INVALID, "other"), options=JSON)
    assert result.exit_code == 0, result.output
    assert "warning: the quota other/q is invalid, and it does not count: other/q: types.T4.cores: -1" in result.stderr


def test_many_invalid_quotas_do_not_hide_the_answer(ask: Any) -> None:
    result = ask(manifest(50), T4, *(quota(INVALID, f"other-{number}") for number in range(30)))
    assert result.exit_code == 0
    assert "warning: and 22 more" in result.stderr
    assert len(result.stderr.splitlines()) == 9


def test_a_quota_cannot_send_control_characters_to_a_terminal(ask: Any) -> None:
    result = ask(manifest(50), T4, quota('"\\e]0;evil": 1', "other"))
    assert "warning: the quota other/q is invalid" in result.stderr
    assert "\x1b" not in result.stderr


def ledger(namespace: str, text: str, within: str = DEFAULT_SYSTEM_NAMESPACE) -> dict[str, Any]:
    kept = Ledger("uid", LedgerState.OPEN)
    kept.set_quotas([parse_quota(text, f"{namespace}/q")], 1)
    metadata = {"name": LEDGER_PREFIX + namespace, "namespace": within, "labels": {LEDGER_LABEL: "true"}}
    return {"kind": "ConfigMap", "metadata": metadata, "data": {LEDGER_KEY: encode_ledger(kept)}}


def test_the_last_valid_version_of_a_quota_counts_where_its_ledger_is_known(ask: Any) -> None:
    result = ask(manifest(60), T4, quota(INVALID), ledger("team", TIGHT), options=JSON)
    assert answer(result)["missing"] == "quota"
    assert "the quota team/q is invalid, and its last valid version counts" in result.stderr


@pytest.mark.parametrize(("text", "is_read"), [(INVALID, True), (TIGHT, False)], ids=["invalid", "valid"])
def test_ledgers_of_a_cluster_are_read_only_for_an_invalid_quota(
    monkeypatch: pytest.MonkeyPatch, text: str, *, is_read: bool
) -> None:
    """They are large."""
    cluster = InMemoryCluster()
    for document in (quota(text), ledger("team", TIGHT)):
        cluster.create(NAMESPACES, {"metadata": {"name": document["metadata"]["namespace"]}})
        cluster.create(CONFIG_MAPS, convert({key: document[key] for key in ("metadata", "data")}, ConfigMap))
    monkeypatch.setattr("console.cluster_snapshot.connect_cluster", lambda _: cluster)
    names = [document["metadata"]["name"] for _, document in read_cluster_objects(Configuration())]
    assert ("ledger.team" in names) is is_read
    assert "q" in names


def test_only_quotients_own_namespace_has_ledgers(ask: Any) -> None:
    assert ask(manifest(60), T4, quota(INVALID), ledger("team", TIGHT, "evil")).exit_code == 0


@pytest.mark.parametrize("text", [TIGHT, "disk: 10Gi"], ids=["a draft", "of another program"])
def test_config_maps_without_the_label_are_no_quotas(ask: Any, text: str) -> None:
    draft = quota(text)
    draft["metadata"]["labels"] = {}
    result = ask(manifest(60), T4, draft)
    assert (result.exit_code, result.stderr) == (0, "")


MALFORMED = {
    "metadata is a list": {"kind": "ConfigMap", "metadata": [1]},
    "labels are a list": {"kind": "ConfigMap", "metadata": {"name": "q", "labels": [1]}},
    "data is a list": {"kind": "ConfigMap", "metadata": {"name": "x"}, "data": [1]},
    "what was learned is a list": {
        "kind": "ConfigMap",
        "metadata": {"name": "gpu-workload", "namespace": DEFAULT_SYSTEM_NAMESPACE},
        "data": [1],
    },
    "a ledger is not valid": {
        "kind": "ConfigMap",
        "metadata": {"name": "ledger.x", "namespace": DEFAULT_SYSTEM_NAMESPACE, "labels": {LEDGER_LABEL: "true"}},
        "data": {LEDGER_KEY: "{"},
    },
    "the data of a quota is a list": {**quota(namespace="other"), "data": [1]},
    "a quota has no key": {**quota(namespace="other"), "data": {}},
}


@pytest.mark.parametrize("document", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_config_map_changes_no_answer(ask: Any, document: dict[str, Any]) -> None:
    result = ask(manifest(50), T4, quota(INVALID, "third"), document)
    assert result.exit_code == 0, result.output


def test_the_quota_of_a_legacy_config_map_counts(ask: Any) -> None:
    legacy = {
        "kind": "ConfigMap",
        "metadata": {"name": "gpuquota", "namespace": "kube-system"},
        "data": {"gpu_quota": '{"team": {"quota": {"A100": 4}}}'},
    }
    assert answer(ask(manifest(50), T4, legacy, options=JSON))["missing"] == "quota"


def test_an_object_that_is_in_two_dumps_counts_once(ask: Any) -> None:
    pod = running("p", "t", 50)
    found = answer(ask(manifest(50), T4, T4, pod, pod, quota(), quota(), options=JSON))
    assert found["possible"]


def test_pods_of_quotients_own_namespace_are_not_charged(ask: Any, configured: Any) -> None:
    config = configured(f'defaultQuota: "{TIGHT}"')
    asked = manifest(60, namespace=DEFAULT_SYSTEM_NAMESPACE)
    assert answer(ask(asked, T4, options=JSON, config=config))["possible"]


def test_names_of_labels_are_those_of_every_domain(ask: Any) -> None:
    labelled = quota(TIGHT)
    labelled["metadata"]["labels"] = {NAMES.quota_label.replace(NAMES.domain, "tencent.com"): "true"}
    assert answer(ask(manifest(60), T4, labelled, options=JSON))["missing"] == "quota"
