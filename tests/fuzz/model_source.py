"""A case's model as Python text: two functions, `wrapped()` and `plain()`.

The fuzzer runs this text itself, so the script that it prints for a failure makes the same model.
"""

from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

import tfwd
from fuzz import model_inputs, user_layers
from fuzz.cases import Case, Part, Wrap
from fuzz.layer_kinds import KINDS, NESTS, REPEATING
from tfwd import layers
from tfwd import parametrizations as P

INPUTS = {"i": "ids", "s": "x", "v": "vector", "m": "shown"}
SHAPES = {"i": "(3,), dtype='int32'", "s": "(3, 4)", "v": "(4,)", "m": "(3,), dtype='bool'"}
FLOAT = "keras.backend.floatx()"
EXAMPLES = {
    "i": "(BATCH, 3), 'int32'",
    "s": f"(BATCH, 3, 4), {FLOAT}",
    "v": f"(BATCH, 4), {FLOAT}",
    "m": "(BATCH, 3), 'bool'",
}
# A pattern for models of any layers.
SOME = ".*(kernel|embeddings|alpha|scale)"
ANY = ".*"


@dataclass
class Text:
    """Lines that make the layers, lines that call them, and the parts that they were made of."""

    case: Case
    wrapped: bool
    makes: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)  # the letters of the inputs
    ends: list[str] = field(default_factory=list)  # the values that no call takes
    seed: int = 0
    added: list[str] = field(default_factory=list)  # lines that add parametrizations in place
    frozen: list[str] = field(default_factory=list)
    chain: bool = True  # whether each call takes the result of the call before it, and nothing else
    layers: int = 0


def program(case: Case) -> str:
    """Returns the text of the two functions. Raises ValueError for a case that is no model."""
    texts = [_text(case, wrapped) for wrapped in (True, False)]
    inputs = [letter for letter in INPUTS if letter in texts[0].used]
    head = f"INPUTS = {''.join(inputs)!r}\n"
    return head + "".join(_function(text, inputs) for text in texts)


def functions(text: str) -> dict[str, Any]:
    """Returns the names that a program defines."""
    names = {
        "keras": keras,
        "tf": tf,
        "tfwd": tfwd,
        "layers": layers,
        "P": P,
        "BATCH": model_inputs.BATCH,
    }
    names |= {k: v for k, v in vars(user_layers).items() if callable(v)}
    exec(text, names)
    return names


def weighs(part: Part) -> bool:
    """Checks whether there are weights to parametrize."""
    return bool(KINDS[part.kind].patterns) and (
        part.kind not in NESTS or any(map(weighs, part.held))
    )


def _text(case: Case, wrapped: bool) -> Text:
    text = Text(case, wrapped)
    values: list[tuple[str, str]] = [(name, letter) for letter, name in INPUTS.items()]
    made: list[tuple[str, Part]] = []
    taken = set()
    last: list[str] = []
    bare = _is_wrapped(case) and any(step.again for step in case.steps)
    for number, step in enumerate(case.steps):
        if step.again and made:
            name, part = made[-1 - step.args[3] % len(made)]
            text.chain = False
        else:
            part = step.part
            if part.kind == "OwnCall" and case.top != "subclassed":
                # A functional model contains the other operations of such a method.
                raise ValueError("a layer's own __call__ would be made twice")
            name = _make(text, part, outer=_is_wrapped(case), bare=bare)
            made.append((name, part))
        forms = KINDS[part.kind].forms
        if not forms:
            raise ValueError("a cell, which other layers hold")
        form = forms[step.form % len(forms)]
        arguments = []
        for letter, pick in zip(form.takes, step.args, strict=False):
            candidates = [v for v, t in values if t == letter]
            value = candidates[-1 - pick % len(candidates)]
            arguments.append(value)
            if value in INPUTS.values():
                text.used.append(letter)
        text.chain &= arguments == last if last else True
        text.chain &= len(arguments) == 1 and form.call == "{0}" and len(form.gives) == 1
        taken.update(arguments)
        results = [f"{letter}{number}{'abc'[k]}" for k, letter in enumerate(form.gives)]
        own = "self." if case.top == "subclassed" else ""
        text.calls.append(f"{', '.join(results)} = {own}{name}({form.call.format(*arguments)})")
        values += zip(results, form.gives, strict=True)
        last = results
    text.ends = [v for v, t in values if v not in taken and v not in INPUTS.values()]
    if case.whole and not any(weighs(step.part) for step in case.steps):
        raise ValueError("no weights")
    return text


