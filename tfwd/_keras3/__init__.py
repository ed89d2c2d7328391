"""Private Keras 3 APIs."""
