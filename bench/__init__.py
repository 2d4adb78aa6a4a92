"""Benchmarks: every figure that the README claims, measured beside a baseline on the same machine."""
