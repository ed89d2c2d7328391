"""The weight decay optimizers of tensorflow-addons, with the same names and arguments.

Existing code runs on Keras 3 after only the import is changed. New code should use
`DecoupledWeightDecay`. It checks its patterns and decays whole embedding tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import wrapped_optimizers
from tfwd.optimizers._updates.decay_rules import Choice, DecayRules
from tfwd.optimizers.decoupled_weight_decay import DecoupledWeightDecay
from tfwd.path_patterns import compiled


class DecoupledWeightDecayExtension(DecoupledWeightDecay):
    """Base class of `AdamW`, `SGDW` and the classes of `extend_with_decoupled_weight_decay`.

    Each update is w <- w - weight_decay * w, followed by the step of the extended optimizer. The
    decay does not follow the learning rate. Give the decay a schedule too if the learning rate has
    a schedule.

    Args:
        weight_decay: float, scalar tensor, schedule, function without arguments, or scalar
            variable.
        *args: Arguments of the extended optimizer.
        exclude_from_weight_decay: Regular expressions. A variable is not decayed if an expression
            matches any part of its path. An expression that matches no variable is not an error.
            Default None.
        name: str. Name of the optimizer. Default None.
        sparse: "rows" decays only the rows in a sparse gradient, as tensorflow-addons does. "table"
            decays the whole table. Default "rows".
        sum_repeated_rows: As in `DecoupledWeightDecay`.
        **kwargs: Arguments of the extended optimizer.

    Attributes:
        base_optimizer: Extended optimizer class. Subclasses set it.
    """

    base_optimizer: Any = None

    def __init__(
        self,
        weight_decay: Any,
        *args: Any,
        exclude_from_weight_decay: Sequence[str] | None = None,
        name: str | None = None,
        sparse: str = "rows",
        sum_repeated_rows: bool = True,
        **kwargs: Any,
    ) -> None:
        if isinstance(weight_decay, (tf.Tensor, np.ndarray)):
            weight_decay = float(weight_decay)
        rules = _AddonsRules(type(self).__name__, exclude_from_weight_decay or ())
        if "lr" in kwargs:
            kwargs["learning_rate"] = kwargs.pop("lr")
        optimizer = self.base_optimizer(*args, **kwargs)
        super().__init__(
            optimizer,
            weight_decay,
            sparse=sparse,
            name=name,
            sum_repeated_rows=sum_repeated_rows,
        )
        self._rules = rules

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        decay_var_list: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Makes one step.

        Args:
            grads_and_vars: Pairs of a gradient and a variable.
            name: Not used. tensorflow-addons has this argument.
            decay_var_list: Variables to decay in this step, even if `exclude_from_weight_decay`
                matches them. Default None, for all variables that are not excluded. An empty list
                means the same.
            **kwargs: Other arguments of the extended optimizer's `apply_gradients`.
        """
        variables = list(decay_var_list or ())
        only = {wrapped_optimizers.key(self, variable) for variable in variables}
        self._rules.only = only or None
        try:
            return super().apply_gradients(grads_and_vars, **kwargs)
        finally:
            self._rules.only = None

    def minimize(
        self,
        loss: Any,
        var_list: Any,
        grad_loss: Any = None,
        name: str | None = None,
        decay_var_list: Iterable[Any] | None = None,
        tape: tf.GradientTape | None = None,
    ) -> Any:
        """Computes the gradient of a loss and makes a step.

        Args:
            loss: Function without arguments, or a tensor that was computed under `tape`.
            var_list: Variables, or a function that returns them.
            grad_loss: Upstream gradient of the loss. Default None, for 1.
            name: Not used.
            decay_var_list: As in `apply_gradients`.
            tape: Tape that recorded the loss. Needed if the loss is a tensor.

        Raises:
            ValueError: If the loss is a tensor and `tape` is None.
        """
        if callable(loss):
            with tape or tf.GradientTape() as tape:
                loss = loss()
        elif tape is None:
            raise ValueError(
                f"{type(self).__name__}.minimize: the loss is a tensor, so it needs tape=: pass "
                "the tf.GradientTape that recorded the loss, or pass the loss as a function"
            )
        variables = list(var_list() if callable(var_list) else var_list)
        plain = [_keras.variables.tf_variable(v) for v in variables]
        gradients = tape.gradient(loss, plain, grad_loss)
        return self.apply_gradients(zip(gradients, variables, strict=True), name, decay_var_list)

    def _multiplier(self, variable: tf.Variable) -> float:
        if self._rules.only is None:
            return super()._multiplier(variable)
        # The list has precedence over the patterns.
        return 1.0 if wrapped_optimizers.key(self, variable) in self._rules.only else 0.0

    def get_config(self) -> dict[str, Any]:
        ours = super().get_config()
        return {
            **self.optimizer.get_config(),
            "name": self.name,
            "weight_decay": ours["weight_decay"],
            "sparse": self.sparse,
            "sum_repeated_rows": self.sum_repeated_rows,
            "exclude_from_weight_decay": self._rules.patterns or None,
        }


