"""TensorFlow's graphs and gradients: recomputation in backward, and what backward stores.

- `recompute`: a function whose backward draws weights again; `saved_tensors`: its hooks.
- `custom_gradient`: hand-written gradients that keep no model alive.
- `stateless_call`: a layer's call on other values of its variables.
- `tentative_assignments`: assignments that can be undone.
- `cached_constants` and `delayed_seeds`: constants and seeds of these functions in a graph.
- `private_graph_apis`: TensorFlow's private names.
"""
