"""Certificates of the webhook: create a CA, issue serving certificates, renew both, rotate one CA to the next."""
