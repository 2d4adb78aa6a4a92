"""Keeps what admission rests on right: ledgers, their status, the catalogue of cards."""
