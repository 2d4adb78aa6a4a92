"""What all components share: names, requests, quotas, the ledger's arithmetic, placement, decisions.

Pure: no I/O, no clock, no environment, no Kubernetes client.
"""
