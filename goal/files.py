"""Files that are whole or not there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

ENDS = 1 << 16
"""Bytes at the beginning and at the end of a file that `fingerprint` reads."""


def fingerprint(files: Iterable[Path]) -> str:
    """Return what tells files from another version of them: names, sizes, and both ends of every file.

    Logs are large and stay unread between their ends; a Parquet file's statistics of its columns lie there.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(ENDS))
            content.seek(max(ENDS, size - ENDS))
            digest.update(content.read(ENDS))
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
