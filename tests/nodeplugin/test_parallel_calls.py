"""Calls for several cards at once, of which some hang, fail, or take their turns."""

import threading

from nodeplugin.parallel_calls import ParallelCalls
from tests.waiting import eventually


def test_a_call_that_hangs_is_waited_for_once() -> None:
    """And is not repeated beside itself, but after it has returned."""
    may_return, began = threading.Event(), list[str]()

    def hang() -> str:
        began.append("hang")
        assert may_return.wait(30)
        return "late"

    calls: ParallelCalls[str] = ParallelCalls("test")
    answers = calls.gather({"hangs": hang, "works": lambda: "at once"}, 1.0)
    assert {key: answer.result() for key, answer in answers.items()} == {"works": "at once"}
    answers = calls.gather({"hangs": hang, "works": lambda: "again"}, 3600)
    assert {key: answer.result() for key, answer in answers.items()} == {"works": "again"}
    assert began == ["hang"]
    may_return.set()
    eventually(lambda: not calls.is_running, "the call to return")
    assert calls.gather({"hangs": hang}, 30)["hangs"].result() == "late"


def test_an_error_of_a_call_is_raised_where_it_is_read() -> None:
    answers = ParallelCalls[int]("test").gather({"fails": lambda: 1 // 0, "works": lambda: 1}, 30)
    assert isinstance(answers["fails"].exception(), ZeroDivisionError)
    assert answers["works"].result() == 1


def test_calls_that_end_one_after_the_other_are_all_waited_for() -> None:
    """Together they take longer than the silence that counts as a hang, unless there is a limit for all."""
    turn = threading.Lock()

    def take_turn() -> bool:
        with turn:
            return not threading.Event().wait(0.2)

    def answered(total_s: float) -> int:
        return len(ParallelCalls[bool]("test").gather(dict.fromkeys("abcdefgh", take_turn), 1.0, total_s))

    assert answered(60) == 8
    assert answered(0.5) < 8
