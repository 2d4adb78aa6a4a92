"""Places GPU pods: an extender of kube-scheduler, which filters and ranks nodes, claims GPUs, and binds pods."""
