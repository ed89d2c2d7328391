"""Labelled texts that come with Python: docstrings of its standard library.

Each docstring of the modules below is a text, cut to its first words. Its label is the area of its
module. No download is needed. The texts differ a little between versions of Python.
"""

from __future__ import annotations

import ast
import os
import platform
import re
from collections.abc import Iterator

import numpy as np

from tfwd.finetune.data.labelled_texts import NAMES, Example, Splits
from tfwd.runs.errors import UserError

AREAS = {
    "code": "ast bdb dis doctest importlib inspect pdb pydoc symtable tokenize trace traceback"
    " typing unittest",
    "files": "_pyio bz2 configparser filecmp fileinput fnmatch genericpath glob gzip lzma mailbox"
    " os pathlib plistlib posixpath shutil tarfile tempfile zipfile",
    "network": "asyncio ftplib http imaplib ipaddress poplib selectors smtplib socket socketserver"
    " ssl urllib webbrowser wsgiref xmlrpc",
    "numbers": "_pydatetime _pydecimal _pylong bisect calendar colorsys datetime fractions heapq"
    " numbers random statistics",
    "processes": "_threading_local concurrent multiprocessing queue sched signal subprocess"
    " threading",
    "text": "base64 csv difflib email gettext html json locale quopri re shlex string textwrap xml",
}
WORDS = 40  # maximum number of words of a text
LEAST = 6  # minimum number of words of a docstring
# Texts per area, in each part. There are few training texts, as in most applications, and the areas
# are of similar size. If an area has fewer texts, all parts shrink by the same factor.
SIZES = (150, 75, 150)


def load_python_docstrings() -> Splits:
    """Reads the docstrings of the standard library, by area, in three parts.

    A docstring is in only one part, and in the same part in each call.

    Raises:
        UserError: this Python comes without the sources of its library.

    Example:
    >>> splits = load_python_docstrings()
    >>> sorted({example.label for example in splits.parts["test"]})
    ['code', 'files', 'network', 'numbers', 'processes', 'text']
    """
    library = os.path.dirname(os.__file__)
    generator = np.random.default_rng(0)
    parts: dict[str, list[Example]] = {name: [] for name in NAMES}
    known: set[str] = set()
    for area, modules in AREAS.items():
        texts = []
        for path in _files(library, modules.split()):
            for text in docstrings(path):
                if text.lower() not in known:
                    known.add(text.lower())
                    texts.append(text)
        if len(texts) < 20:
            raise UserError(
                f"{library} has too few sources of Python's own library ({len(texts)} texts of "
                f"{area!r}): give data.path, a folder with train.tsv, valid.tsv and test.tsv"
            )
        order = generator.permutation(len(texts))[: sum(SIZES)]
        ends = np.cumsum(SIZES) * len(order) // sum(SIZES)
        for name, numbers in zip(NAMES, np.split(order, ends[:-1]), strict=True):
            parts[name] += [Example(texts[number], area) for number in sorted(numbers)]
    return Splits(parts, f"Python {platform.python_version()} docstrings")


def docstrings(path: str) -> Iterator[str]:
    """Yields the beginnings of a source file's docstrings, as prose on one line."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = (ast.get_docstring(node) or "").partition(">>>")[0]
            words = re.sub(r"[-=~*_]{3,}", " ", text).split()
            if len(words) >= LEAST:
                yield " ".join(words[:WORDS])


def _files(library: str, modules: list[str]) -> Iterator[str]:
    for module in modules:
        path = os.path.join(library, module)
        if os.path.isfile(f"{path}.py"):
            yield f"{path}.py"
        for folder, inner, files in os.walk(path):
            inner[:] = sorted(
                name for name in inner if name not in ("test", "tests", "__pycache__")
            )
            yield from (os.path.join(folder, name) for name in sorted(files) if name[-3:] == ".py")
