"""How well the pretrained policy tells what was paid, beside simple predictors, on rows that it never saw."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from goal.log import InteractionLog, Windows
from goal.model import Policy


def amount_accuracy(
    policy: Policy, log: InteractionLog, *, training: np.ndarray, held_out: np.ndarray, multipliers: tuple[float, ...]
) -> list[dict[str, Any]]:
    """Errors of predicted amounts on held-out decisions, one row a predictor.

    The policy's prediction is the median of its samples, which is the best constant under the absolute error; "mean of
    samples" is the same policy read for the squared error. The gradient-boosted regression is there where scikit-learn
    is installed (extra `report`); it sees the same windows, flattened.

    Args:
        policy: the pretrained policy.
        log: the log.
        training: rows that the other predictors are fitted on.
        held_out: rows to predict.
        multipliers: the candidate set. Where the log has no multiplier, the first one is given to the policy.

    Returns:
        Rows `{"predictor", "MAE", "RMSE", "log MAE", "exact"}`: mean absolute and root mean squared error in the
        incentive's unit, mean absolute error of ln(1 + amount), and the share predicted within half a unit.
    """
    windows = Windows(log, held_out, length=policy.config.window)
    truth = log.incentives[held_out]
    samples = _samples(policy, windows, multipliers)
    training_mean = float(log.incentives[training].mean())
    predictions = {
        "policy": np.median(samples, axis=1),
        "policy, mean of samples": samples.mean(axis=1),
        "last amount": _last_amount(log, held_out, training_mean),
        "user's mean": _user_mean(log, training, held_out, training_mean),
    }
    if importlib.util.find_spec("sklearn") is not None:
        predictions["gradient boosting"] = _boosting(Windows(log, training, length=windows.length), windows)
    return [{"predictor": name, **_errors(truth, predicted)} for name, predicted in predictions.items()]


def _errors(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    difference = np.abs(predicted - truth)
    logarithmic = np.abs(np.log1p(np.maximum(predicted, 0)) - np.log1p(truth))
    return {
        "MAE": float(difference.mean()),
        "RMSE": float(np.sqrt(np.square(difference).mean())),
        "log MAE": float(logarithmic.mean()),
        "exact": float((difference < 0.5).mean()),
    }


@torch.no_grad()
def _samples(policy: Policy, windows: Windows, multipliers: tuple[float, ...], *, samples: int = 15) -> np.ndarray:
    device = policy.token_weights.device
    generator = torch.Generator(device=device).manual_seed(0)
    drawn = []
    for indices in windows.parts():
        history = windows.batch(indices).to(device)
        logged = windows.targets(indices).multiplier
        multiplier = (
            torch.full((len(history),), multipliers[0], device=device)
            if logged is None
            else torch.from_numpy(logged).to(device)
        )
        generation = policy.generate(history, multiplier, samples=samples, greedy=False, generator=generator)
        drawn.append(generation.amounts.cpu())
    return torch.cat(drawn).numpy()


def _last_amount(log: InteractionLog, rows: np.ndarray, default: float) -> np.ndarray:
    _, position = log.locate(rows)
    return np.where(position > 0, log.incentives[np.maximum(rows - 1, 0)], default)


def _user_mean(log: InteractionLog, training: np.ndarray, rows: np.ndarray, default: float) -> np.ndarray:
    user = log.user_index
    count = np.bincount(user[training], minlength=log.users)
    total = np.bincount(user[training], weights=log.incentives[training], minlength=log.users)
    mean = np.where(count > 0, total / np.maximum(count, 1), default)
    return mean[user[rows]]


def _boosting(training: Windows, held_out: Windows, *, most_rows: int = 50_000) -> np.ndarray:
    from sklearn.ensemble import HistGradientBoostingRegressor

    stride = max(1, -(-len(training) // most_rows))
    fitted = np.arange(0, len(training), stride)
    model = HistGradientBoostingRegressor(loss="absolute_error", random_state=0)
    table = _flat(training, fitted)
    known = ~np.isnan(table).all(axis=0)  # it cannot bin a column that has no number, such as events nobody has
    model.fit(table[:, known], training.targets(fitted).incentives)
    return model.predict(_flat(held_out, np.arange(len(held_out)))[:, known])


def _flat(windows: Windows, indices: np.ndarray) -> np.ndarray:
    """Windows as `(n, features)`, the pending event last and absent events missing (NaN)."""
    history = windows.batch(indices)
    parts = torch.cat(
        [history.numeric, history.categorical.float(), history.incentives[..., None], history.outcomes], -1
    )
    place = torch.arange(history.window)
    parts[place >= history.lengths[:, None]] = torch.nan
    # Right-padded windows are turned so that the same column is the same distance from the present.
    turned = (place + history.lengths[:, None]) % history.window
    aligned = parts.gather(1, turned[..., None].expand_as(parts))
    return aligned.flatten(1).numpy()
