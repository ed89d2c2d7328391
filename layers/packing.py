"""Arguments and results of a layer's call, as flat lists of tensors and back.

A function that is run again in backward, or stands in a branch of a `tf.cond`, takes and returns
flat lists of tensors; a layer takes and returns nests with other things in them, some of which
carry a Keras mask.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.inspection import Verdict
from tfwd.substitute import Result


class Arguments:
    """Positional and keyword arguments; `tensors` lists all tensors in them, masks last."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._nest = (args, kwargs)
        # A composite (a sparse or ragged tensor) is taken apart into its components.
        self._flat = tf.nest.flatten(self._nest, expand_composites=True)
        tensors = [x for x in self._flat if tf.is_tensor(x)]
        masks = [_keras.get_mask(x) for x in tensors]
        self._masked = [i for i, mask in enumerate(masks) if mask is not None]
        self._count = len(tensors)
        self.tensors = [tf.convert_to_tensor(x) for x in tensors]
        self.tensors += [tf.convert_to_tensor(masks[i]) for i in self._masked]

    def rebuild(self, tensors: list[tf.Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The same nest with other tensors, which are given the masks that stand behind them."""
        plain, masks = [tf.identity(t) for t in tensors[: self._count]], tensors[self._count :]
        for i, mask in zip(self._masked, masks, strict=True):
            _keras.set_mask(plain[i], mask)
        supply = iter(plain)
        flat = [next(supply) if tf.is_tensor(x) else x for x in self._flat]
        return tf.nest.pack_sequence_as(self._nest, flat, expand_composites=True)

    def kind(self) -> tuple:
        """Hashable: everything about the arguments but their values and sizes."""
        tensors = tuple((t.dtype, t.shape.rank) for t in self.tensors)
        others = tuple(repr(x) for x in self._flat if not tf.is_tensor(x))
        return tensors, others, tuple(self._masked)


class Results:
    """The results of one call. `unpack(pack(result))` is the result.

    Args:
        verdict: given if the result comes out of one of two branches, which must return alike
            lists: it says what either branch updates and how many losses either adds.
    """

    def __init__(self, verdict: Verdict | None) -> None:
        self._verdict = verdict
        self._nest: Any = None
        self._flat: list[Any] = []
        self._masked: list[int] = []
        self._updated: list[keras.Variable] = []
        self._losses = 0

    def pack(self, result: Result) -> list[tf.Tensor]:
        """The result's tensors: outputs, their masks, losses and updates."""
        self._nest = result.outputs
        self._flat = tf.nest.flatten(result.outputs, expand_composites=True)
        outputs = [x for x in self._flat if tf.is_tensor(x)]
        masks = [_keras.get_mask(x) for x in outputs]
        self._masked = [i for i, mask in enumerate(masks) if mask is not None]
        losses, updates = list(result.losses), dict((id(v), (v, t)) for v, t in result.updates)
        if self._verdict is not None:
            losses = [tf.cast(loss, tf.float32) for loss in losses]
            losses += [tf.zeros([])] * (self._verdict.losses - len(losses))
            for variable in self._verdict.updated:
                updates.setdefault(id(variable), (variable, _keras.constant(variable)))
            updates = {id(v): updates[id(v)] for v in self._verdict.updated}
        self._losses = len(losses)
        self._updated = [variable for variable, _ in updates.values()]
        return [
            *(tf.convert_to_tensor(x) for x in outputs),
            *(tf.convert_to_tensor(masks[i]) for i in self._masked),
            *(tf.convert_to_tensor(loss) for loss in losses),
            *(tf.stop_gradient(value) for _, value in updates.values()),
        ]

    def unpack(self, tensors: list[tf.Tensor]) -> Result:
        """The result that the last `pack` laid flat, with these tensors for its own."""
        supply = iter(tensors)
        flat = [next(supply) if tf.is_tensor(x) else x for x in self._flat]
        outputs = [x for x in flat if tf.is_tensor(x)]
        for i in self._masked:
            _keras.set_mask(outputs[i], next(supply))
        losses = [next(supply) for _ in range(self._losses)]
        updates = [(variable, next(supply)) for variable in self._updated]
        nest = tf.nest.pack_sequence_as(self._nest, flat, expand_composites=True)
        return Result(nest, updates, losses, [], {})
