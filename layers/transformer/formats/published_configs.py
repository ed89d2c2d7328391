"""Reads the configs of published models, and rejects unsupported settings."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tfwd.layers.transformer.activations import BY_NAME
from tfwd.layers.transformer.formats.encoder_families import FAMILIES, Family
from tfwd.layers.transformer.formats.t5_family import T5
from tfwd.pretrained import Key
from tfwd.pretrained.chief_source import lockstep
from tfwd.pretrained.sources.opening import hub_hint

ALL = {**FAMILIES, "t5": T5}

# Settings that would change the computation, with their supported values.
_NOT_HERE = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "inner_group_num": (1, None),
    "use_task_id": (False, None),
}
_AT_LEAST_0 = {"type_vocabulary_size", "padding_id", "padding_position", "start_id"}
_MAY_BE_NONE = {
    *("num_decoder_layers", "padding_id", "padding_position", "embedding_size", "start_id"),
}
_REAL = {"dropout", "attention_dropout", "epsilon", "initializer"}
# Arguments that change a model's outputs, but not the shapes of its weights.
_NOT_IN_SHAPES = (
    *("num_heads", "head_size", "num_shared", "activation", "epsilon", "padding_position"),
    *("padding_id", "num_buckets", "max_distance", "gated", "scaled"),
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The config of a published model.

    Attributes:
        name: Source of the config, for messages.
        model_type: Name of its family.
        values: All entries of the config.
        overrides: Arguments of the layers that replace values of the config.
    """

    name: str
    model_type: str
    values: Mapping[str, Any]
    overrides: Mapping[str, Any]

    @property
    def family(self) -> Family:
        """Family of the model."""
        return ALL[self.model_type]

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of tfwd's layers."""
        return {**self.family.arguments(self.values), **self.overrides}

    def check(self) -> None:
        """Checks the types and the ranges of numbers, and that tfwd has the activation.

        Raises:
            ValueError: If a value is wrong.
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
            if not (0 if is_real else least) <= value < float("inf"):  # JSON can have NaN
                raise ValueError(
                    f"{self.name}: {key}={value!r}: expected at least {0 if is_real else least}"
                )
        activation = self.family.arguments(self.values)["activation"]
        if activation not in BY_NAME:
            of_t5 = "dense_act_fn" if "dense_act_fn" in self.values else "feed_forward_proj"
            key = self.family.settings.get("activation", (of_t5,))[0]
            raise ValueError(
                f"{self.name}: {key}={self.values.get(key)!r}: activation={activation!r} is not "
                f"supported; use one of {', '.join(BY_NAME)}"
            )

    def differences(
        self, layer: Any, is_own: bool = True, has_all_layers: bool = True
    ) -> list[str]:
        """Lists a layer's arguments that differ from the config and are not visible in shapes.

        Args:
            layer: Layer that is going to have this model's weights.
            is_own: bool. True if this config made the layer. Default True.
            has_all_layers: bool. False if the layer has selected layers of the model. Default True.

        Returns:
            One sentence per difference.
        """
        published: dict[str, Any] = {"num_shared": None, "padding_position": None}
        published |= self.family.arguments(self.values)
        if published["num_shared"] == published["num_layers"]:
            published["num_shared"] = None
        names = list(_NOT_IN_SHAPES)
        if has_all_layers and published["num_shared"] and hasattr(layer, "num_shared"):
            names.append("num_layers")  # layers that share their weights have no shapes
        found = []
        for name in names:
            if not hasattr(layer, name) or name not in published:
                continue
            ours, theirs = getattr(layer, name), published[name]
            if name == "activation":
                same = BY_NAME.get(ours) is BY_NAME.get(theirs)
            elif name == "num_shared":
                same = ours == theirs or (theirs is None and ours == layer.num_layers)
            elif name == "padding_id":  # None means that there is no automatic mask
                same = ours in (None, theirs)
            elif name == "scaled":  # some configs have a wrong "tied", and so a wrong "scaled"
                same = ours in (None, theirs) or layer.tied != published["tied"]
            else:
                same = ours == theirs
            if not same:
                advice = f"remove {name}" if is_own else "make the layer with its from_config"
                found.append(
                    f"{self.name}: {name} is {theirs!r} in the config, but {ours!r} in layer "
                    f"'{layer.name}'. The weights need the value of the config: {advice}"
                )
        return found

    def rules(self) -> Mapping[str, str | Key]:
        """Returns the rules from paths of layers to keys of the file."""
        return self.family.rules_for(self.arguments())

    def layer_count(self, path: str) -> int:
        """Returns the number of layers with their own weights in the stack of a path with `{}`."""
        given = self.arguments()
        if path.startswith("decoder/") and given.get("num_decoder_layers"):
            return given["num_decoder_layers"]
        return given.get("num_shared") or given["num_layers"]

    def layer_numbers(self, layers: Iterable[int] | None, count: int) -> list[int]:
        """Returns the selected layer numbers, of `count` layers in the file.

        Raises:
            ValueError: If a number is out of range, or if the layers share their weights.
        """
        if layers is None:
            return list(range(count))
        numbers, given = list(layers), self.arguments()
        if (given.get("num_shared") or given["num_layers"]) != given["num_layers"]:
            if given["num_shared"] == 1:
                return [0]
            raise ValueError(
                f"{self.name}: layers={numbers}: its {given['num_layers']} layers share the "
                f"weights of {given['num_shared']}, so only all layers can be loaded: remove layers"
            )
        wrong = [n for n in numbers if not isinstance(n, int) or not 0 <= n < count]
        if wrong or not numbers:
            raise ValueError(
                f"layers={numbers}: {self.name} has {count} layers, numbered 0 to {count - 1}"
            )
        return numbers


def is_published(source: Any) -> bool:
    """Returns True for a published config, or for its location.

    The config of a Keras layer is not a published config.
    """
    return not isinstance(source, Mapping) or "model_type" in source


def read_config(source: Any, overrides: Mapping[str, Any] | None = None) -> Configuration:
    """Reads the config of a published model.

    In the scope of a strategy with several workers, only the chief reads the file.

    Args:
        source: Folder with a `config.json`, that file, a file of weights beside it, or a dict.
        overrides: Arguments of the layers that replace values of the config. Default None.

    Raises:
        ValueError: If there is no config, if it cannot be read, or if tfwd does not support its
            family or a setting.
    """
    if isinstance(source, Mapping):
        name, values = "the config", source
    elif isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        with lockstep(()) as workers:
            name, values = workers.json_from_chief(lambda: _read(path))
    else:
        raise ValueError(f"{source!r} is not a path: pass the folder of a published model")
    return check_config(name, values, overrides)


def check_config(
    name: str, values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Configuration:
    """Returns the config of a published model from its entries.

    Args:
        name: Source of the entries, for messages.
        values: All entries of the config.
        overrides: Arguments of the layers that replace values of the config. Default None.

    Raises:
        ValueError: If tfwd does not support the family or a setting.
    """
    model_type = values.get("model_type")
    if model_type not in ALL:
        raise ValueError(
            f"{name}: model_type={model_type!r} is not supported; expected one of "
            f"{', '.join(sorted(ALL))}"
        )
    for key, fine in _NOT_HERE.items():
        if values.get(key) not in fine:
            raise ValueError(
                f"{name}: {key}={values[key]!r} is not supported; expected {fine[0]!r}"
            )
    aliases = ALL[model_type].aliases
    values = {**values, **{key: values[alias] for alias, key in aliases.items() if alias in values}}
    read = Configuration(name, model_type, values, overrides or {})
    read.check()
    return read


def _read(path: str) -> tuple[str, Mapping[str, Any]]:
    if not os.path.exists(path):
        raise ValueError(
            f"{path} does not exist: pass the folder of a published model, or a file in it"
            f"{hub_hint(path)}"
        )
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    file = path if path.endswith("config.json") else os.path.join(folder, "config.json")
    try:
        with open(file, encoding="utf-8") as opened:
            values = json.load(opened)
    except FileNotFoundError as error:
        raise ValueError(
            f"{file} does not exist: a published model has its config beside its weights"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a config: it contains a {type(values).__name__}")
    return file, values
