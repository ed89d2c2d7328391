"""What a first training step costs: building the graph of a model with weight dropout, and without.

    python benchmarks/first_call.py

MobileNetV2 (52 convolutions and a Dense layer, images of 64x64), an encoder of twelve BERT layers
made of Keras layers, and the language model of configs/quickstart.py. What is measured is the
processor time of the first `train_on_batch`, and of the first step of the language model: tracing,
graph optimization, compilation and the step itself. Each step is the first of a process of its own,
since whatever a process has traced or compiled before serves the next model too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import measure
from measure import Row, ratio

MODELS = ("MobileNetV2", "BERT", "quickstart")
WAYS = ("plain", "wrapped")
RATE = 0.1
# Another round begins if it would end within this time; one of all takes about 90 seconds.
SECONDS = 115.0


def mobilenet(wrapped: bool) -> Callable[[], Any]:
    """The step of MobileNetV2, every kernel of which is dropped if `wrapped`."""
    import keras
    import numpy as np

    import tfwd
    from tfwd import parametrizations

    model = keras.applications.MobileNetV2((64, 64, 3), weights=None, classes=10)
    if wrapped:
        model = tfwd.parametrize(model, {r".*kernel": parametrizations.Dropout(RATE)})
    model.compile("sgd", "sparse_categorical_crossentropy")
    random = np.random.default_rng(0)
    images = random.normal(size=(8, 64, 64, 3)).astype("float32")
    return lambda: model.train_on_batch(images, random.integers(0, 10, 8))


def bert(wrapped: bool, depth: int = 12, width: int = 64, words: int = 1000) -> Callable[[], Any]:
    """The step of an encoder of BERT layers, each layer with weights wrapped if `wrapped`."""
    import keras
    import numpy as np

    from tfwd import layers

    def wrap(layer: keras.Layer) -> keras.Layer:
        return layers.WeightDropout(layer, RATE) if wrapped else layer

    ids = keras.Input((32,), dtype="int32")
    x = wrap(keras.layers.Embedding(words, width))(ids)
    for _ in range(depth):
        attended = wrap(keras.layers.MultiHeadAttention(4, width // 4))(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = wrap(keras.layers.Dense(4 * width, "gelu"))(x)
        x = keras.layers.LayerNormalization()(x + wrap(keras.layers.Dense(width))(hidden))
    model = keras.Model(ids, wrap(keras.layers.Dense(words))(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    batch = np.random.default_rng(0).integers(0, words, (8, 32))
    return lambda: model.train_on_batch(batch, batch)


def quickstart(wrapped: bool) -> Callable[[], Any]:
    """The step of the quickstart's language model, without dropped weights if not `wrapped`."""
    import lm_step
    import numpy as np

    config = lm_step.load_config("quickstart")
    if not wrapped:
        # Plain Keras layers: no perturbed weights, and activations are dropped as ever.
        config.model.weight_dropout = config.model.embedding_dropout = 0.0
    words = 2000
    step, _ = lm_step.ours(config, words)
    shape = (config.data.batch_size, config.data.window)
    batch = np.random.default_rng(0).integers(0, words, shape).astype("int32")
    return lambda: step(batch, batch)


def child(model: str, way: str) -> None:
    """Makes one first step and prints its processor time."""
    measure.equal_threads()
    make = {"MobileNetV2": mobilenet, "BERT": bert, "quickstart": quickstart}[model]
    step = make(way == "wrapped")
    start = time.process_time()
    step()
    print(json.dumps(time.process_time() - start), flush=True)


def first_step(model: str, way: str) -> float:
    """The processor time of the first step in a fresh process, seconds."""
    command = [sys.executable, __file__, f"--child={model}", f"--way={way}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures as many rounds as there is time for."""
    parser = measure.parser(__doc__)
    parser.add_argument("--child", choices=MODELS, help="only this model's step, in this process")
    parser.add_argument("--way", choices=WAYS, default="wrapped", help="of --child")
    flags = parser.parse_args()
    if flags.child:
        child(flags.child, flags.way)
        return
    times: dict[tuple[str, str], list[float]] = {(m, w): [] for m in MODELS for w in WAYS}
    start, turn = time.perf_counter(), 0
    while turn == 0 or (time.perf_counter() - start) * (turn + 1) / turn < SECONDS:
        for model in MODELS:
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                times[model, way].append(first_step(model, way))
        turn += 1
    rows = []
    for model in MODELS:
        plain, wrapped = times[model, "plain"], times[model, "wrapped"]
        median = measure.milliseconds({"plain": plain, "wrapped": wrapped})
        rows.append(
            Row(
                f"first training step of {model}",
                ratio(wrapped, plain),
                "processor time over plain",
                ours=float(median["wrapped"]),
                peers={"plain": median["plain"]},
                at_most=1.3,
            )
        )
    measure.report("first_call", rows)


if __name__ == "__main__":
    main()
