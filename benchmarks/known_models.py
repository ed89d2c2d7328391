"""What weight dropout costs in known models: operations, first steps, steps, eager calls.

    python benchmarks/known_models.py

MobileNetV2 with every kernel dropped, an encoder of twelve BERT layers made of Keras layers, and a
stack of LSTMs, as many_layers.py measures chains of Dense layers.
"""

from __future__ import annotations

import many_layers

if __name__ == "__main__":
    many_layers.measured("known_models", ("MobileNetV2", "BERT", "LSTMs"), __doc__)
