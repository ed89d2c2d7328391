"""Reads labelled texts: lines of text TAB label, CSV, or lines of JSON."""

from __future__ import annotations

import collections
import csv
import io
import json
import os
from collections.abc import Iterable
from typing import NamedTuple

import ml_collections
import numpy as np

from tfwd.runs.errors import UserError, listing
from tfwd.runs.settings.command_line import is_utf8
from tfwd.runs.storage.file_access import read_text

SUFFIXES = (".tsv", ".csv", ".jsonl")
NAMES = ("train", "valid", "test")


class Example(NamedTuple):
    """Text with its true label."""

    text: str
    label: str


class Splits(NamedTuple):
    """Training, validation and test part of the data, with a name for reports.

    Attributes:
        parts: dict of the examples, by "train", "valid" and "test".
        name: str. The data's name, for reports.
        first: the first line of the training file, if it may be an unrecognized header.
    """

    parts: dict[str, list[Example]]
    name: str
    first: Example | None = None


def read_examples(
    path: str | os.PathLike[str], text: str = "text", label: str = "label"
) -> list[Example]:
    r"""Reads one file, in the format of its suffix.

    `.tsv`: lines of text TAB label. A first line whose label is the name of the column is a header.
    `.csv`: with a first line of names. `.jsonl`: one object per line.

    Args:
        path: path of a UTF-8 file.
        text: str. The column, or key, of the text.
        label: str. The column, or key, of the label.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or a line does not have the expected form.
            The message names the line.

    Example:
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "train.tsv")
    >>> _ = path.write_text("a fine film\t1\na dull one\t0\n")
    >>> read_examples(path)[1]
    Example(text='a dull one', label='0')
    """
    path = os.fspath(path)
    content = read_text(path)
    reader = {".tsv": _tsv, ".csv": _csv, ".jsonl": _json}.get(os.path.splitext(path)[1])
    if reader is None:
        raise UserError(f"{path}: give a file that ends in {', '.join(SUFFIXES)}")
    examples = []
    for line, example in reader(path, content, text, label):
        for what, found in zip(("text", "label"), example, strict=True):
            if not found.strip():
                raise UserError(f"{path}, line {line}: the {what} is empty; give a {what}")
            if not is_utf8(found):  # JSON can contain half of a surrogate pair
                raise UserError(f"{path}, line {line}: the {what} is not UTF-8")
        examples.append(Example(example.text.strip(), example.label.strip()))
    if not examples:
        raise UserError(f"{path} has no examples; give lines of text and label")
    return examples


Lines = Iterable[tuple[int, Example]]


def _tsv(path: str, content: str, text: str, label: str) -> Lines:
    lines = content.rstrip("\n").split("\n")
    for number, line in enumerate(lines, 1):
        columns = line.split("\t")
        if len(columns) != 2:
            many = "no tab" if len(columns) == 1 else f"{len(columns) - 1} tabs"
            raise UserError(
                f"{path}, line {number} has {many}: give the text, a tab and the label; the line "
                f"is {line[:60]!r}"
            )
        if number == 1 and columns[1].strip().lower() == label.lower():
            # This is a header, unless the name of the column is also the label of other lines.
            others = (other.rpartition("\t")[2].strip() for other in lines[1:])
            if columns == [text, label] or columns[1].strip() not in others:
                continue
        yield number, Example(*columns)


def _csv(path: str, content: str, text: str, label: str) -> Lines:
    reader = csv.DictReader(io.StringIO(content), strict=True)
    try:
        columns = list(reader.fieldnames or [])
        if name := _repeated(filter(None, columns)):
            raise UserError(
                f"{path}: its first line names the column {name!r} twice; give each column its own "
                "name"
            )
        for key, name in (("text", text), ("label", label)):
            if name not in columns:
                raise UserError(
                    f"{path} has no column {name!r}; its first line names {', '.join(columns)}: "
                    f"set data.{key} to one of these names"
                )
        for row in reader:
            if row[text] is None or row[label] is None or None in row:
                raise UserError(
                    f"{path}, line {reader.line_num} does not have the {len(columns)} columns of "
                    "the first line"
                )
            yield reader.line_num, Example(row[text], row[label])
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from error


