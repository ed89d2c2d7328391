"""Config keys, their checks, config files and the command line."""
