"""The ledger as a value: what is charged, once, and no more than there is."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.amounts import Amounts
from vcuda.charging import Charge, Demand, Holder
from vcuda.decision import Code
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.ledger import (
    MAX_BYTES,
    ChargeRequest,
    Ledger,
    LedgerState,
    PodKey,
    adjust_charge,
    decode_ledger,
    encode_ledger,
    mark_used,
    merge_newer_quotas,
    pack_uid,
    reconcile_quotas,
    reserve,
    unpack_uid,
)
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions
from vcuda.quota import parse_quota

A100, T4 = Charge("A100", 50, 1000), Charge("T4", 30, 500)


def pod() -> PodKey:
    return pack_uid(str(uuid.uuid4()))


def needs(cores: int, memory_mib: int = 0) -> Demand:
    return lambda _: Amounts({CORES: cores, MEMORY: memory_mib, PODS: 1})


def opened(text: str = "types: {A100: {cores: 100}, T4: {cores: 50}}") -> Ledger:
    ledger = Ledger("namespace-uid", LedgerState.OPEN)
    ledger.set_quotas([parse_quota(text, "team/q")], 1)
    return ledger


def claim(key: PodKey, cores: int = 50, *models: str, dry_run: bool = False) -> ChargeRequest:
    return ChargeRequest(key, needs(cores), PodOptions(models=models or ("A100",)), {}, dry_run)


def ask(ledger: Ledger, key: PodKey, cores: int = 50, *models: str) -> bool:
    """Reserve, and tell whether there was room."""
    return not reserve(ledger, claim(key, cores, *models), 1, Mode.ENFORCE).reasons


@given(st.uuids())
def test_a_uid_is_written_in_22_characters(uid: uuid.UUID) -> None:
    """And is the same again."""
    assert len(pack_uid(str(uid))) == 22
    assert unpack_uid(pack_uid(str(uid))) == str(uid)


@pytest.mark.parametrize("odd", ["", "pod-1", "705ab4f5-6393-11e8-b7cc"])
def test_what_is_no_uid_is_refused(odd: str) -> None:
    """The API server gives every pod one."""
    with pytest.raises(ValueError, match="is no uid"):
        pack_uid(odd)


@given(st.lists(st.tuples(st.uuids(), st.sampled_from([A100, T4]), st.none() | st.integers(0, 3)), max_size=30))
def test_a_ledger_is_read_as_it_was_written(entries: list[tuple[uuid.UUID, Charge, int | None]]) -> None:
    """Whatever was put in, changed and taken out before."""
    ledger = opened()
    ledger.set_holders([Holder("Job/x", "A100", 1, 2, 3)])
    for uid, charge, since in entries:
        ledger.put(pack_uid(str(uid)), charge, since)
    for uid, _, _ in entries[::3]:
        ledger.remove(pack_uid(str(uid)))
    again = decode_ledger(encode_ledger(ledger))
    assert again == ledger
    assert set(again.pods()) == set(ledger.pods())
    assert all(again.place(key) == ledger.place(key) for key in ledger.pods())
    assert again.usage.taken == ledger.usage.taken


@given(st.lists(st.tuples(st.sampled_from("pra"), st.integers(0, 5), st.sampled_from([A100, T4])), max_size=40))
def test_the_sums_are_those_of_the_entries(steps: list[tuple[str, int, Charge]]) -> None:
    """However they came about: `standing` is kept up incrementally while pods are reserved."""
    ledger, keys = opened("types: {A100: {cores: 1000}, T4: {cores: 1000}}"), [pod() for _ in range(6)]
    model: dict[PodKey, Charge] = {}
    for step, index, charge in steps:
        key = keys[index]
        if step == "p":
            ledger.put(key, charge, None)
            model[key] = charge
        elif step == "r":
            assert ledger.remove(key) == (model.pop(key, None) is not None)
        elif key not in model:
            ledger.reserve(key, charge, 7)
            model[key] = charge
        for name in ("A100", "T4"):
            expected = sum(each.cores for each in model.values() if each.model == name)
            assert ledger.usage.taken["team/q", name, CORES] == expected
    assert set(ledger.pods()) == set(model)


def test_a_uid_inside_two_others_is_not_mistaken_for_one() -> None:
    """Uids stand side by side without a mark between them."""
    first, second = "a" * 21 + "A", "A" + "a" * 20 + "Q"
    ledger = opened()
    for key in (first, "A" * 22, second):
        ledger.put(key, A100, None)
    ledger.remove("A" * 22)
    assert set(ledger.pods()) == {first, second} == set(decode_ledger(encode_ledger(ledger)).pods())


def test_a_pod_is_charged_once_however_often_it_asks() -> None:
    """The API server may ask again about the same pod."""
    ledger, key = opened(), pod()
    assert ask(ledger, key)
    assert ask(ledger, key)
    assert ledger.usage.taken["team/q", "A100", CORES] == 50
    mark_used(ledger, key)
    changes = ledger.changes
    assert ask(ledger, key)
    assert ledger.changes == changes, "nothing has to be written"
    assert ledger.place(key) == (Charge("A100", 50, 0), None)


def test_what_does_not_fit_changes_nothing() -> None:
    """And what fits exactly does fit."""
    ledger = opened()
    assert ask(ledger, pod(), 99)
    assert ask(ledger, pod(), 1)
    before = encode_ledger(ledger)
    assert not ask(ledger, pod(), 1)
    assert encode_ledger(ledger) == before


def test_a_dry_run_charges_nothing() -> None:
    """Granted or refused."""
    ledger = opened()
    before = encode_ledger(ledger)
    assert reserve(ledger, claim(pod(), dry_run=True), 1, Mode.ENFORCE).charge == Charge("A100", 50, 0)
    assert reserve(ledger, claim(pod(), 200, dry_run=True), 1, Mode.ENFORCE).reasons
    assert encode_ledger(ledger) == before


@pytest.mark.parametrize("state", [LedgerState.WANTED, LedgerState.CLOSED])
def test_nothing_is_charged_before_it_is_known_what_is_charged(state: LedgerState) -> None:
    """Refused for a while, or in audit let through without a charge."""
    ledger = opened()
    ledger.set_state(state, "u")
    changes = ledger.changes
    for verdict in (reserve(ledger, claim(pod()), 1, Mode.ENFORCE), adjust_charge(ledger, pod(), A100)):
        assert [reason.code for reason in verdict.reasons] == [Code.LEDGER_NOT_OPEN]
    audited = reserve(ledger, claim(pod()), 1, Mode.AUDIT)
    assert (audited.reasons, audited.charge) == ((), None)
    assert ledger.changes == changes


def test_audit_charges_and_tells() -> None:
    """Whether the quota says so or the cluster does."""
    for ledger, cluster_mode in (
        (opened("types: {A100: {cores: 10}}\nmode: audit"), Mode.ENFORCE),
        (opened("types: {A100: {cores: 10}}"), Mode.AUDIT),
    ):
        verdict = reserve(ledger, claim(pod()), 1, cluster_mode)
        assert verdict.reasons == ()
        assert [reason.code for reason in verdict.audited] == [Code.QUOTA_EXCEEDED]
        assert ledger.usage.taken["team/q", "A100", CORES] == 50
    strict = opened("types: {A100: {cores: 10}}\nmode: enforce")
    assert reserve(strict, claim(pod()), 1, Mode.AUDIT).reasons


def test_a_ledger_never_outgrows_its_configmap() -> None:
    """It refuses before, with the reason; and what it held can still be freed."""
    ledger = opened("types: {A100: {cores: 10000000}}")
    keys = []
    while ledger.size() <= MAX_BYTES:
        keys.append(pod())
        ledger.put(keys[-1], A100, None)
    assert len(encode_ledger(ledger)) < 1 << 20
    (reason,) = reserve(ledger, claim(pod()), 1, Mode.ENFORCE).reasons
    assert "no room for more" in reason.message
    assert adjust_charge(ledger, pod(), A100).reasons
    ledger.remove(keys[0])
    assert len(keys) > 30_000


def test_newer_quotas_are_taken_over_and_older_are_not() -> None:
    """So a replica that has not heard of a change cannot undo it."""
    ledger, newer = opened(), parse_quota("types: {A100: {cores: 1}}", "team/q")
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
    assert ledger.quotas == (newer,), "what was said between two equal quotas does not come back"
    reconcile_quotas(ledger, [newer], {"team/q": 12}, 12, lambda _: True)
    merge_newer_quotas(ledger, older, {"team/q": 11})
    assert ledger.quotas == (newer,)


def test_each_quota_is_as_new_as_it_is() -> None:
    """Who has heard of one change and not of another brings only the one; and brings nothing back that went."""
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


def test_the_controller_takes_away_only_what_is_gone() -> None:
    """What it has not heard of yet may be newer than what it knows; the default needs no proof."""
    default, own = parse_quota("types: {}", "configuration/defaultQuota"), parse_quota("types: {T4: {cores: 1}}", "a/q")
    ledger = Ledger("u", LedgerState.OPEN)
    ledger.set_quotas([default], 1)
    merge_newer_quotas(ledger, [own], {own.name: 40})
    assert ledger.quotas == (own,)
    reconcile_quotas(ledger, [default], {}, 30, lambda _: False)
    assert own in ledger.quotas
    reconcile_quotas(ledger, [default], {}, 60, lambda _: True)
    assert ledger.quotas == (default,)


SETTLED = {
    "turned": (A100, A100, None),
    "lowered": (Charge("A100", 50, 900), A100, None),
    "moved to a model with room": (Charge("T4", 50, 0), A100, None),
    "not moved to one without": (Charge("T4", 60, 0), A100, "types.T4.cores"),
    "obtained by a pod that had none": (A100, None, None),
    "not obtained without room": (Charge("A100", 101, 0), None, "types.A100.cores"),
    "raised as far as there is room": (Charge("A100", 100, 0), A100, None),
    "not raised beyond it": (Charge("A100", 101, 0), A100, "types.A100.cores"),
}


@pytest.mark.parametrize(("wanted", "before", "refused"), SETTLED.values(), ids=SETTLED.keys())
def test_a_charge_is_settled(wanted: Charge, before: Charge | None, refused: str | None) -> None:
    """Whoever binds a pod makes its charge what it will hold, or hears why not; what it held counts as free."""
    ledger, key = opened(), pod()
    if before is not None:
        ledger.put(key, before, 1)
    verdict = adjust_charge(ledger, key, wanted)
    if refused is None:
        assert verdict.charge == wanted
        assert ledger.place(key) == (wanted, None)
    else:
        assert refused in verdict.reasons[0].field
        assert ledger.place(key) == (None if before is None else (before, 1))


def test_lowering_works_in_a_namespace_that_is_over_its_quota() -> None:
    """And so does turning; only what grows needs room."""
    ledger, key = opened("types: {A100: {cores: 10, memory: 1Mi}}"), pod()
    ledger.put(key, A100, 1)
    assert adjust_charge(ledger, key, A100).reasons == ()
    assert adjust_charge(ledger, key, Charge("A100", 50, 10)).reasons == ()
    assert adjust_charge(ledger, key, Charge("A100", 51, 10)).reasons


@pytest.mark.parametrize("text", ["", "{}", '{"v":2,"namespace":"","state":"open"}', '{"v":1,"namespace":1}'])
def test_what_is_no_ledger_is_told(text: str) -> None:
    """A ValueError, and nothing else."""
    with pytest.raises(ValueError, match=r".+"):
        decode_ledger(text)


def test_a_ledger_that_charges_a_pod_twice_is_not_believed() -> None:
    """Somebody else wrote it."""
    ledger, key = opened(), pod()
    ledger.put(key, A100, None)
    twice = encode_ledger(ledger).replace(key, key + key)
    with pytest.raises(ValueError, match="charged twice"):
        decode_ledger(twice)
