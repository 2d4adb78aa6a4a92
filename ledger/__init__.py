"""Quotas in a cluster: followed where they are written, charged in one ledger for each namespace."""
