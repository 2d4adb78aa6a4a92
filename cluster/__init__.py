"""The cluster as components see it: one small interface, kept by the Kubernetes API and by memory."""
