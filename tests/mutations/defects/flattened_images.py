"""Defects of the order of flattened images in a file."""

from __future__ import annotations

from mutations.defects.defect import Defect

DEFECTS = [
    Defect(
        "joined rows of an image have the order of PyTorch",
        "tfwd/pretrained/flatten_order/pieces.py",
        "if any(len(each) > 1 for each in positions.values())",
        "if not positions",
        ("tests/pretrained/test_pieces_of_images.py",),
    ),
    Defect(
        "the outputs of an EinsumDense have the order of its kernel",
        "tfwd/pretrained/flatten_order/einsum_axes.py",
        "return [axis for axis in self.output if axis in self.kernel]",
        "return [axis for axis in self.kernel if axis in self.output]",
        ("tests/pretrained/test_layouts.py", "-k", "many_axes"),
    ),
    Defect(
        "an EinsumDense flattens an image in the order of Keras",
        "tfwd/pretrained/flatten_order/einsum_axes.py",
        'call.recorder.record_axis(call.layer, "inputs", merged)',
        'call.recorder.record_axis(call.layer, "inputs", None)',
        ("tests/pretrained/test_einsum_of_images.py",),
    ),
    Defect(
        "a normalization of channels keeps the order of an image",
        "tfwd/pretrained/flatten_order/normalizations.py",
        "    if isinstance(layer, groups.LAST_AXES_LAYERS):",
        "    if False:",
        ("tests/pretrained/test_normalized_channels.py",),
    ),
    Defect(
        "a flattened image inside a custom layer is not noticed",
        "tfwd/pretrained/flatten_order/layer_rules.py",
        'call.recorder.record_unseen("inputs", shape, inside, takes)',
        "pass",
        ("tests/pretrained/test_hidden_flatten.py",),
    ),
    Defect(
        "a sum of an image and a sequence has no order",
        "tfwd/pretrained/flatten_order/merges.py",
        "        layout = layout.join(other.layout, reason)",
        "        pass",
        ("tests/pretrained/test_orders_that_nothing_proves.py", "-k", "sum"),
    ),
    Defect(
        "a layer that is called twice has the order of its last call",
        "tfwd/pretrained/flatten_order/layer_orders.py",
        "            order = _SEVERAL",
        "            pass",
        ("tests/pretrained/test_orders_that_nothing_proves.py", "-k", "twice"),
    ),
    Defect(
        "a flattening function in a subclassed model is not noticed",
        "tfwd/pretrained/flatten_order/unseen_layers.py",
        "if size not in known | last_image:",
        "if False:",
        ("tests/pretrained/test_orders_that_nothing_proves.py", "-k", "subclassed"),
    ),
    Defect(
        "outputs that are joined before they become an image keep their order",
        "tfwd/pretrained/flatten_order/layer_orders.py",
        "is_changed = any([each.mark_sources(known) for each in made])",
        "is_changed = False",
        ("tests/pretrained/test_outputs_that_become_images.py",),
    ),
    Defect(
        "parts of an image merge in the order of Keras",
        "tfwd/pretrained/flatten_order/made_axes.py",
        "if are_two and not any(map(known.of, self._all_wholes())):",
        "if self._has_parts_only():",
        ("tests/pretrained/test_axes_through_models.py",),
    ),
    Defect(
        "a layer on the channels of an input image shows PyTorch's order",
        "tfwd/pretrained/flatten_order/tensor_axes.py",
        "return is_input and len(self.axes) > 3",
        "return is_input and len(self.axes) > 9",
        ("tests/pretrained/test_images_of_the_caller.py",),
    ),
    Defect(
        "a pixel shuffle that a model writes is not seen",
        "tfwd/pretrained/flatten_order/pixel_shuffles.py",
        "if not pixels.issuperset(parts[parts.index(pixel) + 1 :]):",
        "if False:",
        ("tests/pretrained/test_divided_channels.py",),
    ),
    Defect(
        "a layer on the channels of windows shows no doubt about the order",
        "tfwd/pretrained/flatten_order/needed_places.py",
        "return like(tensor, tensor.axes, layout.reason or reason, is_contradictory=True)",
        "return tensor",
        ("tests/pretrained/test_windows_of_images.py",),
    ),
    Defect(
        "a product with the channels of windows shows no doubt about the order",
        "tfwd/pretrained/flatten_order/products.py",
        "return like(tensor, axes, layout.reason or reason, is_contradictory=True)",
        "return like(tensor, axes)",
        ("tests/pretrained/test_windows_of_images.py",),
    ),
    Defect(
        "the order of one joined part counts for the parts that are known",
        "tfwd/pretrained/given_orders.py",
        """            found.append((size, order))
            continue""",
        """            found.append((size, None))
            continue""",
        ("tests/pretrained/test_joined_parts.py",),
    ),
    Defect(
        "a tensor in Keras's order of axes keeps the rows of joined features",
        "tfwd/pretrained/torch_layouts.py",
        "        rest = inputs_first_layout(target, LayerOrders(None, given.outputs), in_file)",
        "        return Layout.unchanged(shape)",
        ("tests/pretrained/test_joined_parts.py", "-k", "keras_order"),
    ),
    Defect(
        "a shape that fits two orders of axes has the first order",
        "tfwd/pretrained/given_orders.py",
        "    if len(found) == 1:",
        "    if found:",
        ("tests/pretrained/test_shapes_that_fit_two_orders.py",),
    ),
    Defect(
        "a repeated channel shows no doubt about the order",
        "tfwd/pretrained/flatten_order/axis_operations.py",
        "is_repetition=n < last",
        "is_repetition=True",
        ("tests/pretrained/test_repeated_channels.py",),
    ),
    Defect(
        "a matrix for each position is only on the summed axis",
        "tfwd/pretrained/flatten_order/product_operations.py",
        "(*shape[:-2], 1, 1)",
        "(1,) * len(shape)",
        ("tests/pretrained/test_matrices_per_position.py", "-k", "capsule"),
    ),
    Defect(
        "a softmax of zeros has other entries at each position",
        "tfwd/pretrained/flatten_order/elementwise_operations.py",
        "if operation.type in _OF_EQUAL:",
        "if False:",
        ("tests/pretrained/test_matrices_per_position.py", "-k", "routed"),
    ),
    Defect(
        "a layer on the rows of an input image shows the image's order",
        "tfwd/pretrained/flatten_order/time_steps.py",
        "return tensor.is_image_of_caller() and len(tensor.axes) == 4",
        "return False",
        ("tests/pretrained/test_shapes_that_fit_two_orders.py", "-k", "rows"),
    ),
]
