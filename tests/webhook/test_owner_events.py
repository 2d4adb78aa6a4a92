"""Which refusals are reported as events on the owners of pods."""

import inspect
import re

import pytest
from msgspec.structs import replace

from vcuda import quota_refusals
from vcuda.decision import Code
from vcuda.namespace_policy import NamespacePolicy
from webhook.objects import AdmittedMetadata, AdmittedSpec, Owner, Pod
from webhook.owner_events import REPORTED_CODES, may_exist
from webhook.validating import check_pools


def test_every_refusal_for_a_quota_is_reported() -> None:
    """The pods of a Deployment are refused where its author does not look."""
    codes = {Code[name] for name in re.findall(r"\bCode\.([A-Z_]+)", inspect.getsource(quota_refusals))}
    codes |= {reason.code for reason in check_pools(Pod(AdmittedMetadata(), AdmittedSpec()), NamespacePolicy(pools=()))}
    assert {Code.CARD_UNKNOWN, Code.POOL_NOT_GRANTED} <= codes
    assert codes == set(REPORTED_CODES)


@pytest.mark.parametrize("field", ["api_version", "kind", "name", "uid"])
def test_an_owner_that_cannot_exist_gets_no_event(field: str) -> None:
    """The API server does not check the length, and hundreds of refused pods may be queued."""
    owner = Owner("batch/v1", "Job", "x" * 253, "u", controller=True)
    assert may_exist(owner)
    assert not may_exist(replace(owner, **{field: "x" * 254}))
