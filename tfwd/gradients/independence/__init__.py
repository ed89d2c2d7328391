"""Trials of a model that show whether the examples of a batch are independent."""
