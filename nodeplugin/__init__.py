"""The node plugin: discovers a node's GPUs, allocates them to containers, and monitors their health."""

import os

# gRPC's C core reads this once, when grpc is first imported. By default it writes to stderr, past our logging, about
# every connection that a kubelet closes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
