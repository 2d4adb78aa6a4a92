"""The compare-and-swap loop: it retries what another writer caused, and nothing else."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from cluster.errors import AlreadyExists, ApiError, Conflict, NotFound, Rejected
from cluster.in_memory import InMemoryCluster
from cluster.objects import CONFIG_MAPS, ConfigMap
from cluster.retrying import retry_on_conflict
from tests.cluster.objects import config_map
from vcuda.decision import Unavailable


def failing(*errors: Exception) -> Callable[[int], int]:
    """Raise these errors, one for each attempt, then return the attempt's number."""
    left = list(errors)

    def attempt(number: int) -> int:
        if left:
            raise left.pop(0)
        return number

    return attempt


def test_the_result_of_the_first_successful_attempt_is_returned() -> None:
    assert retry_on_conflict(failing(), attempts=3) == 0
    assert retry_on_conflict(failing(Conflict("a"), NotFound("b")), attempts=3) == 2


@pytest.mark.parametrize("error", [Conflict("changed"), NotFound("deleted"), AlreadyExists("created")])
def test_whatever_another_writer_did_to_the_object_is_retried(error: ApiError) -> None:
    assert retry_on_conflict(failing(error), attempts=2) == 1


def test_after_the_last_attempt_its_error_is_raised() -> None:
    errors = [Conflict("first"), NotFound("second"), AlreadyExists("third"), Conflict("never reached")]
    with pytest.raises(AlreadyExists, match="third"):
        retry_on_conflict(failing(*errors), attempts=3)


@pytest.mark.parametrize("error", [Rejected("invalid"), Unavailable("connection refused"), ValueError("a bug")])
def test_other_errors_are_raised_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        retry_on_conflict(failing(error), attempts=3)


def test_the_caller_chooses_what_is_retried() -> None:
    with pytest.raises(NotFound):
        retry_on_conflict(failing(NotFound("deleted")), attempts=3, retry_on=(Conflict,))


def test_attempts_are_numbered_from_zero() -> None:
    """A first attempt may use a cached object; later ones have to read it from the API server."""
    numbers: list[int] = []

    def attempt(number: int) -> None:
        numbers.append(number)
        raise Conflict("changed")

    with pytest.raises(Conflict):
        retry_on_conflict(attempt, attempts=4)
    assert numbers == [0, 1, 2, 3]


def test_an_update_that_lost_to_another_writer_keeps_both_changes() -> None:
    cluster = InMemoryCluster()
    cluster.create(CONFIG_MAPS, config_map("default", "one"))

    def add_key(number: int) -> ConfigMap:
        read = cluster.get(CONFIG_MAPS, "one", "default")
        if number == 0:
            cluster.patch(CONFIG_MAPS, "one", "default", {"data": {"theirs": "x"}})
        return cluster.update(CONFIG_MAPS, replace(read, data={**read.data, "ours": "x"}))

    assert retry_on_conflict(add_key, attempts=2).data == {"ours": "x", "theirs": "x"}
