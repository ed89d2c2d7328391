"""Sweeps of `tfwd-tune`, installed as `tfwd.configs.sweeps`: `--sweep=rates` is one of them."""
