"""The isolation that a pod's shares need: what its author and its namespace's quotas require, whichever is stronger."""

import pytest

from tests.webhook.pods import NAMES, annotation_in, gpu, pod
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.isolation import NO_ISOLATION, Isolation, Rung
from vcuda.limits import admitted_options
from vcuda.names import Names
from vcuda.namespace_policy import NamespacePolicy
from vcuda.scheme import build_scheme

SCHEME = build_scheme()
PRELOAD, BOTH = Isolation(Rung.PRELOAD), Isolation(Rung.PRELOAD, Rung.PRELOAD)

REQUIRED = {
    "nobody requires any": (None, NO_ISOLATION, NO_ISOLATION),
    "the author": ("mps", NO_ISOLATION, Isolation(Rung.MPS)),
    "the namespace": (None, BOTH, BOTH),
    "the author more": ("memory=driver,compute=mps", BOTH, Isolation(Rung.DRIVER, Rung.MPS)),
    "the author less": ("none", BOTH, BOTH),
    "each in one dimension": ("driver", BOTH, Isolation(Rung.DRIVER, Rung.PRELOAD)),
}


@pytest.mark.parametrize(("annotation", "policy", "expected"), REQUIRED.values(), ids=REQUIRED)
def test_the_stronger_requirement_is_recorded_with_the_limits(
    make_caller: MakeCaller, annotation: str | None, policy: Isolation, expected: Isolation
) -> None:
    """There the scheduler and the node plugin read it, and no tenant can write it."""
    api = make_caller(policy=NamespacePolicy(min_isolation=policy))
    written = pod(gpu(), annotations={} if annotation is None else {NAMES.min_isolation: annotation})
    patched = api.mutate(written).patched()
    assert admitted_options(patched["metadata"]["annotations"], SCHEME).min_isolation == expected
    assert annotation_in(patched, NAMES.min_isolation) == annotation, "the author's own stays as it was written"
    recorded = annotation_in(patched, NAMES.limits).get("minIsolation")
    assert recorded == ({"memory": str(expected.memory), "compute": str(expected.compute)} if expected else None)
    assert api.mutate(patched).patched() == patched, "a second call changes nothing"
    assert api.create(written).allowed


def test_a_tenant_cannot_lower_what_is_recorded(make_caller: MakeCaller) -> None:
    """Neither by limits of their own, nor by changing them later, nor by dropping the annotation."""
    api = make_caller(policy=NamespacePolicy(min_isolation=PRELOAD))
    forged = pod(gpu(), annotations={NAMES.limits: '{"v":1,"models":[],"containers":{}}'})
    stored = api.mutate(forged).patched()
    assert annotation_in(stored, NAMES.limits)["minIsolation"] == {"memory": "preload", "compute": "none"}
    assert "AnnotationOwned" in api.validate(forged, "UPDATE", stored).codes
    own = api.mutate(pod(gpu(), annotations={NAMES.min_isolation: "mps"})).patched()
    dropped = api.mutate(pod(gpu(), annotations={NAMES.min_isolation: "none"})).patched()
    dropped["metadata"]["annotations"][NAMES.limits] = own["metadata"]["annotations"][NAMES.limits]
    assert api.validate(dropped, "UPDATE", own).codes == ["AnnotationFrozen"]


def test_a_weaker_annotation_counts_as_what_the_namespace_requires_with_a_warning(make_caller: MakeCaller) -> None:
    api = make_caller(policy=NamespacePolicy(min_isolation=BOTH))
    (warning,) = api.create(pod(gpu(), annotations={NAMES.min_isolation: "preload"})).warnings
    assert "memory=preload counts as memory=preload,compute=preload" in warning
    assert api.create(pod(gpu())).warnings == []
    assert api.create(pod(gpu(), annotations={NAMES.min_isolation: "memory=mps,compute=mps"})).warnings == []


def test_mistakes_of_the_annotation_are_reported_with_the_others(api: Caller) -> None:
    annotations = {NAMES.min_isolation: "memory=strict,compute=driver", NAMES.spread_members: "zone"}
    answer = api.create(pod(gpu(), annotations=annotations))
    assert answer.codes == ["OptionInvalid"] * 3
    assert answer.fields.count(f"metadata.annotations[{NAMES.min_isolation}]") == 2
    assert "must be one of none, preload, mps, driver" in answer.message


def test_the_annotation_of_another_domain_is_renamed(api: Caller) -> None:
    patched = api.mutate(pod(gpu(), annotations={Names("nvidia.com").min_isolation: "mps"})).patched()
    assert annotation_in(patched, NAMES.min_isolation) == "mps"
    assert annotation_in(patched, NAMES.limits)["minIsolation"]["memory"] == "mps"


def test_a_pod_of_an_earlier_release_keeps_the_minimum_of_its_annotation() -> None:
    """Its limits do not record one."""
    annotations = {NAMES.min_isolation: "mps", NAMES.limits: '{"v":1,"models":[],"containers":{}}'}
    assert admitted_options(annotations, SCHEME).min_isolation == Isolation(Rung.MPS)
