"""Configs and weight names of published models, and the layers that they describe."""
