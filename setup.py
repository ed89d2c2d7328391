"""Installation of tfwd. The settings of the tools (ruff, pytest, mypy) are in pyproject.toml.

``layers/``, ``optimizers/`` and ``configs/`` are at the top of the repository, where they are easy
to find. They are installed as ``tfwd.layers``, ``tfwd.optimizers`` and ``tfwd.configs``.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
MOVED = ("layers", "optimizers", "configs")
# The version is in one file. An import would need TensorFlow, so the file is read as text.
SOURCE = (ROOT / "tfwd" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.+?)"', SOURCE, re.MULTILINE)[1]
PLOTS = ["matplotlib>=3.7"]
# TensorFlow writes its summaries through tensorboard, and no longer installs it.
TENSORBOARD = ["tensorboard>=2.15"]
PROGRAMS = ["absl-py>=2", "ml-collections>=1.1", "rich>=13", *PLOTS, *TENSORBOARD]
# tensorflow-addons 0.23 is its last release. It has wheels for x86-64 Linux and for macOS,
# on Python up to 3.11.
ADDONS = ["keras>=2.15,<2.16", "tensorflow-addons>=0.23,<0.24", "tqdm>=4.60"]
# tensorflow-cpu has wheels for x86-64 Linux and Windows. Elsewhere tensorflow is the only build.
X86_64 = "(platform_machine == 'x86_64' or platform_machine == 'AMD64')"
NOT_X86_64 = "(platform_machine != 'x86_64' and platform_machine != 'AMD64')"
HAS_CPU_BUILD = f"sys_platform != 'darwin' and {X86_64}"
HAS_NO_CPU_BUILD = f"sys_platform == 'darwin' or {NOT_X86_64}"


def cpu_build(versions: str) -> list[str]:
    """Returns the requirements for the smallest TensorFlow that has wheels for each platform."""
    return [
        f"tensorflow-cpu{versions}; {HAS_CPU_BUILD}",
        f"tensorflow{versions}; {HAS_NO_CPU_BUILD}",
    ]


def packages() -> list[str]:
    """Returns all packages under their installed names."""
    names = ["tfwd", *(f"tfwd.{name}" for name in find_packages(str(ROOT / "tfwd")))]
    for top in MOVED:
        names.append(f"tfwd.{top}")
        names.extend(f"tfwd.{top}.{name}" for name in find_packages(str(ROOT / top)))
    return names


setup(
    name="tfwd",
    version=VERSION,
    description="Weight dropout and variational noise for TensorFlow 2 and Keras layers",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=packages(),
    py_modules=["tfwd_programs"],
    package_dir={f"tfwd.{top}": top for top in MOVED},
    package_data={"tfwd": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["numpy>=1.26", "safetensors>=0.8"],
    # TensorFlow has two builds with one import name. If install_requires named one, it would be
    # installed over the other. The user therefore chooses: tfwd[tf] or, without a GPU, tfwd[cpu].
    # Keras is part of the choice: Keras 3, or 2.15 with the last TensorFlow that tensorflow-addons
    # supports.
    extras_require={
        "tf": ["tensorflow>=2.18", "keras>=3.5"],
        "cpu": [*cpu_build(">=2.18"), "keras>=3.5"],
        "addons": ["tensorflow>=2.15,<2.16", *ADDONS],
        "addons-cpu": [*cpu_build(">=2.15,<2.16"), *ADDONS],
        # `plot=` of the callbacks needs matplotlib. Their `log_dir=` needs tensorboard.
        "plots": PLOTS,
        "tensorboard": TENSORBOARD,
        "programs": PROGRAMS,
        # tfwd.tuning, and together with `programs` also tfwd-tune.
        "tune": ["keras-tuner[bayesian]>=1.4.8"],
        # tokenizers reads the tokenizer.json of published models.
        "finetune": [*PROGRAMS, "tokenizers>=0.20"],
        # The libraries that the benchmarks compare with.
        "bench": [
            *PROGRAMS,
            "backpack-for-pytorch>=1.6",
            "jax>=0.4.30",
            "kagglehub>=0.3",
            "opacus>=1.5",
            "optax>=0.2.3",
            "regex",
            "sentencepiece>=0.2",
            "tokenizers>=0.20",
            "torch>=2.2",
            "transformers>=4.40",
        ],
        # The site, for `make docs`. It needs no TensorFlow.
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29", "ruff>=0.9"],
        "dev": [
            "build>=1.2",
            "hypothesis>=6.100",
            "mypy>=1.11",
            "pytest>=8.2",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "setuptools>=64",
            "uv>=0.5",  # resolves the extras for other platforms, in tests
            "wheel>=0.43",
            "xxhash>=3",
        ],
    },
    entry_points={
        "console_scripts": [
            "tfwd-classify = tfwd_programs:classify",
            "tfwd-evaluate = tfwd_programs:evaluate",
            "tfwd-finetune = tfwd_programs:finetune",
            "tfwd-generate = tfwd_programs:generate",
            "tfwd-pretrained = tfwd_programs:pretrained",
            "tfwd-train = tfwd_programs:train",
            "tfwd-tune = tfwd_programs:tune",
        ]
    },
)
