"""Configs of published models: read, and refused where they say what is not built here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tfwd.layers.transformer.activations import BY_NAME
from tfwd.layers.transformer.formats.families import FAMILIES, Family
from tfwd.layers.transformer.formats.t5_family import T5
from tfwd.pretrained import Key
from tfwd.pretrained.sources.opening import hub_hint

ALL = {**FAMILIES, "t5": T5}

# What would compute something else, with the values of it that are none.
_NOT_HERE = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "inner_group_num": (1, None),
}
_AT_LEAST_0 = {"type_vocabulary_size", "padding_id", "padding_position"}
_MAY_BE_NONE = {"num_decoder_layers", "padding_id", "padding_position", "embedding_size"}
_REAL = {"dropout", "attention_dropout", "epsilon", "initializer"}
# What the shapes of weights do not tell, and the numbers that a model computes depend on.
_NOT_IN_SHAPES = (
    *("num_heads", "head_size", "num_shared", "activation", "epsilon", "padding_position"),
    *("padding_id", "num_buckets", "max_distance", "gated", "scaled"),
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A published model's config.

    Attributes:
        name: where it is from, for messages.
        model_type: the name of its family.
        values: all that it says.
    """

    name: str
    model_type: str
    values: Mapping[str, Any]
    overrides: Mapping[str, Any]

    @property
    def family(self) -> Family:
        """Its family."""
        return ALL[self.model_type]

    def arguments(self) -> dict[str, Any]:
        """The arguments of the layers here."""
        return {**self.family.arguments(self.values), **self.overrides}

    def check(self) -> None:
        """Verifies that numbers are numbers, and that the activation is one that is here.

        Raises:
            ValueError: one is not.
        """
        for argument, (key, default) in self.family.settings.items():
            value = self.values.get(key, default)
            if argument == "activation" or (value is None and argument in _MAY_BE_NONE):
                continue
            is_real, least = argument in _REAL, int(argument not in _AT_LEAST_0)
            kinds = (int, float) if is_real else int
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "number" if is_real else "whole number"
                raise ValueError(f"{self.name}: {key}={value!r} is not a {what}: correct the file")
            if value < (0 if is_real else least):
                raise ValueError(
                    f"{self.name}: {key}={value!r}: give {0 if is_real else least} or more"
                )
        activation = self.family.arguments(self.values)["activation"]
        if activation not in BY_NAME:
            key = self.family.settings.get("activation", ("feed_forward_proj",))[0]
            raise ValueError(
                f"{self.name}: {key}={self.values.get(key)!r}: activation={activation!r} is not "
                f"built here; there are {', '.join(BY_NAME)}"
            )

    def differences(self, layer: Any) -> list[str]:
        """Says which arguments of a layer differ from the config, where no shape tells.

        Args:
            layer: a layer that is to have this model's weights.
        """
        published: dict[str, Any] = {"num_shared": None, "padding_position": None}
        published |= self.family.arguments(self.values)
        if published["num_shared"] == published["num_layers"]:
            published["num_shared"] = None
        found = []
        for name in _NOT_IN_SHAPES:
            if not hasattr(layer, name) or name not in published:
                continue
            ours, theirs = getattr(layer, name), published[name]
            if name == "activation":
                same = BY_NAME.get(ours) is BY_NAME.get(theirs)
            elif name == "num_shared":
                same = ours == theirs or (theirs is None and ours == layer.num_layers)
            elif name == "padding_id":  # None: no mask by itself
                same = ours in (None, theirs)
            elif name == "scaled":  # of some files "tied" is wrong, and "scaled" with it
                same = ours in (None, theirs) or layer.tied != published["tied"]
            else:
                same = ours == theirs
            if not same:
                found.append(
                    f"{self.name}: {name} is {theirs!r} there, and {ours!r} in layer "
                    f"'{layer.name}': with other values its weights compute something else; leave "
                    f"{name} out"
                )
        return found

    def rules(self) -> Mapping[str, str | Key]:
        """Which layer here has its weights under which key."""
        return self.family.rules_for(self.arguments())

    def count(self, path: str) -> int:
        """How many layers of its own the stack has in which a path with `{}` is."""
        given = self.arguments()
        if path.startswith("decoder/") and given.get("num_decoder_layers"):
            return given["num_decoder_layers"]
        return given.get("num_shared") or given["num_layers"]

    def numbers(self, layers: Iterable[int] | None, count: int) -> list[int]:
        """The numbers of the layers in the file that are wanted, of `count` that there are.

        Raises:
            ValueError: one is out of range, or they share their weights.
        """
        if layers is None:
            return list(range(count))
        numbers, given = list(layers), self.arguments()
        if (given.get("num_shared") or given["num_layers"]) != given["num_layers"]:
            if given["num_shared"] == 1:
                return [0]
            raise ValueError(
                f"{self.name}: layers={numbers}: its {given['num_layers']} layers share the "
                f"weights of {given['num_shared']}, which are taken all or not at all"
            )
        wrong = [n for n in numbers if not isinstance(n, int) or not 0 <= n < count]
        if wrong or not numbers:
            raise ValueError(
                f"layers={numbers}: {self.name} has {count} layers, of the numbers 0 to {count - 1}"
            )
        return numbers


def is_published(source: Any) -> bool:
    """Whether it is where a published config is, or one; and not the config of a Keras layer."""
    return not isinstance(source, Mapping) or "model_type" in source


def read_config(source: Any, overrides: Mapping[str, Any] | None = None) -> Configuration:
    """Reads the config of a published model.

    Args:
        source: a folder with a `config.json`, that file, a file of weights beside it, or a dict.
        overrides: arguments of the layers that are not to be the config's.

    Raises:
        ValueError: there is none, it cannot be read, or is of a family or kind that is not here.
    """
    if isinstance(source, Mapping):
        name, values = "the config", source
    elif isinstance(source, (str, os.PathLike)):
        name, values = _read(os.fspath(source))
    else:
        raise ValueError(f"{source!r} is no path: give the folder of a published model")
    model_type = values.get("model_type")
    if model_type not in ALL:
        raise ValueError(f"{name}: model_type={model_type!r}; there are {', '.join(sorted(ALL))}")
    for key, fine in _NOT_HERE.items():
        if values.get(key) not in fine:
            raise ValueError(f"{name}: {key}={values[key]!r} is not built here")
    read = Configuration(name, model_type, values, overrides or {})
    read.check()
    return read


def _read(path: str) -> tuple[str, Mapping[str, Any]]:
    if not os.path.exists(path):
        raise ValueError(
            f"{path} is not there: give the folder of a published model, or a file in it"
            f"{hub_hint(path)}"
        )
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    file = path if path.endswith("config.json") else os.path.join(folder, "config.json")
    try:
        with open(file, encoding="utf-8") as opened:
            values = json.load(opened)
    except FileNotFoundError as error:
        raise ValueError(
            f"{file} is not there: a published model has its config beside its weights"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is no config: it holds a {type(values).__name__}")
    return file, values
