"""`Published`: layers made from a published model's config, and filled from its file."""

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
import tensorflow as tf

from tfwd import _keras, pretrained
from tfwd.layers.transformer.composite import Composite
from tfwd.layers.transformer.formats.configuration import Configuration, is_published, read_config
from tfwd.layers.transformer.formats.families import FAMILIES
from tfwd.paths import compiled, matches
from tfwd.pretrained.targets import targets_of


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The published config that a layer was made from, its part there, and which layers."""

    read: Configuration
    part: str
    layers: list[int] | None


class Published(Composite):
    """Adds `from_config` and `from_pretrained` to a layer that is a part of a published model.

    Attributes:
        part: where it stands in `T.Bert`: "stack"; "" for all of it.
        families: of which families.
    """

    part = ""
    families: tuple[str, ...] = tuple(FAMILIES)
    hidden_size: int
    _origin: _Origin | None = None

    @classmethod
    def from_config(cls, config: Any, layers: Iterable[int] | None = None, **overrides: Any) -> Any:
        """A layer as the config of a published model says; or as that of a Keras layer.

        Args:
            config: a folder with a `config.json`, that file, or a dict that was read from one. A
                dict without `model_type` is a Keras layer's own config.
            layers: the numbers of the model's layers that are wanted, from 0; any, in any order,
                also several times. By default all. Here they are numbered anew: with `range(8, 12)`
                `layer_0` is the model's layer 8.
            **overrides: arguments of the layer that are not to be the config's, as `dropout`; and
                what any layer takes, as `name`.

        Raises:
            ValueError: there is no such file, its `model_type` is not here, or a number is out of
                range.
        """
        if not is_published(config):
            return cls.with_flags(config, lambda own: cls(**{**own, **overrides}))
        read = read_config(config, overrides)
        if read.model_type not in cls.families:
            other = "T5 and T5Stack" if read.model_type == "t5" else "Bert and its parts"
            raise ValueError(
                f"{read.name}: model_type={read.model_type!r} is for {other}; {cls.__name__} is "
                f"for {', '.join(cls.families)}"
            )
        layers = listed(layers)
        arguments = {k: v for k, v in read.arguments().items() if k in cls.arguments()}
        if cls.part_of(overrides) == "decoder":
            arguments["num_layers"] = read.count("decoder/")
        if arguments.get("num_shared") == arguments.get("num_layers", 0):
            arguments["num_shared"] = None
        if "num_layers" in arguments and layers is not None:
            read.numbers(layers, read.count(f"{cls.part_of(overrides)}/layer_{{}}"))
            arguments["num_layers"] = len(layers)
        if unknown := set(overrides) - set(cls.arguments()) - _ANY_LAYER:
            raise TypeError(
                f"{cls.__name__}.from_config: {', '.join(sorted(unknown))}: there are "
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
        """A built layer with the weights of a published model.

        Its variables are made once, without random numbers, and filled from the file tensor by
        tensor.

        Args:
            source: a folder with `config.json` and weights, or the file of weights beside one.
            layers: as in `from_config`. The others are not unexpected.
            prefix, ignore, allow_missing, strict: as in `tfwd.pretrained.plan`.
            mapping: as there, for what the family's own does not say; it comes first.
            load_weights: False for fresh weights.
            **overrides: as in `from_config`. With weights, an argument that no shape tells, such as
                `num_heads`, must be the config's.

        Raises:
            ValueError: as in `from_config`; or an argument makes another model than the config's.
            tfwd.pretrained.PlanError: something is missing, unexpected or of another shape.
            tfwd.pretrained.SourceError: the file is not there, or not whole.
        """
        if load_weights and "num_layers" in overrides:
            raise ValueError(
                f"num_layers={overrides['num_layers']!r}: say which of the published layers are "
                "wanted, as layers=range(4)"
            )
        read, layers = read_config(source, overrides), listed(layers)
        layer = cls.from_config(source, layers, **overrides)
        shape = layer.any_input_shape()
        if not load_weights:
            _keras.layers.build(layer, shape)
            return layer
        if differences := read.differences(layer):
            raise ValueError(differences[0])
        if overrides.get("add_pooler"):
            patterns = [allow_missing] if isinstance(allow_missing, str) else allow_missing
            _check_pooler(read, [*patterns, *(mapping or ())])
        with unfilled(layer):
            _keras.layers.build(layer, shape)
        plan = pretrained.plan(
            layer,
            source,
            mapping=mapping,
            prefix=prefix,
            ignore=ignore,
            allow_missing=allow_missing,
            strict=strict,
            known=known_of(read, cls.part_of(overrides), layers),
        )
        plan.apply()
        fill(layer, [*plan.missing])
        return layer

    @classmethod
    def part_of(cls, overrides: Mapping[str, Any]) -> str:
        """Where a layer with some arguments stands in its family's whole model."""
        return cls.part

    def known_keys(self, at: str = "") -> pretrained.Known | None:
        """Returns what is known of the files of the model that it was made for by `from_config`.

        Args:
            at: the path of this layer in a model, with a `/` at its end.

        Returns:
            The rules for `tfwd.pretrained.plan`; None if the layer was made by its arguments.
        """
        if self._origin is None:
            return None
        read, part, layers = self._origin.read, self._origin.part, self._origin.layers
        known = known_of(read, part, layers, at)
        return dataclasses.replace(known, problems=tuple(read.differences(self)))

    def any_input_shape(self) -> tuple:
        """A shape of inputs by which it can be built."""
        return (None, None, self.hidden_size)


