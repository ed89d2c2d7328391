"""Several processes that train one model: addresses, start, exchanged values, equal settings."""
