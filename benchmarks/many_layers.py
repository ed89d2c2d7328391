"""Cost of weight dropout with many weights: operations, steps and eager calls.

    python benchmarks/many_layers.py

The models are chains of Dense layers: 100 layers of width 16, and 20 layers of width 768. There are
four sides: tfwd, a naive layer, no dropout, and PyTorch's `parametrize`. The naive layer is ten
lines that a user would write around TensorFlow's stateless dropout. Each side runs in a separate
process, because the next model would reuse traced and compiled functions. Processes run one after
the other, in rounds. known_models.py does the same for MobileNetV2, BERT and a stack of LSTMs.
many_layers_growth.py measures the growth of the costs with the number of layers.
"""

from __future__ import annotations

from common import many_layers_measurements

if __name__ == "__main__":
    many_layers_measurements.measured(__file__, ("dense16", "dense768"), __doc__)