def _check_pooler(read: Configuration, patterns: Sequence[str]) -> None:
    """Raises a ValueError if a pooler is asked for, and nothing says where its weights are.

    Args:
        read: the config of the published model.
        patterns: those of a mapping, and of what may be missing.
    """
    paths = ("pooler/dense", "pooler/dense/kernel")
    known = any(path.startswith("pooler/") for path in read.rules())
    if not known and not any(matches(compiled(p, repr(p)), at) for p in patterns for at in paths):
        raise ValueError(
            f"{read.name}: add_pooler=True, and a {read.model_type} has no pooler: leave "
            "add_pooler out, or begin with a fresh pooler by allow_missing='pooler/.*'"
        )


_ANY_LAYER = {"name", "dtype", "trainable"}


def listed(layers: Any) -> list[int] | None:
    """The numbers of layers as a list.

    Raises:
        ValueError: they are no numbers.
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
        wrong = f"layers={layers!r}: give their numbers, as range(8, 12) or [0, 2]"
        raise ValueError(wrong) from None


def known_of(
    read: Configuration, part: str = "", layers: Iterable[int] | None = None, at: str = ""
) -> pretrained.Known:
    """What is known of the files of a config's family: which keys are whose, and the others.

    Args:
        read: the config.
        part: the part of `T.Bert` that is wanted, as "stack"; "" for all.
        layers: the numbers of the layers that are wanted; by default all.
        at: the path of that part in the model that is filled.
    """
    front, mapping, left_out = f"{part}/" if part else "", {}, [*read.family.beside]
    optional, counts, notes = [], {}, []
    for path, rule in read.rules().items():
        key = rule if isinstance(rule, pretrained.Key) else pretrained.Key(rule)
        count = read.count(path) if "{}" in path else 1
        wanted = []
        if path.startswith(front):
            wanted = read.numbers(layers, count) if "{}" in path else [0]
            if "{}" in path:
                counts[key.name] = count
                if wanted != list(range(len(wanted))):
                    here = at + path.removeprefix(front).partition("{}")[0]
                    notes.append(_numbered(here, wanted))
        counted = Counter(wanted)
        for i, number in enumerate(wanted):
            pattern = re.escape(at + path.removeprefix(front).format(i))
            mapping[pattern] = dataclasses.replace(
                key, name=key.name.format(number), repeated=counted[number] > 1
            )
            if path in read.family.optional:
                optional.append(pattern)
        others = (key.name.format(number) for number in range(count) if number not in counted)
        left_out += [rf"{re.escape(other)}\..*" for other in others]
        if not wanted:
            left_out += [re.escape(copy) for copy in key.copies]
    return pretrained.Known(
        mapping, tuple(left_out), tuple(optional), counts, tuple(dict.fromkeys(notes))
    )


def _numbered(here: str, wanted: list[int]) -> str:
    """Which layer of a file is which one here."""
    pairs = [f"{here}{i} is the file's layer {number}" for i, number in enumerate(wanted)]
    return f"layers are numbered anew: {', '.join(pairs[:2])}{', ...' if len(pairs) > 2 else ''}"


def mapping(
    source: Any, part: str = "stack", at: str = "", layers: Iterable[int] | None = None
) -> dict[str, pretrained.Key]:
    """Which layers of a model have their weights under which keys of a published model's file.

    For `tfwd.pretrained.plan` and `load`, where `from_pretrained` is not enough: for a stack inside
    of another layer, or two that are filled alike.

    Args:
        source: a folder with a `config.json`, that file, or a dict that was read from one.
        part: the part of the published model: "embeddings", "stack", "pooler"; of T5 "encoder" or
            "decoder"; "" for all.
        at: the path of that part in the model that is to be filled, as "first".
        layers: the numbers of the published layers that are wanted; by default all.

    Raises:
        ValueError: there is no such config, or a number is out of range.
    """
    known = known_of(read_config(source), part, layers, f"{at}/" if at else "")
    return {
        pattern: dataclasses.replace(key, repeated=True) for pattern, key in known.mapping.items()
    }


@contextlib.contextmanager
def unfilled(layer: keras.layers.Layer) -> Iterator[None]:
    """Variables that are made in it begin as zeros: random numbers would be thrown away.

    Those of a shape share their zeros, so that no memory is filled that an assignment gives back.
    """
    zeros = functools.cache(lambda shape, dtype: tf.zeros(shape, dtype))
    kept: list[tuple[Any, str, Any]] = []
    for inner in _keras.layers.all_layers(layer):
        for name, value in list(vars(inner).items()):
            if isinstance(value, keras.initializers.Initializer):
                kept.append((inner, name, value))
                setattr(inner, name, _Shared(zeros))
    try:
        yield
    finally:
        for inner, name, value in kept:
            setattr(inner, name, value)


class _Shared(keras.initializers.Initializer):
    """Gives the same tensor for the same shape."""

    def __init__(self, made: Callable[[tuple, tf.DType], tf.Tensor]) -> None:
        self._made = made

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        with tf.init_scope():
            return self._made(tuple(shape), tf.as_dtype(dtype or keras.config.floatx()))


def fill(layer: keras.layers.Layer, paths: Sequence[str]) -> None:
    """Gives the variables of some paths what their initializers give."""
    for target in targets_of(layer):
        if target.path in paths:
            start = getattr(target.owner, f"{target.name}_initializer")
            target.variable.assign(start(target.shape, dtype=target.dtype))
