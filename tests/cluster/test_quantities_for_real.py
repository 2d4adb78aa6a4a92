"""Quantities against the real API server: it has to parse and format them as we do."""

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


def formatted_by_server(real: RealCluster, written: list[str]) -> list[str]:
    """Return quantities as the API server formats them: sent as capacities of devices, in a dry run."""
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
    for text, answered in zip(written, formatted_by_server(real, written), strict=True):
        ours = parse_quantity(text)
        assert parse_quantity(answered).nanos == ours.nanos, (text, answered)
        # Some quantities come back unchanged, such as "1E3", "+5" or "1.n"; those that change become canonical.
        assert answered in (text, format_quantity(ours)), text


batches = st.lists(written_quantities(signs=("", "+")), min_size=BATCH, max_size=BATCH)


@pytest.mark.kubernetes
def test_the_server_parses_and_formats_quantities_as_we_do(control_plane: RealCluster) -> None:
    """500 random quantities."""

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(batches)
    def compare(written: list[str]) -> None:
        check(control_plane, written)

    compare()


@pytest.mark.kubernetes
@pytest.mark.long
def test_the_server_parses_and_formats_many_quantities_as_we_do(
    control_plane: RealCluster, record_property: Any
) -> None:
    """The full-size run: ten thousand random quantities."""
    count = 200 * BATCH

    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(batches)
    def compare(written: list[str]) -> None:
        check(control_plane, written)

    compare()
    record_property("shapes", count)
