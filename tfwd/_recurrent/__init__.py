"""LSTM and GRU as functions of tensors, with hand-written gradients. See `docs/lstm.md`."""
