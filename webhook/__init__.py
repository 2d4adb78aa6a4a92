"""The admission webhook: mutates and validates GPU pods, the workloads that create them, Bindings and quotas."""
