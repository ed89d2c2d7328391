"""What is alike on both Kerases, for `tfwd._keras2` and `tfwd._keras3`."""
