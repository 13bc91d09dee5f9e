"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real logs; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("GOAL_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real logs at {folder}: set GOAL_DATA to the folder that holds them")
    return folder
