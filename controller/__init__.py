"""Reconciles what admission depends on: ledgers, quota status, the GPU catalogue, certificates and webhooks."""
