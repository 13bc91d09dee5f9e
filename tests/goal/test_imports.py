"""Importing costs nothing that was not asked for."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = ("polars", "sklearn", "tensorboard", "wandb", "matplotlib", "jinja2", "tqdm", "rich", "tyro")


def test_importing_is_quiet() -> None:
    script = f"""
import logging, sys, warnings
warnings.simplefilter("error")
import torch
before = set(sys.modules)
handlers = list(logging.getLogger().handlers)
import goal, goal_kernels
loaded = [name for name in {OPTIONAL!r} if name in set(sys.modules) - before]
assert not loaded, loaded
assert not torch.cuda.is_initialized()
assert logging.getLogger().handlers == handlers
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
