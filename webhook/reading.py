"""What a pod under review asks for: amounts and wishes, in whatever vocabulary, with every mistake."""

from msgspec import Struct

from vcuda.decision import Reason
from vcuda.limits import VERSION, Limits, agreed, decode_limits, encode_limits, limits_of, ours
from vcuda.policy import Policy
from vcuda.request import PodRequest, read_pod
from vcuda.vocabulary import WHOLE
from vcuda.wishes import Wishes, annotation_at, core_limit_invalid, read_wishes
from webhook.objects import Pod
from webhook.rules import Rules


class Asked(Struct, frozen=True):
    """A pod as read, and the annotations that say so. Where there are reasons, it is only what could be read.

    `written` are the limits as an annotation, `core_limit` the one on which all fractions agree, if they do.
    """

    request: PodRequest
    wishes: Wishes
    limits: Limits
    written: str
    core_limit: int | None
    reasons: tuple[Reason, ...]

    @property
    def is_gpu(self) -> bool:
        """Whether the pod asks for GPUs, rightly or wrongly."""
        return self.request.is_gpu or bool(self.reasons)


NOTHING = Asked(PodRequest(), Wishes(), Limits(v=VERSION, models=(), containers={}), "", None, ())


def read(pod: Pod, rules: Rules, policy: Policy) -> Asked:
    """Read a pod, and compute what its containers may use."""
    names, spoken = rules.names, rules.language
    annotations = pod.metadata.noted
    reading = read_pod(pod.spec, annotations, spoken)
    request = reading.request
    if not request.is_gpu and not reading.reasons:
        return NOTHING  # Its annotations may be anything: they are nobody's business here.
    wishes, wrong = read_wishes(annotations, spoken, largest_fraction(request))
    present = annotations.get(names.limits)
    if wishes.core_limit is None or present is None:
        limits = limits_of(request, wishes, policy.core_limit, spoken.unit_mib)
        written = encode_limits(limits)
    else:
        # The limit may be one that we injected ourselves in an earlier call: then nobody wished for it.
        unasked = Wishes(None, wishes.models, wishes.avoided)
        limits = limits_of(request, unasked, policy.core_limit, spoken.unit_mib)
        written = encode_limits(limits)
        is_default = present == written and agreed(limits) == wishes.core_limit
        if is_default or is_injected(present, annotations.get(names.core_limit)):
            wishes = unasked
        else:
            limits = limits_of(request, wishes, policy.core_limit, spoken.unit_mib)
            written = encode_limits(limits)
    reasons = [*reading.reasons, *wrong, *check_burst(request, wishes, policy, rules, annotations)]
    return Asked(request, wishes, limits, written, agreed(limits), tuple(reasons))


def largest_fraction(request: PodRequest) -> int:
    """Give the least that a core limit can be."""
    return max([each.share.cores for each in request.containers if not each.share.cards], default=1)


def is_injected(present: str, core_limit: str | None) -> bool:
    """Tell whether a core limit came with these limits, for a pod that has changed since."""
    before = decode_limits(present)
    return before is not None and core_limit is not None and ours(before, core_limit)


def check_burst(
    request: PodRequest, wishes: Wishes, policy: Policy, rules: Rules, annotations: dict[str, str]
) -> list[Reason]:
    """Hold a wished core limit to what the containers ask for, and to what the namespace allows."""
    if wishes.core_limit is None:
        return []
    least = largest_fraction(request)
    if all(each.share.cards for each in request.containers):
        return []
    most = max(policy.core_limit.max, least)
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
