"""Quotas in a cluster: cached from their ConfigMaps, and charged in one ledger per namespace."""
