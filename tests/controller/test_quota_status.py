"""The status of a namespace, computed from its ledger."""

import pytest

from controller.quota_status import encode_status, status_of
from vcuda.ledger import Ledger, LedgerState, decode_ledger
from vcuda.namespace_policy import Mode
from vcuda.quota import parse_quota

NEWER_LEDGER = (
    '{"v":1,"namespace":"u","state":"open","versions":{"team/q":5},'
    '"quotas":[{"name":"team/q","types":{"A100":{"gpus":2,"cores":10}},"unlisted":"deny","untyped":"float",'
    '"policy":{"pools":null,"core_limit":{"default":null,"max":100},"mode":null}}]}'
)


def test_a_dimension_of_a_newer_version_keeps_its_own_name() -> None:
    """The controller was rolled back and reads a ledger that a newer version wrote."""
    status = status_of(decode_ledger(NEWER_LEDGER), Mode.ENFORCE, {}, {})
    (quota,) = status["quotas"]
    assert quota["types"]["A100"] == {
        "gpus": {"hard": 2, "used": 0, "reserved": 0, "free": 2},
        "cores": {"hard": 10, "used": 0, "reserved": 0, "free": 10},
    }


def test_a_status_fits_into_a_configmap_whatever_the_quotas_are() -> None:
    """One that is too large could not be written at all."""
    ledger = Ledger("u", LedgerState.OPEN)
    lines = "".join(f"  A{number}{'X' * 50}: {{cores: 1, memory: 1Gi, pods: 1}}\n" for number in range(256))
    ledger.set_quotas([parse_quota(f"types:\n{lines}", f"team/q{number}") for number in range(20)], 1)
    mistakes = {f"team/invalid{number}": ("x: " + "y" * 500,) for number in range(100)}
    status = status_of(ledger, Mode.ENFORCE, {}, mistakes)
    assert len(encode_status(status)) < 1 << 20
    assert sum(len(quota["types"]) for quota in status["quotas"]) == 1000
    assert len(status["notes"]) == 51
    assert status["notes"][-1] == "and 51 more"


@pytest.mark.parametrize(
    ("mode", "consequence"),
    [(Mode.ENFORCE, "GPU pods are refused, whatever is free,"), (Mode.AUDIT, "GPU pods are not charged")],
)
def test_the_status_says_that_a_ledger_is_being_rebuilt(mode: Mode, consequence: str) -> None:
    """Free quota does not mean that pods are admitted then."""
    ledger = decode_ledger(NEWER_LEDGER.replace('"open"', f'"{LedgerState.REBUILDING}"'))
    (note,) = status_of(ledger, mode, {}, {})["notes"]
    assert note == f"the ledger was lost and is being rebuilt; {consequence} for up to a minute"
