"""`Parametrized`: a wrapper that lets a layer compute with functions of its weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfwd import _keras, training_flag
from tfwd.layers._substitution import per_example_call, recurrent_call, weight_selection
from tfwd.layers._substitution.seed_stream import missing_wrapper_error
from tfwd.layers._substitution.weight_patterns import QUANTIZED, checked_exclude
from tfwd.layers._substitution.weight_perturbation_mixin import WeightPerturbationMixin
from tfwd.layers._substitution.weight_selection import Parametrizations
from tfwd.parametrizations import Parametrization


@keras.saving.register_keras_serializable("tfwd")
class Parametrized(WeightPerturbationMixin, _keras.layer_wrappers.Wraps, keras.layers.Wrapper):
    """A wrapper that runs a layer on functions of its weights, such as dropped or noisy copies.

    Formula: a call computes `layer(x; w')`. `w'_i = p_i(w_i)` for each weight `i` that a pattern
    matches, and `w'_i = w_i` for the others. Gradients go to the raw weights:
    `dL/dw_i = dL/dw'_i * dw'_i/dw_i`. In evaluation the wrapped layer runs unchanged, except that
    deterministic parametrizations also act there.

    Every training call draws once, for the whole batch and all time steps. (With
    `Dropout(per_example=True)` it draws for each example.) A draw depends only on the seed, the
    weight's position in `layer.weights`, the training-call counter and the replica.
    Equal seeds give equal draws in every run. Draws continue after a restart from a `.keras` file,
    a weight file of this layer or a `tf.train.Checkpoint`.

    The wrapper has exactly the wrapped layer's weights, in the same order. (With
    `WeightNorm(gain=True)`, gains come after them.) The wrapped layer is not changed. Other uses of
    the layer compute with the raw weights.

    Args:
        layer: Any Keras layer or model. Wrap the outermost layer: a layer inside `TimeDistributed`
            would draw at every step. An RNN cell cannot be wrapped (wrap its `RNN`).
        parametrizations: A parametrization for the default weights, as in `WeightDropout`. Or a
            dict from a pattern to a parametrization. A pattern is a regular expression. It must
            match a weight's full path, or its last components. A pattern that begins with `/` must
            match the full path. If several patterns match, the first one applies. Some weights are
            never trained, such as moving means. A pattern matches such a weight only if it ends in
            the weight's own name, as `moving_mean` does. Weights of a frozen layer are matched as
            usual. The pattern "all" stands for `.*`, every trained weight. Write "(all)" for a
            weight of this name. A weight that no key matches is not parametrized. (Other functions
            call such patterns `include`.)
        seed: int. Default None, which draws a seed from Keras's global seed
            (`keras.utils.set_random_seed`).
        recompute: bool. Stores no effective weight for backward. Backward computes it again from
            the raw weight and the seed. Default True, which saves memory. In eager mode, or if the
            training flag is a tensor, backward runs the layer a second time. This is possible only
            if the layer consists of Keras's code. A layer that contains custom code runs once and
            stores its effective weights. A layer that cannot run twice, for example because it
            draws from a stateful generator, also stores them, with a warning. Forward-mode
            derivatives need False. The attribute can be changed later. Functions that were already
            traced do not change.
        share_across_replicas: bool. Draws the same on all replicas of a `tf.distribute` strategy.
            Default False.
        exclude: str or list of str. Patterns of weights that are not parametrized, although a
            pattern or the default selects them. Default None, which excludes nothing.
        **kwargs: `name` and `trainable`, as for any layer.

    Raises:
        ValueError: If a pattern matches no weight, or only excluded weights; if earlier patterns
            match all weights of a pattern; if a pattern of `exclude` matches no selected weight; if
            a weight is not floating; if a rate is out of range; if the layer is an RNN cell. The
            message names the layer and the weight. Some checks need weights. They run when the
            layer is built, or in the first call if that call creates the weights.
        ValueError: On loading a weight file that the plain layer or model wrote. A plain layer's
            `tf.train.Checkpoint` cannot be checked, so restore it with the unwrapped layer.
        ValueError: In a training call inside `tf.recompute_grad` or `keras.remat`, which would draw
            another mask in backward.

    Not supported:

    - `tf.autodiff.ForwardAccumulator` in eager mode. It raises a NotImplementedError, unless
      `recompute=False`.
    - A `tf.function` around a wrapped layer, if it was traced before `tf.recompute_grad` calls it.
      It draws another mask in backward. There is no error, because TensorFlow does not run the
      layer's code again. Move the layer out of `tf.recompute_grad`.

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
        exclude: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(parametrizations, (Mapping, Parametrization)) or parametrizations == {}:
            raise ValueError(
                "parametrizations must be a dict from a pattern to a parametrization, such as "
                f"{{'kernel': Dropout(0.5)}}, or one parametrization; got {parametrizations!r}"
            )
        check_wrappable(layer)
        # The wrapped layer's dtype policy applies, even if a config has another policy.
        kwargs.pop("dtype", None)
        super().__init__(layer, dtype=_keras.layers.floating_policy(layer), **kwargs)
        if isinstance(parametrizations, Mapping):
            parametrizations = dict(parametrizations)
        self._exclude = checked_exclude(layer, exclude)
        self._init_perturbation(parametrizations, seed, recompute, share_across_replicas)
        self.draws.wrapper = self.name
        _keras.layer_wrappers.adopt_call(self, layer)

    @property
    def weight_patterns(self) -> list[str] | None:
        """The patterns of the parametrized weights; None stands for the default weights."""
        given = self.parametrizations
        return list(given) if isinstance(given, Mapping) else None

    @property
    def exclude(self) -> list[str] | None:
        """The patterns of weights that are not parametrized, or None."""
        return list(self._exclude) or None

    def _subject(self) -> keras.Layer:
        return self.layer

    def build(self, *args: Any, **kwargs: Any) -> None:
        if not self.layer.built and not _keras.layer_building.has_default_build(self.layer):
            _keras.layer_building.build(self.layer, *args, **kwargs)
        if _keras.layer_building.has_weights(self.layer):
            self._targeted()

    def call(self, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        if training is not None:
            kwargs["training"] = training
        function, args, kwargs = _keras.layer_wrappers.inner_call(self, args, kwargs)
        training = kwargs.pop("training", None)
        self._make_weights(args, kwargs, training)
        unperturbed = function
        if not self._calls_subject():
            pass
        elif recurrent_call.is_plain(self.layer):
            function = functools.partial(recurrent_call.fast_or_plain_call, self.layer, function)
        elif per_example_call.is_product(self.layer):
            function = functools.partial(per_example_call.call, self.layer, function)
            unperturbed = function
        if training_flag.standardize(training) is not False:
            per_example_call.check_inputs(self, self.parametrizations, args, kwargs)
        return self._perturbed_call(function, args, kwargs, training, unperturbed)

    def _unperturbed_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **{**kwargs, "training": True})

    def _make_weights(self, args: tuple, kwargs: dict[str, Any], training: Any) -> None:
        """Lets the layer create all weights that a call of this kind uses.

        A layer may create inner layers in its call, and may use other inner layers in training. So
        the call is made once per training flag, and its result is discarded.
        """
        flag = training if isinstance(training, bool) else None
        if flag in self._call_cache.made_for:
            return
        if not self.layer.built or _keras.layer_building.awaits_call(self.layer):
            _keras.layer_building.build_by_call(self.layer, args, kwargs)
        self._call_cache.made_for.add(flag)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        self._make_weights(args, kwargs, kwargs.get("training"))
        self._targeted()
        if not _keras.layer_calls.accepts_training(self.layer):
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
        # Keras sets it to None in the constructor, before the layer exists.
        if value is not None:
            self.layer.input_spec = value

    @property
    def reset_state(self) -> Any:
        """The wrapped layer's `reset_state()`, if it has one."""
        return _keras.recurrent_layers.reset_states(self.layer)

    @property
    def reset_states(self) -> Any:
        """Keras 2's name of `reset_state`."""
        return _keras.recurrent_layers.reset_states(self.layer)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Rejects quantization.

        Raises:
            ValueError: Always. The message says what to do instead.
        """
        raise ValueError(f"layer '{self.name}' cannot be quantized: {QUANTIZED}")

    def get_build_config(self) -> dict[str, Any] | None:
        # Keras assumes that a loaded layer with any build config is built.
        inner = self.layer.get_build_config()
        return None if inner is None else {"layer": inner}

    def build_from_config(self, config: dict[str, Any]) -> None:
        builds = _keras.layer_building.builds_by_shape(self.layer)
        if not self.layer.built and builds and config.get("layer"):
            _keras.layer_building.build_from_config(self.layer, config["layer"])
        if _keras.layer_building.has_weights(self.layer):
            self._targeted()
            self.built = True

    def load_own_variables(self, store: Any) -> None:
        if _keras.copies.is_absent(store):
            raise missing_wrapper_error(self.name)
        super().load_own_variables(store)

    def unwrapped(self) -> keras.Layer:
        """Returns the wrapped layer.

        Raises:
            ValueError: If a parametrization also acts in evaluation. The wrapped layer alone would
                then compute different outputs. See `fold` of `tfwd.unwrap`.
        """
        weight_selection.check_evaluates_raw(self.layer, self.parametrizations, self.name)
        return self.layer

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config.pop("dtype", None)
        config.pop("batch_input_shape", None)  # Keras 2 adds it to a first layer
        return {
            **config,
            "layer": _keras.copies.serialize(self.layer),
            "parametrizations": _serialized(self.parametrizations),
            "seed": self.seed,
            "recompute": self.recompute,
            "share_across_replicas": self.share_across_replicas,
            "exclude": self.exclude,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        if "go_backwards" in config:
            raise ValueError(
                f"Bidirectional cannot split a {cls.__name__}; wrap the Bidirectional layer: "
                f"{cls.__name__}(Bidirectional(...), ...)"
            )
        return cls(
            **{
                key: _keras.copies.deserialize(value, custom_objects)
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
        raise ValueError(f"expected a Keras layer, got {layer!r} of type {type(layer).__name__}")
    if hasattr(layer, "state_size") and not isinstance(layer, keras.layers.RNN):
        raise ValueError(
            f"'{layer.name}' of type {type(layer).__name__} is an RNN cell, which is called once "
            "per time step and would draw in each call: wrap the recurrent layer, "
            f"as in WeightDropout(keras.layers.RNN({type(layer).__name__}(...)), ...)"
        )
