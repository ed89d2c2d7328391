"""Several processes that train one model: their addresses, their start, and what they agree on."""
