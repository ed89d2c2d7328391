"""Rules of layers: per-example gradients of weights from a layer's inputs and its gradient."""
