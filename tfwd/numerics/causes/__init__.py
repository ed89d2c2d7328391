"""Rules for the likely causes of a bad step. See `docs/non_finite.md`."""
