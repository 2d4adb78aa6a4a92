"""JSON patches (RFC 6902) with the warnings that go with them.

A patch has only the operations that change something, so that a second call on the patched object returns an empty
patch, and so that fields unknown to Quotient stay as they are.
"""

from typing import Any

from vcuda.decision import MAX_KEY_LENGTH, shorten
from webhook.objects import AdmittedMetadata

Operation = dict[str, Any]
# The API server may truncate a warning longer than 256 characters.
MAX_WARNING = 250


def escape_pointer(key: str) -> str:
    """Escape a key as one step of a JSON pointer (RFC 6901)."""
    # Not cached: that would keep the keys of tenants, of up to 3 MiB, and save 0.04 µs.
    return key.replace("~", "~0").replace("/", "~1")


def pointer_steps(pointer: str) -> list[str]:
    """Return the keys and indices of a JSON pointer, unescaped."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def field_of(pointer: str) -> str:
    """Return a JSON pointer as the field path that Kubernetes shows: `spec.containers[0].resources.limits[a.b/c]`.

    The step `-`, which appends to an array, is left out.
    """
    path = ""
    for step in pointer_steps(pointer):
        if step != "-":
            path += f".{step}" if step.isidentifier() else f"[{shorten(step, MAX_KEY_LENGTH)}]"
    return path.removeprefix(".")


def field_prefix(root: str) -> str:
    """Return what precedes a pod's fields in messages, such as `spec.template.`; empty for a pod itself."""
    return f"{field_of(root)}." if root else ""


class PatchBuilder:
    """Collects operations on a pod or a pod template, and warnings for the user.

    `root` is the JSON pointer of the template in the object under review; pointers passed to the methods start there.
    """

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.operations: list[Operation] = []
        # The keys are the warnings, in their order: a variable may be in the environment twice.
        self.warnings: dict[str, None] = {}
        self._annotations: dict[str, str | None] = {}

    @property
    def field_prefix(self) -> str:
        return field_prefix(self.root)

    def add(self, pointer: str, value: Any) -> None:  # noqa: ANN401 - any JSON
        """Set a value, and replace the one that is there."""
        self.operations.append({"op": "add", "path": self.root + pointer, "value": value})

    def remove(self, pointer: str) -> None:
        self.operations.append({"op": "remove", "path": self.root + pointer})

    def annotate(self, key: str, value: str | None) -> None:
        """Set an annotation, or remove it if the value is None. The last call for a key counts."""
        self._annotations[key] = value

    def warn(self, text: str) -> None:
        """Add a warning, unless it is there already."""
        self.warnings[truncate_warning(text)] = None

    def with_root(self, root: str) -> "PatchBuilder":
        """Return the same operations for an object that has this one at `root`."""
        patch = PatchBuilder(root)
        patch.operations = [{**each, "path": root + each["path"]} for each in self.operations]
        patch.warnings = self.warnings
        return patch

    def finish(self, metadata: AdmittedMetadata | None) -> "PatchBuilder":
        """Append the operations for the collected annotations, and return self."""
        if metadata is None or metadata.annotations is None:
            # JSON patch adds no missing parents: the whole map has to be added at once.
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
    return shorten(text, MAX_WARNING)
