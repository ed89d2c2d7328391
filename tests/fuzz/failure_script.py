"""A failing case as one Python file that needs tfwd and no file of the tests."""

import re
from pathlib import Path

from fuzz import model_source

HERE = Path(__file__).parent
# In the order of their dependencies.
PARTS = ("given_weights", "model_inputs", "training_modes", "oracle", "drawn_weights", "compare")
HEAD = '''"""{title}

Run it with Python: it builds the wrapped model and a plain copy of it, runs two steps of each, and
prints in what they differ.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import sys
import types

import keras
import tensorflow as tf

import tfwd
from tfwd import layers
from tfwd import parametrizations as P

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
BATCH = 2

{layers}

{program}

MODE = types.SimpleNamespace({mode})



def module(name, text):
    made = sys.modules["fuzz." + name] = types.ModuleType("fuzz." + name)
    setattr(fuzz, name, made)
    exec(compile(text, name + " in " + __file__, "exec"), vars(made))
    return made


fuzz = sys.modules["fuzz"] = types.ModuleType("fuzz")

# What follows is the comparison, the same for every case.
'''
TAIL = """
program = {"INPUTS": INPUTS, "wrapped": wrapped, "plain": plain}
found = sys.modules["fuzz.compare"].differences(program, MODE)
print("\\n".join(found) or "no difference")
sys.exit(bool(found))
"""


def script(case, found):
    """Returns the text of the script.

    Args:
        case: the case.
        found: its differences.
    """
    title = "; ".join(found)[:500].replace("\\", "/").replace('"""', '"')
    mode = ", ".join(f"{name}={value!r}" for name, value in vars(case.mode).items())
    head = HEAD.format(
        title=title, layers=_text("user_layers"), program=model_source.program(case), mode=mode
    )
    return head + "\n".join(f"module({part!r}, r'''{_text(part)}''')" for part in PARTS) + TAIL


def _text(name):
    """Returns the text of a module of this folder without its docstring."""
    text = (HERE / f"{name}.py").read_text("utf-8")
    return re.sub(r'\A""".*?"""\n', "", text, flags=re.DOTALL)
