"""The ledger as a value: each pod is charged once, and never more than the quotas allow."""

import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.vcuda.demands import fixed
from vcuda.charge_moves import extend_charge
from vcuda.decision import Code
from vcuda.dimensions import CORES
from vcuda.ledger import (
    MAX_BYTES,
    ChargeRequest,
    Ledger,
    LedgerState,
    PodKey,
    decode_ledger,
    encode_ledger,
    mark_used,
    pack_uid,
    reservations_in,
    reserve,
    unpack_uid,
)
from vcuda.ledger_quotas import merge_newer_quotas, reconcile_quotas
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions
from vcuda.quota import parse_quota
from vcuda.quota_usage import Charge, Holder

A100, T4 = Charge("A100", 50, 1000), Charge("T4", 30, 500)


def pod() -> PodKey:
    return pack_uid(str(uuid.uuid4()))


def open_ledger(text: str = "types: {A100: {cores: 100}, T4: {cores: 50}}") -> Ledger:
    ledger = Ledger("namespace-uid", LedgerState.OPEN)
    ledger.set_quotas([parse_quota(text, "team/q")], 1)
    return ledger


def request_for(key: PodKey, cores: int = 50, *models: str, dry_run: bool = False) -> ChargeRequest:
    return ChargeRequest(key, fixed(cores), PodOptions(models=models or ("A100",)), {}, dry_run)


def is_reserved(ledger: Ledger, key: PodKey, cores: int = 50, *models: str) -> bool:
    """Reserve, and return whether it was granted."""
    return not reserve(ledger, request_for(key, cores, *models), 1, Mode.ENFORCE).reasons


@given(st.uuids())
def test_a_uid_takes_22_characters(uid: uuid.UUID) -> None:
    assert len(pack_uid(str(uid))) == 22
    assert unpack_uid(pack_uid(str(uid))) == str(uid)


@pytest.mark.parametrize("odd", ["", "pod-1", "705ab4f5-6393-11e8-b7cc"])
def test_a_text_that_is_no_uid_is_refused(odd: str) -> None:
    with pytest.raises(ValueError, match="is not the UID of a pod"):
        pack_uid(odd)


def test_the_stored_form_does_not_change() -> None:
    """Ledgers outlive upgrades: an older or newer release reads what this one has written."""
    used, reserved = (pack_uid(f"705ab4f5-6393-11e8-b7cc-42010a80000{number}") for number in (1, 2))
    ledger = Ledger("8a3d", LedgerState.OPEN)
    quota = parse_quota("types: {A100: {cores: 400, memory: 1Gi}}\npools: [training]\nmode: audit", "team/q")
    ledger.set_quotas([quota], 4711, {"team/q": 4700})
    ledger.set_holders([Holder("Job/train", "A100", cores=50, pods=1, memory_mib=7680)])
    ledger.put(used, Charge("A100", 50, 7680), None)
    ledger.reserve(reserved, Charge("A100", 50, 7680), 1700000000, "train-0")
    charge = {"model": "A100", "cores": 50, "memoryMiB": 7680}
    expected = {
        "v": 1,
        "namespace": "8a3d",
        "state": "open",
        "quotasAt": 4711,
        "quotas": [
            {
                "name": "team/q",
                "types": {"A100": {"cores": 400, "memory": 1024}},
                "unlisted": "deny",
                "untyped": "float",
                "policy": {"pools": ["training"], "core_limit": {"default": None, "max": 100}, "mode": "audit"},
            }
        ],
        "versions": {"team/q": 4700},
        "groups": [
            {"charge": charge, "pods": "cFq09WOTEei3zEIBCoAAAQ"},
            {"charge": charge, "pods": "cFq09WOTEei3zEIBCoAAAg", "since": 1700000000},
        ],
        "holders": [{"name": "Job/train", "model": "A100", "cores": 50, "pods": 1, "memoryMiB": 7680}],
        "names": {"cFq09WOTEei3zEIBCoAAAg": "train-0"},
    }
    assert encode_ledger(ledger) == json.dumps(expected, separators=(",", ":"))
    assert [str(state) for state in LedgerState] == ["wanted", "closed", "open"]
    assert encode_ledger(Ledger()) == '{"v":1,"namespace":"","state":"wanted"}'


