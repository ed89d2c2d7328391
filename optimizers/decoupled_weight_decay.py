"""Decoupled weight decay around any optimizer.

The decay is made where Keras makes each variable's update, so whatever decides over updates also
decides over the decay: a skipped step, the accumulation of gradients, a variable without a
gradient, the replica that the variable stands on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import updates as _keras_updates
from tfwd._keras import wrapped_optimizers
from tfwd.dtypes import wide
from tfwd.optimizers._updates.decay_parts import FirstUpdates, NamedRows
from tfwd.optimizers._updates.decay_rate import DecayRate
from tfwd.optimizers._updates.decay_rules import Choice, DecayRow, DecayRules, DecayTable
from tfwd.optimizers._updates.decay_step import FusedSteps, decay, decay_rows
from tfwd.optimizers._updates.repeated_rows import SumsRows
from tfwd.optimizers._updates.replicas import on_every_replica

Own = Callable[..., None]  # an optimizer's own update_step
SPARSE = ("table", "rows")
TOWARDS = ("zero", "start")


@keras.saving.register_keras_serializable("tfwd")
class DecoupledWeightDecay(SumsRows):
    """Any Keras optimizer, with weight decay that is not part of the gradient.

    In each update, for each variable that is decayed, first

        w <- w - d * m * s * w

    and then the wrapped optimizer's step, which sees the decayed weight. d is `weight_decay`, m
    the variable's multiplier, and s

    - 1 with `scale="absolute"` (Caffe's `W = W*(1 - d)`, tensorflow-addons),
    - the current learning rate with `"learning_rate"` (PyTorch, Keras),
    - the current learning rate over the initial one with `"schedule"` (Loshchilov and Hutter).

    It adds no state, but for `towards="start"`: variables, learning rate and step counter are the
    wrapped optimizer's. With `weight_decay=0` it is the wrapped optimizer, bit for bit, but for one
    departure: a row that stands more than once in a sparse gradient is added up first, as it is in
    the dense gradient. Keras 3's optimizers, all but SGD and Lion, take each part for the row's
    whole gradient.

    On Keras 2 the optimizer may also be a legacy one (`keras.optimizers.legacy`) or one of
    tensorflow-addons. Around such a one this is a legacy optimizer itself, and stands inside and
    around Lookahead, SWA and MovingAverage.

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
            rows that are in the gradient, each once. Gradients that were accumulated are dense, and
            so are those of several replicas under `global_clipnorm`.
        decay_unused: whether variables without a gradient are decayed too. They are listed once,
            in a warning, unless this is set.
        name: the optimizer's name.
        sum_repeated_rows: whether a row that stands more than once in a sparse gradient is added
            up before clipping and before the step; False for what Keras does.
        towards: "zero", or "start" for `w <- w - d * m * s * (w - w0)`, with w0 what the variable
            was when the optimizer was built, which `fit` does before its first step (L2-SP, as a
            decay). A copy of each decayed variable is kept, and saved with the optimizer.

    Raises:
        TypeError: the optimizer is not a Keras optimizer, or weight_decay not one of its kinds.
        ValueError: the optimizer decays weights itself; an argument is out of its range; at
            `build`, where the variables are first known: a pattern matches none of them.

    Example:

    >>> import keras
    >>> optimizer = DecoupledWeightDecay(keras.optimizers.SGD(0.1), 0.25)
    >>> weight = tf.Variable([4.0, 8.0], name="weight")
    >>> optimizer.apply([tf.constant([10.0, 0.0])], [weight])
    >>> weight.numpy()
    array([2., 6.], dtype=float32)

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
        Departure: the paper subtracts decay and step from the same old weight. The two are equal
        for optimizers whose step does not read the weight; LAMB, Adafactor, Ftrl and the
        schedule-free ones do read it, and here they see the decayed one.
        Li, Grandvalet and Davoine, "Explicit Inductive Bias for Transfer Learning with
        Convolutional Networks" (2018), for "start". Departure: theirs is part of the loss.
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
            decay_rate.check_share(factor)
        if sparse not in SPARSE:
            raise ValueError(f"{kind}: sparse={sparse!r}: give one of {', '.join(SPARSE)}")
        if towards not in TOWARDS:
            raise ValueError(f"{kind}: towards={towards!r}: give one of {', '.join(TOWARDS)}")
        super().__init__(optimizer, sum_repeated_rows, name)
        for held in wrapped_optimizers.chain(self.optimizer):
            _check_no_decay(kind, held)
        self._decay_rate = decay_rate
        self._rules: Any = rules
        self.sparse, self.decay_unused, self.towards = sparse, bool(decay_unused), towards
        self._starts: Any = Starts()
        self._decay_rate.note_initial(wrapped_optimizers.leaves(self.optimizer))
        self._fused = FusedSteps()
        self._unused_known = False

    @property
    def weight_decay(self) -> Any:
        """d, as it was given; it cannot be assigned, since traced functions hold it."""
        return self._decay_rate.weight_decay if "optimizer" in vars(self) else None

    @weight_decay.setter
    def weight_decay(self, value: Any) -> None:
        if "optimizer" in vars(self):  # else it is the constructor of Keras's class
            raise AttributeError(
                "weight_decay cannot be assigned, as traced training steps would not see it: give "
                "a schedule, a function or a tf.Variable, whose value is read in each step"
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
        >>> layer = keras.layers.Dense(3, name="score")
        >>> scores = layer(tf.ones((1, 2)))
        >>> optimizer = DecoupledWeightDecay("adam", 0.0005, exclude="bias")
        >>> print(optimizer.decay_table(layer))
        variable      shape  decay an update  why
        score/kernel    2x3           0.0005  every variable
        score/bias        3                -  exclude 'bias'
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
        leaves = wrapped_optimizers.leaves(self.optimizer)  # some are not known earlier
        for leaf in leaves:
            _check_no_decay(type(self).__name__, leaf)
        self._decay_rate.note_initial(leaves)
        if self.towards == "start":
            decayed = [v for v in variables if self._multiplier(v)]
            for number, variable in enumerate(decayed):
                dtype = _keras.variables.dtype_name(variable)
                start = self._add_variable(f"start_{number}", dtype, None, like=variable)
                self._starts.held[wrapped_optimizers.key(self, variable)] = start

    def _start(self, variable: Any) -> tf.Tensor | None:
        """w0 of a variable that is decayed; None for 0."""
        start = self._starts.held.get(wrapped_optimizers.key(self, variable))
        return None if start is None else _keras.variables.value(start)

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        if self._decay_rate.is_zero:
            return super()._apply(grads, variables, make)
        unused = [v for g, v in zip(grads, variables, strict=True) if g is None]
        self._tell(unused, len(variables))
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
            elif fraction is not None and self._fused.takes(leaf, gradient, variable):
                self._fused(own, gradient, variable, rate, fraction, self._start(variable))
                return
            elif fraction is not None:
                done = decay(variable, fraction, self._start(variable))
            with _keras_updates.after(leaf, done):
                own(gradient, variable, rate)

        def before(leaf: Any) -> None:
            mine = [v for v in unused if wrapped_optimizers.is_built_for(leaf, v)]
            if self.decay_unused and mine:
                on_every_replica(mine, lambda v: self._decay_unused(leaf, v))

        with (
            _keras_updates.intercepted(leaves, step, before),
            _keras_updates.without_warning_of_unused(),
        ):
            return super()._apply(grads, variables, make)

    def _tell(self, unused: list[Any], of: int) -> None:
        """Lists the variables without a gradient, once; none at all is Keras's error."""
        if not unused or len(unused) == of or self.decay_unused or self._unused_known:
            return
        self._unused_known = True
        paths = ", ".join(map(_keras.variables.path, unused))
        warnings.warn(
            f"{type(self).__name__} '{self.name}': no gradient reaches these variables, which are "
            f"neither updated nor decayed: {paths}",
            stacklevel=4,
        )

    def _decay_unused(self, leaf: Any, variable: tf.Variable) -> None:
        fraction = self._fraction(leaf, variable, wrapped_optimizers.learning_rate(leaf))
        if fraction is not None:
            decay(variable, fraction, self._start(variable))

    def _fraction(self, leaf: Any, variable: tf.Variable, rate: Any) -> tf.Tensor | None:
        """d * m * s of this update, `None` for a variable that is not decayed."""
        multiplier = self._multiplier(variable)
        if not multiplier:
            return None
        leaves = wrapped_optimizers.leaves(self.inner)
        return multiplier * self._decay_rate(leaf, leaves, rate, wide(variable.dtype))

    def _multiplier(self, variable: tf.Variable) -> float:
        """m of this update, 0 for a variable that is not decayed."""
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


class Starts:
    """What decayed variables were when the optimizer was built, by the variable.

    Keras's classes take no dict of variables as an attribute.
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
            f"{kind}: {named} decays weights already ({values}), and they would be decayed "
            "twice; wrap one that does not (Adam in place of AdamW), or set its "
            f"{' and its '.join(found)} to 0"
        )
