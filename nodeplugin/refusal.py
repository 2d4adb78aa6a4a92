"""Refusals: why the kubelet gets no GPU for a container.

The kubelet shows the text on the pod, after "Quotient: ", as the message of an UnexpectedAdmissionError or of a failed
container start. So each one names the pod and the container, says what is wrong, and ends with a remedy.
"""

from nodeplugin.host_driver import MissingDeviceNode

# A pod that the kubelet rejected stays Failed; nothing but a new pod is admitted again.
RECREATE = "delete the pod; its controller creates it again"


class AllocationRefused(Exception):  # noqa: N818 - not a fault of the program
    """A call of the kubelet is answered with an error; the message is shown on the pod."""


def container_title(pod: str, container: str) -> str:
    """Name a container in a refusal; `pod` is namespace/name, or the UID of a pod that is not known."""
    return f"pod {pod}, container {container}"


def cannot_create_files(title: str, error: OSError) -> AllocationRefused:
    """Build the refusal for a container whose limits, CDI file or device nodes cannot be created on this node."""
    if isinstance(error, MissingDeviceNode):
        return AllocationRefused(f"{title}: {error}; then {RECREATE}")
    path = f"{error.filename}: " if error.filename else ""
    return disk_problem(title, f"its files cannot be created: {path}{error.strerror or error}")


def disk_problem(title: str, problem: object) -> AllocationRefused:
    return AllocationRefused(f"{title}: {problem}; check the disk of this node, then {RECREATE}")
