"""Decoupled weight decay for any optimizer.

The decay happens where Keras updates each variable. So everything that affects updates also affects
the decay: skipped steps, gradient accumulation, variables without a gradient, and replicas.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import update_interception, wrapped_optimizers
from tfwd.dtypes import wide
from tfwd.optimizers._updates.decay_rate import DecayRate
from tfwd.optimizers._updates.decay_rules import Choice, DecayRow, DecayRules, DecayTable
from tfwd.optimizers._updates.decay_step import (
    FirstUpdates,
    FusedSteps,
    NamedRows,
    decay,
    decay_rows,
)
from tfwd.optimizers._updates.repeated_rows import SumsRows
from tfwd.optimizers._updates.replica_updates import on_every_replica

Own = Callable[..., None]  # an optimizer's own update_step
SPARSE = ("table", "rows")
TOWARDS = ("zero", "start")


@keras.saving.register_keras_serializable("tfwd")
class DecoupledWeightDecay(SumsRows):
    """An optimizer wrapper that adds decoupled weight decay to any Keras optimizer.

    Each update of a decayed variable first computes

        w <- w - d * m * s * w

    and then makes the wrapped optimizer's step, which sees the decayed weight. d is `weight_decay`,
    m is the variable's multiplier, and s is

    - 1 with `scale="absolute"` (Caffe's `W = W*(1 - d)`, tensorflow-addons),
    - the current learning rate with `"learning_rate"` (PyTorch, Keras),
    - the current learning rate divided by the initial learning rate with `"schedule"` (Loshchilov
      and Hutter).

    The wrapper adds no state, except with `towards="start"`. Variables, learning rate and step
    counter belong to the wrapped optimizer. With `weight_decay=0` the wrapper equals the wrapped
    optimizer, bit for bit, with one exception. If a row occurs more than once in a sparse gradient,
    the parts of the row are summed first, as in the dense gradient. Keras 3's optimizers, except
    SGD and Lion, treat each part as the row's whole gradient.

    On Keras 2 the optimizer may also be a legacy optimizer (`keras.optimizers.legacy`) or an
    optimizer of tensorflow-addons. The wrapper is then a legacy optimizer itself. It works inside
    and around Lookahead, SWA and MovingAverage.

    Args:
        optimizer: Keras optimizer, or its name. It can be a LossScaleOptimizer, or be inside a
            LossScaleOptimizer. It can have its own EMA, clipping and gradient accumulation. The
            decay is made once per update. It does not affect clipping.
        weight_decay: float, schedule, function without arguments, or scalar `tf.Variable`. The
            value d, at least 0. A schedule is called with the step, like a learning rate schedule.
        scale: "absolute", "learning_rate" or "schedule". Default "absolute".
        include: str or list of str. Regular expressions. Each must match a variable's full path, or
            its last components. Only matching variables are decayed. Default None, for all
            variables, including biases.
        exclude: str or list of str. Regular expressions for variables that are not decayed. Default
            None.
        multipliers: dict from a regular expression to m. The first matching expression applies.
            Other variables have multiplier 1. Default None.
        sparse: "table" decays a whole embedding table although its gradient is sparse. "rows"
            decays only the rows in the gradient, each once. With "rows", the whole table is decayed
            too if the gradient is dense: after gradient accumulation, or on several replicas with
            `global_clipnorm`. Default "table".
        decay_unused: bool. Also decays variables without a gradient. If False, a warning lists them
            once. Default False.
        name: str. Name of the optimizer. Default None.
        sum_repeated_rows: bool. Sums the parts of a repeated row of a sparse gradient before
            clipping and before the step. False does the same as Keras. Default True.
        towards: "zero", or "start" for `w <- w - d * m * s * (w - w0)` (L2-SP, as a decay). w0 is
            the value of the variable when the optimizer is built. `fit` builds it before its first
            step. The optimizer stores a copy of each decayed variable, and saves it. Default
            "zero".

    Raises:
        TypeError: If the optimizer is not a Keras optimizer, or weight_decay has a wrong type.
        ValueError: If the optimizer already decays weights, or if an argument is out of range. In
            `build`, if a pattern matches no variable.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd.optimizers import DecoupledWeightDecay
        >>> optimizer = DecoupledWeightDecay(keras.optimizers.SGD(0.1), 0.25)
        >>> weight = tf.Variable([4.0, 8.0], name="weight")
        >>> optimizer.apply([tf.constant([10.0, 0.0])], [weight])
        >>> weight.numpy()
        array([2., 6.], dtype=float32)

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101. Departure:
        the paper subtracts decay and step from the same old weight. The results are equal if the
        optimizer's step does not read the weight. LAMB, Adafactor, Ftrl and the schedule-free
        optimizers do read it. Here they read the decayed weight. Li, Grandvalet and Davoine,
        "Explicit Inductive Bias for Transfer Learning with Convolutional Networks" (2018), for
        "start". Departure: their decay is part of the loss.
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
        sum_repeated_rows: bool = True,
        towards: str = "zero",
    ) -> None:
        kind = type(self).__name__
        decay_rate = DecayRate(kind, weight_decay, scale)
        rules = DecayRules(kind, include, exclude, multipliers)
        for factor in (1.0, *(rules.multipliers or {}).values()):
            decay_rate.check_removed_fraction(factor)
        if sparse not in SPARSE:
            raise ValueError(f"{kind}: sparse={sparse!r}: expected one of {', '.join(SPARSE)}")
        if towards not in TOWARDS:
            raise ValueError(f"{kind}: towards={towards!r}: expected one of {', '.join(TOWARDS)}")
        super().__init__(optimizer, sum_repeated_rows, name)
        for held in wrapped_optimizers.chain(self.optimizer):
            _check_no_decay(kind, held)
        self._decay_rate = decay_rate
        self._rules: Any = rules
        self.sparse, self.decay_unused, self.towards = sparse, bool(decay_unused), towards
        self._starts: Any = StartValues()
        self._decay_rate.store_initial_rates(wrapped_optimizers.leaves(self.optimizer))
        self._fused = FusedSteps()
        self._has_warned = False

    @property
    def weight_decay(self) -> Any:
        """The given value of d. It cannot be assigned, because traced functions contain it."""
        return self._decay_rate.weight_decay if "optimizer" in vars(self) else None

    @weight_decay.setter
    def weight_decay(self, value: Any) -> None:
        if "optimizer" in vars(self):  # otherwise the constructor of Keras's class assigns it
            raise AttributeError(
                "weight_decay cannot be assigned, because traced training steps would not see it: "
                "pass a schedule, a function or a tf.Variable, whose value is read in each step"
            )

    @property
    def scale(self) -> str:
        return self._decay_rate.scale

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
        """Rejects Keras's method. Use `exclude`, whose patterns match paths and are saved."""
        raise ValueError(
            f"{type(self).__name__} has no exclude_from_weight_decay(): use exclude=[patterns of "
            "paths]"
        )

    def decay_table(self, model: Any) -> DecayTable:
        """Returns a table of the variables with their decay and the reason for it.

        Args:
            model: Built model or layer, or a list of variables.

        Returns:
            A list of `DecayRow`s, one per trainable variable. It prints as a table. The decay is
            the decay of an update at the current step.

        Raises:
            ValueError: If a pattern matches no variable.

        Example:
            >>> import keras
            >>> layer = keras.layers.Dense(3, name="score")
            >>> scores = layer(tf.ones((1, 2)))
            >>> optimizer = DecoupledWeightDecay("adam", 0.0005, exclude="bias")
            >>> print(optimizer.decay_table(layer))
            variable      shape  decay per update  why
            score/kernel    2x3            0.0005  every variable
            score/bias        3                 -  exclude 'bias'
        """
        variables = getattr(model, "trainable_variables", model)
        rows = DecayTable()
        leaves = wrapped_optimizers.leaves(self.optimizer)
        for variable, choice in zip(variables, self._choose(variables), strict=True):
            share = 0.0
            if choice.multiplier:
                leaf = wrapped_optimizers.leaf_of(self.optimizer, variable)
                absolute = self.scale == "absolute"
                rate = None if absolute else wrapped_optimizers.learning_rate(leaf)
                share = choice.multiplier * float(self._decay_rate(leaf, leaves, rate, tf.float64))
            path, shape = _keras.variables.path(variable), tuple(variable.shape)
            rows.append(DecayRow(path, shape, share, choice.multiplier, choice.reason))
        return rows

    def _choose(self, variables: Sequence[Any]) -> list[Choice]:
        return self._rules.choose(variables)

    def _check_variables(self, variables: list[keras.Variable]) -> None:
        choices = self._choose(variables)
        keys = [wrapped_optimizers.key(self, variable) for variable in variables]
        self._rules.chosen = dict(zip(keys, choices, strict=True))

    def _build(self, variables: list[keras.Variable]) -> None:
        leaves = wrapped_optimizers.leaves(self.optimizer)  # some exist only now
        for leaf in leaves:
            _check_no_decay(type(self).__name__, leaf)
        self._decay_rate.store_initial_rates(leaves)
        if self.towards == "start":
            decayed = [v for v in variables if self._multiplier(v)]
            for number, variable in enumerate(decayed):
                dtype = _keras.variables.dtype_name(variable)
                start = self._add_variable(f"start_{number}", dtype, None, like=variable)
                self._starts.held[wrapped_optimizers.key(self, variable)] = start

    def _start(self, variable: Any) -> tf.Tensor | None:
        """Returns w0 of a decayed variable, or None for 0."""
        start = self._starts.held.get(wrapped_optimizers.key(self, variable))
        return None if start is None else _keras.variables.value(start)

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        if self._decay_rate.is_zero:
            return super()._apply(grads, variables, make)
        unused = [v for g, v in zip(grads, variables, strict=True) if g is None]
        self._warn_of_unused(unused, len(variables))
        leaves = wrapped_optimizers.leaves(self.inner)
        first = FirstUpdates(self, variables)
        rows = NamedRows(self, grads, variables) if self.sparse == "rows" else None

        def step(
            leaf: Any, own: Callable[..., None], gradient: Any, variable: Any, rate: Any
        ) -> None:
            fraction = self._fraction(leaf, variable, rate) if first(variable) else None
            named = rows(leaf, gradient, variable) if rows else None
            done = None
            if fraction is not None and named is not None:
                done = decay_rows(variable, named, fraction, self._start(variable))
            elif fraction is not None and self._fused.supports(leaf, gradient, variable):
                self._fused(own, gradient, variable, rate, fraction, self._start(variable))
                return
            elif fraction is not None:
                done = decay(variable, fraction, self._start(variable))
            with update_interception.waiting_for(leaf, done):
                own(gradient, variable, rate)

        def before(leaf: Any) -> None:
            mine = [v for v in unused if wrapped_optimizers.is_built_for(leaf, v)]
            if self.decay_unused and mine:
                on_every_replica(mine, lambda v: self._decay_unused(leaf, v))

        with (
            update_interception.intercepted(leaves, step, before),
            update_interception.without_warning_of_unused(),
        ):
            return super()._apply(grads, variables, make)

    def _warn_of_unused(self, unused: list[Any], count: int) -> None:
        """Warns once about variables without a gradient. Keras raises an error if all lack one."""
        if not unused or len(unused) == count or self.decay_unused or self._has_warned:
            return
        self._has_warned = True
        paths = ", ".join(map(_keras.variables.path, unused))
        warnings.warn(
            f"{type(self).__name__} '{self.name}': no gradient reaches these variables, so they "
            f"are neither updated nor decayed: {paths}. Pass decay_unused=True to decay them",
            stacklevel=4,
        )

    def _decay_unused(self, leaf: Any, variable: tf.Variable) -> None:
        fraction = self._fraction(leaf, variable, wrapped_optimizers.learning_rate(leaf))
        if fraction is not None:
            decay(variable, fraction, self._start(variable))

    def _fraction(self, leaf: Any, variable: tf.Variable, rate: Any) -> tf.Tensor | None:
        """Returns d * m * s of this update, or None for a variable that is not decayed."""
        multiplier = self._multiplier(variable)
        if not multiplier:
            return None
        leaves = wrapped_optimizers.leaves(self.inner)
        return multiplier * self._decay_rate(leaf, leaves, rate, wide(variable.dtype))

    def _multiplier(self, variable: tf.Variable) -> float:
        """Returns m of this update, 0 for a variable that is not decayed."""
        return self._rules.chosen[wrapped_optimizers.key(self, variable)].multiplier

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **self._decay_rate.get_config(),
            "include": self.include,
            "exclude": self.exclude,
            "multipliers": self.multipliers,
            "sparse": self.sparse,
            "decay_unused": self.decay_unused,
            "towards": self.towards,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = cls._deserialized(config, custom_objects)
        rates = config.pop("initial_rates", None)
        made = cls(**config)
        if rates is not None:
            made._decay_rate.initial = list(rates)
        return made


class StartValues:
    """The values that decayed variables had when the optimizer was built, by the variables' keys.

    Keras's classes do not allow a dict of variables as an attribute.
    """

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {}


def _check_no_decay(kind: str, optimizer: Any) -> None:
    found = wrapped_optimizers.own_decays(optimizer)
    if isinstance(optimizer, DecoupledWeightDecay):
        found = {"weight_decay": optimizer.weight_decay}
    if found:
        named = f"{type(optimizer).__name__} '{wrapped_optimizers.name(optimizer)}'"
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(
            f"{kind}: {named} already decays weights ({values}), so they would be decayed "
            "twice; wrap an optimizer without decay (Adam instead of AdamW), or set its "
            f"{' and its '.join(found)} to 0"
        )
