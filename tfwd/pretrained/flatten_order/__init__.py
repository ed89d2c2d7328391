"""Order of features where a model flattens an image: PyTorch has another order than Keras.

PyTorch flattens `[channels, height, width]`. Keras flattens `[height, width, channels]`. The next
layer's weights therefore have their rows in another order. The same holds for the outputs of a
`Dense` layer that are reshaped to an image.

One call of the model is traced. The search follows each axis of each tensor through the layers and
operations of this call: which axes were divided, merged, joined or exchanged, and in which orders
PyTorch's model may have them. A layer that PyTorch can only call with the channels first, or last,
shows the order. If nothing proves the order of the features at a kernel, loading it is an error.

- `joinable.py`: objects that may turn out to be the same one.
- `axes.py`, `made_axes.py`: what the entries of an axis are, and their order in PyTorch.
- `layouts_in_torch.py`: the orders in which PyTorch may have the axes of a tensor.
- `tensor_axes.py`, `reshapes.py`, `merges.py`, `products.py`: the axes of a tensor, and what
  permutations, reshapes, sums and matrix products do to them.
- `operation_rules.py` and the files that it imports: the rules of TensorFlow's operations.
- `needed_places.py`: orders that normalizations and a softmax need.
- `layer_rules.py` and the files that it imports: the rules of Keras's layers.
- `traced_calls.py`, `traced_operations.py`: the trace of a call.
- `order_search.py`: the pass over the calls.
- `layer_orders.py`, `orders.py`: the orders that are found at each layer.
- `unseen_layers.py`: layers that no traced call reaches.
"""
