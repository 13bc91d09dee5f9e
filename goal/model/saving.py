"""A policy as a folder: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from goal.config import PolicyConfig
from goal.errors import ConfigurationError
from goal.log import FeatureScaling
from goal.serialization import dumps, from_dict
from goal.tokenizer import IncentiveTokenizer

if TYPE_CHECKING:
    from goal.model.policy import Policy

WEIGHTS, CONFIG, SCALING = "model.safetensors", "config.json", "scaling.json"


def save(policy: Policy, folder: Path) -> None:
    """Write ``policy`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in policy.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    (folder / CONFIG).write_text(dumps(policy.config) + "\n")
    (folder / SCALING).write_text(json.dumps(policy.scaling.to_dict(), indent=2) + "\n")
    IncentiveTokenizer(policy.config.vocabulary, max_length=policy.config.max_length - 1).save(folder)


def load(kind: type[Policy], folder: Path) -> Policy:
    """Read a policy of class ``kind`` from ``folder``."""
    config = from_dict(PolicyConfig, _read(folder, CONFIG))
    policy = kind(config, FeatureScaling.from_dict(_read(folder, SCALING)))
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigurationError(f"{path}: not found; expected a folder that Policy.save_pretrained wrote")
    try:
        policy.load_state_dict(load_file(path))
    except (RuntimeError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: cannot be read, or does not fit {folder / CONFIG}: {error}") from error
    return policy


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise ConfigurationError(f"{path}: not found; expected a folder that Policy.save_pretrained wrote")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: not JSON: {error}") from error
