"""Which files of the NVIDIA driver a container needs, and where drivers put them.

They are those of NVIDIA's container toolkit, except the modules of the X server, GSP firmware, which only the kernel
reads, and the loaders that all vendors share (libGL, libEGL, libOpenCL), which come with the image.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from nodeplugin.rooted_paths import resolve_links

# Where a driver may be, below the host's root: installed, or by the driver containers of NVIDIA's operator and of GKE,
# or by Flatcar's nvidia.service.
DRIVER_ROOTS = ("", "run/nvidia/driver", "home/kubernetes/bin/nvidia", "opt/nvidia/current")
LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "lib",
    # Bottlerocket.
    "usr/lib/nvidia/tesla",
    "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    "aarch64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    # Talos, whose own programs do not use glibc.
    "usr/local/glibc/usr/lib",
    "usr/local/lib",
)
PROGRAM_FOLDERS = (
    "usr/bin",
    "usr/sbin",
    "bin",
    "sbin",
    "usr/local/bin",
    "usr/local/nvidia/bin",
    "opt/bin",
    "usr/libexec/nvidia/tesla/bin",
    "x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin",
    "aarch64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin",
)
PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex-ctl",
)
# By name, because not all have the driver's version: some have their own, and links have that of the interface.
LIBRARIES = re.compile(
    r"lib(cuda|cudadebugger|nvcuvid|nvoptix|vdpau_nvidia|(GLX|EGL|GLESv1_CM|GLESv2)_nvidia"
    r"|nvidia-(ml|cfg|nscq|ptxjitcompiler|fatbinaryloader|opencl|compiler|nvvm|nvvm70|gpucomp|tileiras|allocator|api"
    r"|encode|opticalflow|fbc|ifr|rtcore|cbl|ngx|present|eglcore|glcore|glsi|tls|glvkspirv|vulkan-producer"
    r"|egl-(wayland|wayland2|gbm|xcb|xlib)|wayland-client|pkcs11|pkcs11-openssl3|sandboxutils))"
    r"\.so(\.[0-9.]+)?"
)
# Newer drivers have libraries that this list does not know; those have the driver's version in their names.
VERSIONED = re.compile(r"lib[A-Za-z0-9_.+-]+\.so\.")
# Folders beside the libraries with more of them.
LIBRARY_SUBFOLDERS = ("", "vdpau")
# How loaders find the driver: the path in the container, and where it may be in the driver's root. Packages put them
# below /usr/share or /etc, GKE into the root itself.
SHARED_FOLDERS = ("usr/share", "etc", "")
DESCRIPTIONS = {
    "etc/OpenCL/vendors/nvidia.icd": ("OpenCL/vendors/nvidia.icd",),
    "etc/vulkan/icd.d/nvidia_icd.json": tuple(
        f"vulkan/icd.d/nvidia_icd{machine}.json" for machine in ("", ".x86_64", ".aarch64")
    ),
    "etc/vulkan/implicit_layer.d/nvidia_layers.json": ("vulkan/implicit_layer.d/nvidia_layers.json",),
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json": ("glvnd/egl_vendor.d/10_nvidia.json",),
    **{
        f"usr/share/egl/egl_external_platform.d/{name}": (f"egl/egl_external_platform.d/{name}",)
        for name in (
            "10_nvidia_wayland.json",
            "15_nvidia_gbm.json",
            "20_nvidia_xcb.json",
            "20_nvidia_xlib.json",
            "99_nvidia_wayland2.json",
        )
    },
    # The weights of OptiX' denoiser.
    "usr/share/nvidia/nvoptix.bin": ("nvidia/nvoptix.bin",),
}
# Sockets of the driver's daemons, which are in /run of the host or of the driver's root.
SOCKETS = ("run/nvidia-persistenced/socket",)


def is_library(name: str, version: str) -> bool:
    """Whether a file is a library of the driver of this version; with an empty version, only by the list."""
    if LIBRARIES.fullmatch(name):
        return True
    match = VERSIONED.match(name) if version else None
    return match is not None and name[match.end() :] == version


def find_descriptions(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the descriptions that a driver's root has: the path of each in containers, and its path here."""
    for inside, names in DESCRIPTIONS.items():
        candidates = (root / folder / name for folder in SHARED_FOLDERS for name in names)
        found = next((each for each in candidates if resolve_links(each, root).is_file()), None)
        if found is not None:
            yield inside, found
