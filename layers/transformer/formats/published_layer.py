"""`Published`: layers that are made from a published config and filled from its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, pretrained
from tfwd.layers.transformer.composite_layer import Composite
from tfwd.layers.transformer.formats.encoder_families import FAMILIES
from tfwd.layers.transformer.formats.published_configs import (
    Configuration,
    check_config,
    is_published,
    read_config,
)
from tfwd.path_patterns import compiled, matches
from tfwd.pretrained.chief_source import lockstep
from tfwd.pretrained.key_rules import FamilyRules
from tfwd.pretrained.target_variables import targets_of


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The published config of a layer, the layer's part of the model, and its layer numbers."""

    read: Configuration
    part: str
    layers: list[int] | None

    def rules(self, at: str = "") -> FamilyRules:
        """Returns the rules for the files of the config's family. See `loading_rules`."""
        return loading_rules(self.read, self.part, self.layers, at)


class Published(Composite):
    """Base class of layers that load published models, with `from_pretrained`.

    Attributes:
        part: Position in `T.Bert`, such as "stack". "" is the whole model.
        families: Names of the supported families.
    """

    part = ""
    families: tuple[str, ...] = tuple(FAMILIES)
    hidden_size: int
    _origin: _Origin | None = None

    @classmethod
    def from_config(cls, config: Any, layers: Iterable[int] | None = None, **overrides: Any) -> Any:
        """Creates a layer from the config of a published model, or from a Keras config.

        Args:
            config: Folder with a `config.json`, that file, or a dict that was read from one. A dict
                without `model_type` is a Keras layer's own config.
            layers: Numbers of the selected layers, from 0. They can be in any order and repeated.
                Default None, for all. They are renumbered: with `range(8, 12)`, `layer_0` is the
                model's layer 8.
            **overrides: Arguments of the layer that replace the config's values, such as `dropout`.
                Also arguments of every Keras layer, such as `name`.

        Raises:
            ValueError: If the file does not exist, if its `model_type` is not supported, or if a
                number is out of range.
        """
        if is_published(config):
            return cls.from_published_config(config, layers, **overrides)
        return cls.with_flags(config, lambda own: cls(**{**own, **overrides}))

    @classmethod
    def from_published_config(
        cls, config: Any, layers: Iterable[int] | None = None, **overrides: Any
    ) -> Any:
        """Creates a layer from the config of a published model. See `from_config`."""
        read = read_config(config, overrides)
        if read.model_type not in cls.families:
            other = "T5 and T5Stack" if read.model_type == "t5" else "Bert and its parts"
            raise ValueError(
                f"{read.name}: model_type={read.model_type!r} is for {other}, but {cls.__name__} "
                f"is for {', '.join(cls.families)}: use {other}"
            )
        layers = as_layer_numbers(layers)
        arguments = {k: v for k, v in read.arguments().items() if k in cls.arguments()}
        if cls.part_of(overrides) == "decoder":
            arguments["num_layers"] = read.layer_count("decoder/")
        if arguments.get("num_shared") == arguments.get("num_layers", 0):
            arguments["num_shared"] = None
        if "num_layers" in arguments and layers is not None:
            read.layer_numbers(layers, read.layer_count(f"{cls.part_of(overrides)}/layer_{{}}"))
            arguments["num_layers"] = len(layers)
        if unknown := set(overrides) - set(cls.arguments()) - _ANY_LAYER:
            raise TypeError(
                f"{cls.__name__}.from_config: unknown arguments "
                f"{', '.join(sorted(unknown))}; expected "
                f"{', '.join(cls.arguments())}"
            )
        layer = cls(**{**arguments, **overrides})
        layer._origin = _Origin(read, cls.part_of(overrides), layers)
        return layer

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        layers: Iterable[int] | None = None,
        prefix: str | None = None,
        mapping: Mapping[str, Any] | None = None,
        ignore: str | Sequence[str] = (),
        allow_missing: str | Sequence[str] = (),
        strict: bool = True,
        load_weights: bool = True,
        **overrides: Any,
    ) -> Any:
        """Creates a built layer with the weights of a published model.

        The variables are created once, without random numbers. They are filled tensor by tensor. In
        the scope of a strategy with several workers, only the chief reads the files.

        Args:
            source: Folder with `config.json` and weights, or the file of weights beside a
                `config.json`.
            layers: As in `from_config`. The file's other layers are not reported as unexpected.
            prefix: As in `tfwd.pretrained.plan`.
            mapping: As in `tfwd.pretrained.plan`. It has precedence over the family's own rules.
            ignore: As in `tfwd.pretrained.plan`.
            allow_missing: As in `tfwd.pretrained.plan`.
            strict: As in `tfwd.pretrained.plan`.
            load_weights: bool. False gives fresh weights. Default True.
            **overrides: As in `from_config`. If weights are loaded, some arguments must have the
                config's value: the arguments that shapes do not determine, such as `num_heads`.

        Raises:
            ValueError: As in `from_config`, or if an argument contradicts the config.
            tfwd.pretrained.PlanError: If a weight is missing, unexpected or of another shape.
            tfwd.pretrained.SourceError: If the file does not exist, or is incomplete.
        """
        if load_weights and "num_layers" in overrides:
            raise ValueError(
                f"num_layers={overrides['num_layers']!r}: select the published layers with the "
                "argument layers, for example layers=range(4)"
            )
        read, layers = read_config(source, overrides), as_layer_numbers(layers)
        layer = cls.from_published_config(source, layers, **overrides)
        if not load_weights:
            _keras.layer_building.build(layer, layer.any_input_shape())
            return layer
        if differences := layer._differences(read):
            raise ValueError(differences[0])
        if overrides.get("add_pooler"):
            patterns = [allow_missing] if isinstance(allow_missing, str) else allow_missing
            _check_pooler(read, [*patterns, *(mapping or ())])
        plan = plan_weights(
            layer,
            source,
            mapping=mapping,
            prefix=prefix,
            ignore=ignore,
            allow_missing=allow_missing,
            strict=strict,
        ).apply()
        initialize_variables(layer, [*plan.missing])
        return layer

    @classmethod
    def part_of(cls, overrides: Mapping[str, Any]) -> str:
        """Returns this layer's part of the whole model, such as "decoder", for these arguments."""
        return cls.part

    def family_rules(self, at: str = "") -> FamilyRules | None:
        """Returns the rules for files of the published model whose config made this layer.

        Args:
            at: Path of this layer in a model, with a `/` at its end. Default "".

        Returns:
            The rules for `tfwd.pretrained.plan`. None if the layer was made from its arguments.
        """
        if self._origin is None:
            return None
        problems = tuple(self._differences(self._origin.read))
        return dataclasses.replace(self._origin.rules(at), problems=problems)

    def argument_problems(self, path: str, config: Mapping[str, Any] | None) -> list[str]:
        """Lists the arguments that differ from the config of weights, and that shapes do not show.

        Args:
            path: Path of the config, for messages.
            config: dict of the published config beside the weights. None for the config that made
                this layer. A config of a family that this layer is not for counts as None.

        Returns:
            One sentence per argument. Empty if there is no config to compare with.
        """
        read = None if self._origin is None else self._origin.read
        if config is not None and config.get("model_type") in self.families:
            try:
                read = check_config(path, config)
            except ValueError as error:
                return [str(error)]
        return [] if read is None else self._differences(read)

    def _differences(self, read: Configuration) -> list[str]:
        """Lists the arguments that differ from a config, and that shapes do not show."""
        origin = self._origin
        is_own = origin is not None and read.values == origin.read.values
        has_all_layers = origin is not None and origin.layers is None
        return read.differences(self, is_own, has_all_layers)

    def any_input_shape(self) -> tuple:
        """Returns an input shape with which the layer can be built."""
        return (None, None, self.hidden_size)


