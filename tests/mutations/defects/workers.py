"""Defects of loading on several workers."""

from __future__ import annotations

from mutations.defects.defect import Defect

LOCKSTEP = "tfwd/_keras_shared/worker_lockstep.py"
SHARED = ("tests/distribute/test_load.py",)

DEFECTS = [
    Defect(
        "workers are not told of another worker's failure",
        LOCKSTEP,
        "        if error is None or isinstance(error, Exception):",
        "        if error is None:",
        SHARED,
    ),
    Defect(
        "workers do not get the end of a long message",
        LOCKSTEP,
        "        for start in range(0, len(content), CHUNK):",
        "        for start in range(0, len(content) - CHUNK, CHUNK):",
        SHARED,
    ),
    Defect(
        "workers with other plans load their weights",
        "tfwd/pretrained/loading_plan.py",
        "            if here != there:",
        "            if here[:1] != there[:1]:",
        SHARED,
    ),
    Defect(
        "each of several workers draws the parts that a file lacks",
        "layers/transformer/formats/published_layer.py",
        "                if not workers.is_alone:",
        "                if workers is None:",
        SHARED,
    ),
    Defect(
        "each of several workers reads the config of a model",
        "layers/transformer/formats/published_configs.py",
        "            name, values = workers.json_from_chief(lambda: _read(path))",
        "            name, values = _read(path)",
        SHARED,
    ),
]
