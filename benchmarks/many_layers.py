"""Cost of weight dropout with many weights: operations, steps and eager calls.

    python benchmarks/many_layers.py

Chains of Dense layers, 100 of width 16 and 20 of width 768: by tfwd, naively (ten lines that a user
would write around TensorFlow's stateless dropout), without dropout, and by PyTorch's `parametrize`.
Each side has a process of its own, since traced and compiled functions serve the next model too.
Processes run one after the other, in rounds. known_models.py does the same for MobileNetV2, BERT
and a stack of LSTMs. many_layers_growth.py measures how the costs grow with the number of layers.
"""

from __future__ import annotations

from common import many_layers_measurements

if __name__ == "__main__":
    many_layers_measurements.measured(__file__, ("dense16", "dense768"), __doc__)
