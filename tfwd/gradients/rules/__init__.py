"""Rules of layers: per-example gradients of a layer's weights from its inputs and its gradient."""
