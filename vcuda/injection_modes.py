"""The ways to make GPUs available in a container. `nodeplugin/injection.py` implements them.

`native` returns device nodes and mounts to the kubelet and needs only a standard runtime. `cdi` writes them into a file
that the runtime reads. `nvidia-runtime` leaves the driver's libraries to NVIDIA's container runtime.
"""

from typing import Literal

# The values are stored in allocation checkpoints.
InjectionMode = Literal["native", "cdi", "nvidia-runtime"]
# The setting may leave the choice to the node plugin, which knows the versions of runtime and kubelet.
InjectionSetting = Literal["auto", InjectionMode]
