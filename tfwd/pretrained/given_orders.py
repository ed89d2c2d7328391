"""Orders that a mapping gives: the shape in PyTorch of a tensor that is flattened, or made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tfwd.pretrained.axis_permutations import orders_of_axes
from tfwd.pretrained.flatten_order.axes import same_order
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, Side
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    JoinedPart,
    Shape,
    UnknownFeatureOrder,
    flattened_image,
)

OPTIONS: dict[Side, str] = {"inputs": "flattened", "outputs": "unflattened"}
NO_SHAPE = "no shape can give the order of the parts"


class GivenOrder(NamedTuple):
    """Order that a shape of PyTorch gives, and why it is none.

    Attributes:
        order: The order. None if PyTorch has the same order as Keras.
        problem: str. Why the shape gives no order, as the end of a sentence; "" if it gives one.
    """

    order: FeatureOrder
    problem: str = ""


def given_order(shape: Shape, side: Side, of_model: LayerOrders) -> GivenOrder:
    """Returns the order that a shape of PyTorch gives.

    If the model shows the axes in Keras, the shape shows which order PyTorch has of these axes; see
    `orders_of_axes`. If the model does not show the axes, the shape describes an image with the
    channels first, of at most three axes. If the model joins several tensors, the shape counts for
    the one whose order the model does not show.

    Args:
        shape: Shape in PyTorch. () if PyTorch has the same order.
        side: Side of the layer.
        of_model: Orders at the layer that the model shows.
    """
    shown, in_keras = of_model.of(side), of_model.sizes.get(side, ())
    kept = tuple(size for size in shape if size != 1)
    if isinstance(shown, UnknownFeatureOrder) and (parts := of_model.parts.get(side)):
        return _order_of_parts(shape, side, shown, parts)
    if not kept:
        return GivenOrder(None)
    if isinstance(shown, JoinedFeatures):
        return GivenOrder(shown, "is wrong, because several tensors are joined here: omit it")
    same = f"{OPTIONS[side]}=()"
    if isinstance(shown, UnknownFeatureOrder):
        if side in of_model.joined:
            return GivenOrder(
                shown, f"is one shape, but several tensors are joined here: {NO_SHAPE}"
            )
        if shown.is_of_parts:
            return GivenOrder(
                shown, f"is one image, but only parts of the outputs become images: {NO_SHAPE}"
            )
        if shown.is_of_other_channels:
            return GivenOrder(
                shown, "does not show the order inside the channels, which is another in PyTorch"
            )
    channels_first = flattened_image(shape)
    if isinstance(shown, FlattenedAxes):
        if kept == shown.shape != shown.torch_shape:
            return GivenOrder(
                shown, f"has the axes in Keras's order: give {same} if PyTorch has this order"
            )
        if math.prod(kept) != math.prod(shown.shape) or shown.torch_shape == kept:
            return GivenOrder(shown if shown.torch_shape == kept else channels_first)
        if channels_first is not None and same_order(channels_first, shown):
            return GivenOrder(shown)
        expected = f"is not {shown.torch_shape}, which the model shows"
        return GivenOrder(shown, f"{expected}: give this shape, or omit it")
    if not in_keras and len(kept) > 3:  # a volume with the channels first, or a video with the time
        return GivenOrder(
            shown,
            f"has {len(kept)} axes, but the model does not show which axes Keras has here: give "
            f"{same} if PyTorch has the same order",
        )
    if not in_keras or math.prod(kept) != math.prod(in_keras):
        return GivenOrder(channels_first)
    if len(kept) == 1 < len(in_keras):
        return GivenOrder(
            shown, f"has one axis, which shows no order: give {same} if it is Keras's"
        )
    exchanged = isinstance(shown, UnknownFeatureOrder) and shown.may_be_exchanged
    found = orders_of_axes(in_keras, kept, exchanged)
    if len(found) == 1:
        return GivenOrder(found.pop())
    if found:
        return GivenOrder(
            shown,
            f"does not show which order PyTorch has of the axes {in_keras}, because sizes are equal"
            f"{' or axes are merged' * (len(kept) < len(in_keras))}: give {same} if it has Keras's "
            "order",
        )
    return GivenOrder(
        shown,
        f"has other axes than {in_keras}, which Keras has here: give {same} if PyTorch has the "
        "same order",
    )


def _order_of_parts(
    shape: Shape, side: Side, shown: UnknownFeatureOrder, parts: Sequence[JoinedPart]
) -> GivenOrder:
    """Returns the order of joined features, if a shape gives the order of the unknown parts.

    Args:
        shape, side: As in `given_order`.
        shown: Order that the model shows.
        parts: The joined parts.
    """
    unknown = [part.size for part in parts if part.is_unknown]
    if shape and len(unknown) > 1:
        return GivenOrder(
            shown,
            f"does not show which of the joined parts of {' and '.join(map(str, unknown))} "
            "features it is for",
        )
    found: list[tuple[int, FlattenedAxes | None]] = []
    for size, order, in_keras in parts:
        if not isinstance(order, UnknownFeatureOrder):
            found.append((size, order))
            continue
        if shape and math.prod(shape) != size:
            return GivenOrder(
                shown,
                f"has {math.prod(shape)} entries, but a part of {size} features whose order the "
                "model does not show is joined with others: give the shape of this part",
            )
        given = given_order(shape, side, LayerOrders(order, order, {side: in_keras}))
        if given.problem or isinstance(given.order, (JoinedFeatures, UnknownFeatureOrder)):
            return GivenOrder(shown, given.problem)
        found.append((size, given.order))
    return GivenOrder(JoinedFeatures(tuple(found)) if any(order for _, order in found) else None)


def with_given(
    of_model: LayerOrders, flattened: Shape | None, unflattened: Shape | None
) -> LayerOrders:
    """Returns the orders at a layer with the shapes that keys give, without their problems."""
    inputs, outputs = of_model.inputs, of_model.outputs
    if flattened is not None:
        inputs = given_order(flattened, "inputs", of_model).order
    if unflattened is not None:
        outputs = given_order(unflattened, "outputs", of_model).order
    return LayerOrders(inputs, outputs)


def with_given_in_keras(
    of_model: LayerOrders, flattened: Shape | None, unflattened: Shape | None
) -> LayerOrders:
    """Returns the orders of the features of a tensor with its axes in Keras's order.

    Such a tensor has PyTorch's order of features only if the mapping gives a shape.
    """
    found = with_given(of_model, flattened, unflattened)
    return LayerOrders(found.inputs if flattened else None, found.outputs if unflattened else None)


class Features(NamedTuple):
    """Features on an axis of a weight.

    Attributes:
        axis: int. Equal numbers are the same features.
        order: Their order in the file.
        path: str. Path of the weight.
        option: str. Name of the option of a key that gives the order.
        shape: tuple of int. Shape that the mapping gives, or None.
        is_own: bool. True if the weight's own key has the shape.
        in_keras: bool. True if the file has the weight in Keras's order of axes.
        key: str. Key of the weight in the file.
    """

    axis: int
    order: FeatureOrder
    path: str
    option: str
    shape: Shape | None
    is_own: bool
    in_keras: bool
    key: str


def conflicting_orders(found: Sequence[Features]) -> list[str]:
    """Returns an error for each weight with another order than others have for the same features.

    Either the mapping gives an order, or a key shows that the file has PyTorch's order.

    Args:
        found: The features of all weights of the plan.
    """
    given: dict[int, Features] = {}
    of_torch: dict[int, Features] = {}
    for one in found:
        if one.shape is not None:
            given.setdefault(one.axis, one)
        elif not one.in_keras:
            of_torch.setdefault(one.axis, one)
    errors = []
    for one in found:
        first = given.get(one.axis)
        if first is None and (other := of_torch.get(one.axis)) and one.in_keras:
            errors += _other_style(one, other)
        if first is None or same_order(one.order, first.order):
            continue
        if (
            one.is_own
            and first.is_own
            and any(each.in_keras and not each.shape for each in (one, first))
        ):
            continue  # the file has one of them in Keras's order, and the other in PyTorch's
        advice = f"give {one.option}= for '{one.path}' too"
        if one.is_own:
            advice = f"but its key has {one.option}={one.shape}: give the same order"
        errors.append(
            f"'{one.path}' has the same features as '{first.path}', whose key has "
            f"{first.option}={first.shape}, {advice}"
        )
    return errors


def _other_style(one: Features, other: Features) -> list[str]:
    """Returns the error for a weight in Keras's order beside one in PyTorch's, if they differ."""
    if same_order(one.order, other.order):
        return []
    return [
        f"'{one.path}' has the same features as '{other.path}', and the file has '{other.key}' in "
        f"PyTorch's order, but the key '{one.key}' does not show this order: map to "
        f"Key({one.key!r}, transposed=True) if the file has PyTorch's order here too; otherwise "
        f"map to Key(..., transposed=False, {one.option}=())"
    ]
