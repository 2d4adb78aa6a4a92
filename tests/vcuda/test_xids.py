"""The XID errors of NVIDIA's driver."""

from settings.configuration import HealthSettings
from vcuda.xids import APPLICATION_XIDS, HARDWARE_XIDS, describe_xid


def test_a_known_xid_is_described() -> None:
    assert describe_xid(79) == "XID 79: GPU has fallen off the bus"
    assert describe_xid(13) == "XID 13: graphics engine exception"


def test_an_unknown_xid_has_only_its_number() -> None:
    assert describe_xid(999) == "XID 999"


def test_an_xid_is_caused_by_applications_or_by_hardware() -> None:
    assert not APPLICATION_XIDS.keys() & HARDWARE_XIDS.keys()


def test_xids_of_applications_are_ignored_by_default() -> None:
    """Clusters depend on this default: a removal makes intact cards unhealthy."""
    assert HealthSettings().ignored_xids == (13, 31, 43, 45, 68, 109)
