"""A patch in the making: the fewest operations that make an object what it should be, and what to tell about them."""

from functools import lru_cache
from typing import Any

from webhook.objects import Metadata

Operation = dict[str, Any]
# The API server cuts longer warnings off.
MAX_WARNING = 250


@lru_cache(maxsize=1024)
def escape_pointer(key: str) -> str:
    """Write a key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


class PatchBuilder:
    """Operations on one object, and warnings for its author.

    `root` is where the pod, or its template, stands; pointers (RFC 6901) begin there.
    """

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.warnings: list[str] = []
        self._annotations: dict[str, str | None] = {}

    @property
    def path(self) -> str:
        """Say where the root is, as messages name fields."""
        return f"{self.root[1:].replace('/', '.')}." if self.root else ""

    def add(self, pointer: str, value: Any) -> None:  # noqa: ANN401 - any JSON
        """Put a value in, over whatever stands there."""
        self.operations.append({"op": "add", "path": self.root + pointer, "value": value})

    def remove(self, pointer: str) -> None:
        """Take out what stands there."""
        self.operations.append({"op": "remove", "path": self.root + pointer})

    def annotate(self, key: str, value: str | None) -> None:
        """Set an annotation, or with None take it away."""
        self._annotations[key] = value

    def warn(self, text: str) -> None:
        """Tell the author something; the same thing only once."""
        if (short := truncate_warning(text)) not in self.warnings:
            self.warnings.append(short)

    def moved(self, root: str) -> "PatchBuilder":
        """Give the same operations on an object in which this one stands at `root`."""
        draft = PatchBuilder(root)
        draft.operations = [{**each, "path": root + each["path"]} for each in self.operations]
        draft.warnings = self.warnings
        return draft

    def finish(self, metadata: Metadata | None) -> "PatchBuilder":
        """Write out the annotations, where there were some and where there were none."""
        if metadata is None or metadata.annotations is None:
            wanted = {key: value for key, value in self._annotations.items() if value is not None}
            if wanted and metadata is None:
                self.add("/metadata", {"annotations": wanted})
            elif wanted:
                self.add("/metadata/annotations", wanted)
            return self
        for key, value in self._annotations.items():
            if value is None:
                if key in metadata.annotations:
                    self.remove(f"/metadata/annotations/{escape_pointer(key)}")
            elif metadata.annotations.get(key) != value:
                self.add(f"/metadata/annotations/{escape_pointer(key)}", value)
        return self


def truncate_warning(text: str) -> str:
    """Cut a warning to the length that the API server passes on."""
    return text if len(text) <= MAX_WARNING else text[: MAX_WARNING - 1] + "…"
