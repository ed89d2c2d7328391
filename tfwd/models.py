"""`parametrize` and `unwrap`: add parametrizations to a model's weights, and remove them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from tfwd import _keras
from tfwd.layers._substitution import folding, weight_selection
from tfwd.layers._substitution.seed_stream import checked_seed
from tfwd.layers.parametrized import Parametrized
from tfwd.parametrizations import Parametrization
from tfwd.pretrained import listeners


def parametrize(
    model: keras.Model,
    parametrizations: Mapping[str, Parametrization],
    seed: int | None = None,
    recompute: bool = True,
    share_across_replicas: bool = False,
) -> keras.Model:
    """Returns a model on the same variables whose training calls use functions of its weights.

    In a Sequential or functional model each layer with a matching weight is wrapped in its own
    `tfwd.layers.Parametrized`, under the layer's name. This includes nested models. All other
    layers are shared. A subclassed model is wrapped as a whole, in a `ParametrizedModel`. The
    wrapper has its call, but none of its other methods. It warns if the model defines `train_step`.
    The given model is not changed, and still computes with the raw weights.

    Args:
        model: Sequential, functional or subclassed Keras model.
        parametrizations: dict from a pattern on the weights' paths to a parametrization, as in
            `tfwd.layers.Parametrized`. A pattern is matched against the whole model. It is an error
            if it matches nothing. (A subclassed model without weights is checked in its first
            call.) Patterns such as `.*` exclude weights that are never trained, such as moving
            statistics.
        seed: int. Each wrapped layer gets its own seed: `seed` plus the index of its first weight
            in `model.weights`. Default None, which draws seeds from Keras's global seed.
        recompute, share_across_replicas: As in `tfwd.layers.Parametrized`.

    Returns:
        A model with the same weights in the same order. If a Sequential or functional model was
        compiled, the new one is compiled in the same way, with a new optimizer, as in Keras's
        `clone_model`. A `ParametrizedModel` is not compiled.

    Raises:
        ValueError: As `tfwd.layers.Parametrized`; if `parametrizations` is not a dict; if a
            Sequential model is not built yet.

    Example:
        >>> import keras, tfwd
        >>> from tfwd import parametrizations as P
        >>> dense = [keras.layers.Dense(4), keras.layers.Dense(1)]
        >>> model = keras.Sequential([keras.Input((8,)), *dense])
        >>> dropped = tfwd.parametrize(model, {"kernel": P.Dropout(0.3)}, seed=1)
        >>> dropped.weights[0] is model.weights[0]
        True
        >>> [type(layer).__name__ for layer in dropped.layers]
        ['Parametrized', 'Parametrized']
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"parametrize expects a Keras model, got {model!r} of type {type(model).__name__}; "
            "for a layer use tfwd.layers.Parametrized"
        )
    if not isinstance(parametrizations, Mapping):
        raise ValueError(
            f"parametrizations of model '{model.name}' must be a dict from a pattern on weights' "
            f"paths to a parametrization, such as {{'kernel': Dropout(0.5)}}; got "
            f"{parametrizations!r}"
        )
    if not parametrizations:
        raise ValueError("parametrizations is empty: pass at least one pattern, as in the example")
    for pattern, parametrization in parametrizations.items():
        if not isinstance(parametrization, Parametrization):
            raise ValueError(
                f"'{pattern}' of model '{model.name}': expected a parametrization such as "
                f"Dropout(0.5), got {parametrization!r}"
            )
    seed = checked_seed(seed)
    options = {"recompute": recompute, "share_across_replicas": share_across_replicas}
    if not _keras.copies.is_layer_graph(model):
        return ParametrizedModel(model, parametrizations, seed, name=model.name, **options)
    if not model.built:
        raise ValueError(
            f"model '{model.name}' has no weights yet: give it an Input layer, build it, or call it"
        )
    chosen = {
        id(target.variable): (target.position, parametrization)
        for target, parametrization in weight_selection.match(model, parametrizations)
    }

    def wrap(layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):  # an operation such as `x + y`
            return layer
        found = [t for t in weight_selection.all_targets(layer) if id(t.variable) in chosen]
        if not found:
            return layer
        own = {re.escape(t.name): chosen[id(t.variable)][1] for t in found}
        own_seed = None
        if seed is not None:
            own_seed = (seed + chosen[id(found[0].variable)][0]) % (1 << 63)
        return Parametrized(layer, own, seed=own_seed, name=layer.name, **options)

    return _keras.copies.clone(model, wrap)


def unwrap(model: keras.Layer, fold: bool = False) -> keras.Layer:
    """Returns the plain Keras model or layer on the same variables.

    Wrappers are replaced by the layers they wrap. tfwd's own layers are replaced by plain layers on
    the same variables: `WeightDropLSTM` by `LSTM`, `DropoutEmbedding` by `Embedding`,
    `LockedDropout` by `SpatialDropout1D`, `TiedDense` by `EinsumDense`. In evaluation the result
    computes the same as the model. It reads and writes the weight files of the plain model. It can
    be saved and exported for programs without tfwd.

    Args:
        model: Model or layer. It is not changed.
        fold: bool. Also unwraps a layer with a parametrization that acts in evaluation, such as
            `WeightNorm`. Such a layer is copied with all its variables, and the copy has the
            effective weights of evaluation as its weights. The copy shares no variable with the
            model. Training the result does not change the model's layer, and training the model
            does not change the copy. All other layers share their variables as usual. Default
            False, which rejects such a layer.

    Returns:
        A model on the same variables, or the same object if it contains nothing of tfwd. Its
        `weights` are in the same order, except that an `EinsumDense` lists its kernel before its
        bias.

    Raises:
        ValueError: If a parametrization also acts in evaluation (`WeightNorm`) and `fold` is False,
            or if a subclassed model has layers that Keras does not track. If `fold` is True and a
            layer cannot be copied from its config, or if two nested wrappers of one weight act in
            evaluation.

    Example:
        >>> import keras, tfwd
        >>> from tfwd import layers
        >>> model = keras.Sequential([keras.Input((3, 8)), layers.WeightDropLSTM(4)])
        >>> plain = tfwd.unwrap(model)
        >>> type(plain.layers[0]).__name__, plain.weights[0] is model.weights[0]
        ('LSTM', True)
    """
    return _unwrap(model, {}, fold)


