"""Quantities against the real API server: it must read and write what we read and write."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster.real import RealCluster
from tests.vcuda.quantities import written_quantities
from vcuda.quantity import Family, canonical, parse

BATCH = 50
EXACT = (Family.DECIMAL, Family.BINARY)


def as_the_server_writes(real: RealCluster, written: list[str]) -> list[str]:
    """Let the API server read and write quantities, in a quota that is not stored."""
    keys = [f"class-{number}.storageclass.storage.k8s.io/requests.storage" for number in range(len(written))]
    quota: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "quantities"},
        "spec": {"hard": dict(zip(keys, written, strict=True))},
    }
    answer = real.kubectl("create", "--dry-run=server", "-ojson", "-f-", stdin=json.dumps(quota))
    hard = json.loads(answer)["spec"]["hard"]
    return [hard[key] for key in keys]


def check(real: RealCluster, written: list[str]) -> None:
    for text, answered in zip(written, as_the_server_writes(real, written), strict=True):
        ours = parse(text)
        assert parse(answered).nanos == ours.nanos, (text, answered)
        # An exponent keeps its capital E, and a plus its sign, where the rest is canonical already.
        if ours.family in EXACT and not text.startswith("+"):
            assert canonical(ours) == answered, text


batches = st.lists(written_quantities(signs=("", "+")), min_size=BATCH, max_size=BATCH)


@pytest.mark.kubernetes
def test_the_server_reads_and_writes_quantities_as_we_do(control_plane: RealCluster) -> None:
    """In a few hundred shapes."""

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(batches)
    def compare(written: list[str]) -> None:
        check(control_plane, written)

    compare()


@pytest.mark.kubernetes
@pytest.mark.long
def test_the_server_reads_and_writes_quantities_as_we_do_in_many_shapes(
    control_plane: RealCluster, record_property: Any
) -> None:
    """The full-size form: ten thousand shapes."""
    shapes = 200 * BATCH

    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(batches)
    def compare(written: list[str]) -> None:
        check(control_plane, written)

    compare()
    record_property("shapes", shapes)
