"""The code for Keras 3, with its private APIs."""
