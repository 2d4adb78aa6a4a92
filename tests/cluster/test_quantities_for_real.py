"""Quantities against the real API server: it must read and write what we read and write."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster.real import RealCluster
from tests.vcuda.quantities import written_quantities
from vcuda.quantity import format_quantity, parse_quantity

BATCH = 50
PER_DEVICE = 25


def as_the_server_writes(real: RealCluster, written: list[str]) -> list[str]:
    """Let the API server read and write quantities, as capacities of devices in an object that is not stored."""
    devices = [
        {
            "name": f"device-{first}",
            "capacity": {f"c{n}": {"value": text} for n, text in enumerate(written[first:][:PER_DEVICE])},
        }
        for first in range(0, len(written), PER_DEVICE)
    ]
    slice_: dict[str, Any] = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "quantities"},
        "spec": {
            "driver": "quantities.quotient.test",
            "nodeName": "none",
            "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }
    answer = real.kubectl("create", "--dry-run=server", "-ojson", "-f-", stdin=json.dumps(slice_))
    answered = json.loads(answer)["spec"]["devices"]
    return [device["capacity"][f"c{n}"]["value"] for device in answered for n in range(len(device["capacity"]))]


def check(real: RealCluster, written: list[str]) -> None:
    for text, answered in zip(written, as_the_server_writes(real, written), strict=True):
        ours = parse_quantity(text)
        assert parse_quantity(answered).nanos == ours.nanos, (text, answered)
        # Some texts come back as they were typed, such as "1E3", "+5" or "1.n"; what is rewritten is canonical.
        assert answered in (text, format_quantity(ours)), text


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
