"""The status of a namespace, computed from its ledger."""

from controller.quota_status import status_of
from vcuda.ledger import decode_ledger
from vcuda.namespace_policy import Mode

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
