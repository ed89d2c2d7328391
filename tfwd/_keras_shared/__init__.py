"""What `tfwd._keras2` and `tfwd._keras3` do alike, written once."""
