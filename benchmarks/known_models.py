"""Cost of weight dropout in known models: operations, first steps, steps and eager calls.

    python benchmarks/known_models.py

The models are MobileNetV2 with every kernel dropped, an encoder of twelve BERT layers made of Keras
layers, and a stack of LSTMs. The measurement is the same as in many_layers.py.
"""

from __future__ import annotations

from common import many_layers_measurements

if __name__ == "__main__":
    many_layers_measurements.measured(__file__, ("MobileNetV2", "BERT", "LSTMs"), __doc__)
