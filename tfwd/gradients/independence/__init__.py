"""Trials that check whether the examples of a batch are independent in a model."""