def _is_wrapped(case: Case) -> bool:
    """Checks whether one wrapper is around the whole model."""
    return case.whole is not None and (case.top == "subclassed" or case.in_place)


def _make(text: Text, part: Part, outer: bool, bare: bool) -> str:
    """Adds the lines that make a layer, and returns its name.

    Args:
        outer: True if a wrapper around an outer layer may draw for this layer too.
        bare: leave out the wrappers. A wrapper around an outer layer draws for this layer too and
            calls it twice, so its weights would have two values in one call of that wrapper.
    """
    name = f"l{text.layers}"
    text.layers += 1
    kind = KINDS[part.kind]
    outer = outer or bool(part.wraps) or text.case.whole is not None
    bare_inside = bare or (outer and part.kind in REPEATING)
    held = [_make(text, inner, outer, bare_inside) for inner in part.held]
    options = f", name='{name}'"
    places = {"n": name, "i": f"{name}i", "j": f"{name}j", "o": options}
    places |= dict(zip("ab", held, strict=False))
    for letter in "ij":
        if f"{{{letter}}}" in kind.make:
            text.makes.append(f"{places[letter]} = keras.Input((3, 4), batch_size=BATCH)")
    make = kind.make.format(**places).replace("(, ", "(")
    if text.wrapped and weighs(part) and not bare:
        for depth, wrap in enumerate(part.wraps):
            text.seed += 1
            if text.case.in_place:
                text.added.append(_added(text, wrap, part, name))
            else:
                make = _wrapped(text, make, wrap, part, f"{name}_{depth}")
    text.makes.append(f"{name} = {make}")
    if part.frozen and text.case.in_place:
        text.frozen.append(f"found['{name}'].trainable = False")
    elif part.frozen:
        text.makes.append(f"{name}.trainable = False")
    return name


def _patterns(part: Part) -> list[str | None]:
    """Returns the patterns that choose some weight of a layer, or of the layers in a nest."""
    patterns = list(KINDS[part.kind].patterns)
    if part.kind in NESTS:
        inside = [pattern for inner in part.held for pattern in _patterns(inner)]
        if None not in inside:
            patterns.remove(None)
        if not any("kernel" in (pattern or "") for pattern in inside):
            patterns.remove(".*kernel")
    return patterns


def _wrapped(text: Text, make: str, wrap: Wrap, part: Part, name: str) -> str:
    patterns = _patterns(part)
    pattern = patterns[wrap.pattern % len(patterns)]
    options = f"{_options(text, text.seed)}, name='{name}'"
    weights = f", weights={pattern!r}" if pattern else ""
    if wrap.kind == "drop":
        return f"layers.WeightDropout({make}, {_rate(wrap)}{weights}, {options})"
    if wrap.kind == "noise":
        late = ", start_call=1" if wrap.variant == 2 else ""
        return f"layers.VariationalNoise({make}, 0.25{weights}{late}, {options})"
    pattern = pattern or ANY
    return f"layers.Parametrized({make}, {{{pattern!r}: {_parametrization(wrap)}}}, {options})"


def _options(text: Text, seed: int) -> str:
    mode = text.case.mode
    options = f"seed={seed}, recompute={mode.recompute}"
    if mode.run == "replicas" and mode.share:
        options += ", share_across_replicas=True"
    return options


