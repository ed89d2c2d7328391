"""`parametrize` and `unwrap`: add parametrizations to a model's weights, and remove them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.in_place import parametrize_in_place, remove_in_place
from tfwd.layers._substitution import (
    copies_with_effective_weights,
    weight_patterns,
    weight_selection,
    weight_setters,
)
from tfwd.layers._substitution.seed_stream import checked_seed
from tfwd.layers.parametrized import Parametrized, check_wrappable
from tfwd.parametrizations import Parametrization
from tfwd.pretrained import weight_change_listeners


def parametrize(
    model: keras.Layer,
    parametrizations: Mapping[str, Parametrization],
    seed: int | None = None,
    recompute: bool = True,
    share_across_replicas: bool = False,
    exclude: str | Sequence[str] | None = None,
    in_place: bool = False,
) -> Any:
    """Adds parametrizations to weights of a model. The model then computes with effective weights.

    With `in_place=True` the model stays the same object, with its class, methods, attributes,
    optimizer and compiled state. Use it for a model with custom methods, such as `train_step`,
    `generate` or `enable_lora`. Its files equal the plain model's files. `tfwd.unwrap(model)`
    removes the parametrizations. A second call of `parametrize` adds more parametrizations. They
    are applied to the effective weights of the first call. Keras traces the functions of `fit`,
    `evaluate` and `predict` again. A custom `tf.function` is not traced again, so create a new
    `tf.function` after `parametrize` and after `unwrap`.

    Without `in_place=True` the result is another model on the same variables.

    In a Sequential or functional model each layer with a matching weight is wrapped in its own
    `tfwd.layers.Parametrized`, under the layer's name. This includes nested models. All other
    layers are shared. A subclassed model is wrapped as a whole, in a `ParametrizedModel`. This
    wrapper has the model's call, but none of its other methods. It warns if the model defines
    `train_step`. The given model is not changed, and still computes with the raw weights.

    Args:
        model: Sequential, functional or subclassed Keras model. With `in_place=True` it may be any
            built layer or model.
        parametrizations: dict from a pattern on the weights' paths to a parametrization, as in
            `tfwd.layers.Parametrized`. A pattern is matched against the whole model. It is an error
            if it matches nothing. (A subclassed model without weights is checked in its first
            call.) Patterns such as `.*` exclude weights that are never trained, such as moving
            statistics. The pattern "all" means `.*`. If several patterns match, the first pattern
            applies. A pattern whose weights all belong to earlier patterns is an error. The keys
            have the meaning of `include` in other functions.
        seed: int. Each wrapped layer gets its own seed: `seed` plus the index of its first weight
            in `model.weights`. With `in_place=True` the whole model has one seed. Default None,
            which draws seeds from Keras's global seed.
        recompute, share_across_replicas: As in `tfwd.layers.Parametrized`.
        exclude: str or list of str. Patterns of weights that are not parametrized, although a key
            of `parametrizations` matches them. Each must exclude a weight. Default None.
        in_place: bool. Changes the given model. Default False.

    Returns:
        With `in_place=True` the given model. Otherwise a model with the same weights in the same
        order. If a Sequential or functional model was compiled, the new model is compiled in the
        same way, with a new optimizer, as in Keras's `clone_model`. A `ParametrizedModel` is not
        compiled.

    Raises:
        ValueError: As `tfwd.layers.Parametrized`; if `parametrizations` is not a dict; if a
            Sequential model is not built yet. With `in_place=True` also if a model or layer is not
            built; if a pattern matches only frozen weights. The model is not changed then.

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
        >>> tfwd.parametrize(model, {"kernel": P.Dropout(0.3)}, seed=1, in_place=True) is model
        True
    """
    if in_place:
        _check_patterns(model, parametrizations)
        out = weight_patterns.checked_exclude(model, exclude)
        return parametrize_in_place(
            model, parametrizations, checked_seed(seed), recompute, share_across_replicas, out
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"parametrize expects a Keras model, got {model!r} of type {type(model).__name__}; "
            "for a layer use tfwd.layers.Parametrized, or in_place=True"
        )
    _check_patterns(model, parametrizations)
    seed = checked_seed(seed)
    out = weight_patterns.checked_exclude(model, exclude)
    options: dict[str, Any] = {
        "recompute": recompute,
        "share_across_replicas": share_across_replicas,
    }
    if not _keras.copies.is_layer_graph(model):
        return ParametrizedModel(
            model, parametrizations, seed, exclude=exclude, name=model.name, **options
        )
    if not model.built:
        raise ValueError(
            f"model '{model.name}' has no weights yet: give it an Input layer, build it, or call it"
        )
    chosen = {
        id(target.variable): (target.position, pattern)
        for target, pattern in weight_selection.match(model, {p: p for p in parametrizations}, out)
    }

    def wrap(layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):  # an operation such as `x + y`
            return layer
        found = [t for t in weight_selection.all_targets(layer) if id(t.variable) in chosen]
        if not found:
            return layer
        patterns = {weight_patterns.literal(t.name): chosen[id(t.variable)][1] for t in found}
        own = {name: parametrizations[pattern] for name, pattern in patterns.items()}
        own_seed = None
        if seed is not None:
            own_seed = (seed + chosen[id(found[0].variable)][0]) % (1 << 63)
        wrapper = Parametrized(layer, own, seed=own_seed, name=layer.name, **options)
        wrapper._call_cache.given_patterns = patterns  # for `tfwd.parametrizations.table`
        return wrapper

    return _keras.copies.clone(model, wrap)


def _check_patterns(model: Any, parametrizations: Any) -> None:
    """Raises a ValueError for parametrizations that are not a dict from patterns."""
    check_wrappable(model)
    if not isinstance(parametrizations, Mapping):
        raise ValueError(
            f"parametrizations of model '{model.name}' must be a dict from a pattern on weights' "
            f"paths to a parametrization, such as {{'kernel': Dropout(0.5)}}; got "
            f"{parametrizations!r}"
        )
    if not parametrizations:
        raise ValueError(
            f"parametrizations of model '{model.name}' is empty: pass at least one pattern, such "
            "as {'kernel': Dropout(0.5)}"
        )
    for pattern, parametrization in parametrizations.items():
        if not isinstance(parametrization, Parametrization):
            raise ValueError(
                f"'{pattern}' of model '{model.name}': expected a parametrization such as "
                f"Dropout(0.5), got {parametrization!r}"
            )


def unwrap(model: keras.Layer, fold: bool = False) -> keras.Layer:
    """Returns the plain Keras model or layer on the same variables.

    It removes parametrizations that were added in place, in the model or in a layer inside. If the
    model contains nothing else of tfwd, the result is the given model itself.

    Wrappers are replaced by the layers they wrap. tfwd's own layers are replaced by plain layers on
    the same variables: `WeightDropLSTM` by `LSTM`, `DropoutEmbedding` by `Embedding`,
    `LockedDropout` by `SpatialDropout1D`, `TiedDense` by `EinsumDense`. In evaluation the result
    computes the same as the model. It reads and writes the weight files of the plain model. It can
    be saved and exported for programs without tfwd.

    Args:
        model: Model or layer. It is not changed, except for parametrizations in place.
        fold: bool. Also unwraps a layer with a parametrization that acts in evaluation, such as
            `WeightNorm`. Such a layer is copied with all its variables, and the copy has the
            effective weights of evaluation as its weights. The copy shares no variable with the
            model. Training the result does not change the model's layer, and training the model
            does not change the copy. All other layers share their variables as usual. A layer that
            was parametrized in place is not copied: its own variables get the effective weights.
            Default False, which rejects such a layer.

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
    if isinstance(model, keras.layers.Layer):
        remove_in_place(model, fold)
    return _unwrap(model, {}, fold)


