"""Links between GPUs: containers with several whole GPUs get those that are best connected."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vcuda.gpus import WHOLE, Links, app, gpus, indexes, init, place, pod, unused
from vcuda.gpu_topology import best_sets
from vcuda.inventory import Gpu
from vcuda.placement import InsufficientGpus


def whole_gpus(of: Sequence[Gpu], wanted: int, free: Sequence[int] | None = None) -> list[int]:
    """Place a container that requests this many whole GPUs, and return their indexes."""
    available = unused([each for each in of if free is None or each.index in free])
    return indexes(place(pod(app("a", wanted * WHOLE, 0)), available)["a"])


def test_links_rank_nvlink_first_and_then_by_distance() -> None:
    """More NVLinks before fewer, then one board, one PCIe switch, several, one bridge, one socket, two sockets."""
    order = ["nvlink12", "nvlink2", "nvlink1", "board", "pix", "pxb", "phb", "node", "sys"]
    links = {(0, number + 1): kind for number, kind in enumerate(order)}
    chosen = best_sets(gpus(len(order) + 1, links), 2)
    from_first = [pair[1].index for pair in chosen if pair[0].index == 0]
    assert from_first == list(range(1, len(order) + 1))


@pytest.mark.parametrize(
    ("better", "worse"),
    [("nvlink2", "nvlink1"), ("nvlink1", "board"), ("pix", "pxb"), ("pxb", "phb"), ("phb", "node"), ("node", "sys")],
)
def test_whole_gpus_are_the_best_connected(better: str, worse: str) -> None:
    """Even where lower indexes are free."""
    links = dict.fromkeys(combinations(range(4), 2), worse) | {(1, 3): better}
    assert whole_gpus(gpus(4, links), 2) == [1, 3]


@pytest.mark.parametrize("end", [1, 3], ids=["the first reports it", "the second reports it"])
def test_a_link_that_one_of_two_gpus_reports_counts_for_both(end: int) -> None:
    wired, bare = gpus(4, {(1, 3): "nvlink1"}), gpus(4)
    assert whole_gpus([wired[index] if index == end else bare[index] for index in range(4)], 2) == [1, 3]


def test_the_slowest_link_of_a_set_counts_most() -> None:
    """Two fast links and a slow one rank after three medium ones."""
    links = {(0, 1): "nvlink4", (1, 2): "nvlink4", (0, 2): "sys", (3, 4): "pix", (3, 5): "pix", (4, 5): "pix"}
    assert whole_gpus(gpus(6, links), 3) == [3, 4, 5]


# A hybrid cube mesh as in a DGX-1: two squares with diagonals, and an edge from each corner to the other square.
CUBE_MESH: Links = {
    (0, 1): "nvlink1",
    (0, 2): "nvlink1",
    (0, 3): "nvlink2",
    (0, 4): "nvlink2",
    (1, 2): "nvlink2",
    (1, 3): "nvlink1",
    (1, 5): "nvlink2",
    (2, 3): "nvlink2",
    (2, 6): "nvlink1",
    (3, 7): "nvlink1",
    (4, 5): "nvlink1",
    (4, 6): "nvlink1",
    (4, 7): "nvlink2",
    (5, 6): "nvlink2",
    (5, 7): "nvlink1",
    (6, 7): "nvlink2",
}

MESHED = {
    "a pair has two links": (2, None, [0, 3]),
    "four make a square": (4, None, [0, 1, 2, 3]),
    "four make the other square if one is in use": (4, [1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]),
    "the pair that leaves another pair": (2, [1, 4, 5, 2], [1, 2]),
    "all eight": (8, None, [0, 1, 2, 3, 4, 5, 6, 7]),
    "one GPU leaves a whole square": (1, [1, 4, 5, 6, 7], [1]),
}


@pytest.mark.parametrize(("wanted", "free", "expected"), MESHED.values(), ids=MESHED.keys())
def test_a_cube_mesh_is_used_along_its_edges(wanted: int, free: list[int] | None, expected: list[int]) -> None:
    """GPUs without a link between them would communicate through the CPUs."""
    numa = (0, 0, 0, 0, 1, 1, 1, 1)
    assert whole_gpus(gpus(8, CUBE_MESH, numa), wanted, free) == expected


def test_without_links_gpus_of_one_numa_node_go_together() -> None:
    of = gpus(4, numa=(0, 1, 0, 1))
    assert whole_gpus(of, 2) == [0, 2]
    assert whole_gpus(of, 2, [0, 1, 3]) == [1, 3]


def test_a_single_gpu_comes_from_a_numa_node_that_is_in_use() -> None:
    """A free pair stays together."""
    assert whole_gpus(gpus(4, numa=(0, 0, 1, 1)), 1, [0, 1, 3]) == [3]


def test_behind_a_switch_the_lowest_free_indexes_are_taken() -> None:
    links = dict.fromkeys(combinations(range(8), 2), "nvlink12")
    assert whole_gpus(gpus(8, links), 4) == [0, 1, 2, 3]
    assert whole_gpus(gpus(8, links), 2, [1, 4, 6]) == [1, 4]


SIXTEEN = {
    "all alike": (dict.fromkeys(combinations(range(16), 2), "nvlink6"), list(range(8))),
    "two islands with alternating indexes": (
        {(a, b): "nvlink6" if a % 2 == b % 2 else "sys" for a, b in combinations(range(16), 2)},
        list(range(0, 16, 2)),
    ),
    "four boards in two sockets": (
        {
            (a, b): "nvlink4" if a // 4 == b // 4 else "node" if a // 8 == b // 8 else "sys"
            for a, b in combinations(range(16), 2)
        },
        list(range(8)),
    ),
}


@pytest.mark.parametrize(
    ("links", "expected"),
    [pytest.param(*case, id=name) for name, case in SIXTEEN.items()],
)
def test_half_of_sixteen_gpus_is_found_without_ranking_all_sets(links: Links, expected: list[int]) -> None:
    """There are 12870 sets."""
    assert whole_gpus(gpus(16, links), 8) == expected


def test_three_halves_of_sixteen_gpus_are_refused() -> None:
    """The search ends, though each half can be chosen in thousands of ways."""
    with pytest.raises(InsufficientGpus):
        place(pod(*(app(name, 800, 0) for name in "abc")), unused(gpus(16)))


@given(st.integers(1, 6), st.dictionaries(st.sampled_from(list(combinations(range(6), 2))), st.just("nvlink1")))
def test_every_set_is_returned_once(wanted: int, links: dict[tuple[int, int], str]) -> None:
    """If one were missing, a pod might not get the only set that has enough memory."""
    sets = [tuple(each.index for each in chosen) for chosen in best_sets(gpus(6, links), wanted)]
    assert sorted(sets) == list(combinations(range(6), wanted))


def test_an_init_container_gets_a_gpu_of_its_pod_before_one_that_leaves_a_pair() -> None:
    free = unused(gpus(4, {(2, 3): "nvlink4"}))
    assert indexes(place(pod(app("a", 100, 0)), free)["a"]) == [0]
    assert indexes(place(pod(init("i", 100, 0), app("a", 200, 0)), free)["i"]) == [2]
