"""LSTM and GRU as functions of tensors, with gradients written by hand. See `docs/lstm.md`."""
