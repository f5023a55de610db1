"""Output files: never overwritten unasked, whole or not there, and closed to others.

Traces tell which files were accessed, and so does all that is made of them: pictures, pages, other formats.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.files import create, rename


class Output:
    """A file written under a temporary name beside `path`, which it takes when the with block ends without an error."""

    def __init__(self, path: str | os.PathLike[str], force: bool, option: str = "OUT") -> None:
        """UsageError, naming `option`, if `path` exists and `force` is not set, or cannot be a file."""
        self.path = Path(path)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        if self.path.is_dir():
            raise UsageError(f"{option}: '{self.path}' is a directory", "name a file")
        if self.path.exists() and not force:
            raise UsageError(f"{option}: '{self.path}' exists", "--force replaces it")
        if not self.path.parent.is_dir():
            raise UsageError(f"{option}: '{self.path.parent}' is not a directory", "make it first")

    def __enter__(self) -> Path:
        """Returns the temporary name to write to, of a file that is there and empty."""
        return self.begin()

    def begin(self) -> Path:
        """Makes the temporary file, empty, and returns its name. EnvironmentProblem if that is not possible."""
        try:
            os.close(create(self.temporary))
        except OSError as error:
            raise problem(self.path, error) from error
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.keep()
        else:
            self.discard()

    def keep(self) -> None:
        """Give the file its name, on the disk with all that is in it."""
        try:
            with self.temporary.open("rb") as file:
                os.fsync(file.fileno())
            rename(self.temporary, self.path)
        except OSError as error:
            raise problem(self.path, error) from error

    def discard(self) -> None:
        """Remove what has been written."""
        self.temporary.unlink(missing_ok=True)


def problem(path: str | os.PathLike[str], error: OSError) -> EnvironmentProblem:
    """Returns the error to raise where `path` cannot be written."""
    hint = "name a place that is writable and has room"
    return EnvironmentProblem(f"cannot write '{path}': {error.strerror or error}", hint)
