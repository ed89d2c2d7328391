"""Defects of loading weights from a file."""

from __future__ import annotations

from mutations.defects.defect import Defect

DEFECTS = [
    Defect(
        "the config beside the weights is not read",
        "tfwd/pretrained/published_layers.py",
        "config, error = workers.json_from_chief(lambda: _config_at(path))",
        "config, error = None, None",
        ("tests/layers/transformer/test_config_of_weights.py",),
    ),
    Defect(
        "the gates of PyTorch's GRU stay in their order",
        "tfwd/pretrained/torch_layouts.py",
        "_GRU_GATES = (1, 0, 2)",
        "_GRU_GATES = (0, 1, 2)",
        ("tests/pretrained/test_layouts.py", "-k", "recurrent"),
    ),
    Defect(
        "a bias has PyTorch's order beside any kernel",
        "tfwd/pretrained/key_styles.py",
        'return None if last_component(name) == "bias" else self.of(target)[name]',
        "return self.of(target)[name]",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "a file of safetensors always has PyTorch's order",
        "tfwd/pretrained/key_styles.py",
        "self._default = source.transposed and not is_of_keras",
        "self._default = source.transposed",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "a tensor in Keras's order says that PyTorch has the same order",
        "tfwd/pretrained/file_layouts.py",
        "shape or of_other.transposed is not False or self._is_in_keras_order(target)",
        "True",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "no order is asked for beside transposed=False, if nothing proves PyTorch's order",
        "tfwd/pretrained/unknown_orders.py",
        "        if isinstance(shown, UnknownFeatureOrder):\n            advice",
        "        if False:\n            advice",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "features of a tensor in Keras's order are not compared with other weights",
        "tfwd/pretrained/file_layouts.py",
        "        inputs_first = not self._styles.is_transposed(target, key, step.key)\n",
        "        inputs_first = not self._styles.is_transposed(target, key, step.key)\n"
        "        if inputs_first:\n            return\n",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "the axis of a gain in the file does not count",
        "tfwd/pretrained/gains.py",
        "len(in_file) == rank and in_file[axis] == size",
        "len(in_file) == rank",
        ("tests/pretrained/test_gains.py",),
    ),
    Defect(
        "half of a weight normalization is loaded as the weight",
        "tfwd/pretrained/computed_weights.py",
        '(other == "u" or beside_it not in loaded)',
        'other == "u"',
        ("tests/pretrained/test_computed_weights.py",),
    ),
    Defect(
        "the original of a spectral normalization is loaded beside its vectors",
        "tfwd/pretrained/computed_weights.py",
        "if not (spectral or left_out)",
        "if not left_out",
        ("tests/pretrained/test_computed_weights.py",),
    ),
    Defect(
        "weights of the same features may have Keras's order and PyTorch's by their keys",
        "tfwd/pretrained/given_orders.py",
        "errors += _other_style(one, other)",
        "pass",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "a square kernel whose key has no known end has the order of the file",
        "tfwd/pretrained/square_kernels.py",
        "kernel.is_torch is not None or names_show or is_conv",
        "True",
        ("tests/pretrained/test_square_kernels.py",),
    ),
    Defect(
        "ignored keys show the order of axes of others",
        "tfwd/pretrained/key_styles.py",
        "endings = {last_component(key) for key in keys}",
        "endings = {last_component(key) for key in source.entries}",
        ("tests/pretrained/test_square_kernels.py",),
    ),
    Defect(
        "the order of a convolution's kernel is guessed if its shape fits both orders",
        "tfwd/pretrained/square_kernels.py",
        "return shape == target.shape == torch_shape(target)",
        "return False",
        ("tests/pretrained/test_square_kernels.py",),
    ),
    Defect(
        "kernels that are not loaded show no order of axes",
        "tfwd/pretrained/square_kernels.py",
        "told[is_torch].setdefault(value, key)",
        "pass",
        ("tests/pretrained/test_square_kernels.py",),
    ),
    Defect(
        "a name of Keras shows the order of a cube in a file of PyTorch",
        "tfwd/pretrained/key_styles.py",
        "return len(axes) > 1 and",
        "return False and",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "the gates of a user's LSTM have PyTorch's order",
        "tfwd/pretrained/known_weights.py",
        "WITH_GATES = (keras.layers.LSTMCell, keras.layers.GRUCell)",
        "WITH_GATES = (keras.layers.GRUCell,)",
        ("tests/pretrained/test_users_classes.py",),
    ),
    Defect(
        "a flattened image has its rows and columns exchanged",
        "tfwd/pretrained/torch_layouts.py",
        "    first = _split_axis(inputs, shape[0])\n    if len(shape) == 1:",
        "    first = _split_axis(inputs, shape[0])\n"
        "    if isinstance(inputs, FlattenedAxes) and len(inputs.shape) == 3:\n"
        "        rows, columns, channels = inputs.positions\n"
        "        first = FlattenedAxes(inputs.shape, (columns, rows, channels))\n"
        "    if len(shape) == 1:",
        ("tests/pretrained/test_random_models.py",),
    ),
    Defect(
        "every rule is tried for every variable",
        "tfwd/path_patterns.py",
        "    if not isinstance(pattern, str) or expression.flags & _CHANGES:",
        "    if True:",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    Defect(
        "the flags of a regular expression are ignored in the index of keys",
        "tfwd/path_patterns.py",
        "_CHANGES = re.IGNORECASE | re.VERBOSE",
        "_CHANGES = re.VERBOSE",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    Defect(
        "the last rows of a transposed kernel stay zero",
        "tfwd/pretrained/tiled_transpose.py",
        "        for i in range(0, rows, TILE):",
        "        for i in range(0, max(rows - rows % TILE, 1), TILE):",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    Defect(
        "each block of a table is read into the table's first rows",
        "tfwd/pretrained/sources/safetensors_files.py",
        "begin = 0 if into is None else start * row",
        "begin = 0",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    Defect(
        "gates under unknown names have the order of the layer",
        "tfwd/pretrained/recurrent_gates.py",
        "if not is_weight or key.transposed is not None",
        "if is_weight or key.transposed is not None",
        ("tests/pretrained/test_recurrent_gates.py",),
    ),
    Defect(
        "a transposed square table is loaded as it is",
        "tfwd/pretrained/unknown_layouts.py",
        "if is_table(target) and key.transposed and shape[0] == shape[1]:",
        "if False:",
        ("tests/pretrained/test_layouts.py", "-k", "table"),
    ),
    Defect(
        "a quantized kernel takes the numbers of a file",
        "tfwd/pretrained/key_matching.py",
        "if _is_quantized(target) and name",
        "if False and name",
        ("tests/pretrained/test_dtype_conversion.py", "-k", "quantized"),
    ),
    Defect(
        "the dropped copy of a weight is loaded",
        "tfwd/pretrained/computed_weights.py",
        "if raw in entries and raw not in loaded:",
        "if False:",
        ("tests/pretrained/test_computed_weights.py", "-k", "copy"),
    ),
    Defect(
        "variables without a key keep their values without a word",
        "tfwd/pretrained/loading_plan.py",
        "            warned = self._unloaded()",
        "            warned: list[str] = []",
        ("tests/pretrained/test_plan.py", "-k", "missing"),
    ),
]
