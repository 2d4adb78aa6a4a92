"""The quota algebra: laws that hold for all amounts and ceilings."""

from hypothesis import given
from hypothesis import strategies as st

from vcuda.amounts import Amounts, Ceiling

KEYS = st.sampled_from(["A100/cores", "A100/memory", "T4/cores", "*/pods"])
amounts = st.dictionaries(KEYS, st.integers(-1000, 1000)).map(Amounts)
usages = st.dictionaries(KEYS, st.integers(0, 1000)).map(Amounts)
ceilings = st.dictionaries(KEYS, st.integers(0, 1000)).map(Ceiling)
NOTHING = Amounts()


@given(amounts, amounts, amounts)
def test_amounts_are_a_group_under_addition(a: Amounts, b: Amounts, c: Amounts) -> None:
    """Order and grouping of charges do not matter, and what was added can be taken away."""
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + NOTHING == a
    assert (a + b) - b == a
    assert a - a == NOTHING


@given(amounts, amounts)
def test_largest_and_smallest_bound_both(a: Amounts, b: Amounts) -> None:
    """`|` is the least above both, `&` the greatest below both."""
    assert a <= a | b
    assert a & b <= b
    assert (a | b) + (a & b) == a + b
    assert a | a == a == a & a


@given(amounts, amounts)
def test_order_is_antisymmetric_and_kept_by_addition(a: Amounts, b: Amounts) -> None:
    """Less-or-equal both ways is equality."""
    assert (a <= b <= a) == (a == b)
    assert (a <= b) == (a - b <= NOTHING)


@given(st.dictionaries(KEYS, st.integers(-3, 3)))
def test_zero_and_absent_are_the_same(of: dict[str, int]) -> None:
    """Equality and hash see amounts, not how they were written."""
    assert Amounts(of) == Amounts({key: of[key] for key in of if of[key]})
    assert hash(Amounts(of)) == hash(Amounts({key: of[key] for key in of if of[key]}))
    assert 0 not in Amounts(of).values()


@given(amounts, st.sets(KEYS))
def test_masks_split_amounts(a: Amounts, keys: set[str]) -> None:
    """What a mask keeps and what it drops make the whole."""
    assert a.masked(keys) + a.masked(set(a) - keys) == a
    assert set(a.masked(keys)) <= keys


@given(amounts)
def test_floor_drops_exactly_what_is_negative(a: Amounts) -> None:
    """Negative amounts are named and can be dropped."""
    assert a.floored() == a.masked(set(a) - a.negative())
    assert not a.floored().negative()


@given(ceilings, ceilings, ceilings)
def test_several_ceilings_all_apply(a: Ceiling, b: Ceiling, c: Ceiling) -> None:
    """Joining is commutative, associative, idempotent, and no ceiling is the neutral one."""
    assert a & b == b & a
    assert (a & b) & c == a & (b & c)
    assert a & a == a
    assert a & Ceiling() == a


@given(ceilings, ceilings, usages, usages)
def test_what_fits_under_joined_ceilings_fits_under_each(a: Ceiling, b: Ceiling, used: Amounts, asked: Amounts) -> None:
    """And the other way round."""
    joined = not (a & b).short(used, asked)
    assert joined == (not a.short(used, asked) and not b.short(used, asked))


@given(ceilings, usages, usages)
def test_what_fits_never_passes_a_ceiling_that_held_before(ceiling: Ceiling, used: Amounts, asked: Amounts) -> None:
    """The invariant of quotas: granted only if used and asked together stay below."""
    if not ceiling.excess(used) and not ceiling.short(used, asked):
        assert not ceiling.excess(used + asked)


@given(ceilings, usages, usages)
def test_short_is_exactly_what_has_to_be_freed(ceiling: Ceiling, used: Amounts, asked: Amounts) -> None:
    """With that much less used, it fits; with one less freed of any key, it does not."""
    short = ceiling.short(used, asked)
    assert not ceiling.short(used - short, asked)
    for key in short:
        assert ceiling.short(used - short + Amounts({key: 1}), asked)


@given(ceilings, usages)
def test_nothing_asked_is_never_short(ceiling: Ceiling, used: Amounts) -> None:
    """A namespace over its ceiling can still do what takes nothing."""
    assert not ceiling.short(used, NOTHING)


@given(ceilings, usages)
def test_room_and_excess_are_two_sides_of_one_number(ceiling: Ceiling, used: Amounts) -> None:
    """Room is negative exactly where a ceiling is passed."""
    room = ceiling.room(used)
    assert {key for key in room if room[key] < 0} == set(ceiling.excess(used))
    assert all(room[key] + used[key] == ceiling[key] for key in ceiling)


def test_a_ceiling_of_zero_is_not_the_same_as_none() -> None:
    """Zero forbids; absence allows."""
    asked = Amounts({"T4/cores": 1})
    assert Ceiling({"T4/cores": 0}).short(NOTHING, asked) == asked
    assert Ceiling().short(NOTHING, asked) == NOTHING