def test_a_name_is_kept_as_long_as_its_pod_is_reserved() -> None:
    """Over copies and writes; not for a pod that exists or is released."""
    ledger, (kept, used, released) = open_ledger(), (pod(), pod(), pod())
    for key, name in ((kept, "kept"), (used, "used"), (released, "released")):
        ledger.reserve(key, A100, 1, name)
    mark_used(ledger, used)
    ledger.release(released)
    for each in (ledger, ledger.copy(), decode_ledger(encode_ledger(ledger))):
        assert each.reserved_names() == {kept: "kept"}
        assert each.size() == ledger.size()
    ledger.release(kept)
    assert '"names"' not in encode_ledger(ledger)


@pytest.mark.parametrize("name", ["", "x" * 254, 'quo"te', "ünïcode", "new\nline", "..", "a/b"])
def test_a_text_that_no_pod_can_have_as_its_name_is_not_recorded(name: str) -> None:
    """It comes from a review, which may be forged."""
    ledger = open_ledger()
    ledger.reserve(pod(), A100, 1, name)
    assert not ledger.reserved_names()


@given(st.lists(st.tuples(st.uuids(), st.sampled_from([A100, T4]), st.none() | st.integers(0, 3)), max_size=30))
def test_a_ledger_is_read_as_it_was_written(entries: list[tuple[uuid.UUID, Charge, int | None]]) -> None:
    """Whatever was put in, changed and released before."""
    ledger = open_ledger()
    ledger.set_holders([Holder("Job/x", "A100", 1, 2, 3)])
    for uid, charge, since in entries:
        ledger.put(pack_uid(str(uid)), charge, since)
    for uid, _, _ in entries[::3]:
        ledger.release(pack_uid(str(uid)))
    again = decode_ledger(encode_ledger(ledger))
    assert again == ledger
    assert set(again.pods()) == set(ledger.pods())
    assert all(again.entry(key) == ledger.entry(key) for key in ledger.pods())
    assert again.usage.taken == ledger.usage.taken
    assert set(reservations_in(encode_ledger(ledger))) == set(ledger.reservations())


@given(st.lists(st.tuples(st.sampled_from("pra"), st.integers(0, 5), st.sampled_from([A100, T4])), max_size=40))
def test_usage_is_the_sum_of_the_entries(steps: list[tuple[str, int, Charge]]) -> None:
    """Also while pods are reserved, when it is not computed again but added to."""
    ledger, keys = open_ledger("types: {A100: {cores: 1000}, T4: {cores: 1000}}"), [pod() for _ in range(6)]
    expected: dict[PodKey, Charge] = {}
    for step, index, charge in steps:
        key = keys[index]
        if step == "p":
            ledger.put(key, charge, None)
            expected[key] = charge
        elif step == "r":
            assert ledger.release(key) == (expected.pop(key, None) is not None)
        elif key not in expected:
            ledger.reserve(key, charge, 7)
            expected[key] = charge
        for name in ("A100", "T4"):
            cores = sum(each.cores for each in expected.values() if each.model == name)
            assert ledger.usage.taken["team/q", name, CORES] == cores
    assert set(ledger.pods()) == set(expected)


def test_the_end_of_one_key_and_the_beginning_of_the_next_are_not_taken_for_a_key() -> None:
    """The keys of a group have no separator."""
    first, second = "a" * 21 + "A", "A" + "a" * 20 + "Q"
    ledger = open_ledger()
    for key in (first, "A" * 22, second):
        ledger.put(key, A100, None)
    ledger.release("A" * 22)
    assert set(ledger.pods()) == {first, second} == set(decode_ledger(encode_ledger(ledger)).pods())


def test_a_pod_is_charged_once_however_often_it_is_reserved() -> None:
    """The API server may call the webhook several times for the same pod."""
    ledger, key = open_ledger(), pod()
    assert is_reserved(ledger, key)
    assert is_reserved(ledger, key)
    assert ledger.usage.taken["team/q", "A100", CORES] == 50
    mark_used(ledger, key)
    changes = ledger.changes
    assert is_reserved(ledger, key)
    assert ledger.changes == changes, "nothing has to be written"
    assert ledger.entry(key) == (Charge("A100", 50, 0), None)


