"""Configs of the programs, installed as `tfwd.configs`: `--config=quickstart` is one of them."""
