"""Limits and wishes: what a container may use, written for everybody after the webhook."""

import pytest

from vcuda.decision import Code
from vcuda.limits import (
    ContainerLimits,
    LimitSource,
    PodLimits,
    common_core_limit,
    decode_limits,
    encode_limits,
    is_injected_core_limit,
)
from vcuda.names import Names
from vcuda.pod_options import PodOptions, read_pod_options
from vcuda.scheme import build_scheme

SPOKEN = build_scheme()


def of(**cores: int) -> PodLimits:
    containers = {
        name: ContainerLimits(cores=core, core_limit=core, limit_source=LimitSource.DEFAULT, memory_mib=1)
        for name, core in cores.items()
    }
    return PodLimits(v=1, models=(), containers=containers)


def test_limits_are_read_as_they_were_written() -> None:
    """And keys that a later version adds are passed over."""
    limits = of(a=50, b=200)
    text = encode_limits(limits)
    assert decode_limits(text) == limits
    assert decode_limits(text.replace('"v":1', '"v":1,"new":{"x":1}')) == limits
    assert '"memoryPercent"' not in text


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"v":2,"models":[],"containers":{}}', '{"v":1}', "[" * 10_000]
)
def test_what_is_not_ours_is_none(text: str) -> None:
    """A tenant may write anything."""
    assert decode_limits(text) is None


def test_a_common_limit_is_that_of_the_fractions() -> None:
    """Whole cards have none."""
    assert common_core_limit(of(a=50, b=50, c=200)) == 50
    assert common_core_limit(of(a=50, b=40)) is None
    assert common_core_limit(of(a=100)) is None


def test_an_injected_limit_is_told_from_one_that_a_user_wrote() -> None:
    """By who is recorded to have set it."""
    assert is_injected_core_limit(of(a=50), "50")
    assert not is_injected_core_limit(of(a=50), "60")
    assert not is_injected_core_limit(of(a=100), "100")
    user = ContainerLimits(cores=50, core_limit=50, limit_source=LimitSource.USER)
    assert not is_injected_core_limit(PodLimits(v=1, models=(), containers={"a": user}), "50")


def test_wishes_are_read_under_every_domain() -> None:
    """Spaces and case do not matter, empty lists say nothing."""
    notes = {
        "tencent.com/vcuda-core-limit": " 80 ",
        "nvidia.com/use-gputype": "A100, ,NVIDIA V100,A100",
        "inspur.com/nouse-gputype": "",
    }
    assert read_pod_options(notes, SPOKEN) == (PodOptions(80, ("A100", "V100"), ()), [])
    assert read_pod_options({"x": "y"}, SPOKEN) == (PodOptions(), [])
    assert read_pod_options({"inspur.com/vcuda-core-limit": "\x1e1\u2003"}, SPOKEN) == (PodOptions(1), [])


def test_the_same_wish_under_two_domains_is_no_contradiction() -> None:
    """Only another value is."""
    same = {"inspur.com/use-gputype": "A100", "nvidia.com/use-gputype": " A100"}
    assert read_pod_options(same, SPOKEN)[1] == []
    _, (reason,) = read_pod_options(same | {"nvidia.com/use-gputype": "T4"}, SPOKEN)
    assert reason.code is Code.VOCABULARIES_MIXED
    own = build_scheme(Names("nvidia.com"))
    assert read_pod_options({"nvidia.com/use-gputype": "T4"}, own)[0].models == ("T4",)
    assert "inspur.com/use-gputype" not in own.options


@pytest.mark.parametrize("text", ["0", "101", "x", "", "5.5", "-1", "\uff11\uff12", "0x10", "1" * 50])
def test_a_core_limit_is_a_whole_number_up_to_a_card(text: str) -> None:
    """In ASCII digits."""
    _, (reason,) = read_pod_options({"inspur.com/vcuda-core-limit": text}, SPOKEN)
    assert reason.code is Code.CORE_LIMIT_INVALID


def test_a_list_of_models_is_bounded() -> None:
    """An annotation may have 256 KiB."""
    many = ",".join(f"M{n}" for n in range(40_000))
    assert [reason.code for reason in read_pod_options({"inspur.com/use-gputype": many}, SPOKEN)[1]] == [
        Code.MODEL_INVALID
    ]
    few = ",".join(f"M{n}" for n in range(64))
    assert len(read_pod_options({"inspur.com/use-gputype": few}, SPOKEN)[0].models) == 64
