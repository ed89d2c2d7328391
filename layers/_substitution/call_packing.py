"""Packs the arguments and results of a layer's call into flat lists of tensors.

A function that runs again in backward, or in a branch of a `tf.cond`, takes and returns flat lists
of tensors. A layer takes and returns nests that also contain other values. Some tensors carry a
Keras mask.

`tf.nest` supports lists, tuples, dicts, attrs and dataclasses that define `__tf_flatten__`. This
module also opens other dataclasses, field by field. A tensor that is hidden in an object would not
be a result of the differentiated function, and would get no gradient.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph.stateless_call import Result


class Arguments:
    """Positional and keyword arguments of a call.

    If a tensor is given twice, the rebuilt call also gets one tensor twice. Some layers compare
    their arguments, or remove masks from them.

    Attributes:
        tensors: All tensors in the arguments. Masks come last.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._nest = (args, kwargs)
        self._flat = flatten(self._nest)
        given = {id(x): x for x in self._flat if tf.is_tensor(x)}
        self._given = list(given.values())
        self._masks = [_keras.layers.get_mask(x) for x in self._given]
        numbers = {key: i for i, key in enumerate(given)}
        self._positions = [numbers.get(id(x)) for x in self._flat]
        masks = [mask for mask in self._masks if mask is not None]
        self.tensors = [t for x in (*self._given, *masks) for t in components(x)]
        self._copies: list[tuple[Any, Any]] = []

    def rebuild(self, tensors: list[tf.Tensor]) -> tuple[tuple, dict[str, Any]]:
        """Returns the same nest with other tensors, and attaches the masks to them."""
        parts = iter([tf.identity(tensor) for tensor in tensors])
        copies = [from_components(x, parts) for x in self._given]
        masks = [None if m is None else from_components(m, parts) for m in self._masks]
        self._copies = list(zip(copies, masks, strict=True))
        for rebuilt, mask in self._copies:
            if mask is not None:
                _keras.layers.set_mask(rebuilt, mask)
        pairs = zip(self._flat, self._positions, strict=True)
        return unflatten(self._nest, iter(x if i is None else copies[i] for x, i in pairs))

    def changed_masks(self) -> list[tuple[Any, Any]]:
        """Returns pairs of an argument and its new mask, for masks that the last call changed."""
        found = [_keras.layers.get_mask(rebuilt) for rebuilt, _ in self._copies]
        return [
            (x, after)
            for x, (_, before), after in zip(self._given, self._copies, found, strict=True)
            if after is not before
        ]

    def signature(self) -> tuple:
        """Returns a hashable description of the arguments, without their values and sizes."""
        tensors = tuple((t.dtype, t.shape.rank) for t in self.tensors)
        others = tuple(repr(x) for x in self._flat if not tf.is_tensor(x))
        masked = tuple(mask is not None for mask in self._masks)
        return tensors, others, masked, tuple(self._positions)


