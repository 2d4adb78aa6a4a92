"""Replays workloads through the code that admits, charges and places pods in a cluster."""
