"""Quotas that cannot be meant are refused where they are written: a slip of the pen must not free a namespace."""

from ledger.quota_config_maps import is_quota_config_map, parse_quota_config_map
from vcuda.decision import Code, Decision, Reason
from vcuda.quota import QuotaError, QuotaMistake
from webhook.admission_config import AdmissionConfig
from webhook.objects import ConfigMap


def check_quota(found: ConfigMap, namespace: str, name: str, config: AdmissionConfig) -> Decision:
    """Check a ConfigMap, if it is a quota."""
    name = name or found.metadata.name
    if not is_quota_config_map(namespace, name, found.metadata.labels or {}, config.scheme):
        return Decision()
    try:
        parse_quota_config_map(namespace, name, found.data or {}, config.scheme.unit_mib)
    except QuotaError as wrong:
        return Decision(tuple(map(reason_of, wrong.mistakes)))
    return Decision()


def reason_of(mistake: QuotaMistake) -> Reason:
    """Say what is wrong with a quota: the place, what stands there, and what to write instead."""
    return Reason(
        code=Code.QUOTA_INVALID,
        field=f"{mistake.quota}: {mistake.path}" if mistake.path else mistake.quota,
        value=mistake.value,
        message="this quota cannot be meant, and the one in force stays so",
        remedy=mistake.remedy,
    )
