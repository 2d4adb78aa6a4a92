"""Certificates: a CA, what it signs, when to renew either, and the order in which one CA follows another."""
