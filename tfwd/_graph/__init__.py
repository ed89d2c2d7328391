"""TensorFlow's graphs and gradients: what runs again in backward, and what backward stores.

- `recompute`: a function whose backward draws weights again; `saved_tensors`: its hooks.
- `custom_gradient`: gradients written by hand that keep no model alive.
- `substitute`: a layer's call on other values of its variables.
- `tentative`: assignments that can be taken back.
- `graphs`: TensorFlow's private names.
"""