def _json(path: str, content: str, text: str, label: str) -> Lines:
    for number, line in enumerate(content.rstrip("\n").split("\n"), 1):
        try:
            found = json.loads(line, object_pairs_hook=_Object)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is not JSON: {error}") from error
        if isinstance(found, _Object) and found.repeated is not None:
            raise UserError(
                f"{path}, line {number} has the key {found.repeated!r} twice; give each key once"
            )
        if not isinstance(found, dict) or text not in found or label not in found:
            raise UserError(
                f"{path}, line {number} is not an object with {text!r} and {label!r}; set "
                "data.text and data.label to the keys of the object"
            )
        if not isinstance(found[text], str) or not isinstance(found[label], (str, int)):
            raise UserError(f"{path}, line {number}: {text!r} and {label!r} must be texts")
        yield number, Example(found[text], str(found[label]))


class _Object(dict):
    """Object of JSON that knows whether it has a key twice.

    Args:
        pairs: Keys with their values.

    Attributes:
        repeated: the first key that is there twice, or None.
    """

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self.repeated = _repeated(key for key, _ in pairs)


def _repeated(names: Iterable[str]) -> str | None:
    """Returns the first name that is there twice, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def read_parts(data: ml_collections.ConfigDict) -> Splits:
    """Reads the files of `data.path`. Without a validation file, splits off a part of train.

    Raises:
        UserError: the folder or a file is missing, there are two files of a part, or a file is
            wrong.
    """
    folder = data.path
    if not os.path.isdir(folder):
        raise UserError(
            f"data.path={folder}: there is no such folder; give a folder with train.tsv, valid.tsv "
            "and test.tsv"
        )
    parts, first = {}, None
    for name in NAMES:
        files = [os.path.join(folder, name + suffix) for suffix in SUFFIXES]
        files = [path for path in files if os.path.exists(path)]
        if len(files) > 1:
            raise UserError(f"data.path={folder} has {' and '.join(files)}; keep one of them")
        if not files and (name != "valid" or not data.valid_share):
            raise UserError(
                f"data.path={folder} has no {name}.tsv, {name}.csv or {name}.jsonl; "
                f"it has {listing(folder)}"
            )
        if files:
            parts[name] = read_examples(files[0], data.text, data.label)
            if name == "train" and files[0].endswith(".tsv"):
                first = parts[name][0]
    if "valid" not in parts:
        train = parts["train"]
        order = np.random.default_rng(1).permutation(len(train))
        cut = max(1, round(data.valid_share * len(train)))
        parts["valid"] = [train[number] for number in sorted(order[:cut])]
        parts["train"] = [train[number] for number in sorted(order[cut:])]
    parts = {name: parts[name] for name in NAMES}
    return Splits(parts, os.path.basename(os.path.abspath(folder)), first)


def check(splits: Splits) -> None:
    """Checks that the examples suffice to train and evaluate a classifier.

    Raises:
        UserError: there are fewer than two labels, a label is in only one part, or a label has only
            one training example.
    """
    counts = {
        name: collections.Counter(example.label for example in part)
        for name, part in splits.parts.items()
    }
    train = counts["train"]
    for label in sorted(set().union(*counts.values())):
        parts = [name for name in NAMES if counts[name][label]]
        if not train[label]:
            raise UserError(
                f"{splits.name}: the label {label!r} is in {' and '.join(parts)} but not in train: "
                f"the labels in train are {_listed(train)}"
            )
        hint = ""
        if train[label] == 1 and splits.first is not None and splits.first.label == label:
            hint = (
                "; if the first line of train.tsv is a header, name its columns: data.text="
                f"{splits.first.text[:60]!r} and data.label={label!r}"
            )
        if parts == ["train"]:
            raise UserError(
                f"{splits.name}: the label {label!r} is in train only, {train[label]} times, so "
                "its accuracy cannot be measured: give examples in valid or test, or remove "
                f"it{hint}"
            )
        if train[label] == 1:
            raise UserError(
                f"{splits.name}: the label {label!r} has one example in train: give at least two"
                f"{hint}"
            )
    if len(train) < 2:
        raise UserError(
            f"{splits.name}: all texts have the label {_listed(train)}: give at least two labels"
        )


def _listed(labels: Iterable[str]) -> str:
    labels = sorted(labels)
    return ", ".join(map(repr, labels[:8])) + (", ..." if len(labels) > 8 else "")
