"""`SavedVocabulary`: base class of vocabularies that a run stores as JSON in its folder."""

from __future__ import annotations

import abc
import hashlib
import os

from tfwd.runs.storage.file_access import write_file


class SavedVocabulary(abc.ABC):
    """Vocabulary with a fingerprint, and a file."""

    @abc.abstractmethod
    def _json(self) -> str:
        """Returns the content as JSON."""

    def fingerprint(self) -> str:
        """Returns a hash, sixteen hexadecimal digits. Only equal vocabularies have equal hashes."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the vocabulary as JSON, in one step.

        Raises:
            UserError: the file cannot be written.
        """
        write_file(path, self._json() + "\n")
