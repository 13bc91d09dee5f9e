"""Finished small runs, made once for the modules that look at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from goal.pipeline import Run

from .tiny import REMEMBERING, TINY


@pytest.fixture(scope="session")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remembering")
    Run(REMEMBERING, folder).run(until="evaluation")
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    Run(TINY, folder).run()
    return folder