def test_a_refused_pod_changes_nothing() -> None:
    """And a pod that fits exactly is granted."""
    ledger = open_ledger()
    assert is_reserved(ledger, pod(), 99)
    assert is_reserved(ledger, pod(), 1)
    before = encode_ledger(ledger)
    assert not is_reserved(ledger, pod(), 1)
    assert encode_ledger(ledger) == before


def test_a_dry_run_charges_nothing() -> None:
    """Granted or refused."""
    ledger = open_ledger()
    before = encode_ledger(ledger)
    assert reserve(ledger, request_for(pod(), dry_run=True), 1, Mode.ENFORCE).charge == Charge("A100", 50, 0)
    assert reserve(ledger, request_for(pod(), 200, dry_run=True), 1, Mode.ENFORCE).reasons
    assert encode_ledger(ledger) == before


NOT_OPEN = {LedgerState.REQUESTED: "this namespace has no ledger yet", LedgerState.REBUILDING: "is being rebuilt"}


@pytest.mark.parametrize(("state", "message"), NOT_OPEN.items(), ids=NOT_OPEN.keys())
def test_nothing_is_charged_before_all_charges_are_known(state: LedgerState, message: str) -> None:
    """Refused for now, or admitted without a charge in audit mode."""
    ledger = open_ledger()
    ledger.set_state(state, "u")
    changes = ledger.changes
    for result in (reserve(ledger, request_for(pod()), 1, Mode.ENFORCE), extend_charge(ledger, pod(), A100, 1)):
        assert [reason.code for reason in result.reasons] == [Code.LEDGER_NOT_OPEN]
        assert message in result.reasons[0].message
    audited = reserve(ledger, request_for(pod()), 1, Mode.AUDIT)
    assert (audited.reasons, audited.charge) == ((), None)
    assert ledger.changes == changes


def test_audit_mode_charges_and_reports() -> None:
    """Whether it is set in the quota or for the cluster."""
    for ledger, cluster_mode in (
        (open_ledger("types: {A100: {cores: 10}}\nmode: audit"), Mode.ENFORCE),
        (open_ledger("types: {A100: {cores: 10}}"), Mode.AUDIT),
    ):
        result = reserve(ledger, request_for(pod()), 1, cluster_mode)
        assert result.reasons == ()
        assert [reason.code for reason in result.audited] == [Code.QUOTA_EXCEEDED]
        assert ledger.usage.taken["team/q", "A100", CORES] == 50
    strict = open_ledger("types: {A100: {cores: 10}}\nmode: enforce")
    assert reserve(strict, request_for(pod()), 1, Mode.AUDIT).reasons


def test_a_ledger_never_outgrows_its_configmap() -> None:
    """It refuses before, and its charges can still be released."""
    ledger = open_ledger("types: {A100: {cores: 10000000}}")
    keys = []
    while ledger.size() <= MAX_BYTES:
        keys.append(pod())
        ledger.put(keys[-1], A100, None)
    assert len(encode_ledger(ledger)) < 1 << 20
    (reason,) = reserve(ledger, request_for(pod()), 1, Mode.ENFORCE).reasons
    assert f"is full with {len(keys)} pods" in reason.message
    assert extend_charge(ledger, pod(), A100, 1).reasons
    ledger.release(keys[0])
    assert len(keys) > 30_000


def test_a_ledger_of_reservations_with_long_names_stays_within_its_configmap_too() -> None:
    ledger = open_ledger("types: {A100: {cores: 10000000}}")
    while ledger.size() <= MAX_BYTES:
        ledger.reserve(pod(), A100, 1, "x" * 253)
    assert len(encode_ledger(ledger)) <= ledger.size() < 1 << 20
    assert len(ledger) > 2_500


def test_newer_quotas_replace_older_ones_and_not_the_other_way_round() -> None:
    """A replica with an old cache cannot undo a change."""
    ledger, newer = open_ledger(), parse_quota("types: {A100: {cores: 1}}", "team/q")
    older = ledger.quotas
    merge_newer_quotas(ledger, [newer], {"team/q": 5})
    assert ledger.quotas == (newer,)
    merge_newer_quotas(ledger, older, {"team/q": 4})
    assert ledger.quotas == (newer,)
    changes = ledger.changes
    merge_newer_quotas(ledger, [newer], {"team/q": 5})
    assert ledger.changes == changes
    merge_newer_quotas(ledger, [newer], {"team/q": 9})
    merge_newer_quotas(ledger, older, {"team/q": 7})
    assert ledger.quotas == (newer,), "a version between two equal quotas does not come back"
    reconcile_quotas(ledger, [newer], {"team/q": 12}, 12, lambda _: True)
    merge_newer_quotas(ledger, older, {"team/q": 11})
    assert ledger.quotas == (newer,)


