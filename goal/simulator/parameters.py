"""Parameters of the synthetic environments, their presets and their TOML files.

The model is the paper's appendix "Synthetic ROI-Constrained Environment", with a scale in money and, for a population
of users, a spread around each parameter:

    p_t     = sigmoid(base_logit + alpha * g(a_t) - beta * f_t)          probability of an engagement
    f_{t+1} = rho * f_t + eta * g(a_t)                                   fatigue, 0 at the first step
    revenue = engagement * revenue_per_engagement * noise,  noise of mean 1
    cost    = cost_rate * a_t

The paper has base_logit 0, g the identity, one unit of revenue an engagement and a cost rate of 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import typing
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from goal.errors import ConfigurationError

Floats = NDArray[np.float64]


def _typed(name: str, kind: Any, value: Any) -> Any:
    """The value as the plain Python type of its field, so that equality and JSON do not depend on how it was given."""
    choices = typing.get_args(kind)
    if choices:
        if value in choices:
            return value
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, got {value!r}: choose one of them")
    if kind is bool and isinstance(value, bool | np.bool_):
        return bool(value)
    if kind is str and isinstance(value, str):
        return value
    numeric = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    number = numeric and math.isfinite(value)
    if kind is int and number and value == int(value):
        return int(value)
    if kind is float and number:
        return float(value)
    expected = {bool: "true or false", str: "a text", int: "a whole number", float: "a finite number"}[kind]
    raise ConfigurationError(f"{name} must be {expected}, got {value!r}: correct the value")


def _at_least(name: str, value: float, low: float, reason: str) -> None:
    if value < low:
        raise ConfigurationError(f"{name} must be at least {low:g}, got {value}: {reason}")


@dataclass(frozen=True)
class Parameters:
    """One environment: how users respond to incentives, tire of them and pay.

    The first eight fields are the paper's model; the rest have defaults that leave it as it is. Where users differ
    (a spread above 0), the first fields describe the middle user, and each user's own parameters are drawn around them.

    Args:
        base_logit: logit of an engagement without incentive and without fatigue.
        alpha: what one unit of response g(a) adds to the logit now.
        beta: what one unit of fatigue takes from the logit.
        rho: share of the fatigue that remains after a step, in [0, 1).
        eta: fatigue that one unit of response adds.
        revenue_per_engagement: mean revenue of an engagement, in currency.
        max_level: the largest amount of the grid (the paper's K).
        horizon: steps of an episode (the paper's T).
        spacing: "unit" for the amounts 0, 1, ..., max_level; "geometric" for 0 and the distinct rounded values of
            ``geomspace(1, max_level, spacing_points)``.
        spacing_points: points of the geometric spacing, before rounding and without 0.
        response: "linear" for g(a) = a; "log" for g(a) = ln(1 + a / response_scale).
        response_scale: the amount at which the logarithmic response bends, in incentive units.
        cost_rate: cost in currency of one unit of incentive.
        revenue_sigma: standard deviation of the logarithm of the revenue of an engagement (log-normal); 0: no noise.
        hidden_fatigue: whether the policy's features leave the fatigue out.
        base_logit_spread: standard deviation of the users' normal base_logit.
        alpha_spread: standard deviation of ln(alpha); the median is alpha.
        beta_spread: standard deviation of ln(beta); the median is beta.
        rho_spread: half the width of the uniform interval around rho.
        incentive_unit: what the amounts count.
        currency: what revenue and cost are in.

    Raises:
        ConfigurationError: a field has a value that cannot work; the message names it.
    """

    base_logit: float
    alpha: float
    beta: float
    rho: float
    eta: float
    revenue_per_engagement: float
    max_level: int
    horizon: int
    spacing: Literal["unit", "geometric"] = "unit"
    spacing_points: int = 31
    response: Literal["linear", "log"] = "linear"
    response_scale: float = 30.0
    cost_rate: float = 1.0
    revenue_sigma: float = 0.0
    hidden_fatigue: bool = False
    base_logit_spread: float = 0.0
    alpha_spread: float = 0.0
    beta_spread: float = 0.0
    rho_spread: float = 0.0
    incentive_unit: str = "units"
    currency: str = "units"

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(Parameters).items():
            object.__setattr__(self, name, _typed(name, kind, getattr(self, name)))
        _at_least("alpha", self.alpha, 0.0, "an incentive should not lower the chance of an engagement")
        _at_least("beta", self.beta, 0.0, "fatigue should not raise the chance of an engagement")
        _at_least("eta", self.eta, 0.0, "use 0 for incentives that do not tire")
        _at_least("max_level", self.max_level, 1, "there must be something to pay")
        _at_least("horizon", self.horizon, 1, "an episode has at least one step")
        _at_least("spacing_points", self.spacing_points, 2, "or use spacing 'unit'")
        for name in ("revenue_sigma", "base_logit_spread", "alpha_spread", "beta_spread", "rho_spread"):
            _at_least(name, getattr(self, name), 0.0, "use 0 for no spread")
        for name in ("revenue_per_engagement", "response_scale", "cost_rate"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be above 0, got {getattr(self, name)}: give a positive number")
        if self.rho - self.rho_spread < 0 or self.rho + self.rho_spread >= 1:
            raise ConfigurationError(
                f"rho - rho_spread and rho + rho_spread must lie in [0, 1), got rho = {self.rho} and rho_spread = "
                f"{self.rho_spread}: fatigue that does not decay never ends, so choose a smaller rho or spread"
            )

    @cached_property
    def levels(self) -> Floats:
        """Amounts that the environment knows, ascending from 0, shape (n,), in incentive units; read-only."""
        if self.spacing == "unit":
            levels = np.arange(self.max_level + 1, dtype=np.float64)
        else:
            points = np.round(np.geomspace(1, self.max_level, self.spacing_points))
            levels = np.concatenate(([0.0], np.unique(points)))
        levels.setflags(write=False)
        return levels

    @cached_property
    def level_responses(self) -> Floats:
        """Response g of every level, shape (n,); read-only."""
        responses = self.g(self.levels)
        responses.setflags(write=False)
        return responses

    @cached_property
    def _midpoints(self) -> Floats:
        return (self.levels[1:] + self.levels[:-1]) / 2

    @property
    def numeric_names(self) -> tuple[str, ...]:
        """Names of the features that a policy sees before each decision, in the order of the feature columns."""
        seen = ("previous_engagement", "progress")
        return seen if self.hidden_fatigue else ("fatigue", *seen)

    @property
    def users_alike(self) -> bool:
        """Whether all users are of one type."""
        return not (self.base_logit_spread or self.alpha_spread or self.beta_spread or self.rho_spread)

    @property
    def max_fatigue(self) -> float:
        """Fatigue that the most enduring user can reach within an episode by always being paid the most."""
        rho = self.rho + self.rho_spread
        return float(self.eta * self.level_responses[-1] * (1 - rho**self.horizon) / (1 - rho))

    def g(self, amounts: ArrayLike) -> Floats:
        """Response to an amount: the amount itself, or ln(1 + amount / response_scale). Any shape."""
        amounts = np.asarray(amounts, dtype=np.float64)
        return amounts.copy() if self.response == "linear" else np.log1p(amounts / self.response_scale)

    def cost(self, amounts: ArrayLike) -> Floats:
        """Cost of amounts, in currency. Any shape."""
        return self.cost_rate * np.asarray(amounts, dtype=np.float64)

    def nearest(self, amounts: ArrayLike) -> NDArray[np.int64]:
        """Index of the level nearest to each amount, any shape; a tie goes to the smaller level.

        Raises:
            ConfigurationError: an amount is negative, infinite or NaN.
        """
        amounts = np.asarray(amounts, dtype=np.float64)
        legal = (amounts >= 0) & (amounts < np.inf)
        if not legal.all():
            bad = amounts[~legal].flat[0]
            raise ConfigurationError(f"amounts must be finite and not negative, got {bad}: pay 0 or more")
        return np.searchsorted(self._midpoints, amounts, side="left")

    def expected_revenue(self, amounts: ArrayLike, fatigue: ArrayLike) -> Floats:
        """Mean revenue of the middle user's next step, in currency; `amounts` and `fatigue` are broadcast."""
        logits = self.base_logit + self.alpha * self.g(amounts) - self.beta * np.asarray(fatigue, dtype=np.float64)
        return self.revenue_per_engagement * expit(logits)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values; ``Parameters(**parameters.to_dict())`` gives them back."""
        return dataclasses.asdict(self)


_PRESETS: dict[str, Parameters] = {
    # Degenerate as the paper gives it: never paying beats every constant amount (docs/decisions.md).
    "paper": Parameters(
        base_logit=0.0, alpha=0.8, beta=1.2, rho=0.9, eta=0.5, revenue_per_engagement=1.0, max_level=10, horizon=100
    ),
    "calibrated": Parameters(
        base_logit=-3.0, alpha=0.8, beta=1.2, rho=0.9, eta=0.05, revenue_per_engagement=30.0, max_level=10, horizon=100
    ),
    "population": Parameters(
        base_logit=-3.0,
        alpha=1.6,
        beta=1.2,
        rho=0.9,
        eta=0.1,
        revenue_per_engagement=30.0,
        max_level=3000,
        horizon=100,
        spacing="geometric",
        response="log",
        cost_rate=0.01,
        revenue_sigma=0.5,
        hidden_fatigue=True,
        base_logit_spread=0.5,
        alpha_spread=0.25,
        beta_spread=0.3,
        rho_spread=0.05,
        incentive_unit="coins",
    ),
}
PRESETS = tuple(_PRESETS)


def preset(name: str) -> Parameters:
    """Parameters of a named environment: "paper", "calibrated" or "population".

    Raises:
        ConfigurationError: no preset has that name.
    """
    if name not in _PRESETS:
        raise ConfigurationError(f"there is no environment preset {name!r}: choose one of {', '.join(PRESETS)}")
    return _PRESETS[name]


def load(source: str | PathLike[str]) -> Parameters:
    """Parameters of a preset's name or of a TOML file.

    The file names a preset and overrides any of its fields::

        preset = "calibrated"
        [parameters]
        eta = 0.03

    Args:
        source: a preset's name, or the path of such a file. Without `preset` the table must give all required fields.

    Raises:
        ConfigurationError: the file cannot be read, or has an unknown key or a value that cannot work.
    """
    if source in _PRESETS:
        return _PRESETS[str(source)]
    path = Path(source)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"environment {str(source)!r} is neither a preset ({', '.join(PRESETS)}) nor a file: check the path"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"environment file {path} cannot be read as TOML: {error}") from error
    _known("key", content, ("preset", "parameters"), path)
    overrides = content.get("parameters", {})
    if not isinstance(overrides, dict):
        raise ConfigurationError(
            f"{path}: 'parameters' must be a table, got {overrides!r}: write [parameters] above it"
        )
    fields = dataclasses.fields(Parameters)
    _known("parameter", overrides, tuple(field.name for field in fields), path)
    base = preset(str(content["preset"])).to_dict() if "preset" in content else {}
    values = base | overrides
    missing = [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in values]
    if missing:
        raise ConfigurationError(f"{path} lacks {', '.join(missing)}: give them, or name a preset to start from")
    try:
        return Parameters(**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _known(kind: str, names: dict[str, Any], known: tuple[str, ...], path: Path) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ConfigurationError(f"{path} has an unknown {kind} {name!r}: {remedy}")