def plan_weights(layer: Any, source: str | os.PathLike[str], **options: Any) -> pretrained.Plan:
    """Plans the weights of a layer that was made from the config of a published model.

    A layer that is not built is built here. Its variables are created without random numbers.

    Args:
        layer: Layer from `from_config` of a `Published`.
        source: Folder or file of the model's weights.
        **options: As in `tfwd.pretrained.plan`, without `family_rules`.
    """
    if not layer.built:
        build_with_zeros(layer)
    return pretrained.plan(layer, source, family_rules=layer._origin.rules(), **options)


def _check_pooler(read: Configuration, patterns: Sequence[str]) -> None:
    """Raises a ValueError if a pooler is requested but no rule has a key for its weights.

    Args:
        read: Config of the published model.
        patterns: Patterns of the mapping, and of parts that may be missing.
    """
    paths = ("pooler/dense", "pooler/dense/kernel")
    known = any(path.startswith("pooler/") for path in read.rules())
    if not known and not any(matches(compiled(p, repr(p)), at) for p in patterns for at in paths):
        raise ValueError(
            f"{read.name}: add_pooler=True, but a {read.model_type} has no pooler: remove "
            "add_pooler, or use a pooler with fresh weights by allow_missing='pooler/.*'"
        )


_ANY_LAYER = {"name", "dtype", "trainable"}


def as_layer_numbers(layers: Any) -> list[int] | None:
    """Returns the numbers of layers as a list.

    Raises:
        ValueError: If they are not integers.
    """
    if layers is None:
        return None
    try:
        if isinstance(layers, str):
            raise TypeError
        found = list(layers)
        if any(isinstance(number, bool) for number in found):
            raise TypeError
        return [operator.index(number) for number in found]
    except TypeError:
        wrong = f"layers={layers!r}: expected layer numbers, such as range(8, 12) or [0, 2]"
        raise ValueError(wrong) from None


