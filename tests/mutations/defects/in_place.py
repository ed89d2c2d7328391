"""Defects of parametrizations in place."""

from __future__ import annotations

from mutations.defects.defect import Defect

IN_PLACE = "layers/_substitution/in_place/"
LINK = f"{IN_PLACE}layer_call.py"
PARAMETRIZATION = f"{IN_PLACE}parametrization_in_place.py"
INSTALLATION = f"{IN_PLACE}installation.py"
LAYER_KINDS = "tests/in_place/test_layer_kinds.py"
ANNOUNCED = "tests/in_place/test_announced_weights.py"

DEFECTS = [
    Defect(
        "a layer inside a parametrized wrapper draws again in each trace",
        LINK,
        "        return {one: one.begin(one.target, training) for one in dict.fromkeys(owners)}",
        "        return {}",
        ("tests/in_place/test_several_parametrizations.py",),
    ),
    Defect(
        "parametrizations in place act in the order of the layers",
        "tfwd/parametrizations/chain.py",
        "        ordered += pairs if is_wrapper else sorted(pairs, key=lambda pair: pair[0] or 0)",
        "        ordered += pairs",
        ("tests/in_place/test_several_parametrizations.py", "-k", "order_of_the_calls"),
    ),
    Defect(
        "a layer that reads a weight of a layer inside it loses a parametrization",
        INSTALLATION,
        "            for other, larger in links_that_share(link):",
        "            for other, larger in ():",
        ("tests/in_place/test_several_parametrizations.py", "-k", "order_of_the_calls"),
    ),
    Defect(
        "a weight that an outer layer has computed is computed again inside",
        LINK,
        "        if self.substituted <= present.covered:\n",
        "        if False:\n",
        (LAYER_KINDS, "-k", "cells"),
    ),
    Defect(
        "reads before the call of a layer get effective weights",
        LINK,
        "now._replace(covered=now.covered | own)",
        "now",
        ("tests/in_place/test_several_parametrizations.py", "-k", "a_model_inside_a_model"),
    ),
    Defect(
        "each layer takes its own number, not the outermost one",
        LINK,
        "        if present is not None:\n            return self._run(",
        "        if False:\n            return self._run(",
        (ANNOUNCED, "-k", "uses_the_announced"),
    ),
    Defect(
        "a container reads the raw value of a tied weight",
        PARAMETRIZATION,
        "        if not chains or chains[0][0] is not self:\n",
        "        if True:\n",
        (ANNOUNCED, "-k", "uses_the_announced and tied"),
    ),
    Defect(
        "backward calls a layer without the present calls",
        LINK,
        "            with running_calls.using_calls({**inner, self.in_place: now}):\n",
        "            if True:\n",
        (LAYER_KINDS, "-k", "large_weights and (bidirectional or cells)"),
    ),
    Defect(
        "unwrap leaves the hooks",
        "layers/_substitution/method_hooks.py",
        "    hook.links.remove(link)\n",
        "    pass\n",
        (ANNOUNCED, "-k", "uses_the_announced"),
    ),
    Defect(
        "a layer's own attribute `call` is lost",
        "layers/_substitution/method_hooks.py",
        "hook.replaced[name] = vars(layer).get(name)",
        "hook.replaced[name] = None",
        (LAYER_KINDS, "-k", "replaced"),
    ),
    Defect(
        "checkpoints do not track the seeds",
        INSTALLATION,
        "        self.draws = [one.draws for one in held.all]\n",
        "        self.draws = []\n",
        ("tests/in_place/test_saved_state.py",),
    ),
    Defect(
        "functions of models around the target are not forgotten",
        "tfwd/in_place.py",
        "        if any(id(layer) in inside for layer in _keras.layers.all_layers(found)):\n",
        "        if found is target:\n",
        ("tests/in_place/test_traced_functions.py", "-k", "before_and_after or around_the_target"),
    ),
    Defect(
        "a seed depends on the number of weights before it in the parametrization",
        LINK,
        "        return self.targeted_here\n",
        "        here = enumerate(self.targeted_here)\n"
        "        return [(t._replace(position=i), p) for i, (t, p) in here]\n",
        (ANNOUNCED, "-k", "uses_the_announced"),
    ),
    Defect(
        "an interrupted parametrize leaves hooks",
        INSTALLATION,
        "    except BaseException:  # such as Ctrl-C\n",
        "    except OSError:\n",
        ("tests/in_place/test_errors.py", "-k", "interruption"),
    ),
    Defect(
        "equal layers share an analysis although one has a further parametrization",
        "layers/_substitution/keras_own_layers.py",
        "    if len(added) > 1 or not is_keras_own(owner):\n",
        "    if not is_keras_own(owner):\n",
        ("tests/in_place/test_several_parametrizations.py", "-k", "equal_layers"),
    ),
]
