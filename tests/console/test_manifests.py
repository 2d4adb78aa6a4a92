"""The pods that manifests stand for."""

from typing import Any

import pytest

from console.errors import CommandError
from console.manifests import pods_of


def workload(kind: str, group: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {"name": "w"}, "spec": {"template": {}, **spec}}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("3", "Deployment w: spec.replicas: '3' is not a whole number of at least 0; write it without quotes"),
        (2.5, "Deployment w: spec.replicas: '2.5' is not a whole number of at least 0; write one such as 2"),
        (-1, "spec.replicas: '-1' is not a whole number"),
        (True, "spec.replicas: 'True' is not a whole number"),
        ([1], "spec.replicas: '[1]' is not a whole number"),
    ],
    ids=str,
)
def test_replicas_that_are_no_number_are_an_error(written: Any, message: str) -> None:
    with pytest.raises(CommandError) as error:
        list(pods_of(workload("Deployment", "apps", replicas=written)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ({"parallelism": 3, "completions": 2}, 2),
        ({"parallelism": 2, "completions": 9}, 2),
        ({"completions": 9}, 1),
        ({"parallelism": 3}, 3),
        ({"parallelism": None}, 1),
        ({"parallelism": 0}, 0),
    ],
    ids=str,
)
def test_a_job_runs_no_more_pods_than_it_has_completions(spec: dict[str, Any], count: int) -> None:
    assert len(list(pods_of(workload("Job", "batch", **spec)))) == count


def test_a_cron_job_is_counted_by_its_job() -> None:
    job = {"spec": {"template": {}, "parallelism": "2"}}
    with pytest.raises(CommandError, match=r"CronJob w: spec\.jobTemplate\.spec\.parallelism: '2' is"):
        list(pods_of(workload("CronJob", "batch", jobTemplate=job)))


def test_a_workload_that_does_not_say_has_one_pod() -> None:
    assert len(list(pods_of(workload("Deployment", "apps")))) == 1
