"""The language all components speak. Pure: no I/O, no clock, no environment, no Kubernetes client."""
