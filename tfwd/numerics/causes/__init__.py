"""Likely causes of a bad step, each found in what the step computed. See `docs/non_finite.md`."""