def test_each_quota_has_a_version_of_its_own() -> None:
    """A replica that has seen one change and not another merges only the one, and adds no removed quota again."""
    one, lowered, other = (
        parse_quota(text, name)
        for text, name in (
            ("types: {A100: {cores: 400}}", "kube-system/gpuquota"),
            ("types: {A100: {cores: 100}}", "kube-system/gpuquota"),
            ("types: {T4: {cores: 1}}", "team/q"),
        )
    )
    ledger = Ledger("u", LedgerState.OPEN)
    ledger.set_quotas([lowered], 35, {lowered.name: 35})
    merge_newer_quotas(ledger, [one, other], {one.name: 30, other.name: 40})
    assert list(ledger.quotas) == [lowered, other]
    reconcile_quotas(ledger, [other], {other.name: 40}, 50, lambda _: True)
    assert list(ledger.quotas) == [other]
    merge_newer_quotas(ledger, [one, other], {one.name: 30, other.name: 40})
    assert list(ledger.quotas) == [other]


def test_reconciling_removes_only_quotas_that_are_confirmed_to_be_gone() -> None:
    """A quota that the cache does not have may be newer than the cache; the default needs no confirmation."""
    default = parse_quota("unlisted: allow", "configuration/defaultQuota")
    own = parse_quota("types: {T4: {cores: 1}}", "a/q")
    ledger = Ledger("u", LedgerState.OPEN)
    ledger.set_quotas([default], 1)
    merge_newer_quotas(ledger, [own], {own.name: 40})
    assert ledger.quotas == (own,)
    reconcile_quotas(ledger, [default], {}, 30, lambda _: False)
    assert own in ledger.quotas
    reconcile_quotas(ledger, [default], {}, 60, lambda _: True)
    assert ledger.quotas == (default,)


@pytest.mark.parametrize("text", ["", "{}", '{"v":2,"namespace":"","state":"open"}', '{"v":1,"namespace":1}'])
def test_an_unreadable_ledger_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_ledger(text)
    assert list(reservations_in(text)) == []


def test_a_ledger_that_charges_a_pod_twice_is_rejected() -> None:
    """Quotient never writes one."""
    ledger, key = open_ledger(), pod()
    ledger.put(key, A100, None)
    twice = encode_ledger(ledger).replace(key, key + key)
    with pytest.raises(ValueError, match="charged twice"):
        decode_ledger(twice)
    with pytest.raises(ValueError, match="truncated"):
        decode_ledger(encode_ledger(ledger).replace(key, key[:-1]))


def test_the_size_of_a_ledger_is_that_of_its_charges() -> None:
    """It is counted as charges come and go, and as they are read."""
    ledger = open_ledger("types: {A100: {cores: 10000000}}")
    empty = ledger.size()
    keys = [pod() for _ in range(20)]
    for number, key in enumerate(keys):
        ledger.put(key, replace(A100, cores=number % 7, moved_from=A100 if number % 2 else None), None)
    assert decode_ledger(encode_ledger(ledger)).size() == ledger.copy().size() == ledger.size()
    assert ledger.size() >= len(encode_ledger(ledger))
    for key in keys:
        ledger.release(key)
    assert ledger.size() == empty


def test_a_full_ledger_names_what_fills_it() -> None:
    """Quotas fill it as well as pods do."""
    ledger = Ledger("u", LedgerState.OPEN)
    lines = "".join(f"  A{number}{'X' * 50}: {{cores: 1, memory: 1Gi, pods: 1}}\n" for number in range(256))
    ledger.set_quotas([parse_quota(f"types:\n{lines}", f"team/q{number}") for number in range(40)], 1)
    (reason,) = reserve(ledger, request_for(pod()), 1, Mode.ENFORCE).reasons
    assert reason.code is Code.QUOTA_EXCEEDED
    assert f"{ledger.quotas_size()} bytes of quotas" in reason.message
    assert "shorten the quotas" in reason.remedy
