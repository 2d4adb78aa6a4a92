"""Options of pods that limit their GPUs: UUIDs, isolation, and the spreading of a workload's members."""

import pytest

from vcuda.decision import Code
from vcuda.isolation import Isolation, Rung
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
    "one word is the isolation of memory": (
        {NAMES.min_isolation: "mps"},
        PodOptions(min_isolation=Isolation(memory=Rung.MPS)),
    ),
    "the isolation of both": (
        {NAMES.min_isolation: " Compute=MPS, memory=preload "},
        PodOptions(min_isolation=Isolation(Rung.PRELOAD, Rung.MPS)),
    ),
    "the isolation of compute alone": (
        {NAMES.min_isolation: "compute=preload"},
        PodOptions(min_isolation=Isolation(compute=Rung.PRELOAD)),
    ),
    "no isolation": ({NAMES.min_isolation: "memory=none"}, PodOptions()),
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
    "a rung that compute lacks": (NAMES.min_isolation, "compute=driver", "compute must be one of none, preload, mps"),
    "an unknown dimension": (NAMES.min_isolation, "bandwidth=mps", "must begin with memory= or compute="),
    "a dimension twice": (NAMES.min_isolation, "memory=none,memory=none", "names memory a second time"),
    "more than two dimensions": (NAMES.min_isolation, "memory=mps,compute=mps,memory=mps", "at most once each"),
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


def test_all_mistakes_of_an_isolation_are_reported() -> None:
    """Each with the part that is wrong."""
    options, reasons = read_pod_options({NAMES.min_isolation: "memory=strict,disk=mps"}, SCHEME)
    assert [each.value for each in reasons] == ["memory=strict", "disk=mps"]
    assert options == PodOptions()