# Methods with which a model may define its own training.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


@keras.saving.register_keras_serializable("tfwd")
class ParametrizedModel(keras.Model):
    """A model around a subclassed model that computes with functions of its weights.

    Its weights are the wrapped model's weights. It trains with `fit` as the wrapped model does. It
    does not use custom methods such as `train_step` of the wrapped model, and warns about them. The
    wrapped model, with its other methods and attributes, is `parametrized.layer`.

    Args:
        model: Wrapped model.
        parametrizations, seed, recompute, share_across_replicas: As in `tfwd.layers.Parametrized`.
        **kwargs: Arguments of every Keras model, such as `name`.
    """

    def __init__(
        self,
        model: keras.Model,
        parametrizations: Mapping[str, Parametrization],
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        own = [name for name in _STEPS if not _keras.training.is_of_keras(type(model), name)]
        if own:
            kind = type(model).__name__
            warnings.warn(
                f"model '{model.name}' of type {kind} has its own {', '.join(own)}, which the "
                "model around it does not use: fit, evaluate and predict are Keras's. Write a "
                "custom loop around the new model, or wrap layers inside the old one",
                stacklevel=3,
            )
        self.parametrized = Parametrized(
            model, parametrizations, seed, recompute, share_across_replicas, name=model.name
        )
        _keras.wrapping.adopt_call(self, model)
        self.built = _keras.layers.has_weights(model)

    def set_weights(self, weights: Any) -> None:
        """Sets the weights. Warns if Mixout has already copied its references."""
        super().set_weights(weights)
        listeners.tell(self.weights)

    @property
    def calls(self) -> Any:
        """Number of training calls so far, as in `tfwd.layers.Parametrized`."""
        return self.parametrized.calls

    def effective_weights(self, call: int, examples: int | None = None) -> dict[str, Any]:
        """Returns the weights of a training call, as in `tfwd.layers.Parametrized`."""
        return self.parametrized.effective_weights(call, examples)

    def build(self, *args: Any, **kwargs: Any) -> None:
        self.parametrized.build(*args, **kwargs)

    def call(self, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        return self.parametrized(*args, training=training, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        return self.parametrized.compute_output_spec(*args, **kwargs)

    def get_build_config(self) -> dict[str, Any] | None:
        return self.parametrized.get_build_config()

    def build_from_config(self, config: dict[str, Any]) -> None:
        self.parametrized.build_from_config(config)
        self.built = self.parametrized.built

    def get_config(self) -> dict[str, Any]:
        config = self.parametrized.get_config()
        return {**config, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        inner = Parametrized.from_config(config, custom_objects)
        return cls(
            inner.layer,
            inner.parametrizations,
            inner.seed,
            inner.recompute,
            inner.share_across_replicas,
            name=config["name"],
        )


def _unwrap(layer: Any, done: dict[int, Any], fold: bool) -> Any:
    """Returns the plain layer. A layer with several uses becomes one layer."""
    if not isinstance(layer, keras.layers.Layer):
        return layer
    if id(layer) not in done:
        done[id(layer)] = layer
        done[id(layer)] = _unwrapped(layer, done, fold)
    return done[id(layer)]


def _unwrapped(layer: keras.Layer, done: dict[int, Any], fold: bool) -> keras.Layer:
    if isinstance(layer, ParametrizedModel):
        return _unwrap(layer.parametrized, done, fold)
    if fold and isinstance(layer, Parametrized) and folding.is_needed(layer):
        return folding.folded(layer, _unwrap(layer.layer, done, fold))
    if hasattr(layer, "unwrapped"):
        return _unwrap(layer.unwrapped(), done, fold)
    if not _holds_tfwd(layer):
        return layer
    if _keras.copies.is_layer_graph(layer):
        return _keras.copies.clone(layer, lambda inner: _unwrap(inner, done, fold))
    changed = folding.changed_weights(layer) if fold else frozenset()
    return _keras.copies.share(
        layer, replace=lambda value: _unwrap_nest(value, done, fold), changed=changed
    )


def _unwrap_nest(value: Any, done: dict[int, Any], fold: bool) -> Any:
    if isinstance(value, dict):
        return {key: _unwrap_nest(item, done, fold) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = [_unwrap_nest(item, done, fold) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return _unwrap(value, done, fold)


def _holds_tfwd(layer: keras.Layer) -> bool:
    return any(
        hasattr(inner, "unwrapped") or isinstance(inner, ParametrizedModel) or _holds_tfwd(inner)
        for inner in _keras.layers.sublayers(layer)
    )
