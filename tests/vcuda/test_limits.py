"""Limits and pod options: what a container may use, as the webhook writes it for the other components."""

import msgspec
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

SCHEME = build_scheme()
CORE_LIMIT, USE, AVOID = "inspur.com/vcuda-core-limit", "inspur.com/use-gputype", "inspur.com/nouse-gputype"


def limits_with(**cores: int) -> PodLimits:
    containers = {
        name: ContainerLimits(cores=core, core_limit=core, limit_source=LimitSource.DEFAULT, memory_mib=1)
        for name, core in cores.items()
    }
    return PodLimits(v=1, models=(), containers=containers)


def test_limits_are_decoded_as_they_were_encoded() -> None:
    """Keys that a later version adds are ignored."""
    limits = limits_with(a=50, b=200)
    text = encode_limits(limits)
    assert decode_limits(text) == limits
    assert decode_limits(text.replace('"v":1', '"v":1,"new":{"x":1}')) == limits
    assert '"memoryPercent"' not in text


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"v":2,"models":[],"containers":{}}', '{"v":1}', "[" * 10_000]
)
def test_invalid_limits_are_none(text: str) -> None:
    """Any user may write the annotation."""
    assert decode_limits(text) is None


def test_the_common_core_limit_is_that_of_the_containers_that_share_a_card() -> None:
    """Whole cards have none."""
    assert common_core_limit(limits_with(a=50, b=50, c=200)) == 50
    assert common_core_limit(limits_with(a=50, b=40)) is None
    assert common_core_limit(limits_with(a=100)) is None


def test_an_injected_core_limit_differs_from_a_users_by_its_recorded_source() -> None:
    assert is_injected_core_limit(limits_with(a=50), "50")
    assert not is_injected_core_limit(limits_with(a=50), "60")
    assert not is_injected_core_limit(limits_with(a=100), "100")
    user = ContainerLimits(cores=50, core_limit=50, limit_source=LimitSource.USER)
    assert not is_injected_core_limit(PodLimits(v=1, models=(), containers={"a": user}), "50")


def test_options_are_read_under_every_domain() -> None:
    """Spaces and case do not matter, empty lists set nothing."""
    annotations = {
        "tencent.com/vcuda-core-limit": " 80 ",
        "nvidia.com/use-gputype": "A100, ,NVIDIA V100,A100",
        AVOID: "",
    }
    assert read_pod_options(annotations, SCHEME) == (PodOptions(80, ("A100", "V100"), ()), [])
    assert read_pod_options({"x": "y"}, SCHEME) == (PodOptions(), [])
    assert read_pod_options({CORE_LIMIT: "\x1e1\u2003"}, SCHEME) == (PodOptions(1), [])


@pytest.mark.parametrize("reverse", [False, True])
def test_an_option_under_two_domains_conflicts_only_if_the_values_differ(*, reverse: bool) -> None:
    """The configured domain wins, in whatever order the annotations come."""

    def read(other: str) -> tuple[PodOptions, list[str]]:
        annotations = [(USE, "A100"), ("nvidia.com/use-gputype", other)]
        options, reasons = read_pod_options(dict(reversed(annotations) if reverse else annotations), SCHEME)
        return options, [f"{reason.code}: {reason}" for reason in reasons]

    assert read(" A100") == (PodOptions(models=("A100",)), [])
    conflict = (
        f"{Code.VOCABULARIES_MIXED}: metadata.annotations[nvidia.com/use-gputype]: 'T4': conflicts with the "
        f"annotation {USE}, which sets the same option to 'A100'; remove nvidia.com/use-gputype or {USE}"
    )
    assert read("T4") == (PodOptions(models=("A100",)), [conflict])


def test_options_of_another_configured_domain_are_not_read() -> None:
    own = build_scheme(Names("nvidia.com"))
    assert read_pod_options({"nvidia.com/use-gputype": "T4"}, own)[0].models == ("T4",)
    assert USE not in own.option_precedence


@pytest.mark.parametrize("text", ["0", "101", "x", "", "5.5", "-1", "\uff11\uff12", "0x10", "1" * 50])
def test_a_core_limit_is_a_whole_number_up_to_a_card(text: str) -> None:
    """In ASCII digits."""
    _, (reason,) = read_pod_options({CORE_LIMIT: text}, SCHEME)
    assert reason.code is Code.CORE_LIMIT_INVALID
    assert reason.message == "must be a whole number from 1 to 100"


def test_an_invalid_core_limit_is_explained_with_the_least_that_is_possible() -> None:
    _, (reason,) = read_pod_options({CORE_LIMIT: "x"}, SCHEME, 30)
    assert str(reason) == (
        f"metadata.annotations[{CORE_LIMIT}]: 'x': must be a whole number from 30 (the largest request of a container "
        'that shares a GPU) to 100; write "30" to "100", in quotes, or remove the annotation'
    )


def test_a_list_of_models_is_bounded() -> None:
    """An annotation may have 256 KiB."""
    many = ",".join(f"M{n}" for n in range(40_000))
    _, (reason,) = read_pod_options({USE: many}, SCHEME)
    assert (reason.code, reason.message) == (Code.MODEL_INVALID, "must have at most 64 models and 4160 characters")
    few = ",".join(f"M{n}" for n in range(64))
    assert len(read_pod_options({USE: few}, SCHEME)[0].models) == 64


@pytest.mark.parametrize("word", ["RTX", "NVIDIA", "A100;T4", "A100|T4", "x" * 64])
def test_what_can_match_no_card_is_not_a_model(word: str) -> None:
    """The pod would stay pending."""
    options, (reason,) = read_pod_options({USE: f"A10,{word}"}, SCHEME)
    assert options.models == ("A10",)
    assert (reason.code, reason.value, reason.message) == (Code.MODEL_INVALID, word, "does not name a GPU model")


def test_models_that_are_all_excluded_are_rejected() -> None:
    annotations = {USE: "A100-SXM4-40GB", AVOID: "A100"}
    _, (reason,) = read_pod_options(annotations, SCHEME)
    assert str(reason) == (
        f"metadata.annotations[{USE}]: 'A100-SXM4-40GB': every model listed here is excluded by the annotation {AVOID};"
        " remove a model from one of the two annotations"
    )
    assert read_pod_options(annotations | {USE: "A100,T4"}, SCHEME)[1] == []


def test_the_keys_of_stored_options_do_not_change() -> None:
    """The node plugin reads options from pods.json, which an earlier version may have written."""
    options = PodOptions(80, ("A100",), ("T4",))
    assert msgspec.to_builtins(options) == {"core_limit": 80, "models": ("A100",), "avoided": ("T4",)}
