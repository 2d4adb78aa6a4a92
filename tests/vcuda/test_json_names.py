"""Names in JSON are found by their hashes, exactly as by themselves."""

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda import json_names
from vcuda.json_names import JsonNames, NameIndex, encode_names, node_names, parse_names

NAMES = st.lists(st.text("ab-.1", max_size=5), unique=True, min_size=1, max_size=30)


def parse(names: list[str]) -> JsonNames:
    parsed = parse_names(encode_names(names))
    assert parsed is not None
    return parsed


@given(NAMES)
def test_names_are_read_as_json(names: list[str]) -> None:
    parsed = parse(names)
    assert list(parsed) == names
    assert len(parsed) == len(names)
    assert parsed[0] == names[0]
    assert names[-1] in parsed


@given(NAMES, NAMES, st.randoms(use_true_random=False))
def test_names_are_found_exactly_if_they_are_known(known: list[str], asked: list[str], random: Random) -> None:
    index = NameIndex(known)
    found = index.find(parse(asked))
    assert (found is None) == bool(set(asked) - set(known))
    part = random.sample(known, random.randint(1, len(known)))
    positions = index.find(parse(part))
    assert positions is not None
    assert sorted(part) == sorted(np.array(known, object)[positions])


def test_names_with_the_same_letters_at_the_same_places_differ() -> None:
    """The sum of their hashes must not be that of other names."""
    first, second = parse(["a1", "b2"]), parse(["a2", "b1"])
    assert first.fingerprint != second.fingerprint
    assert parse(["b2", "a1"]).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "[1]", '{"a":"b"}', '["a", "b"]', '[ "a"]', '["a" ]', '["a\\"b"]', '["a",1,"b"]'),
        *('["', '["a', '["a"', '["a",', '["a","', '["a",]', '["a"]]', '["a"] ', '["a"]["b"]', '["a"x"b"]'),
    ],
)
def test_other_forms_are_left_to_the_decoder(text: str) -> None:
    assert parse_names(text.encode()) is None


def test_names_are_also_found_when_there_are_very_many() -> None:
    names = [f"node-{number:06}.example" for number in range(20_000)]
    index = NameIndex(names)
    assert index.find(parse(names[::-1])) == slice(None)
    assert index.find(parse([*names, "other"])) is None
    assert json.loads(encode_names(names)) == names


def test_no_name_is_known_without_nodes() -> None:
    assert NameIndex([]).find(parse(["a"])) is None


@given(NAMES, st.data(), st.sampled_from([True, False]))
def test_parts_of_names_are_written_in_any_order(names: list[str], data: st.DataObject, is_compiled: bool) -> None:  # noqa: FBT001
    """With the compiled functions and without."""
    positions = data.draw(st.lists(st.integers(0, len(names) - 1), max_size=40))
    scores = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(positions), max_size=len(positions)))
    chosen = [names[at] for at in positions]
    with pytest.MonkeyPatch.context() as patched:
        if not is_compiled:
            patched.setattr(json_names, "KERNEL", None)
        part = node_names(names).take(np.array(positions, np.int64))
        assert list(part) == chosen
        assert part.joined("; ") == "; ".join(chosen).encode()
        pairs = zip(chosen, scores, strict=True)
        expected = "".join(f"{name}={score}," for name, score in pairs).encode()
        assert part.with_scores(np.array(scores, np.int64), "=", ",") == expected


def test_without_compiled_functions_names_are_left_to_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_names, "KERNEL", None)
    assert parse_names(encode_names(["a", "b"])) is None
    assert encode_names(["a", "b"]) == b'["a","b"]'
