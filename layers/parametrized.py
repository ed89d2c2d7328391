"""`Parametrized`: a wrapper that lets a layer compute with functions of its weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras

from tfwd import _keras
from tfwd.layers import recurrent_call, weight_selection
from tfwd.layers.seed_stream import plain_file
from tfwd.layers.weight_perturbation import WeightPerturbationMixin
from tfwd.layers.weight_selection import QUANTIZED, Parametrizations
from tfwd.parametrizations import Parametrization


@keras.saving.register_keras_serializable("tfwd")
class Parametrized(WeightPerturbationMixin, _keras.wrapping.Wraps, keras.layers.Wrapper):
    """Runs a layer on functions of its weights, such as dropped or noisy copies, while it trains.

    Formula: a call computes `layer(x; w')` with `w'_i = p_i(w_i)` for each weight `i` that a
    pattern matches and `w'_i = w_i` for the others. Gradients go to the raw weights:
    `dL/dw_i = dL/dw'_i * dw'_i/dw_i`. In evaluation the call is the wrapped layer's own (save for
    deterministic parametrizations, which always act).

    Every training call draws once, for the whole batch and all time steps. A draw depends on the
    seed, the weight's position in `layer.weights`, the number of the call and the replica, and on
    nothing else: equal seeds give equal draws in every run, and after a restart from a `.keras`
    file, a weight file of this layer or a `tf.train.Checkpoint`.

    The wrapper has the wrapped layer's weights and no other, in the same order. The wrapped layer
    stays as it is and can be used elsewhere, where it computes with the raw weights.

    Args:
        layer: any Keras layer or model. Wrap the outermost: a layer inside `TimeDistributed` would
            draw at every step, and an RNN cell cannot be wrapped (wrap its `RNN`).
        parametrizations: a parametrization for the default weights, as in `WeightDropout`; or a
            dict from a pattern to a parametrization. A pattern is a regular
            expression that must match a weight's whole path, or a whole end of it that begins after
            a `/`; where several match, the first one counts. Weights that are not made to be
            trained, as moving statistics, are left out unless the pattern ends in their own name,
            as `moving_mean` does. Those of a frozen layer are matched as ever.
        seed: an integer, or None for one that is drawn from Keras's global seed
            (`keras.utils.set_random_seed`).
        recompute: keep no effective weight for backward, and compute it again there from the raw
            weight and the seed. In eager mode, or where the training flag is a tensor, this takes a
            second run, which only a layer that is Keras's own all the way down gets; one with
            anything that a user wrote keeps its effective weights, and so does one that cannot be
            run twice (it draws from a stateful generator, say), which says so in a warning.
            Forward-mode derivatives need False. It can be set later; functions that were traced
            before stay as they are.
        share_across_replicas: draw alike on all replicas of a `tf.distribute` strategy.
        **kwargs: `name` and `trainable`, as for any layer.

    Raises:
        ValueError: for a pattern that matches no weight, or only weights that it leaves out; a
            weight that is not floating, a rate out of range (with the names of the layer and the
            weight), or an RNN cell. What can only be known once the layer is built is raised when
            it is built, or by the first call, if that is what makes its weights. A file of weights
            that the plain layer or model wrote is refused too; a `tf.train.Checkpoint` is not, so
            read one with the unwrapped layer. In training, a call inside `tf.recompute_grad` or
            `keras.remat`, which would draw another mask in backward.

    Not supported: `tf.autodiff.ForwardAccumulator` in eager mode, which raises a
    NotImplementedError unless `recompute=False`; a `tf.function` around a wrapped layer that was
    traced before `tf.recompute_grad` calls it. It draws another mask in backward, and there is no
    error: TensorFlow runs no code of the layer then. Call `tf.recompute_grad` without the layer.

    Example:

    >>> import keras, numpy as np, tensorflow as tf
    >>> from tfwd import layers, parametrizations as P
    >>> dropped = {"recurrent_kernel": P.Dropout(0.5)}
    >>> lstm = layers.Parametrized(keras.layers.LSTM(4), dropped, seed=1)
    >>> y = lstm(tf.ones((2, 3, 5)), training=True)
    >>> lstm.calls, [tuple(w.shape) for w in lstm.weights]
    (1, [(5, 16), (4, 16), (16,)])
    >>> kernel = lstm.effective_weights(0)["recurrent_kernel"]
    >>> 16 < int(np.count_nonzero(kernel)) < 48
    True

    References: Wan et al. (2013) for DropConnect; Merity et al. (2017) for recurrent kernels.
    """

    def __init__(
        self,
        layer: keras.Layer,
        parametrizations: Parametrizations,
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(parametrizations, (Mapping, Parametrization)) or parametrizations == {}:
            raise ValueError(
                "parametrizations must be a dict from a pattern to a parametrization, such as "
                f"{{'kernel': Dropout(0.5)}}; got {parametrizations!r}"
            )
        check_wrappable(layer)
        # The wrapped layer's dtype policy decides, whatever a config says.
        kwargs.pop("dtype", None)
        super().__init__(layer, dtype=_keras.layers.floating_policy(layer), **kwargs)
        if isinstance(parametrizations, Mapping):
            parametrizations = dict(parametrizations)
        self._init_perturbation(parametrizations, seed, recompute, share_across_replicas)
        self.draws.wrapper = self.name
        _keras.wrapping.adopt_call(self, layer)

    @property
    def weight_patterns(self) -> list[str] | None:
        """The patterns of the parametrized weights; None stands for the default weights."""
        given = self.parametrizations
        return list(given) if isinstance(given, Mapping) else None

    def _subject(self) -> keras.Layer:
        return self.layer

    def build(self, *args: Any, **kwargs: Any) -> None:
        if not self.layer.built and not _keras.layers.has_default_build(self.layer):
            _keras.layers.build(self.layer, *args, **kwargs)
        if _keras.layers.has_weights(self.layer):
            self._targeted()

    def call(self, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        if training is not None:
            kwargs["training"] = training
        function, args, kwargs = _keras.wrapping.inner_call(self, args, kwargs)
        training = kwargs.pop("training", None)
        self._make_weights(args, kwargs, training)
        unperturbed = function
        if recurrent_call.is_plain(self.layer):
            function = functools.partial(recurrent_call.either_call, self.layer, function)
        return self._perturbed_call(function, args, kwargs, training, unperturbed)

    def _unperturbed_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **{**kwargs, "training": True})

    def _make_weights(self, args: tuple, kwargs: dict[str, Any], training: Any) -> None:
        """Has the layer make all weights that a call of this kind uses, before any is chosen.

        A layer may leave it to its call to build the layers in it, and may use other ones in
        training. The call is made once for each training flag, and its result is thrown away.
        """
        flag = training if isinstance(training, bool) else None
        if flag in self._known.made_for:
            return
        if not self.layer.built or _keras.layers.awaits_call(self.layer):
            _keras.layers.build_by_call(self.layer, args, kwargs)
        self._known.made_for.add(flag)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        self._make_weights(args, kwargs, kwargs.get("training"))
        self._targeted()
        if not _keras.layers.accepts_training(self.layer):
            kwargs.pop("training", None)
        return self.layer.compute_output_spec(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.compute_mask(*args, **kwargs)

    @property
    def input_spec(self) -> Any:
        return self.layer.input_spec

    @input_spec.setter
    def input_spec(self, value: Any) -> None:
        # Keras sets it to None in the constructor, before there is a layer.
        if value is not None:
            self.layer.input_spec = value

    @property
    def reset_state(self) -> Any:
        """The wrapped layer's `reset_state()`, if it has one."""
        return _keras.recurrent.reset_states(self.layer)

    @property
    def reset_states(self) -> Any:
        """The same by the name that it has in Keras 2."""
        return _keras.recurrent.reset_states(self.layer)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Not supported.

        Raises:
            ValueError: with what is possible instead.
        """
        raise ValueError(f"layer '{self.name}' cannot be quantized: {QUANTIZED}")

    def get_build_config(self) -> dict[str, Any] | None:
        # Keras takes a layer for built that is read back with any config of a build.
        inner = self.layer.get_build_config()
        return None if inner is None else {"layer": inner}

    def build_from_config(self, config: dict[str, Any]) -> None:
        builds = _keras.layers.builds_by_shape(self.layer)
        if not self.layer.built and builds and config.get("layer"):
            _keras.layers.build_from_config(self.layer, config["layer"])
        if _keras.layers.has_weights(self.layer):
            self._targeted()
            self.built = True

    def load_own_variables(self, store: Any) -> None:
        if _keras.configs.is_absent(store):
            raise plain_file(self.name)
        super().load_own_variables(store)

    def unwrapped(self) -> keras.Layer:
        """The wrapped layer.

        Raises:
            ValueError: if a parametrization acts in evaluation too, so that the wrapped layer alone
                computes something else.
        """
        weight_selection.check_evaluates_raw(self.layer, self.parametrizations, self.name)
        return self.layer

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config.pop("dtype", None)
        config.pop("batch_input_shape", None)  # a first layer's, in Keras 2
        return {
            **config,
            "layer": _keras.configs.serialize(self.layer),
            "parametrizations": _serialized(self.parametrizations),
            "seed": self.seed,
            "recompute": self.recompute,
            "share_across_replicas": self.share_across_replicas,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        if "go_backwards" in config:
            raise ValueError(
                f"Bidirectional cannot take a {cls.__name__} apart; wrap the Bidirectional layer: "
                f"{cls.__name__}(Bidirectional(...), ...)"
            )
        return cls(
            **{
                key: _keras.configs.deserialize(value, custom_objects)
                if isinstance(value, dict)
                else value
                for key, value in config.items()
            }
        )


def _serialized(parametrizations: Parametrizations) -> Any:
    if isinstance(parametrizations, Mapping):
        return {key: _serialized(value) for key, value in parametrizations.items()}
    return keras.saving.serialize_keras_object(parametrizations)


def check_wrappable(layer: Any) -> None:
    """Raises a ValueError if the object is not a layer whose call can be wrapped."""
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(f"a Keras layer is wanted, got {layer!r} of type {type(layer).__name__}")
    if hasattr(layer, "state_size") and not isinstance(layer, keras.layers.RNN):
        raise ValueError(
            f"'{layer.name}' of type {type(layer).__name__} is an RNN cell, which is called once a "
            "time step and would draw anew each time: wrap the recurrent layer, "
            f"as in WeightDropout(keras.layers.RNN({type(layer).__name__}(...)), ...)"
        )
