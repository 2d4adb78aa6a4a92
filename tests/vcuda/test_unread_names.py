"""Names that a pod's author probably meant for Quotient get at most a warning."""

import pytest

from vcuda.names import ANCESTOR_DOMAINS, DEFAULT_DOMAIN
from vcuda.scheme import build_scheme
from vcuda.unread_names import MAX_LENGTH, readable_names, similar_short_name, unread_annotations

SCHEME = build_scheme()


@pytest.mark.parametrize("domain", [DEFAULT_DOMAIN, *ANCESTOR_DOMAINS])
def test_the_name_of_a_resource_as_an_annotation_is_looked_at_under_every_domain(domain: str) -> None:
    """Users write amounts into annotations, where no option may have a similar name."""
    for resource in readable_names(SCHEME.names):
        key = f"{domain}/{resource.partition('/')[2]}"
        for warning in unread_annotations([key], SCHEME):
            assert warning.startswith(f"metadata.annotations[{key}] is not read by Quotient; {domain}/")


def test_a_long_key_of_a_tenant_is_not_kept() -> None:
    """A cache of keys of 3 MiB fills the memory."""
    before = similar_short_name.cache_info().currsize
    assert not list(unread_annotations([f"{DEFAULT_DOMAIN}/{'x' * MAX_LENGTH}"], SCHEME))
    assert similar_short_name.cache_info().currsize == before
