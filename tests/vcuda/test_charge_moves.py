"""Charges of pods that are being bound: extended as far as the quota allows, and never lost by a failed binding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.vcuda.test_ledger import A100, T4, open_ledger, pod
from vcuda.charge_moves import extend_charge, is_covered, move_problems, revert_charge
from vcuda.decision import Code
from vcuda.dimensions import CORES
from vcuda.ledger import Ledger, decode_ledger, encode_ledger
from vcuda.ledger_snapshot import decode_snapshot
from vcuda.namespace_policy import Mode
from vcuda.quota_usage import Charge

EXTENDED = {
    "moved to a model whose quota suffices": (Charge("T4", 50, 0), A100, None),
    "not moved to one whose quota does not": (Charge("T4", 60, 0), A100, "types.T4.cores"),
    "not moved to one that the quota does not grant": (Charge("V100", 10, 0), A100, "use-gputype"),
    "added for a pod without a charge": (A100, None, None),
    "not added beyond the quota": (Charge("A100", 101, 0), None, "types.A100.cores"),
    "raised up to the quota": (Charge("A100", 100, 0), A100, None),
    "not raised beyond the quota": (Charge("A100", 101, 0), A100, "types.A100.cores"),
}


@pytest.mark.parametrize(("wanted", "before", "refused"), EXTENDED.values(), ids=EXTENDED)
def test_a_charge_is_extended_as_far_as_the_quota_allows(
    wanted: Charge, before: Charge | None, refused: str | None
) -> None:
    ledger, key = open_ledger(), pod()
    if before is not None:
        ledger.put(key, before, 1)
    result = extend_charge(ledger, key, wanted, 1)
    if refused is None:
        assert result.charge == wanted
        entry = ledger.entry(key)
        assert entry is not None
        assert (entry[0].model, entry[0].moved_from, entry[1]) == (wanted.model, before, 1)
    else:
        assert result.reasons
        assert ledger.entry(key) == (None if before is None else (before, 1))


COVERED = {
    "the same charge": (A100, True),
    "less of the same model": (Charge("A100-SXM4-40GB", 50, 900), True),
    "more": (Charge("A100", 51, 0), False),
    "another model": (Charge("T4", 10, 0), False),
}


@pytest.mark.parametrize(("wanted", "covered"), COVERED.values(), ids=COVERED)
def test_a_charge_that_covers_the_placement_is_not_written_again(wanted: Charge, *, covered: bool) -> None:
    """The ledger is written once when a pod is created, and not again when it is bound."""
    ledger, key = open_ledger("types: {A100: {cores: 100, memory: 1Ti}, T4: {cores: 50}}"), pod()
    ledger.put(key, A100, None)
    assert is_covered(ledger.usage, A100, wanted) is covered
    changes = ledger.changes
    extend_charge(ledger, key, wanted, 1)
    assert (ledger.changes == changes) is covered


def test_a_moved_charge_holds_both_models_until_its_binding_is_known() -> None:
    """Otherwise another pod could take the room of either, and one of the two could not run."""
    ledger, key = open_ledger(), pod()
    ledger.put(key, A100, None)
    extend_charge(ledger, key, T4, 1)
    taken = ledger.usage.taken
    assert (taken["team/q", "A100", CORES], taken["team/q", "T4", CORES]) == (50, 30)


def test_a_moved_charge_counts_once_against_a_common_limit() -> None:
    """A namespace whose limit over all models is full can still move its pods."""
    ledger, key = open_ledger('types: {"*": {cores: 50}}\nunlisted: allow'), pod()
    ledger.put(key, A100, None)
    assert not extend_charge(ledger, key, T4, 1).reasons
    assert ledger.usage.taken["team/q", "*", CORES] == 50


def test_a_failed_binding_gives_back_the_charge_that_the_pod_was_admitted_with() -> None:
    ledger, key = open_ledger("types: {A100: {cores: 100}, T4: {cores: 50}, V100: {cores: 50}}"), pod()
    ledger.put(key, A100, None)
    extend_charge(ledger, key, T4, 1)
    assert extend_charge(ledger, key, Charge("V100", 50, 0), 1).reasons, "it is being moved by another replica"
    assert revert_charge(ledger, key, Charge("V100", 50, 0)).charge == replace(T4, moved_from=A100), "not ours"
    assert revert_charge(ledger, key, T4).charge == A100
    assert ledger.entry(key) == (A100, None)
    assert revert_charge(ledger, key, T4).charge == A100


def test_a_pod_keeps_its_charge_in_a_namespace_that_exceeds_its_quota() -> None:
    """Only a charge that grows is checked."""
    ledger, key = open_ledger("types: {A100: {cores: 10, memory: 1Mi}}"), pod()
    ledger.put(key, A100, 1)
    assert extend_charge(ledger, key, A100, 1).reasons == ()
    assert extend_charge(ledger, key, Charge("A100", 51, 10), 1).reasons


def test_audit_mode_moves_beyond_the_quota() -> None:
    ledger, key = open_ledger(), pod()
    ledger.put(key, A100, None)
    result = extend_charge(ledger, key, Charge("T4", 60, 0), 1, Mode.AUDIT)
    assert (result.reasons, result.audited[0].code) == ((), Code.QUOTA_EXCEEDED)


CHARGES = st.builds(Charge, st.sampled_from(["A100", "T4"]), st.integers(1, 60), st.just(0))


@given(st.lists(st.tuples(CHARGES, CHARGES, st.booleans()), max_size=6))
def test_moves_never_exceed_the_quota(moves: list[tuple[Charge, Charge, bool]]) -> None:
    """Whatever is granted, of all models together, and whether bindings fail."""
    ledger = open_ledger('types: {A100: {cores: 100}, T4: {cores: 50}, "*": {cores: 120}}')
    for first, second, fails in moves:
        key = pod()
        if extend_charge(ledger, key, first, 1).reasons:
            continue
        granted = not move_problems(ledger.usage, first, second)
        assert bool(extend_charge(ledger, key, second, 1).reasons) is not granted
        if fails:
            revert_charge(ledger, key, second)
        assert not ledger.usage.hard.exceeded(ledger.usage.taken)
        assert decode_ledger(encode_ledger(ledger)).usage.taken == ledger.usage.taken


def test_a_snapshot_says_what_each_pod_is_charged() -> None:
    ledger: Ledger = open_ledger()
    keys = [pod() for _ in range(50)]
    for number, key in enumerate(keys):
        ledger.put(key, A100 if number % 2 else T4, number if number % 3 else None)
    snapshot = decode_snapshot(encode_ledger(ledger))
    assert [snapshot.charge(key) for key in keys] == [ledger.charge(key) for key in keys]
    assert snapshot.charge(pod()) is None
    # Keys that overlap the end of one pod and the beginning of the next are no pods.
    joined = "".join(keys)
    assert snapshot.charge(joined[3:25]) is None
    assert snapshot.usage.taken == ledger.usage.taken
    assert snapshot.is_open
    assert snapshot.policy == ledger.policy


@pytest.mark.parametrize("text", ["", "{}", '{"v":2,"namespace":"","state":"open"}'])
def test_a_snapshot_of_an_unreadable_ledger_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_snapshot(text)
