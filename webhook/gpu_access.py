"""Refuses what would let a container use GPUs that it does not request: privileges, mounts, variables of a ConfigMap.

Only pods with GPUs are checked here. Pods without any do not reach the webhook: Pod Security holds them.
"""

import posixpath
from collections.abc import Iterator

from vcuda.decision import Code, Reason, printable
from vcuda.names import DEVICE_LIST, DEVICE_LIST_FOLDERS, SHARING_VARIABLE_PREFIXES, VISIBLE_DEVICES
from vcuda.namespace_policy import NamespacePolicy
from webhook.admission_config import AdmissionConfig
from webhook.objects import AdmittedContainer, Pod
from webhook.patching import field_of


def selects_gpus_by_env_from(container: AdmittedContainer) -> bool:
    """Whether a ConfigMap or Secret could set which GPUs the container sees: only a prefix rules that out.

    What is in it now does not matter, because it is read when the container starts.
    """
    return any(VISIBLE_DEVICES.startswith(source.prefix or "") for source in container.env_from or ())


def check_gpu_access(
    pointer: str, container: AdmittedContainer, config: AdmissionConfig, policy: NamespacePolicy, *, has_gpu: bool
) -> Iterator[Reason]:
    """Check a container of a pod with GPUs; `has_gpu` is whether it requests one itself."""
    security = container.security_context
    if security is not None and security.privileged and not policy.allows_privileged(config.cluster_privileged):
        yield Reason(
            code=Code.PRIVILEGED_NOT_GRANTED,
            field=f"{field_of(pointer)}.securityContext.privileged",
            value="true",
            message="a privileged container can use every GPU of its node",
            remedy="remove it, and add the capabilities that the container needs; or ask an administrator to set "
            "privileged: allow in the namespace's quota",
        )
    for index, mount in enumerate(container.volume_mounts or ()):
        if is_device_list(mount.mount_path):
            yield device_list_refused(f"{field_of(pointer)}.volumeMounts[{index}].mountPath", mount.mount_path)
    # Elsewhere an explicit variable hides the GPUs from NVIDIA's runtime (see `clean_environment`). In this mode it is
    # what gives the container its own, so it has to come from the node plugin.
    if has_gpu and config.injection == "nvidia-runtime":
        for index, source in enumerate(container.env_from or ()):
            if may_set_reserved_variable(source.prefix or ""):
                yield Reason(
                    code=Code.ENV_FROM_SELECTS_GPUS,
                    field=f"{field_of(pointer)}.envFrom[{index}].prefix",
                    value=printable(source.prefix or ""),
                    message=f"a ConfigMap or Secret could set {VISIBLE_DEVICES}, and NVIDIA's runtime obeys it",
                    remedy="set a prefix such as APP_, or list the variables in env with valueFrom",
                )


def check_device_list_volumes(pod: Pod) -> Iterator[Reason]:
    for index, volume in enumerate(pod.spec.volumes or ()):
        if volume.host_path is not None and is_device_list(volume.host_path.path):
            yield device_list_refused(f"spec.volumes[{index}].hostPath.path", volume.host_path.path)


def is_device_list(path: str) -> bool:
    """Whether NVIDIA's runtime may read a mount at this path as the name of a GPU.

    It compares the beginnings of paths as text. Mounts at a parent folder select nothing, and stay allowed.
    """
    # First what most paths fail, and what costs a tenth.
    return DEVICE_LIST in path and posixpath.normpath("/" + path.lstrip("/")).startswith(DEVICE_LIST_FOLDERS)


def device_list_refused(field: str, path: str) -> Reason:
    return Reason(
        code=Code.MOUNT_SELECTS_GPUS,
        field=field,
        value=printable(path),
        message="NVIDIA's runtime gives a container the GPUs that are named by mounts in this folder",
        remedy="remove it: Quotient sets the GPUs of a container from its resources",
    )


def may_set_reserved_variable(prefix: str) -> bool:
    """Whether some key after this prefix makes a variable that only Quotient may set."""
    return VISIBLE_DEVICES.startswith(prefix) or any(
        reserved.startswith(prefix) or prefix.startswith(reserved) for reserved in SHARING_VARIABLE_PREFIXES
    )
