"""GPU models: the names of drivers, node labels, quotas and users are parsed in the same way."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.gpu_model import GpuModel, matches, never_matches, parse_model, product_label, similar_names

PRODUCTS = {
    "NVIDIA A100-SXM4-40GB": ("NVIDIA-A100-SXM4-40GB", "A100-SXM4-40GB", "A100", ""),
    "Tesla V100-SXM2-16GB": ("Tesla-V100-SXM2-16GB", "V100-SXM2-16GB", "V100", ""),
    "NVIDIA GeForce RTX 3090": ("NVIDIA-GeForce-RTX-3090", "RTX-3090", "RTX-3090", ""),
    "NVIDIA GeForce RTX 3090 Ti": ("NVIDIA-GeForce-RTX-3090-Ti", "RTX-3090-Ti", "RTX-3090-Ti", ""),
    "Tesla T4": ("Tesla-T4", "T4", "T4", ""),
    "Tesla P40": ("Tesla-P40", "P40", "P40", ""),
    "NVIDIA H100 80GB HBM3": ("NVIDIA-H100-80GB-HBM3", "H100-80GB-HBM3", "H100", ""),
    "NVIDIA H100 PCIe": ("NVIDIA-H100-PCIe", "H100-PCIe", "H100", ""),
    "NVIDIA A10": ("NVIDIA-A10", "A10", "A10", ""),
    "NVIDIA RTX A6000": ("NVIDIA-RTX-A6000", "RTX-A6000", "RTX-A6000", ""),
    "NVIDIA RTX 6000 Ada Generation": ("NVIDIA-RTX-6000-Ada-Generation", "RTX-6000-Ada-Generation", "RTX-6000-Ada", ""),
    "NVIDIA RTX 4000 SFF Ada Generation": (
        "NVIDIA-RTX-4000-SFF-Ada-Generation",
        "RTX-4000-SFF-Ada-Generation",
        "RTX-4000-SFF-Ada",
        "",
    ),
    "Quadro RTX 4000": ("Quadro-RTX-4000", "RTX-4000", "RTX-4000", ""),
    "NVIDIA CMP 170HX": ("NVIDIA-CMP-170HX", "CMP-170HX", "CMP-170HX", ""),
    "NVIDIA TITAN RTX": ("NVIDIA-TITAN-RTX", "TITAN-RTX", "TITAN-RTX", ""),
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": (
        "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
        "A100-SXM4-40GB-MIG-1g.5gb",
        "A100",
        "1g.5gb",
    ),
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me": (
        "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me",
        "H100-80GB-HBM3-MIG-1g.10gb.me",
        "H100",
        "1g.10gb.me",
    ),
}


@pytest.mark.parametrize(("nvml", "expected"), PRODUCTS.items())
def test_a_driver_name_gives_label_model_family_and_slice(nvml: str, expected: tuple[str, str, str, str]) -> None:
    """A new GPU is a line in this table."""
    label, name, family, profile = expected
    assert product_label(nvml) == label
    assert parse_model(nvml) == GpuModel(name, family, profile)


@pytest.mark.parametrize("nvml", PRODUCTS)
def test_a_label_names_the_same_model_as_the_driver(nvml: str) -> None:
    """Node labels of GPU feature discovery and the node plugin's inventory agree."""
    assert parse_model(product_label(nvml)) == parse_model(nvml)


