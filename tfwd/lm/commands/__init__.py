"""Console scripts of the language model."""
