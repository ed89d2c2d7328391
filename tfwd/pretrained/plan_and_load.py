"""`plan` and `load`: find which tensor of a file is loaded into which variable, and load it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.chief_source import lockstep, open_together
from tfwd.pretrained.flatten_order.order_search import orders_by_layer
from tfwd.pretrained.key_rules import FamilyRules, KeyMapping
from tfwd.pretrained.loading_plan import Plan, PlanError
from tfwd.pretrained.plan_builder import build_plan
from tfwd.pretrained.published_layers import (
    argument_problems,
    notes_on_mapping,
    published_layers,
    rules_of_layers,
)
from tfwd.pretrained.sources.base import SourceError
from tfwd.pretrained.target_variables import check_weights, targets_of


def plan(
    model: keras.layers.Layer,
    source: str | os.PathLike[str],
    mapping: KeyMapping | None = None,
    prefix: str | None = None,
    ignore: str | Sequence[str] = (),
    allow_missing: str | Sequence[str] = (),
    strict: bool = True,
    family_rules: FamilyRules | None = None,
) -> Plan:
    """Finds which tensors of a file are loaded into a model. Reads only names, shapes and dtypes.

    A pattern for paths must match the full path or its last components. A pattern that begins with
    `/` must match the full path. A pattern for keys must match the full key, with or without the
    prefix. PyTorch's integer buffers `position_ids`, `token_type_ids` and `num_batches_tracked`,
    and TensorFlow's `save_counter`, are not weights. They never count as unexpected.

    Args:
        model: A built Keras model or layer.
        source: Path of a `.safetensors` file, of the index of several such files, of an `.npz`
            file, of a TensorFlow checkpoint, of a folder with one of these, or of a SavedModel.
        mapping: dict from a pattern for paths of variables or layers to a key. The key is a str, or
            a `Key` with more properties. Default None: a layer of `tfwd.layers.transformer` that
            `from_config` made has the keys of its family. All other keys are paths.
        prefix: str. Beginning of all keys. Default None, for the prefix with which most keys are
            found. Keys in `mapping` may have the prefix or not. A key without the prefix is used as
            it is if the file has no key with the prefix, such as the key of a head.
        ignore: str or list of str. Patterns for keys that are not loaded, also if a variable
            has the key. Such a variable needs `allow_missing`. Default none.
        allow_missing: str or list of str. Patterns for paths of variables that keep their values if
            the file lacks them. Default none.
        strict: bool. Treats missing and unexpected keys as errors. Default True. False makes
            missing keys a warning if at least one variable has a key.
        family_rules: Rules for the files of a model family, from the method `family_rules` of a
            layer that `from_config` made. Default None, for the rules of the layers in the model.

    Returns:
        A `Plan`. Its `problems()` has all errors.

    Raises:
        SourceError: If the file does not exist, or is incomplete.
        TypeError: If the model is not a Keras layer, or the mapping is not a dict of keys.
        ValueError: If the model is not built, or a pattern is not a regular expression.

    Example:
    >>> import keras, numpy as np, os, tempfile
    >>> from tfwd.pretrained import plan
    >>> file = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> arrays = {"out.kernel": np.ones((3, 2), "float32"), "out.bias": np.zeros(2, "float32")}
    >>> np.savez(file, **arrays)
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
    >>> found = plan(model, file, mapping={"head": "out"})
    >>> [(step.target.path, step.key, step.layout.words) for step in found.steps]
    [('head/kernel', 'out.kernel', 'as it is'), ('head/bias', 'out.bias', 'as it is')]
    >>> _ = found.apply()
    >>> float(keras.ops.sum(model(np.ones((1, 3)))))
    6.0
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(f"model={model!r}: give a built Keras model or layer")
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(
            f"mapping={mapping!r} is a {type(mapping).__name__}: give a dict from patterns for "
            "paths to keys, for example {'layer_0': 'enc.0'}"
        )
    if not model.built and hasattr(model, "any_input_shape"):  # a layer from a published config
        _keras.layer_building.build(model, model.any_input_shape())
    with lockstep(model.weights if model.built else (), PlanError, SourceError) as workers:
        check_weights(model)
        with open_together(workers, source) as opened:
            orders = orders_by_layer(model)  # its trace builds the layers that are not built yet
            targets, published = targets_of(model), published_layers(model)
            if mapping is None and family_rules is None:
                family_rules = rules_of_layers(published, targets, opened)
            made = build_plan(
                model,
                opened,
                targets,
                orders,
                mapping=mapping,
                prefix=prefix,
                ignore=_as_list(ignore),
                allow_missing=_as_list(allow_missing),
                strict=strict,
                family_rules=family_rules,
            )
            problems = argument_problems(published, made.steps, opened, workers)
            made.mistakes = [*problems, *(each for each in made.mistakes if each not in problems)]
            if mapping is not None and family_rules is None:
                made.notes += notes_on_mapping(published, made.missing)
            return made


def load(model: keras.layers.Layer, source: str | os.PathLike[str], **options: Any) -> Plan:
    """Loads weights into a built model: `plan(model, source, ...).apply()`.

    Under `tf.distribute.MultiWorkerMirroredStrategy`, all workers must call it. Only the chief
    reads the file, and sends it to the others block by block. The path need not exist on the other
    workers. All workers end with the same bits, or with the same error. This holds in the scope of
    the strategy. It also holds outside the scope if the model was made in the scope.

    Args:
        model: As in `plan`.
        source: As in `plan`.
        **options: Other arguments of `plan`.

    Returns:
        The applied plan.

    Raises:
        PlanError: If a key is missing or unexpected, if a tensor has another shape, or if workers
            have different models. Nothing is loaded.
        SourceError: If the file does not exist, or is incomplete.
        tf.errors.UnavailableError: If another worker ended.
    """
    return plan(model, source, **options).apply()


def _as_list(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)
