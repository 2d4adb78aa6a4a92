"""The node plugin: finds a node's GPUs, hands the right ones to the right containers, and watches over them."""

import os

# gRPC writes about every kubelet that ends a connection, past all logging, unless it was told before it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
