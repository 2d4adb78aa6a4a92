"""Filter as a dry run: the same answer, nothing claimed, and nodes that do not exist yet."""

from typing import Any

import pytest

from tests.scheduler.world import NAMES, SIZES, World, container, gpu
from vcuda.inventory import encode_inventory

DRY = "filter?dryRun=true"


def template(name: str, model: str = "A100-SXM4-40GB", gpus: int = 2, **labels: str) -> dict[str, Any]:
    """A node as an autoscaler's template has it: labels and amounts, and no inventory."""
    return {
        "metadata": {"name": name, "labels": {NAMES.model_label: model, **labels}},
        "status": {"allocatable": {NAMES.core: str(100 * gpus), NAMES.memory: "100"}},
    }


def ask(world: World, pod: Any, *nodes: dict[str, Any]) -> tuple[set[str], dict[str, str]]:
    answer = world.call(DRY, {"Pod": pod, "Nodes": {"items": list(nodes)}})
    assert not answer["Error"]
    fitting = {each["metadata"]["name"] for each in answer["Nodes"]["items"]}
    return fitting, answer["FailedNodes"] | answer["FailedAndUnresolvableNodes"]


def test_a_dry_run_claims_nothing(world: World) -> None:
    world.add_node("n", 1)
    pod = world.add_pod("p", container(cores=100, memory=1))
    arrivals = world.service.learning.learner.history.arrivals
    for _ in range(2):
        assert world.call(DRY, {"Pod": world.raw(pod), "NodeNames": ["n"]})["NodeNames"] == ["n"]
    assert world.service.state.claims() == []
    assert world.service.learning.learner.history.arrivals == arrivals
    assert world.schedule(world.add_pod("other", container(cores=100, memory=1))) == "n"
    refused = world.call(DRY, {"Pod": world.raw(pod), "NodeNames": ["n"]})
    assert refused["FailedNodes"] == {"n": "not enough unused GPUs"}
    assert world.service.waiting.get(pod.metadata.uid) is None


def test_templates_fit_by_model_and_count(world: World) -> None:
    world.add_node("n", 1)
    pod = world.raw(world.add_pod("p", container(cores=400, memory=4)))
    fitting, problems = ask(world, pod, template("four", gpus=4), template("two", gpus=2), template("none", gpus=0))
    assert fitting == {"four"}
    assert problems == {
        "two": "not enough GPUs on this node",
        "none": "node not known to the GPU scheduler yet",
    }


def test_the_memory_of_a_template_is_that_of_its_model(world: World) -> None:
    """From its name, or from the nodes that have the model."""
    world.add_node("n", 1, "V100")
    pod = world.raw(world.add_pod("p", container(cores=50, memory=SIZES["V100"] // 256)))
    fitting, problems = ask(world, pod, template("v", "V100"), template("t", "T4-8GB"), template("unknown", "T4"))
    assert fitting == {"v"}
    assert set(problems.values()) == {"no GPU with enough memory"}


def test_an_inventory_of_a_template_counts(world: World) -> None:
    pod = world.raw(world.add_pod("p", container(cores=50)))
    sick = encode_inventory((gpu("x", 0, healthy=False),))
    node = {"metadata": {"name": "x", "annotations": {NAMES.inventory: sick}}}
    assert ask(world, pod, node) == (set(), {"x": "GPUs unhealthy or cordoned"})


def test_a_node_that_exists_is_not_a_template(world: World) -> None:
    world.add_node("n", 1)
    assert world.schedule(world.add_pod("p", container(cores=100, memory=1))) == "n"
    pod = world.raw(world.add_pod("second", container(cores=100, memory=1)))
    assert ask(world, pod, template("n", "T4", 8)) == (set(), {"n": "not enough unused GPUs"})


def test_a_pod_that_does_not_exist_needs_no_charge(world: World) -> None:
    world.add_node("n", 1)
    pod = world.raw(world.add_pod("p", charged_for=None))
    text = "pod not charged to the GPU quota of its namespace"
    assert world.call(DRY, {"Pod": pod, "NodeNames": ["n"]})["FailedAndUnresolvableNodes"] == {"n": text}
    del pod["metadata"]["uid"]
    assert world.call(DRY, {"Pod": pod, "NodeNames": ["n"]})["NodeNames"] == ["n"]


@pytest.mark.parametrize("query", ["dryRun=yes", "dryrun=true", "dryRun=true&x=1", "dryRun"])
def test_an_unknown_parameter_is_refused(world: World, query: str) -> None:
    """It must not turn a dry run into a claim."""
    pod = world.add_pod("p")
    world.call(f"filter?{query}", {"Pod": world.raw(pod), "NodeNames": []}, status=400)
    world.call("bind?dryRun=true", {}, status=400)


@pytest.mark.parametrize(
    ("labels", "amount", "annotations", "text"),
    [
        ({}, "400", {}, "node x: label inspur.com/gpu-model: missing, or no model of a GPU; set it, as in T4"),
        ({NAMES.model_label: "T4"}, "four", {}, "node x: inspur.com/vcuda-core: 'four' is no number of cores"),
        ({NAMES.model_label: "T4"}, "6500", {}, "node x: inspur.com/vcuda-core: 6500 is more than 64 GPUs"),
        ({NAMES.model_label: "T4"}, "400", {NAMES.inventory: "{"}, "node x: annotation inspur.com/gpu-inventory"),
    ],
    ids=["no model", "no number", "too many GPUs", "an invalid inventory"],
)
def test_a_template_whose_gpus_are_not_clear_is_refused(
    world: World, labels: dict[str, str], amount: str, annotations: dict[str, str], text: str
) -> None:
    node = {
        "metadata": {"name": "x", "labels": labels, "annotations": annotations},
        "status": {"allocatable": {NAMES.core: amount}},
    }
    pod = world.raw(world.add_pod("p"))
    assert text in world.call(DRY, {"Pod": pod, "Nodes": {"items": [node]}}, status=400)


def test_names_and_templates_are_not_mixed(world: World) -> None:
    """One of them would be left out without a word."""
    body = {"Pod": world.raw(world.add_pod("p")), "NodeNames": ["n"], "Nodes": {"items": [template("x")]}}
    assert "send the names of the nodes, or the nodes" in world.call(DRY, body, status=400)


def test_a_dry_run_does_not_wait_for_a_charge(world: World) -> None:
    """Else pods that are really filtered would not be waited for."""
    world.add_node("n", 1)
    pod = world.add_pod("p", charged_for=None)
    world.call(DRY, {"Pod": world.raw(pod), "NodeNames": ["n"]})
    assert world.service.ledgers.may_wait
