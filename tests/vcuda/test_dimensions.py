"""Every dimension of a quota is known in each place that the recipe in vcuda/dimensions.py names."""

import pytest

from tests.vcuda.pods import gpu_container, parse_pod
from vcuda.dimensions import DIMENSIONS, EXPLAINED_UNITS, STATUS_KEYS, UNITS
from vcuda.quota import parse_quota
from vcuda.quota_usage import Charge, Holder

CHARGE = Charge("A100", cores=50, memory_mib=7680)
HOLDER = Holder("Job/train", "A100", cores=50, pods=1, memory_mib=7680)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_pod_demands_and_is_charged_every_dimension(dimension: str) -> None:
    """A limit on a dimension that is missing in the demand would silently not be enforced."""
    assert parse_pod(gpu_container(core=50, memory=30)).request.demand(40960, 256)[dimension] > 0
    assert CHARGE.amounts[dimension] > 0
    assert HOLDER.amounts[dimension] > 0


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_every_dimension_can_be_limited_in_a_quota(dimension: str) -> None:
    quota = parse_quota(f"types: {{A100: {{{dimension}: 4}}}}", "q")
    assert quota.types["A100"].keys() == {dimension}


@pytest.mark.parametrize("table", [UNITS, EXPLAINED_UNITS, STATUS_KEYS])
def test_every_dimension_has_its_units_and_its_key(table: dict[str, str]) -> None:
    assert tuple(table) == DIMENSIONS
