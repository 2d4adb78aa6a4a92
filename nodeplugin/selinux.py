"""Labels what containers mount, so that SELinux lets them read it.

The kubelet relabels volumes, but not the mounts of device plugins: below /var/lib they would have a label that is
denied to containers. Files that are created in a labelled folder get its label.
"""

import os
from contextlib import suppress
from pathlib import Path

import structlog

ATTRIBUTE = "security.selinux"
# What container runtimes themselves label volumes with that several pods read.
CONTAINER_LABEL = b"system_u:object_r:container_file_t:s0"


def label_for_containers(folder: Path) -> None:
    """Label a folder and what is in it; does nothing where files have no labels. A failure is logged."""
    if read_label(folder) is None:
        return
    try:
        for path in (folder, *folder.rglob("*")):
            # The host's own file, under a second name: its label is right for libraries, and read by the host as well.
            is_hard_link = path.lstat().st_nlink > 1 and not path.is_dir()
            if not is_hard_link and read_label(path) != CONTAINER_LABEL:
                os.setxattr(path, ATTRIBUTE, CONTAINER_LABEL, follow_symlinks=False)
    except OSError as error:
        # Bottlerocket's policy has no such type, and lets containers read the label that is there.
        structlog.get_logger().warning(
            "selinux_label_not_set",
            folder=str(folder),
            error=str(error),
            remedy="if containers cannot read their driver files, label the folder as your policy requires",
        )


def read_label(path: Path) -> bytes | None:
    """Return a file's label, None if it has none: SELinux is not used."""
    with suppress(OSError):
        # Some kernels end it with a zero byte.
        return os.getxattr(path, ATTRIBUTE, follow_symlinks=False).rstrip(b"\0")
    return None