def with_mask_of_inputs(args: tuple, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns keyword arguments with the mask of a layer's only tensor argument.

    Keras 3 passes this mask itself, but not if the training flag is a second tensor.

    Args:
        args: Positional arguments, without the training flag.
        kwargs: Keyword arguments, without the training flag.
    """
    if "mask" not in kwargs or kwargs["mask"] is not None:
        return kwargs
    given = [*args, *(value for name, value in kwargs.items() if name != "mask")]
    tensors = [value for value in given if any(map(tf.is_tensor, flatten(value)))]
    if len(tensors) != 1:
        return kwargs
    masks = [_keras.layers.get_mask(x) if tf.is_tensor(x) else None for x in flatten(tensors[0])]
    return {**kwargs, "mask": unflatten(tensors[0], iter(masks))}


class CommonBranchResults(NamedTuple):
    """The common results of the two branches of a training flag.

    Attributes:
        updated: Variables that either branch updates.
        losses: Largest number of losses that a branch adds.
    """

    updated: list[keras.Variable]
    losses: int


class Results:
    """The results of one call. `unpack(pack(result))` is the result.

    Args:
        name: Name of the layer, for messages.
        arguments: Arguments of the call. The call may change their masks.
        branches: Common results of both branches. None if the call does not run in a branch.
    """

    def __init__(
        self, name: str, arguments: Arguments, branches: CommonBranchResults | None
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._branches = branches
        self._nest: Any = None
        self._flat: list[Any] = []
        self._masks: list[Any] = []
        self._remasked: list[tuple[Any, Any]] = []
        self._updated: list[keras.Variable] = []
        self._losses = 0

    def pack(self, result: Result) -> list[tf.Tensor]:
        """Returns the tensors of a result: outputs, masks that the call made, losses and updates.

        Raises:
            TypeError: If an output is an object that cannot be returned from a branch.
        """
        self._nest = result.outputs
        self._flat = flatten(result.outputs)
        outputs = [x for x in self._flat if tf.is_tensor(x)]
        self._masks = [_keras.layers.get_mask(x) for x in outputs]
        self._remasked = self._arguments.changed_masks()
        masks = [
            mask for mask in (*self._masks, *(m for _, m in self._remasked)) if mask is not None
        ]
        losses, updates = list(result.losses), dict((id(v), (v, t)) for v, t in result.updates)
        if self._branches is not None:
            if name := opaque_class(result.outputs):
                raise TypeError(
                    f"layer '{self._name}' returns a {name}, whose tensors cannot be returned from "
                    "the branch of a training flag that is a tensor. Return a dict, a tuple or a "
                    "dataclass, or pass the flag as a Python bool"
                )
            losses = [tf.cast(loss, tf.float32) for loss in losses]
            losses += [tf.zeros([])] * (self._branches.losses - len(losses))
            for variable in self._branches.updated:
                updates.setdefault(id(variable), (variable, _keras.variables.constant(variable)))
            updates = {id(v): updates[id(v)] for v in self._branches.updated}
        self._losses = len(losses)
        self._updated = [variable for variable, _ in updates.values()]
        return [
            *(part for x in (*outputs, *masks) for part in components(x)),
            *(tf.convert_to_tensor(loss) for loss in losses),
            *(tf.stop_gradient(value) for _, value in updates.values()),
        ]

    def unpack(self, tensors: list[tf.Tensor]) -> Result:
        """Returns the result of the last `pack`, with `tensors` in place of its tensors.

        The arguments of the call keep the masks that the call gave them.
        """
        supply = iter(tensors)
        flat = [from_components(x, supply) if tf.is_tensor(x) else x for x in self._flat]
        outputs = [x for x in flat if tf.is_tensor(x)]
        for output, mask in zip(outputs, self._masks, strict=True):
            if mask is not None:
                _keras.layers.set_mask(output, from_components(mask, supply))
        for given, mask in self._remasked:
            _keras.layers.set_mask(given, None if mask is None else from_components(mask, supply))
        losses = [next(supply) for _ in range(self._losses)]
        updates = [(variable, next(supply)) for variable in self._updated]
        return Result(unflatten(self._nest, iter(flat)), updates, losses, [], {})


def flatten(nest: Any) -> list[Any]:
    """Returns the leaves of a nest in the order of `tf.nest`. A composite tensor is one leaf."""
    leaves: list[Any] = []
    for leaf in tf.nest.flatten(nest):
        if _is_opened(leaf):
            for name in _fields(leaf):
                leaves += flatten(getattr(leaf, name))
        else:
            leaves.append(leaf)
    return leaves


def unflatten(nest: Any, leaves: Iterator[Any]) -> Any:
    """Returns the same nest with other leaves."""
    flat = [
        _with_fields(leaf, leaves) if _is_opened(leaf) else next(leaves)
        for leaf in tf.nest.flatten(nest)
    ]
    return tf.nest.pack_sequence_as(nest, flat)


def components(leaf: Any) -> list[tf.Tensor]:
    """Returns the component tensors: several for a sparse or ragged tensor, else one."""
    if isinstance(leaf, tf.Variable):
        return [tf.convert_to_tensor(leaf)]
    parts = tf.nest.flatten(leaf, expand_composites=True)
    return [tf.convert_to_tensor(part) for part in parts]


def from_components(leaf: Any, parts: Iterator[tf.Tensor]) -> Any:
    """Returns a tensor like `leaf` that is made of the next component tensors."""
    if not isinstance(leaf, tf.__internal__.CompositeTensor) or isinstance(leaf, tf.Variable):
        return next(parts)
    count = len(tf.nest.flatten(leaf, expand_composites=True))
    given = [next(parts) for _ in range(count)]
    return tf.nest.pack_sequence_as(leaf, given, expand_composites=True)


def opaque_class(nest: Any) -> str:
    """Returns the class of an object that hides tensors and cannot be opened, or ""."""
    for leaf in flatten(nest):
        if (
            tf.is_tensor(leaf)
            or _keras.variables.is_variable(leaf)
            or not hasattr(leaf, "__dict__")
        ):
            continue
        held = [item for value in vars(leaf).values() for item in tf.nest.flatten(value)]
        if any(map(tf.is_tensor, held)):
            return type(leaf).__name__
    return ""


def _is_opened(leaf: Any) -> bool:
    """Returns True for a dataclass that `tf.nest` treats as a leaf."""
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and not tf.is_tensor(leaf)
        and not isinstance(leaf, tf.Module)
    )


def _fields(instance: Any) -> list[str]:
    """Returns the names of the fields that have a value."""
    names = [field.name for field in dataclasses.fields(instance)]
    return [name for name in names if hasattr(instance, name)]


def _with_fields(instance: Any, leaves: Iterator[Any]) -> Any:
    """Returns a copy of a dataclass with other leaves. Its constructor does not run again."""
    other = copy.copy(instance)
    for name in _fields(instance):
        # `object.__setattr__` also works on a frozen class.
        object.__setattr__(other, name, unflatten(getattr(instance, name), leaves))
    # Keras treats the instance as a leaf and gives it a mask. The copy has the first instance's
    # mask.
    if _keras.layers.get_mask(other) is not None:
        _keras.layers.set_mask(other, None)
    return other
