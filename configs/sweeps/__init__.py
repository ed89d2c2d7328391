"""Sweeps of `tfwd-tune`, installed as `tfwd.configs.sweeps`. Example: `--sweep=rates`."""
