"""The node plugin: finds a node's GPUs, hands the right ones to the right containers, and watches over them."""
