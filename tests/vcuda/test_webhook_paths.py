"""The paths of the webhook, and the record of their secrets in webhook configurations."""

import pytest

from vcuda.webhook_paths import (
    IDLE_S,
    MAX_FORMER_S,
    PLAIN,
    PathRecord,
    decode_record,
    digest_of,
    encode_record,
    is_retired,
    path_for,
    secret_in,
    with_next,
    with_registered,
)

OLD, NEW = "0" * 32, "a1" * 16


@pytest.mark.parametrize("route", ["mutate", "validate"])
@pytest.mark.parametrize("secret", [PLAIN, OLD, NEW])
def test_a_path_gives_back_its_secret(route: str, secret: str) -> None:
    assert secret_in(path_for(route, secret)) == secret


@pytest.mark.parametrize(
    "path", ["", "/", "/mutate/", "/other", f"/mutate/{'A' * 32}", f"/mutate/{OLD}/", f"/mutate/{OLD[1:]}", f"//{OLD}"]
)
def test_other_paths_have_no_secret(path: str) -> None:
    assert secret_in(path) is None


def test_the_record_contains_no_secret() -> None:
    """Tenants who see an annotation of a webhook configuration could call by it."""
    record = with_registered(with_next(PathRecord(), NEW), NEW, {OLD}, 100)
    text = encode_record(record)
    assert OLD not in text
    assert NEW not in text
    assert decode_record(text) == record


@pytest.mark.parametrize("text", ["", "{", "[]", '{"former": 1}'])
def test_an_unreadable_record_records_nothing(text: str) -> None:
    assert decode_record(text) == PathRecord()


def test_a_registered_secret_replaces_what_was_registered_and_what_was_recorded() -> None:
    """What another client has written in between is one of the former ones, too."""
    foreign = "f" * 32
    record = with_registered(with_next(PathRecord(current=digest_of(OLD), since=1), NEW), NEW, {foreign}, 100)
    former = {digest_of(OLD): 100, digest_of(foreign): 100}
    assert record == PathRecord(current=digest_of(NEW), since=100, former=former)
    assert with_registered(record, NEW, {NEW}, 200) == record
    assert with_registered(record, NEW, {NEW}, 100 + MAX_FORMER_S).former == {}


def test_a_former_secret_is_retired_when_it_is_not_used_or_too_old() -> None:
    assert not is_retired(0, 0, IDLE_S - 1)
    assert is_retired(0, 0, IDLE_S)
    assert not is_retired(0, IDLE_S, IDLE_S + 1)
    assert not is_retired(0, MAX_FORMER_S - 1, MAX_FORMER_S - 1)
    assert is_retired(0, MAX_FORMER_S, MAX_FORMER_S)
