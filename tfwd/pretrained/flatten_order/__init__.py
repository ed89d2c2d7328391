"""Order of features where a model flattens an image: PyTorch has another order than Keras.

PyTorch flattens `[channels, height, width]`. Keras flattens `[height, width, channels]`. The next
layer's weights therefore have their rows in another order. The same holds for the outputs of a
`Dense` layer that are reshaped to an image. The model's graph shows both cases. A subclassed model
or custom layer has no graph, so one of its calls is traced. If the graph does not prove the order
of the features at a kernel, loading the kernel is an error.

- `orders.py`: the order of a tensor's axes, and of flattened features.
- `layer_groups.py`: Keras layers that have the same effect on the order.
- `reshape_rules.py`, `forward_rules.py`, `backward_rules.py`: the effect of one layer.
- `einsum_axes.py`: the effect of `EinsumDense`.
- `image_axes_rules.py`: layers that PyTorch's model may run with the channels last.
- `time_steps.py`: layers inside a `TimeDistributed`.
- `layer_graphs.py`: the graphs of layers.
- `traced_calls.py`, `traced_operations.py`, `axes_of_operations.py`: the graph of a traced call.
- `unseen_layers.py`: layers that are called outside all graphs, where a call cannot be traced.
- `model_ends.py`: inputs and outputs of models.
- `layer_orders.py`: the orders that were found at each layer.
- `propagation.py`: the pass through a model.
"""
