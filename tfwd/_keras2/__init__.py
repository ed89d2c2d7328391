"""The code for Keras 2.15, with its private APIs: the same modules as `tfwd._keras3`."""