class _AddonsRules(DecayRules):
    """Exclusion rules that may match anywhere in a path, or nowhere."""

    def __init__(self, owner: str, patterns: Sequence[str]) -> None:
        super().__init__(owner)
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        self.only: set[Any] | None = None
        self._expressions = [
            compiled(pattern, f"{owner}: exclude_from_weight_decay pattern {pattern!r}")
            for pattern in self.patterns
        ]

    def _choice(self, variable: Any, path: str) -> Choice:
        for expression in self._expressions:
            if expression.search(path):
                return Choice(0.0, f"exclude_from_weight_decay {expression.pattern!r}")
        return super()._choice(variable, path)


def extend_with_decoupled_weight_decay(base_optimizer: type) -> type:
    """Returns a class that adds decoupled weight decay to an optimizer class.

    Args:
        base_optimizer: Optimizer class of Keras. On Keras 2 the returned class is a legacy
            optimizer if this class is a legacy optimizer.

    Returns:
        A class whose constructor takes `weight_decay` first, then the arguments of
        `base_optimizer`, and `exclude_from_weight_decay`. To load a saved optimizer, register the
        class with Keras under your own name, or pass it in `custom_objects`.

    Example:
        >>> import keras
        >>> from tfwd.optimizers.addons import extend_with_decoupled_weight_decay
        >>> NadamW = extend_with_decoupled_weight_decay(keras.optimizers.Nadam)
        >>> optimizer = NadamW(weight_decay=1e-4, learning_rate=1e-3)
        >>> optimizer.weight_decay, optimizer.beta_1
        (0.0001, 0.9)
    """

    class OptimizerWithDecoupledWeightDecay(DecoupledWeightDecayExtension):
        """`base_optimizer`, after a decay of  w <- w - weight_decay * w."""

    OptimizerWithDecoupledWeightDecay.base_optimizer = base_optimizer
    return OptimizerWithDecoupledWeightDecay


@keras.saving.register_keras_serializable("tfwd")
class AdamW(DecoupledWeightDecayExtension):
    """tensorflow-addons' AdamW:  w <- w - weight_decay * w,  then Adam's step.

    Unlike in `keras.optimizers.AdamW`, the decay is not multiplied by the learning rate.

    Args:
        weight_decay: float, schedule, function without arguments, or scalar variable.
        learning_rate, beta_1, beta_2, epsilon, amsgrad: As in `keras.optimizers.Adam`.
        name: str. Name of the optimizer. Default "AdamW".
        **kwargs: `exclude_from_weight_decay`, `sparse`, `sum_repeated_rows`, and other arguments of
            `keras.optimizers.Adam`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.optimizers.addons import AdamW
        >>> optimizer = AdamW(weight_decay=0.25, learning_rate=1.0)
        >>> weight = tf.Variable([4.0])
        >>> _ = optimizer.minimize(lambda: 2.0 * weight, [weight])
        >>> round(float(weight[0]), 3)
        2.0
    """

    base_optimizer = keras.optimizers.Adam

    def __init__(
        self,
        weight_decay: Any,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-07,
        amsgrad: bool = False,
        name: str = "AdamW",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            weight_decay,
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            name=name,
            **kwargs,
        )


@keras.saving.register_keras_serializable("tfwd")
class SGDW(DecoupledWeightDecayExtension):
    """tensorflow-addons' SGDW:  w <- w - weight_decay * w,  then the step of SGD with momentum.

    Args:
        weight_decay: float, schedule, function without arguments, or scalar variable.
        learning_rate, momentum, nesterov: As in `keras.optimizers.SGD`.
        name: str. Name of the optimizer. Default "SGDW".
        **kwargs: `exclude_from_weight_decay`, `sparse`, `sum_repeated_rows`, and other arguments of
            `keras.optimizers.SGD`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.optimizers.addons import SGDW
        >>> optimizer = SGDW(weight_decay=0.25, learning_rate=1.0)
        >>> weight = tf.Variable([4.0])
        >>> _ = optimizer.apply_gradients([(tf.constant([1.0]), weight)])
        >>> float(weight[0])
        2.0
    """

    base_optimizer = keras.optimizers.SGD

    def __init__(
        self,
        weight_decay: Any,
        learning_rate: Any = 0.001,
        momentum: float = 0.0,
        nesterov: bool = False,
        name: str = "SGDW",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            weight_decay,
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            name=name,
            **kwargs,
        )
