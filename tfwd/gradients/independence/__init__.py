"""Trials of a model that show if the examples of a batch are independent."""
