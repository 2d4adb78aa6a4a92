"""The cluster as components see it: one small interface, implemented by the Kubernetes API and in memory."""