def loading_rules(
    read: Configuration, part: str = "", layers: Iterable[int] | None = None, at: str = ""
) -> FamilyRules:
    """Returns the rules for the files of a config's family.

    Args:
        read: Config.
        part: Selected part of `T.Bert`, such as "stack". Default "", for all.
        layers: Numbers of the selected layers. Default None, for all.
        at: Path of that part in the model that is filled. Default "".
    """
    front, keys, left_out = f"{part}/" if part else "", {}, [*read.family.beside]
    optional, counts, notes = [], {}, []
    for path, rule in read.rules().items():
        key = rule if isinstance(rule, pretrained.Key) else pretrained.Key(rule)
        count = read.layer_count(path) if "{}" in path else 1
        wanted: list[int] = []
        if path.startswith(front):
            wanted = read.layer_numbers(layers, count) if "{}" in path else [0]
            if "{}" in path:
                counts[key.name] = count
                if wanted != list(range(len(wanted))):
                    here = at + path.removeprefix(front).partition("{}")[0]
                    notes.append(_numbered(here, wanted))
        counted = Counter(wanted)
        for i, number in enumerate(wanted):
            pattern = re.escape(at + path.removeprefix(front).format(i))
            keys[pattern] = dataclasses.replace(
                key, name=key.name.format(number), repeated=counted[number] > 1
            )
            if path in read.family.optional:
                optional.append(pattern)
        others = (key.name.format(number) for number in range(count) if number not in counted)
        left_out += [rf"{re.escape(other)}\..*" for other in others]
        if not wanted:
            left_out += [re.escape(copy) for copy in key.copies]
    return FamilyRules(keys, tuple(left_out), tuple(optional), counts, tuple(dict.fromkeys(notes)))


def _numbered(here: str, wanted: list[int]) -> str:
    """Describes which layer of the file became which layer of the model."""
    pairs = [f"{here}{i} is the file's layer {number}" for i, number in enumerate(wanted)]
    return f"layers are renumbered: {', '.join(pairs[:2])}{', ...' if len(pairs) > 2 else ''}"


def mapping(
    source: Any, part: str = "stack", at: str = "", layers: Iterable[int] | None = None
) -> dict[str, pretrained.Key]:
    """Returns a mapping from the layers of a part to the keys of a published model's file.

    Use it with `tfwd.pretrained.plan` and `load` where `from_pretrained` is not enough. Examples
    are a stack inside another layer, or two stacks with the same weights.

    Args:
        source: Folder with a `config.json`, that file, or a dict that was read from one.
        part: Part of the published model: "embeddings", "stack", "pooler", or "" for all. Of T5:
            "encoder" or "decoder". Default "stack".
        at: Path of that part in the model that is filled, such as "first". Default "".
        layers: Numbers of the selected layers. Default None, for all.

    Returns:
        dict from a pattern to a `tfwd.pretrained.Key`.

    Raises:
        ValueError: If the config does not exist, or if a number is out of range.
    """
    rules = loading_rules(read_config(source), part, layers, f"{at}/" if at else "")
    return {pattern: dataclasses.replace(key, repeated=True) for pattern, key in rules.keys.items()}


def build_with_zeros(layer: Published) -> None:
    """Builds a layer whose variables get values later, without random numbers."""
    with _zero_initialized(layer):
        _keras.layer_building.build(layer, layer.any_input_shape())


@contextlib.contextmanager
def _zero_initialized(layer: keras.layers.Layer) -> Iterator[None]:
    """Initializes variables that are created in the body with zeros.

    Variables of one shape share their zeros. This avoids filling memory that a later assignment
    replaces.
    """
    zeros = functools.cache(lambda shape, dtype: tf.zeros(shape, dtype))
    replaced: list[tuple[Any, str, Any]] = []
    for inner in _keras.layers.all_layers(layer):
        for name, value in list(vars(inner).items()):
            if isinstance(value, keras.initializers.Initializer):
                replaced.append((inner, name, value))
                setattr(inner, name, _CachedInitializer(zeros))
    try:
        yield
    finally:
        for inner, name, value in replaced:
            setattr(inner, name, value)


class _CachedInitializer(keras.initializers.Initializer):
    """An initializer that returns the same tensor for the same shape."""

    def __init__(self, made: Callable[[tuple, tf.DType], tf.Tensor]) -> None:
        self._made = made

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        with tf.init_scope():
            return self._made(tuple(shape), tf.as_dtype(dtype or keras.config.floatx()))


def initialize_variables(layer: keras.layers.Layer, paths: Sequence[str]) -> None:
    """Initializes the variables of some paths with their initializers.

    All workers get the values of the chief.
    """
    with lockstep(layer.weights) as workers:
        for target in targets_of(layer):
            if target.path in paths:
                start = getattr(target.owner, f"{target.name}_initializer")
                values = start(target.shape, dtype=target.dtype)
                if not workers.is_alone:
                    drawn = np.asarray(values)
                    content = workers.bytes_from_chief(drawn.tobytes)
                    values = np.frombuffer(content, drawn.dtype).reshape(drawn.shape)
                target.variable.assign(values)
