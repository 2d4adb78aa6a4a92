"""Validates quotas when they are written: a typing error must not lift the limits of a namespace."""

from ledger.quota_config_maps import is_quota_config_map, parse_quota_config_map
from vcuda.decision import Code, Decision, Reason
from vcuda.quota import QuotaError, QuotaMistake
from webhook.admission_config import AdmissionConfig
from webhook.objects import ConfigMap


def check_quota(config_map: ConfigMap, namespace: str, name: str, config: AdmissionConfig) -> Decision:
    """Check a ConfigMap if it is a quota. `name` is the request's, and empty for a generated name."""
    name = name or config_map.metadata.name
    if not is_quota_config_map(namespace, name, config_map.metadata.labels or {}, config.scheme):
        return Decision()
    try:
        parse_quota_config_map(namespace, name, config_map.data or {}, config.scheme.unit_mib)
    except QuotaError as error:
        return Decision(tuple(map(quota_invalid, error.mistakes)))
    return Decision()


def quota_invalid(mistake: QuotaMistake) -> Reason:
    return Reason(
        code=Code.QUOTA_INVALID,
        field=f"{mistake.quota}: {mistake.path}" if mistake.path else mistake.quota,
        value=mistake.value,
        message="invalid quota, nothing changed",
        remedy=mistake.remedy,
    )
