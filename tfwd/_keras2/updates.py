"""What is to happen with each update of a variable, on Keras 2.15."""