# Methods that a model may override to define its own training.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


@keras.saving.register_keras_serializable("tfwd")
class ParametrizedModel(keras.Model):
    """A model around a subclassed model that computes with functions of its weights.

    Its weights are the wrapped model's weights. It trains with `fit` as the wrapped model does. It
    does not use custom methods such as `train_step` of the wrapped model, and warns about them. The
    wrapped model, with its other methods and attributes, is `parametrized.layer`.

    Args:
        model: Wrapped model.
        parametrizations, seed, recompute, share_across_replicas, exclude: As in
            `tfwd.layers.Parametrized`.
        **kwargs: Arguments of every Keras model, such as `name`.
    """

    replaces_inner_layer = True

    def __init__(
        self,
        model: keras.Model,
        parametrizations: Mapping[str, Parametrization],
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
        exclude: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        own = [name for name in _STEPS if not _keras.is_of_keras(type(model), name)]
        if own:
            kind = type(model).__name__
            warnings.warn(
                f"model '{model.name}' of type {kind} has its own {', '.join(own)}, which the "
                "wrapper does not use: the wrapper's fit, evaluate and predict are Keras's. Call "
                "tfwd.parametrize with in_place=True, or train the wrapper in a custom loop",
                stacklevel=3,
            )
        self.parametrized = Parametrized(
            model,
            parametrizations,
            seed,
            recompute,
            share_across_replicas,
            exclude,
            name=model.name,
        )
        _keras.layer_wrappers.adopt_call(self, model)
        self.built = _keras.layer_building.has_weights(model)

    def set_weights(self, weights: Any) -> None:
        """Sets the weights. Warns if Mixout has already copied its references."""
        super().set_weights(weights)
        with weight_setters.told():  # of the references of Mixout, and not of gains
            weight_change_listeners.tell(self.weights)

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
            inner.exclude,
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
    if fold and isinstance(layer, Parametrized) and copies_with_effective_weights.is_needed(layer):
        return copies_with_effective_weights.folded(layer, _unwrap(layer.layer, done, fold))
    if hasattr(layer, "unwrapped"):
        return _unwrap(layer.unwrapped(), done, fold)
    if not _holds_tfwd(layer):
        return layer
    if _keras.copies.is_layer_graph(layer):
        return _keras.copies.clone(layer, lambda inner: _unwrap(inner, done, fold))
    changed = copies_with_effective_weights.changed_weights(layer) if fold else frozenset()
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
