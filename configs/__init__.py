"""Configs of the programs, installed as `tfwd.configs`. Example: `--config=quickstart`."""