MATCHING = [
    ("A100", "NVIDIA A100-SXM4-40GB"),
    ("a100", "NVIDIA A100-SXM4-40GB"),
    ("A100-SXM4", "NVIDIA A100-SXM4-40GB"),
    ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
    ("nvidia-a100-sxm4-40gb", "NVIDIA A100-SXM4-40GB"),
    ("Tesla V100", "Tesla V100-SXM2-16GB"),
    ("rtx 3090", "NVIDIA GeForce RTX 3090"),
    ("GeForce-RTX-3090", "NVIDIA GeForce RTX 3090"),
    ("A100-MIG", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    ("A100-MIG-1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    ("3090", "NVIDIA GeForce RTX 3090"),
    ("3090 Ti", "NVIDIA GeForce RTX 3090 Ti"),
    ("nvidia 3090", "NVIDIA GeForce RTX 3090"),
    ("A6000", "NVIDIA RTX A6000"),
    ("170HX", "NVIDIA CMP 170HX"),
    ("6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
    ("RTX3090", "NVIDIA GeForce RTX 3090"),
    ("3090Ti", "NVIDIA GeForce RTX 3090 Ti"),
    ("RTX4090d", "NVIDIA GeForce RTX 4090 D"),
    ("2080SUPER", "NVIDIA GeForce RTX 2080 SUPER"),
    ("RTX-3090-Ti", "3090Ti"),
    ("PRO 6000 Blackwell", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ("RTX-3090", "3090"),
    ("3090", "RTX3090"),
]
NOT_MATCHING = [
    ("a10", "NVIDIA A100-SXM4-40GB"),
    ("A100", "NVIDIA A10"),
    # A slice is no card.
    ("A100", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    ("A100-MIG-2g.10gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    ("A100-80GB", "NVIDIA A100-SXM4-40GB"),
    ("40GB-A100", "NVIDIA A100-SXM4-40GB"),
    ("RTX", "NVIDIA GeForce RTX 3090"),
    ("RTX-3090", "NVIDIA GeForce RTX 3090 Ti"),
    ("3090", "NVIDIA GeForce RTX 3090 Ti"),
    ("309", "NVIDIA GeForce RTX 3090"),
    ("3090Ti", "NVIDIA GeForce RTX 3090"),
    ("RTX-3090", "3090Ti"),
    ("3090", "3090-Ti"),
    ("100", "NVIDIA A100-SXM4-40GB"),
    ("6000", "NVIDIA RTX 6000 Ada Generation"),
    ("RTX", "NVIDIA TITAN RTX"),
    ("Ti", "NVIDIA GeForce RTX 3090 Ti"),
    ("nvidia", "NVIDIA A10"),
    ("", "NVIDIA A10"),
]


@pytest.mark.parametrize(("pattern", "nvml"), MATCHING)
def test_a_family_or_words_of_a_product_match_it(pattern: str, nvml: str) -> None:
    """Word by word, ignoring case and brand."""
    assert matches(pattern, parse_model(nvml))


@pytest.mark.parametrize(("pattern", "nvml"), NOT_MATCHING)
def test_parts_of_words_and_of_families_match_nothing(pattern: str, nvml: str) -> None:
    """`a10` is not an A100, and `RTX` is not a card."""
    assert not matches(pattern, parse_model(nvml))


@pytest.mark.parametrize("name", ["", "  ", "NVIDIA", "---", "Tesla-"])
def test_a_name_without_a_model_is_rejected(name: str) -> None:
    """A brand alone is not a model."""
    with pytest.raises(ValueError, match="does not name a GPU model: write one such as A100, T4 or RTX-3090"):
        parse_model(name)


@given(st.sampled_from(list(PRODUCTS)))
def test_every_model_matches_itself_and_its_family(nvml: str) -> None:
    """The names that Quotient shows can be used in a quota unchanged."""
    model = parse_model(nvml)
    assert matches(model.name, model)
    assert matches(model.family, model) is not bool(model.mig_profile)
    assert parse_model(model.name) == model


@given(st.text(max_size=100))
def test_a_product_label_is_a_label(name: str) -> None:
    """Kubernetes accepts the value, whatever name the driver reports."""
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", product_label(name))


@given(st.text(max_size=60), st.sampled_from(list(PRODUCTS)))
def test_any_text_can_be_a_pattern(pattern: str, nvml: str) -> None:
    """A user's annotation never raises; at worst it matches nothing."""
    matches(pattern, parse_model(nvml))


WORDS = ["NVIDIA", "GeForce", "RTX", "GTX", "TITAN", "X", "3090", "A6000", "A100", "Ti", "Pro", "Ada", "40GB", "MIG"]
model_names = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("-".join)


@given(pattern=model_names, name=model_names)
def test_names_that_match_are_similar(pattern: str, name: str) -> None:
    """A quota has hundreds of lines, and only those that are similar to a model are compared with it."""
    try:
        model = parse_model(name)
    except ValueError:
        return
    if matches(pattern, model) and not never_matches(pattern):
        assert pattern in similar_names((pattern, "T4"), model.name)
        assert model.name in similar_names((model.name, "T4"), pattern)
