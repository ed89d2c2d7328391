"""The programs of the language model."""
