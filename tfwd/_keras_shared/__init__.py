"""The code that both versions of Keras share, for `tfwd._keras2` and `tfwd._keras3`."""