def _added(text: Text, wrap: Wrap, part: Part, name: str) -> str:
    """Returns the line that adds a wrapper's parametrization in place."""
    patterns = _patterns(part)
    pattern = patterns[wrap.pattern % len(patterns)] or ANY
    kinds = {"drop": f"P.Dropout({_rate(wrap)})", "noise": "P.GaussianNoise(0.25)"}
    what = f"{{{pattern!r}: {kinds.get(wrap.kind, _parametrization(wrap))}}}"
    return f"tfwd.parametrize(found['{name}'], {what}, {_options(text, text.seed)}, in_place=True)"


def _rate(wrap: Wrap) -> float:
    return (0.5, 0.25, 0.3, 0.0)[wrap.variant]


def _parametrization(wrap: Wrap) -> str:
    return (
        "P.Dropout(0.5)",
        "P.Chain([P.GaussianNoise(0.25), P.Dropout(0.5)])",
        "P.Chain([P.Dropout(0.25), P.Dropout(0.5)])",
        "P.GaussianNoise(0.25)",
    )[wrap.variant]


def _function(text: Text, inputs: list[str]) -> str:
    case = text.case
    names = [INPUTS[letter] for letter in inputs]
    ends = f"[{', '.join(text.ends)}]"
    given = [f"{INPUTS[t]} = keras.Input({SHAPES[t]}, batch_size=BATCH)" for t in inputs]
    lines = []
    if case.top == "subclassed":
        made = [line.split(" = ")[0] for line in text.makes]
        made = [m for m in made if "." not in m and m.strip("ij") == m]
        lines += ["class Top(keras.Model):", "    def __init__(self):"]
        lines += ["        super().__init__(name='top')"]
        if case.mode.fresh:
            # Keras would otherwise build all layers before the first call, by a call of its own.
            lines += ["        self.built = True"]
        lines += [f"        {line}" for line in text.makes]
        lines += [
            f"        self.{name} = {name}" for name in made if f"self.{name}(" in str(text.calls)
        ]
        lines += ["", "    def call(self, inputs, training=None):"]
        lines += [f"        [{', '.join(names)}] = inputs"]
        lines += [f"        {line}" for line in text.calls]
        lines += [f"        return {ends}", "", "model = Top()"]
    elif case.top == "sequential" and text.chain:
        order = [call.split(" = ")[1].split("(")[0] for call in text.calls]
        lines += [*given, *text.makes]
        lines += [f"model = keras.Sequential([{', '.join([*names, *order])}], name='top')"]
    else:
        lines += [*given, *text.makes, *text.calls]
        lines += [f"model = keras.Model([{', '.join(names)}], {ends}, name='top')"]
    if case.compiled:
        lines.append("model.compile(optimizer='sgd', loss='mse')")
    if case.in_place:
        is_late = case.top == "subclassed" or "Late" in str(text.makes)
        if is_late and (text.wrapped or text.frozen):
            # Only a call makes all weights. A layer that is frozen before has others in Keras.
            given = ", ".join(f"tf.ones({EXAMPLES[letter]})" for letter in inputs)
            one = case.top == "sequential" and text.chain
            lines.append(f"model({given if one else f'[{given}]'}, training=False)")
        lines.append("found = {layer.name: layer for layer in model._flatten_layers()}")
        lines += text.added
    if case.whole and text.wrapped:
        pattern = SOME if case.whole.pattern % 2 == 0 and _some(case) else ANY
        options = _options(text, 50) + ", in_place=True" * case.in_place
        what = f"{{{pattern!r}: {_parametrization(case.whole)}}}"
        lines.append(f"model = tfwd.parametrize(model, {what}, {options})")
    lines += [*text.frozen, "return model"]
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    return f"\n\ndef {'wrapped' if text.wrapped else 'plain'}():\n{body}\n"


def _some(case: Case) -> bool:
    """Checks whether `SOME` matches."""
    parts = [inner for step in case.steps for inner in (step.part, *step.part.held)]
    return any(weighs(part) and "Normalization" not in part.kind for part in parts)
