"""Errors for tensors that are no weights: PyTorch computes the weight from them in each call."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from tfwd import _keras
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.sources.base import Entry

_PARAMETRIZED = re.compile(r"(.*[./]|)parametrizations[./]([^./]+)[./]original(\d*)")
_OLD = re.compile(r"(.*[./]|)([^./]+)_(orig|v)")

_DROPPED = re.compile(r"(.*[./]|)module[./]([^./]+)")  # a layer inside one that drops its weights

_SAVE = "save the weight of PyTorch after torch.nn.utils."
_NEW = "parametrize.remove_parametrizations"
_WEIGHT_NORM = "load both into a weight with WeightNorm(gain=True), or "


def computed_weight_errors(steps: Sequence[Step], entries: Mapping[str, Entry]) -> list[str]:
    """Returns an error for each tensor from which PyTorch computes the weight.

    The names follow `torch.nn.utils.parametrize`, and the older `spectral_norm`, `weight_norm` and
    `prune`. A tensor is no error if all tensors beside it are loaded too, because the model then
    computes the weight. An original of spectral normalization is always an error: PyTorch divides
    it by the spectral norm in evaluation, and Keras only in training. The copy of a weight that
    AWD-LSTM's weight dropout keeps beside the weight is an error too.

    Args:
        steps: The variables that are loaded.
        entries: The tensors of the file.
    """
    loaded = {step.key for step in steps}
    return [error for step in steps if (error := _error(step, entries, loaded))]


def _error(step: Step, entries: Mapping[str, Entry], loaded: Collection[str]) -> str | None:
    """Returns the error for the tensor of a variable, or None."""
    start = f"'{step.target.path}': PyTorch computes the weight from '{step.key}'"
    if found := _PARAMETRIZED.fullmatch(step.key):
        module, name, number = found.groups()
        folder = step.key[: found.end(2) + 1]
        others = [key for key in entries if key.startswith(folder) and key != step.key]
        spectral = [key for key in others if re.search(r"[./]_[uv]$", key)]
        left_out = [key for key in others if key not in loaded]
        if not (spectral or left_out) and (
            others or not _keras.is_of_keras(type(step.target.owner))
        ):
            return None
        beside = spectral or left_out
        start += f" and '{beside[0]}'" if beside else ", by a function that the file does not show"
        norm = _WEIGHT_NORM if number and not spectral else ""
        return f"{start}: {norm}{_SAVE}{_NEW}({module[:-1] or 'module'}, '{name}')"
    if found := _DROPPED.fullmatch(step.key):
        raw = f"{found[1]}{found[2]}_raw"
        if raw in entries and raw not in loaded:
            return (
                f"'{step.target.path}': '{step.key}' is the dropped copy of '{raw}' in PyTorch's "
                f"last step: load '{raw}', and ignore '{step.key}'"
            )
    if found := _OLD.fullmatch(step.key):
        module, name, last = found.groups()
        functions = (
            {"u": "remove_spectral_norm", "mask": "prune.remove"}
            if last == "orig"
            else {"g": "remove_weight_norm"}
        )
        for other, function in functions.items():
            beside_it = f"{module}{name}_{other}"
            if beside_it in entries and (other == "u" or beside_it not in loaded):
                norm = _WEIGHT_NORM if other == "g" else ""
                given = f"{module[:-1] or 'module'}, '{name}'"
                return f"{start} and '{beside_it}': {norm}{_SAVE}{function}({given})"
    return None
