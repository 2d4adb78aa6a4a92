"""The cards that do not work until they are reset, with the XID that says so. A restart of the plugin does not help.

A reboot resets all cards. A reset without one shows where the driver tells which cards still need it (from r565 on), or
by a card that was away in between, as it is while it is reset.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from nodeplugin.checkpoint import replace_file
from vcuda.decoding import decoder_for

FILE = "pending-resets.json"


class StoredResets(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The XID of each card, by uuid, since a boot."""

    boot_id: str = ""
    xids: dict[str, int] = {}


class PendingResets:
    """What is stored in the plugin's folder; entries of an earlier boot do not count."""

    def __init__(self, folder: Path, boot_id: str) -> None:
        self._path, self._boot_id = folder / FILE, boot_id
        try:
            stored = decoder_for(StoredResets).decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeError):
            stored = StoredResets()
        self.xids: dict[str, int] = dict(stored.xids) if boot_id and stored.boot_id == boot_id else {}

    def put(self, uuid: str, xid: int) -> None:
        if self.xids.get(uuid) != xid:
            self.xids[uuid] = xid
            self._write()

    def remove(self, uuid: str) -> None:
        if self.xids.pop(uuid, None) is not None:
            self._write()

    def _write(self) -> None:
        replace_file(self._path, msgspec.json.encode(StoredResets(self._boot_id, self.xids)))
