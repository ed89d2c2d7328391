"""Draws of the wrappers, as factors and offsets: each effective weight is `a w + b`.

Dropout, noise and their chains act on each entry of a weight separately, and the effective weight
is linear in the raw weight. So two calls of `effective_weights`, with raw weights of 0 and of 1,
give the effective weight of any raw weight, and its derivative `a`. The laws of dropout and of
noise are then checked on `a` and `b`: every mask is verified.
"""

import itertools
import re

import numpy as np

import tfwd
from fuzz.given_weights import IS_KERAS_2, flatten


def wrappers(model):
    """Returns by wrapped layer's name the wrappers around it that draw, from the inside."""
    found = {}
    for layer in flatten(model):
        if hasattr(layer, "effective_weights") and hasattr(layer, "draws") and _draws(layer):
            found.setdefault(_wrapped(layer).name, []).append(layer)
    for one in map(Added, tfwd.added_parametrizations(model)):
        if _draws(one):
            found.setdefault(one.layer.name, []).append(one)
    return {name: sorted(those, key=_depth) for name, those in found.items()}


class Added:
    """Parametrizations that were added to a layer in place, like a wrapper around the layer."""

    def __init__(self, one):
        self.layer = one.target
        self.effective_weights = one.effective_weights
        self.calls = one.calls
        self.parametrizations = {target.name: p for target, p in one.targeted}
        # On Keras 2 a variable's name does not say in which layer it is.
        self.positions = {target.name: target.position for target, _ in one.targeted}

    @property
    def weights(self):
        return self.layer.weights


def _draws(wrapper):
    """Checks whether a wrapper counts its calls: one with a rate of 0 does not."""
    if hasattr(wrapper, "parametrization"):
        return not wrapper.parametrization.is_identity
    return not all(p.is_identity for p in wrapper.parametrizations.values())


def _wrapped(layer):
    while hasattr(layer, "effective_weights") and hasattr(layer, "layer"):
        layer = layer.layer
    return layer


def _depth(layer):
    inner = getattr(layer, "layer", None)
    return 0 if not hasattr(inner, "effective_weights") else 1 + _depth(inner)


def factors(model, calls):
    """Returns the factors and offsets of the weights in their first training calls.

    Args:
        model: the wrapped model. Its weights are restored afterwards.
        calls: number of calls.

    Returns:
        For the name of each wrapped layer a list over the calls of a dict from a weight's index in
        the layer's `weights` to `(a, b)`.
    """
    before = [np.asarray(v) for v in model.weights]
    found = wrappers(model)
    looks = []
    for value in (0.0, 1.0):
        for variable in model.weights:
            variable.assign(np.full(variable.shape, value))
        looks.append({name: _look(those, calls) for name, those in found.items()})
    for variable, value in zip(model.weights, before, strict=True):
        variable.assign(value)
    return {
        name: [
            {i: (ones[i] - zeros[i], zeros[i]) for i in zeros}
            for zeros, ones in zip(looks[0][name], looks[1][name], strict=True)
        ]
        for name in found
    }


def _look(those, calls):
    weights = _wrapped(those[0]).weights
    result = []
    for call in range(calls):
        values = {}
        for wrapper in those:  # the outer wrappers include the effect of the inner ones
            for name, tensor in wrapper.effective_weights(call).items():
                values[_index(wrapper, name)] = np.asarray(tensor, np.float64)
        result.append(values)
    assert all(i < len(weights) for values in result for i in values)
    return result


def path(variable):
    """Returns a variable's path without Keras 2's additions."""
    return variable.name.split(":")[0] if IS_KERAS_2 else variable.path


def _index(wrapper, name):
    if isinstance(wrapper, Added):
        return wrapper.positions[name]
    weights = wrapper.weights
    found = [i for i, v in enumerate(weights) if f"/{path(v)}".endswith(f"/{name}")]
    assert len(found) == 1, f"{name!r} names {len(found)} of {[path(v) for v in weights]}"
    return found[0]


def unlawful(model, drawn):
    """Returns the violations in the draws: a list of sentences."""
    wrong = []
    found = wrappers(model)
    times: dict[int, int] = {}  # number of layers whose wrappers change a weight
    for name, values in drawn.items():
        for index in values[0] if values else ():
            key = id(_wrapped(found[name][0]).weights[index])
            times[key] = times.get(key, 0) + 1
    for name, those in found.items():
        for index in drawn[name][0] if drawn[name] else ():
            if times[id(_wrapped(those[0]).weights[index])] == 1:
                elements = [e for w in those for e in _elements(w, index)]
                looks = [values[index] for values in drawn[name]]
                wrong += [f"weight {index} of '{name}': {s}" for s in _wrong(elements, looks)]
    return wrong


def _wrong(elements, looks):
    """Returns the violations in the draws of one weight, one for each call."""
    keeps = [round((1.0 - e.rate) * 65536) / 65536 for e in elements if hasattr(e, "rate")]
    spread = sum(e.stddev for e in elements if hasattr(e, "stddev"))
    scales = [1.0 / np.prod(keeps), *([0.0] if min(keeps, default=1) < 1 else [])]
    for call, (a, b) in enumerate(looks):
        distance = np.abs(a[..., None] - np.array(scales)).min(-1).max(initial=0)
        # Of the raw weight 1 plus noise, in the weight's own precision.
        if distance > (1e-5 if spread else 1e-6) * scales[0]:  # each factor rounds once
            yield f"call {call}: a kept entry is not w / keep (off by {distance:.1e})"
        if spread == 0 and np.any(b):
            yield f"call {call}: an offset of {np.abs(b).max():.2g} where nothing adds noise"
        if np.abs(b).max(initial=0) > 7 * spread * scales[0]:
            yield f"call {call}: an offset of {np.abs(b).max():.2g} for noise of {spread}"
    for (one, first), (other, second) in itertools.combinations(enumerate(looks), 2):
        alike = np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])
        if alike and first[0].size >= 64 and max(scales) > 1.3:
            yield f"calls {one} and {other} draw alike"


def _elements(wrapper, index):
    """Returns the parametrizations that one wrapper puts on a weight."""
    names = {_index(wrapper, name): name for name in wrapper.effective_weights(0)}
    if index not in names:
        return []
    if isinstance(wrapper, Added):
        return wrapper.parametrizations[names[index]].elements()
    if hasattr(wrapper, "parametrization"):
        return wrapper.parametrization.elements()
    ends = path(wrapper.weights[index]).split("/")
    ends = ["/".join(ends[k:]) for k in range(len(ends))]
    patterns = wrapper.parametrizations.items()
    return next(p for key, p in patterns if any(re.fullmatch(key, e) for e in ends)).elements()
