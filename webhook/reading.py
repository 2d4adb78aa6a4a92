"""What a pod under review asks for: amounts and wishes, in whatever vocabulary, with every mistake."""

from msgspec import Struct

from vcuda.decision import Reason
from vcuda.limits import Limits, decode_limits, limits_of, ours
from vcuda.policy import Policy
from vcuda.request import PodRequest, read_pod
from vcuda.vocabulary import WHOLE
from vcuda.wishes import Wishes, annotation_at, core_limit_invalid, read_wishes
from webhook.objects import Pod
from webhook.rules import Rules


class Asked(Struct, frozen=True):
    """A pod as read. Where there are reasons, the rest is only as much as could be read."""

    request: PodRequest
    wishes: Wishes
    limits: Limits
    reasons: tuple[Reason, ...]

    @property
    def is_gpu(self) -> bool:
        """Whether the pod asks for GPUs, rightly or wrongly."""
        return self.request.is_gpu or bool(self.reasons)


def read(pod: Pod, rules: Rules, policy: Policy) -> Asked:
    """Read a pod, and compute what its containers may use."""
    names, spoken = rules.names, rules.language
    annotations = pod.metadata.noted
    reading = read_pod(pod.spec, annotations, spoken)
    if not reading.request.is_gpu and not reading.reasons:
        # Its annotations may be anything: they are nobody's business here.
        return Asked(reading.request, Wishes(), limits_of(reading.request, Wishes(), policy.core_limit, 1), ())
    injected = annotations.get(names.core_limit)
    if injected is not None and (before := decode_limits(annotations.get(names.limits, ""))) and ours(before, injected):
        annotations = {key: value for key, value in annotations.items() if key != names.core_limit}
    wishes, wrong = read_wishes(annotations, spoken)
    reasons = [*reading.reasons, *wrong, *check_burst(reading.request, wishes, policy, rules, annotations)]
    limits = limits_of(reading.request, wishes, policy.core_limit, spoken.unit_mib)
    return Asked(reading.request, wishes, limits, tuple(reasons))


def check_burst(
    request: PodRequest, wishes: Wishes, policy: Policy, rules: Rules, annotations: dict[str, str]
) -> list[Reason]:
    """Hold a wished core limit to what the containers ask for, and to what the namespace allows."""
    if wishes.core_limit is None:
        return []
    parts = [each.share.cores for each in request.containers if not each.share.cards]
    if not parts:
        return []
    least, most = max(parts), max(policy.core_limit.max, *parts)
    if least <= wishes.core_limit <= most:
        return []
    key = next(names.core_limit for names in rules.language.all_names if names.core_limit in annotations)
    if most < WHOLE and wishes.core_limit > most:
        reason = core_limit_invalid(key, annotations[key], least)
        return [
            Reason(
                code=reason.code,
                field=annotation_at(key),
                value=reason.value,
                message=f"this namespace's quota lets containers burst to {most} cores at the most",
                remedy=f'write "{least}" to "{most}", or leave the annotation out',
            )
        ]
    return [core_limit_invalid(key, annotations[key], least)]
