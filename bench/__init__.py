"""Every figure the README claims, measured, with the yardstick beside it."""
