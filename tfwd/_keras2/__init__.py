"""Private Keras 2.15 APIs: the same modules and functions as `tfwd._keras3`."""
