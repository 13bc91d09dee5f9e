"""A policy as a folder: safetensors and JSON, no pickle.

Each file is whole or not there. config.json, written first, holds a digest of the weights, written last: a folder whose
writing was cut off in between is refused, also one that an earlier version wrote without a digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
from safetensors import SafetensorError

from goal.config import PolicyConfig
from goal.errors import ConfigurationError
from goal.files import write_atomically
from goal.log import FeatureScaling
from goal.serialization import from_dict, read_json, to_dict
from goal.tokenizer import IncentiveTokenizer

if TYPE_CHECKING:
    from goal.model.policy import Policy

WEIGHTS, CONFIG, SCALING = "model.safetensors", "config.json", "scaling.json"
DIGEST = "weights_sha256"
"""Key of config.json beside the fields of `PolicyConfig`; folders of earlier versions have none."""
REMEDY = "save the policy there again with Policy.save_pretrained"


def save(policy: Policy, folder: Path) -> None:
    """Write ``policy`` into ``folder``."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in policy.state_dict().items()}
    weights = safetensors.torch.save(tensors)
    write_atomically(folder / CONFIG, _json({**to_dict(policy.config), DIGEST: hashlib.sha256(weights).hexdigest()}))
    write_atomically(folder / SCALING, _json(policy.scaling.to_dict()))
    IncentiveTokenizer(policy.config.vocabulary, max_length=policy.config.max_length - 1).save(folder)
    write_atomically(folder / WEIGHTS, weights)


def load(kind: type[Policy], folder: Path) -> Policy:
    """Read a policy of class ``kind`` from ``folder``."""
    values = read_json(_found(folder / CONFIG), remedy=REMEDY)
    digest = values.pop(DIGEST, None)
    config = from_dict(PolicyConfig, values, source=folder / CONFIG, remedy=REMEDY)
    values = read_json(_found(folder / SCALING), remedy=REMEDY)
    scaling = from_dict(FeatureScaling, values, source=folder / SCALING, remedy=REMEDY)
    path = _found(folder / WEIGHTS)
    weights = path.read_bytes()
    if digest not in (None, hashlib.sha256(weights).hexdigest()):
        raise ConfigurationError(
            f"{path}: not the weights that {folder / CONFIG} was written with, so one of the two is of another "
            f"policy (saving was cut off, or files were copied one by one); {REMEDY}"
        )
    try:
        policy = kind(config, scaling)
    except ConfigurationError as error:
        raise ConfigurationError(f"{folder}: {error}; {REMEDY}") from error
    try:
        policy.load_state_dict(safetensors.torch.load(weights))
    except (RuntimeError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: cannot be read, or does not fit {folder / CONFIG}: {error}") from error
    return policy


def _found(path: Path) -> Path:
    if not path.is_file():
        raise ConfigurationError(f"{path}: not found; expected a folder that Policy.save_pretrained wrote")
    return path


def _json(values: dict) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
