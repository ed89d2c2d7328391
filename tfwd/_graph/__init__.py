"""TensorFlow's graphs and gradients: recomputation in backward, and what backward stores.

- `recompute`: runs a function whose backward draws weights again.
- `saved_tensors`: replaces tensors that backward would store, for `recompute`.
- `custom_gradient`: hand-written gradients that keep no model alive.
- `stateless_call`: a layer's call on other values of its variables.
- `tentative_assignments`: assignments that can be undone. `function_calls`: what a called function
  assigns to.
- `cached_constants`: constants of a graph. `delayed_seeds`: seeds that wait for another tensor.
- `private_graph_apis`: private names of TensorFlow.
"""
