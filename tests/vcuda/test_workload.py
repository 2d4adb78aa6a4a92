"""What is learned of a workload."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.compiled_workload import CompiledWorkload
from vcuda.host import Host
from vcuda.learning import DELAY, FIRST, WorkloadLearner
from vcuda.offers import LENGTH, SEQUENCES, draw_offers, shuffled
from vcuda.pod_options import PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.task_shapes import MAX_MODELS, task_shape
from vcuda.vocabulary import Share
from vcuda.workload import (
    MAX_ARRIVALS,
    MAX_FREQUENT,
    MAX_LARGEST,
    MAX_SHAPES,
    TaskShape,
    WorkloadHistory,
    decode_history,
    given_history,
    prior_tasks,
)

HALF, WHOLE, EIGHT = TaskShape(4000, 1, 50), TaskShape(8000, 1, 100), TaskShape(64_000, 8, 100)


def test_without_arrivals_the_prior_applies() -> None:
    typical = WorkloadHistory().typical()
    assert {task.shape for task in typical} == set(prior_tasks())
    assert sum(task.frequency for task in typical) == pytest.approx(1)


def test_frequent_and_large_tasks_are_typical() -> None:
    """One in a hundred tasks requests 8 GPUs, which is a tenth of all demand."""
    history = given_history([(HALF, 1000)] * 60 + [(WHOLE, 2000)] * 39 + [(EIGHT, 3000)])
    assert [task.shape for task in history.typical()] == [HALF, WHOLE, EIGHT]
    assert [task.shape for task in history.typical(with_largest=False)] == [HALF, WHOLE]
    assert [task.host_mib for task in history.typical()] == [1000, 2000, 3000]


def test_rare_shapes_are_dropped_before_there_are_too_many() -> None:
    history = WorkloadHistory()
    for number in range(3 * MAX_SHAPES):
        history.add(TaskShape(number, 1, 50), 0)
        history.add(HALF, 0)
    assert len(decode_history(history.encode()).typical()) <= MAX_SHAPES
    assert history.typical()[0].shape == HALF


def test_old_tasks_lose_weight() -> None:
    history = WorkloadHistory({})
    for shape in (HALF, WHOLE):
        for _ in range(MAX_ARRIVALS):
            history.add(shape, 0)
    by_shape = {task.shape: task.frequency for task in history.typical()}
    assert by_shape[WHOLE] > 2 * by_shape.get(HALF, 0.0)


@given(st.lists(st.sampled_from([HALF, WHOLE, EIGHT]), max_size=60), st.integers(0, 30))
def test_a_history_is_read_as_it_was_written(arrived: list[TaskShape], departures: int) -> None:
    history = WorkloadHistory()
    for shape in arrived:
        history.add(shape, 100)
    for _ in range(departures):
        history.note_departure()
    again = decode_history(history.encode())
    assert again.typical() == history.typical()
    assert (again.arrivals, again.turnover) == (history.arrivals, history.turnover)


@pytest.mark.parametrize("text", ["", "{", '{"v":2,"arrivals":0,"turnover":[0,0],"tasks":[]}', "[]"])
def test_an_invalid_history_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_history(text)


def test_turnover_is_the_ratio_of_departures() -> None:
    history = WorkloadHistory()
    assert history.turnover == 0
    for _ in range(100):
        history.add(HALF, 0)
    assert history.turnover == 0
    for _ in range(50):
        history.note_departure()
    assert history.turnover == pytest.approx(0.5, abs=0.03)


def test_offers_are_drawn_by_frequency_and_always_the_same() -> None:
    tasks = given_history([(HALF, 0)] * 3 + [(WHOLE, 0)]).typical()
    offers = draw_offers(tasks)
    assert offers.shape == (SEQUENCES, LENGTH)
    assert (offers == 0).mean() == pytest.approx(0.75, abs=0.001)
    assert (offers == draw_offers(tasks)).all()
    assert sorted(shuffled(1000).tolist()) == list(range(1000))


def test_an_estimate_is_due_at_first_soon_and_then_each_time_arrivals_have_grown_by_half() -> None:
    learner, due = WorkloadLearner(), []
    pending = False
    for arrival in range(1, 200):
        learner.note_arrival(HALF, 0)
        if pending and learner.is_effective:
            learner.replace_workload(CompiledWorkload(learner.typical()))
            pending = False
        if learner.is_due:
            learner.begin()
            pending = True
            due.append(arrival)
    assert due[0] == FIRST
    assert all(later - sooner >= DELAY for sooner, later in pairwise(due))
    assert all(later <= max(1.5 * sooner + 1, sooner + DELAY) for sooner, later in pairwise(due))
    assert learner.estimate.version == len(due) - pending


def test_a_stored_history_is_due_at_once() -> None:
    learner = WorkloadLearner()
    history = WorkloadHistory()
    for _ in range(100):
        history.add(HALF, 0)
    learner.restart(history)
    assert learner.is_due
    learner.begin()
    assert learner.is_effective
    assert not learner.is_due


def request_of(*shares: Share) -> PodRequest:
    return PodRequest(tuple(ContainerRequest(f"c{at}", Role.APP, share, "vcuda") for at, share in enumerate(shares)))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((Share(30, 8),), (1, 30, 2048)),
        ((Share(30, 1, memory_follows_cores=True),), (1, 30, 0)),
        ((Share(100, 1),), (1, 100, 0)),
        ((Share(400, 4),), (4, 100, 0)),
        ((Share(30, 8), Share(20, 4)), (1, 50, 3072)),
        ((Share(100, 1), Share(30, 4)), (2, 100, 0)),
        ((), (0, 0, 0)),
    ],
    ids=["a share", "memory follows", "a GPU", "four GPUs", "two shares", "a GPU and a share", "no GPU"],
)
def test_the_shape_of_a_pod(shares: tuple[Share, ...], expected: tuple[int, int, int]) -> None:
    shape = task_shape(request_of(*shares), PodOptions(), Host(4000, 1), 256)
    assert (shape.gpus, shape.cores, shape.memory_mib) == expected


def test_long_lists_of_models_are_not_kept() -> None:
    """Tenants write them, and the history is stored in a ConfigMap."""
    many = PodOptions(models=tuple(f"M{number}" for number in range(MAX_MODELS + 1)))
    assert task_shape(request_of(Share(30, 8)), many, Host(), 256).models == ()


def test_amounts_that_no_node_has_can_be_compiled() -> None:
    """A tenant may request any amount of CPU: learning must not stop."""
    odd = TaskShape(2**40, 1, 50, 2**40)
    compiled = CompiledWorkload(given_history([(odd, 2**50), (HALF, 0)]).typical())
    assert compiled.for_model(("T4", 15360)).offered


def test_typical_tasks_are_limited() -> None:
    """The cost of every placement grows with them, and a tenant can create pods of which no two are alike."""
    history = given_history((TaskShape(number, 1 + number % 8, 100), 0) for number in range(900))
    assert len(history.typical()) <= MAX_FREQUENT + MAX_LARGEST
