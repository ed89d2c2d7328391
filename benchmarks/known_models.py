"""Cost of weight dropout in known models: operations, first steps, steps and eager calls.

    python benchmarks/known_models.py

MobileNetV2 with every kernel dropped, an encoder of twelve BERT layers made of Keras layers, and a
stack of LSTMs. They are measured as many_layers.py measures chains of Dense layers.
"""

from __future__ import annotations

from common import many_layers_measurements

if __name__ == "__main__":
    many_layers_measurements.measured(__file__, ("MobileNetV2", "BERT", "LSTMs"), __doc__)
