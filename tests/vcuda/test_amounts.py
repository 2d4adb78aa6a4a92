"""The arithmetic of quotas: laws that hold for all amounts and hard limits."""

from hypothesis import given
from hypothesis import strategies as st

from vcuda.amounts import Amounts, HardLimits

KEYS = st.sampled_from(["A100/cores", "A100/memory", "T4/cores", "*/pods"])
amounts = st.dictionaries(KEYS, st.integers(-1000, 1000)).map(Amounts)
usages = st.dictionaries(KEYS, st.integers(0, 1000)).map(Amounts)
limits = st.dictionaries(KEYS, st.integers(0, 1000)).map(HardLimits)
NOTHING = Amounts()


@given(amounts, amounts, amounts)
def test_amounts_are_a_group_under_addition(a: Amounts, b: Amounts, c: Amounts) -> None:
    """The order of charges does not matter, and releasing a charge undoes it."""
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + NOTHING == a
    assert (a + b) - b == a
    assert a - a == NOTHING


@given(amounts, amounts)
def test_the_larger_of_each_key(a: Amounts, b: Amounts) -> None:
    assert all((a | b)[key] == max(a[key], b[key]) for key in {*a, *b})
    assert a | b == b | a
    assert a | a == a


@given(amounts, st.integers(0, 5))
def test_times_is_repeated_addition(a: Amounts, count: int) -> None:
    assert a.times(count) == sum([a] * count, NOTHING)


@given(st.dictionaries(KEYS, st.integers(-3, 3)))
def test_zero_and_absent_are_the_same(of: dict[str, int]) -> None:
    assert Amounts(of) == Amounts({key: of[key] for key in of if of[key]})
    assert hash(Amounts(of)) == hash(Amounts({key: of[key] for key in of if of[key]}))
    assert 0 not in Amounts(of).values()


@given(limits, usages, usages)
def test_what_fits_never_exceeds_a_limit_that_was_kept_before(
    hard: HardLimits[str], used: Amounts, asked: Amounts
) -> None:
    """The invariant of quotas: granted only if used and asked together stay within the limit."""
    if not hard.exceeded(used) and not hard.short(used, asked):
        assert not hard.exceeded(used + asked)


@given(limits, usages, usages)
def test_short_is_exactly_what_has_to_be_freed(hard: HardLimits[str], used: Amounts, asked: Amounts) -> None:
    """With that much less in use it fits; with one less freed of any key it does not."""
    short = hard.short(used, asked)
    assert not hard.short(used - short, asked)
    for key in short:
        assert hard.short(used - short + Amounts({key: 1}), asked)


@given(limits, usages)
def test_asking_for_nothing_is_never_short(hard: HardLimits[str], used: Amounts) -> None:
    """A namespace that exceeds its quota can still do what takes nothing."""
    assert not hard.short(used, NOTHING)


@given(limits, usages)
def test_a_key_is_free_or_exceeded(hard: HardLimits[str], used: Amounts) -> None:
    for key in hard:
        assert hard.free(used, key) - hard.exceeded(used)[key] == hard[key] - used[key]
        assert 0 in (hard.free(used, key), hard.exceeded(used)[key])


@given(limits, usages, usages)
def test_the_number_that_fits_fits_and_one_more_does_not(hard: HardLimits[str], used: Amounts, asked: Amounts) -> None:
    count = hard.count_fitting(used, asked)
    if count is None:
        assert not any(key in hard for key in asked)
    else:
        assert not count or not hard.short(used, asked.times(count))
        assert hard.short(used, asked.times(count + 1))


def test_a_limit_of_zero_is_not_the_same_as_no_limit() -> None:
    asked = Amounts({"T4/cores": 1})
    assert HardLimits({"T4/cores": 0}).short(NOTHING, asked) == asked
    assert HardLimits[str]().short(NOTHING, asked) == NOTHING
