"""Decoupled weight decay around any optimizer.

The decay is made where Keras makes each variable's update, so whatever decides over updates also
decides over the decay: a skipped step, the accumulation of gradients, a variable without a
gradient, the replica that the variable stands on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras_optimizers
from tfwd.optimizers.decay_rules import Choice, DecayRow, DecayRules, DecayTable
from tfwd.optimizers.decay_step import decay, decay_rows, wide

SCALES = ("absolute", "learning_rate", "schedule")
SPARSE = ("table", "rows")


@keras.saving.register_keras_serializable("tfwd")
class DecoupledWeightDecay(_keras_optimizers.Wrapper):
    """Any Keras optimizer, with weight decay that is not part of the gradient.

    In each update, for each variable that is decayed, first

        w <- w - d * m * s * w

    and then the wrapped optimizer's step, which sees the decayed weight. d is `weight_decay`, m
    the variable's multiplier, and s

    - 1 with `scale="absolute"` (Caffe's `W = W*(1 - d)`, tensorflow-addons),
    - the current learning rate with `"learning_rate"` (PyTorch, Keras),
    - the current learning rate over the initial one with `"schedule"` (Loshchilov and Hutter).

    It adds no state: variables, learning rate and step counter are the wrapped optimizer's. With
    `weight_decay=0` it is the wrapped optimizer, bit for bit.

    Args:
        optimizer: a Keras optimizer, or the name of one. It may be a LossScaleOptimizer, be put
            into one, and have EMA, clipping and gradient accumulation of its own: the decay is
            made once an update, and takes no part in clipping.
        weight_decay: d, at least 0: a number, a schedule (called with the step, as a learning rate
            schedule), a function without arguments, or a scalar `tf.Variable`.
        scale: "absolute", "learning_rate" or "schedule".
        include: regular expressions (one, or a list), each of which must match a variable's whole
            path, or a whole end of it that begins after a `/`. Only these variables are decayed;
            `None` is all of them, biases and the like too.
        exclude: the same, for variables that are not decayed.
        multipliers: dict from such an expression to m. The first that matches a variable counts;
            a variable that none matches has 1.
        sparse: "table" decays the whole of an embedding whose gradient is sparse, "rows" only the
            rows that are in the gradient, each once. Gradients that were accumulated are dense.
        decay_unused: whether variables without a gradient are decayed too. They are listed once,
            in a warning, unless this is set.
        name: the optimizer's name.

    Raises:
        TypeError: the optimizer is not a Keras optimizer, or weight_decay not one of its kinds.
        ValueError: the optimizer decays weights itself; an argument is out of its range; at
            `build`, where the variables are first known: a pattern matches none of them.

    Example:
        >>> import keras
        >>> optimizer = DecoupledWeightDecay(keras.optimizers.SGD(0.1), 0.25)
        >>> weight = keras.Variable([4.0, 8.0], name="weight")
        >>> optimizer.apply([tf.constant([10.0, 0.0])], [weight])
        >>> weight.numpy()
        array([2., 6.], dtype=float32)

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
        Departure: the paper subtracts decay and step from the same old weight. The two are equal
        for optimizers whose step does not read the weight; LAMB, Adafactor, Ftrl and the
        schedule-free ones do read it, and here they see the decayed one.
    """

    def __init__(
        self,
        optimizer: Any,
        weight_decay: Any,
        scale: str = "absolute",
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        multipliers: Mapping[str, float] | None = None,
        sparse: str = "table",
        decay_unused: bool = False,
        name: str | None = None,
    ) -> None:
        kind = type(self).__name__
        _check_weight_decay(kind, weight_decay)
        for argument, value, values in (("scale", scale, SCALES), ("sparse", sparse, SPARSE)):
            if value not in values:
                raise ValueError(f"{kind}: {argument}={value!r}: give one of {', '.join(values)}")
        rules = DecayRules(kind, include, exclude, multipliers)
        super().__init__(optimizer, name=name)
        for held in _keras_optimizers.chain(self.optimizer):
            _check_no_decay(kind, held)
        self._rules = rules
        self._weight_decay = weight_decay
        self.scale, self.sparse, self.decay_unused = scale, sparse, bool(decay_unused)
        self._initial_rates: list[float] = []
        if scale == "schedule":
            self._note_initial_rates()
        self._choices: dict[Any, Choice] = {}
        self._unused_known = False

    @property
    def weight_decay(self) -> Any:
        """d, as it was given; it cannot be assigned, since traced functions hold it."""
        return vars(self).get("_weight_decay")

    @weight_decay.setter
    def weight_decay(self, value: Any) -> None:
        if "optimizer" in vars(self):  # else it is the constructor of Keras's class
            raise AttributeError(
                "weight_decay cannot be assigned, as traced training steps would not see it: give "
                "a schedule, a function or a tf.Variable, whose value is read in each step"
            )

    @property
    def include(self) -> list[str] | None:
        return self._rules.include

    @property
    def exclude(self) -> list[str] | None:
        return self._rules.exclude

    @property
    def multipliers(self) -> dict[str, float] | None:
        return self._rules.multipliers

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Not here: use `exclude`, which looks at paths and is saved."""
        raise ValueError(
            f"{type(self).__name__} takes what is not decayed as exclude=[patterns of paths]"
        )

    def decay_table(self, model: Any) -> DecayTable:
        """What will be decayed, by how much, and why.

        Args:
            model: a built model or layer, or a list of variables.

        Returns:
            A list of `DecayRow`s, one a trainable variable; printed, a table. The decay is that
            of an update made now.

        Raises:
            ValueError: a pattern matches none of the variables.

        Example:
            >>> import keras
            >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="score")])
            >>> optimizer = DecoupledWeightDecay("adam", 0.0005, exclude="bias")
            >>> print(optimizer.decay_table(model))
            variable      shape  decay an update  why
            score/kernel    2x3           0.0005  every variable
            score/bias        3                -  exclude 'bias'
        """
        variables = getattr(model, "trainable_variables", model)
        rows = DecayTable()
        for variable, choice in zip(variables, self._choose(variables), strict=True):
            share = 0.0
            if choice.multiplier:
                leaf = _keras_optimizers.leaf_of(self.optimizer, variable)
                rate = leaf.learning_rate if self.scale != "absolute" else None
                share = float(self._fraction(leaf, choice.multiplier, rate, tf.float64))
            path, shape = _keras_optimizers.path(variable), tuple(variable.shape)
            rows.append(DecayRow(path, shape, share, choice.multiplier, choice.reason))
        return rows

    def _choose(self, variables: Sequence[Any]) -> list[Choice]:
        return self._rules.choose(variables)

    def _check_variables(self, variables: list[keras.Variable]) -> None:
        choices = self._choose(variables)
        keys = [_keras_optimizers.key(self, variable) for variable in variables]
        self._choices = dict(zip(keys, choices, strict=True))

    def _build(self, variables: list[keras.Variable]) -> None:
        if self.scale == "schedule":
            self._note_initial_rates()
        for leaf in _keras_optimizers.leaves(self.optimizer):  # some are not known earlier
            _check_no_decay(type(self).__name__, leaf)

    def _apply(self, grads: list[Any], variables: list[Any]) -> None:
        unused = [v for g, v in zip(grads, variables, strict=True) if g is None]
        if self._is_zero():
            super()._apply(grads, variables)
            return
        if len(unused) == len(variables):
            unused = []  # the wrapped optimizer's error
        if unused and not self.decay_unused and not self._unused_known:
            self._unused_known = True
            warnings.warn(
                f"{type(self).__name__} '{self.name}': no gradient reaches these variables, which "
                f"are neither updated nor decayed: {', '.join(map(_keras_optimizers.path, unused))}",
                stacklevel=3,
            )
        twice = _Once(self, variables)
        quiet = _keras_optimizers.without_warning_of_unused

        def step(own: Callable[..., None], gradient: Any, variable: Any, rate: Any) -> None:
            if twice.first(variable):
                self._decay(variable, rate, gradient)
            own(gradient, variable, rate)

        def before(leaf: Any, _: Any) -> None:
            if not self.decay_unused:
                return
            mine = [v for v in unused if _keras_optimizers.leaf_of(self.inner, v) is leaf]
            rate = leaf.learning_rate
            _keras_optimizers.on_every_replica(mine, lambda v: self._decay(v, rate, None))

        leaves = _keras_optimizers.leaves(self.inner)
        with _keras_optimizers.intercepted(leaves, step, before), quiet():
            super()._apply(grads, variables)

    def _is_zero(self) -> bool:
        return isinstance(self._weight_decay, (int, float)) and self._weight_decay == 0

    def _decay(self, variable: tf.Variable, rate: Any, gradient: Any) -> None:
        choice = self._choices[_keras_optimizers.key(self, variable)]
        if not choice.multiplier:
            return
        leaf = _keras_optimizers.leaf_of(self.inner, variable)
        fraction = self._fraction(leaf, choice.multiplier, rate, wide(variable.dtype))
        if self.sparse == "rows" and isinstance(gradient, tf.IndexedSlices):
            decay_rows(variable, gradient.indices, fraction)
        else:
            decay(variable, fraction)

    def _fraction(self, leaf: Any, multiplier: float, rate: Any, dtype: tf.DType) -> tf.Tensor:
        """d * m * s of an update that is made now."""
        current = self._weight_decay
        if isinstance(current, keras.optimizers.schedules.LearningRateSchedule):
            current = current(_keras_optimizers.schedule_step(leaf))
        elif callable(current) and not isinstance(current, (tf.Variable, keras.Variable)):
            current = current()
        if isinstance(current, (int, float)):
            fraction = tf.constant(current * multiplier, dtype)
        else:
            fraction = tf.cast(keras.ops.convert_to_tensor(current), dtype) * multiplier
        if self.scale == "absolute":
            return fraction
        rate = tf.cast(keras.ops.convert_to_tensor(rate), dtype)
        if self.scale == "schedule":
            rate = rate / self._initial_rate(leaf)
        return fraction * rate

    def _note_initial_rates(self) -> None:
        """Keeps the learning rates of the optimizers that were not known before."""
        for leaf in _keras_optimizers.leaves(self.optimizer)[len(self._initial_rates) :]:
            rate = leaf._learning_rate
            if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
                initial = float(rate(tf.constant(0, tf.int64)))
            else:
                initial = float(leaf.learning_rate)
            if initial <= 0:
                raise ValueError(
                    f"{type(self).__name__}: scale='schedule' divides by the initial learning "
                    f"rate, and that of {type(leaf).__name__} '{leaf.name}' is {initial}; take "
                    "scale='learning_rate' and divide weight_decay by the largest rate"
                )
            self._initial_rates = [*self._initial_rates, initial]

    def _initial_rate(self, leaf: Any) -> float:
        for known, rate in zip(
            _keras_optimizers.leaves(self.optimizer), self._initial_rates, strict=True
        ):
            if known is leaf:
                return rate
        raise AssertionError(f"{leaf.name} is not in {self.name}")

    def get_config(self) -> dict[str, Any]:
        weight_decay = self._weight_decay
        if isinstance(weight_decay, (tf.Variable, keras.Variable)):
            weight_decay = float(weight_decay.numpy())
        elif not isinstance(weight_decay, (int, float)):
            weight_decay = keras.saving.serialize_keras_object(weight_decay)
        config = {
            **super().get_config(),
            "weight_decay": weight_decay,
            "scale": self.scale,
            "include": self.include,
            "exclude": self.exclude,
            "multipliers": self.multipliers,
            "sparse": self.sparse,
            "decay_unused": self.decay_unused,
        }
        if self.scale == "schedule":
            # The learning rate in the optimizer's config is the current one.
            config["initial_rates"] = list(self._initial_rates)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = _keras_optimizers.revived(config, custom_objects)
        rates = config.pop("initial_rates", None)
        made = cls(**config)
        if rates is not None:
            made._initial_rates = list(rates)
        return made


class _Once:
    """Tells a variable's first update in a step from others, where one is given twice.

    A variable that is tied by being in the list twice gets two updates, and is decayed once.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._optimizer = optimizer
        keys = [_keras_optimizers.key(optimizer, v) for v in variables]
        self._repeated = {k for k in keys if keys.count(k) > 1} if len(set(keys)) < len(keys) else {}
        self._seen: set[int] = set()

    def first(self, variable: tf.Variable) -> bool:
        if _keras_optimizers.key(self._optimizer, variable) not in self._repeated:
            return True
        if id(variable) in self._seen:
            return False
        self._seen.add(id(variable))
        return True


def _check_weight_decay(kind: str, weight_decay: Any) -> None:
    if isinstance(weight_decay, bool) or not (
        isinstance(weight_decay, (int, float, tf.Variable, keras.Variable))
        or callable(weight_decay)
    ):
        raise TypeError(
            f"{kind}: weight_decay={weight_decay!r}: give a number, a schedule, a function without "
            "arguments or a scalar variable"
        )
    if isinstance(weight_decay, (int, float)) and not 0 <= weight_decay < math.inf:
        raise ValueError(f"{kind}: weight_decay={weight_decay}: give a finite number, at least 0")


def _check_no_decay(kind: str, optimizer: Any) -> None:
    found = _keras_optimizers.own_decay(optimizer)
    if isinstance(optimizer, DecoupledWeightDecay):
        found = ("weight_decay", optimizer.weight_decay)
    if found is not None:
        name, value = found
        raise ValueError(
            f"{kind}: {type(optimizer).__name__} '{optimizer.name}' decays weights already "
            f"({name}={value}), and they would be decayed twice; wrap one that does not (Adam in "
            f"place of AdamW), or set its {name} to {'None' if value is None else '0'}"
        )
