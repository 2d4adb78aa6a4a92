"""The admission webhook: what becomes of a pod between `kubectl apply` and the cluster."""
