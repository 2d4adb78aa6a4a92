"""Options of pods that limit their GPUs: UUIDs, isolation, and the spreading of a workload's members."""

import pytest

from vcuda.decision import Code
from vcuda.isolation import Isolation
from vcuda.names import Names
from vcuda.pod_options import MAX_UUIDS, PodOptions, SpreadMembers, read_pod_options
from vcuda.scheme import build_scheme

SCHEME = build_scheme()
NAMES = SCHEME.names

VALID = {
    "uuids": ({NAMES.use_uuids: " GPU-1, GPU-2,GPU-1 "}, PodOptions(uuids=("GPU-1", "GPU-2"))),
    "uuids of mig devices": ({NAMES.use_uuids: "MIG-GPU-1/3/0"}, PodOptions(uuids=("MIG-GPU-1/3/0",))),
    "uuids to avoid": ({NAMES.avoid_uuids: "GPU-1"}, PodOptions(avoided_uuids=("GPU-1",))),
    "an empty list": ({NAMES.use_uuids: " , "}, PodOptions()),
    "uuids under another domain": ({Names("nvidia.com").use_uuids: "GPU-1"}, PodOptions(uuids=("GPU-1",))),
    "isolation": ({NAMES.min_isolation: "mps"}, PodOptions(min_isolation=Isolation.MPS)),
    "members by node": ({NAMES.spread_members: "Node"}, PodOptions(spread_members=SpreadMembers.NODE)),
    "members by gpu": ({NAMES.spread_members: "gpu"}, PodOptions(spread_members=SpreadMembers.GPU)),
}


@pytest.mark.parametrize(("annotations", "options"), VALID.values(), ids=VALID)
def test_options_are_read(annotations: dict[str, str], options: PodOptions) -> None:
    assert read_pod_options(annotations, SCHEME) == (options, [])


INVALID = {
    "no uuid": (NAMES.use_uuids, "GPU 1", "is not the UUID of a GPU"),
    "too many uuids": (NAMES.avoid_uuids, ",".join(["GPU-1"] * (MAX_UUIDS + 1)), "at most 64 UUIDs"),
    "an unknown isolation": (NAMES.min_isolation, "strict", "must be one of none, preload, mps, driver"),
    "isolation that only whole cards have": (NAMES.min_isolation, "exclusive", "must be one of"),
    "an unknown spreading": (NAMES.spread_members, "zone", "must be one of gpu, node"),
}


@pytest.mark.parametrize(("key", "value", "message"), INVALID.values(), ids=INVALID)
def test_an_invalid_option_is_refused_with_its_remedy(key: str, value: str, message: str) -> None:
    options, (reason,) = read_pod_options({key: value}, SCHEME)
    assert options == PodOptions()
    assert reason.code is Code.OPTION_INVALID
    assert key in reason.field
    assert message in reason.message
    assert reason.remedy


def test_the_same_option_under_two_domains_must_agree() -> None:
    annotations = {NAMES.use_uuids: "GPU-1", Names("tencent.com").use_uuids: "GPU-2"}
    options, (reason,) = read_pod_options(annotations, SCHEME)
    assert options.uuids == ("GPU-1",), "the configured domain takes precedence"
    assert reason.code is Code.VOCABULARIES_MIXED


@pytest.mark.parametrize("stronger", list(Isolation))
def test_isolation_is_ordered_by_strength(stronger: Isolation) -> None:
    assert stronger.is_at_least(Isolation.NONE)
    assert stronger.is_at_least(stronger)
    assert Isolation.EXCLUSIVE.is_at_least(stronger)
    assert Isolation.NONE.is_at_least(stronger) is (stronger is Isolation.NONE)
