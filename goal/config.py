"""Every setting of the package, in one place, as frozen dataclasses.

The paper calls three things epsilon and two things delta (docs/decisions.md 5); here each has its own name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from goal.checks import (
    require,
    require_choices,
    require_counts,
    require_each,
    require_not_negative,
    require_positive,
)


@dataclass(frozen=True)
class VocabularyConfig:
    """Algorithm 1. Defaults are the reference settings of the method's origin (docs/decisions.md 7)."""

    q_start: float = 0.9999
    q_end: float = 0.9
    decay: float = 0.99
    """Factor on the percentile after each round (the first of the paper's two deltas)."""
    relative_error: float = 1e-3
    """Worst residual over amount at which the rounds stop (epsilon 1)."""
    min_unit: float = 1.0
    """Smallest value told from zero, in the incentive's unit (epsilon 2)."""
    max_tokens: int = 512
    max_length: int = 16
    """Most value tokens in one amount."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """What a user chooses of the policy network and of the rules its amounts obey."""

    window: int = 16
    """Events in a window, the pending one included. The policy is left with the pending one alone where the log gives
    no evidence that the past says more than the features do (`RewardConfig.history`)."""
    dimension: int = 64
    heads: int = 2
    convolution: bool = True
    """Dilated causal convolution before the attention; False is the ablation "w/o DCC"."""
    kernel_size: int = 3
    dilations: tuple[int, ...] = (1, 2, 4)
    convolution_activation: Literal["linear", "gelu"] = "linear"
    """The paper's block is linear inside (docs/decisions.md 12)."""
    encoder_layers: int = 1
    decoder_layers: int = 1
    feedforward: int = 128
    experts: int = 4
    experts_per_token: int = 2
    expert_hidden: int = 64
    dropout: float = 0.0
    canonical: bool = True
    """Only greedy decompositions can be written, so that each amount has exactly one sequence."""
    correct_weighting: bool = True
    """Take log omega off the logits wherever the policy is read (docs/decisions.md 11)."""
    weight_smoothing: float = 1.0
    """The delta of omega = log10(v + 1) + delta, Eq. of the weighted next-token loss."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_counts(
            self, "window dimension heads kernel_size encoder_layers decoder_layers feedforward experts expert_hidden"
        )
        require(self.dimension % self.heads == 0, "heads", self.heads, f"a divisor of dimension={self.dimension}")
        require(all(d >= 1 for d in self.dilations), "dilations", self.dilations, "integers of at least 1")
        require(
            1 <= self.experts_per_token <= self.experts,
            "experts_per_token", self.experts_per_token, f"between 1 and experts={self.experts}",
        )  # fmt: skip
        require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        require_positive(self, "weight_smoothing")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(NetworkConfig):
    """A policy network whole: what the user chose and what the log decided.

    Raises:
        ConfigurationError: a value that cannot work; the message names it and says what is expected.
    """

    vocabulary: tuple[float, ...]
    """Values of the tokens from large to small; ids 3, 4, ... (0 PAD, 1 SOS, 2 EOS)."""
    numeric_features: int = 0
    categories: tuple[tuple[str, ...], ...] = ()
    """The known categories of each categorical feature in the order of their codes 1, 2, ...; code 0 is unknown. Read a
    log with `goal.log.read(..., categories=policy.config.categories)`, so that the codes are those of training."""
    outcomes: int = 1
    """Columns of `History.outcomes`: the revenue, then the further objectives."""
    multiplier_max: float = 3.0
    """The network sees multiplier / multiplier_max."""
    max_length: int = 17
    """Most tokens of one amount, EOS counted."""
    maximum_amount: float | None = None
    """Largest amount that can be written: the paper's C_max mapped to an amount. None: no bound."""
    allowed_amounts: tuple[float, ...] | None = None
    """The only amounts that can be written, ascending (needs `canonical`). None: every sum of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        values = self.vocabulary
        require(len(values) > 0, "vocabulary", values, "at least one value")
        require(
            all(a > b for a, b in pairwise((math.inf, *values))) and values[-1] > 0,
            "vocabulary", values, "positive values, strictly descending and finite",
        )  # fmt: skip
        require_counts(self, "outcomes")
        require(self.numeric_features >= 0, "numeric_features", self.numeric_features, "at least 0")
        require_positive(self, "multiplier_max")
        require(self.max_length >= 2, "max_length", self.max_length, "at least 2 (a token and EOS)")
        require(
            self.maximum_amount is None or self.maximum_amount >= 0,
            "maximum_amount", self.maximum_amount, "None or at least 0",
        )  # fmt: skip
        amounts = self.allowed_amounts
        if amounts is not None:
            require(self.canonical, "allowed_amounts", "a list", "canonical=True beside it")
            require(
                len(amounts) > 0 and amounts[0] >= 0 and all(a < b for a, b in pairwise(amounts)),
                "allowed_amounts", amounts, "amounts of at least 0, strictly ascending",
            )  # fmt: skip
            # An amount beyond the bound would be offered and could not be written to its end.
            most = math.inf if self.maximum_amount is None else self.maximum_amount + 1e-6 * min(values)
            require(
                math.isfinite(max(amounts)) and max(amounts) <= most,
                "allowed_amounts", amounts, f"finite amounts, none above maximum_amount={self.maximum_amount}",
            )  # fmt: skip

    @property
    def categorical_sizes(self) -> tuple[int, ...]:
        """Number of known categories of each categorical feature."""
        return tuple(len(names) for names in self.categories)

    @property
    def vocabulary_size(self) -> int:
        """V, the special tokens included."""
        return len(self.vocabulary) + 3


@dataclass(frozen=True)
class LoopConfig:
    """One optimisation loop, the same for every stage."""

    steps: int
    batch_size: int
    learning_rate: float = 2e-3
    final_learning_rate: float = 0.0
    """Where the cosine ends."""
    warmup_steps: int = 50
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    amp: bool = False
    """bfloat16 autocast; takes effect on CUDA."""
    log_every: int = 50
    checkpoint_seconds: float = 30.0
    """Least time between two checkpoints; one is always written at the end."""

    def __post_init__(self) -> None:
        require_counts(self, "steps batch_size log_every")
        require_positive(self, "learning_rate")
        require_not_negative(self, "final_learning_rate weight_decay")
        require_each(self, "warmup_steps checkpoint_seconds", lambda value: value >= 0, "at least 0")
        require(self.gradient_clip > 0, "gradient_clip", self.gradient_clip, "positive")


@dataclass(frozen=True)
class PretrainingConfig:
    """Weighted next-token prediction on the log (W-NTP)."""

    loop: LoopConfig = LoopConfig(steps=400, batch_size=128, learning_rate=3e-3)


@dataclass(frozen=True)
class RewardConfig:
    """P-Score and long-horizon value (docs/decisions.md 2)."""

    horizon: Literal["immediate", "long"] = "long"
    """"immediate" is the paper's reading: no to-go terms."""
    history: Literal["auto", "always"] = "auto"
    """"auto" leaves the past out of P-Score, value and policy where it does not help on kept-back stretches of the log
    to predict what a payment brings; "always" uses it."""
    discount: float = 0.98
    """Of later money, a step."""
    episode_discount: float = 1.0
    """The same where the past is left out and an episode has a known length and a clock: there values are planned from
    its last step back, exactly, and nothing need be discounted (docs/decisions.md)."""
    fusion_weight: float = 0.0
    """Weight of the fused objectives (P-Score) in R beside the money terms."""
    window: int = 64
    """Events that P-Score and value read in policy optimisation, the pending one included, where the past is used: more
    than the policy does, since averages over many cost little. They learn from decisions with 16 to 79 events before
    them (stretches of 64 decisions and what came before)."""
    dimension: int = 64
    """Width of the P-Score."""
    value_dimension: int = 128
    """Width of the value networks."""
    pscore: LoopConfig = LoopConfig(steps=1200, batch_size=2048, learning_rate=4e-3)
    value: LoopConfig = LoopConfig(steps=1500, batch_size=1024, learning_rate=2e-3, warmup_steps=100)
    ensemble: int = 2
    """Value networks trained side by side on the same log, where the past is used; the least of their utilities
    counts."""
    counterfactual: float = 0.5
    """Share of decisions whose value is learned at another amount than the logged one, with the outcome that the
    P-Score expects of it and what both do to the next features (`AmountEffects`)."""
    travel: float = 20.0
    """Steps of an episode that value travels back over the training of the value networks: their targets follow at
    travel / steps. What is believed of a user errs in ways that last, and a policy that looks further ahead finds more
    errors than reasons (docs/decisions.md)."""
    grid_size: int = 24
    """Amounts at which values are compared where the log has more distinct amounts than this."""

    def __post_init__(self) -> None:
        require_choices(self)
        require(0 <= self.discount < 1, "discount", self.discount, "in [0, 1)")
        require(math.isfinite(self.fusion_weight), "fusion_weight", self.fusion_weight, "finite")
        require(0 <= self.counterfactual <= 1, "counterfactual", self.counterfactual, "in [0, 1]")
        require_counts(self, "window dimension value_dimension ensemble")
        require(0 <= self.episode_discount <= 1, "episode_discount", self.episode_discount, "in [0, 1]")
        require_positive(self, "travel")
        require(self.grid_size >= 2, "grid_size", self.grid_size, "at least 2")


@dataclass(frozen=True)
class ScpoConfig:
    """Safe constrained policy optimisation, Algorithm 3."""

    loop: LoopConfig = LoopConfig(steps=700, batch_size=480, learning_rate=3e-3, log_every=10)
    """`batch_size` counts (state, multiplier) groups; every state meets every multiplier."""
    repeat: int = 2
    """Where the past is left out a step reads one event a state instead of a window: so many times the steps."""
    rollout: Literal["auto", "exact", "shared", "per_multiplier"] = "auto"
    """Where a group's candidates come from (docs/decisions.md 3): "exact" takes every allowed amount, weighted by its
    probability, where the log lists them; "shared" draws once a state for all multipliers, "per_multiplier" once for
    each. "auto" is exact where amounts are listed, else per_multiplier."""
    group_size: int = 16
    """m, the candidates of one (state, multiplier)."""
    pool: int = 8
    """The exact rollout draws from this many times as many states those where most is still lost."""
    most_tokens: int = 16_384
    """Bounds the states of the exact rollout: those of a pool are, under all multipliers, no more tokens than this for
    encoder and decoder to read, those of an update half. Long windows and many amounts of many tokens would make a step
    last minutes."""
    imagined: float = 0.5
    """Share of the drawn states that the policy brings about itself, as the reward model imagines them, where the past
    is used and values look ahead."""
    imagined_steps: int = 48
    """Mean events of an imagined trajectory, unless the log of its user ends before."""
    exploration: float = 0.05
    """Probability added, over all amounts, to those better than the policy's mean, in the exact rollout."""
    updates_per_rollout: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_weight_start: float = 0.3
    """Weight of the KL at the beginning; it falls to `kl_weight` over the first half."""
    kl_weight: float = 0.01
    kl: Literal["exact", "k3"] = "exact"
    """Of sampled candidates; that of the exact rollout is always exact."""
    ratio: Literal["sequence", "token"] = "sequence"
    std_floor: float = 0.0
    """Least standard deviation of a group, in money."""
    advantage_epsilon: float = 1e-6
    importance_cap: float = 5.0
    """Truncation of pi_old / mu in the shared rollout."""

    def __post_init__(self) -> None:
        require_choices(self)
        require(self.group_size >= 2, "group_size", self.group_size, "at least 2")
        require_counts(self, "repeat pool most_tokens imagined_steps updates_per_rollout")
        require_each(self, "imagined exploration", lambda value: 0 <= value <= 1, "in [0, 1]")
        require_not_negative(self, "kl_weight kl_weight_start std_floor")
        # Without it a group of equal candidates would divide 0 by 0.
        require_positive(self, "advantage_epsilon")
        require(self.importance_cap > 0, "importance_cap", self.importance_cap, "positive")
        require_each(self, "clip_low clip_high", lambda value: 0 < value < 1, "in (0, 1)")


@dataclass(frozen=True)
class ConstraintConfig:
    """Candidate multipliers and calibration (the paper's appendix on lambda, Algorithm 2)."""

    step: float = 0.5
    fine_step: float = 0.03
    """Distance of the multipliers among which calibration searches."""
    roi: Literal["average", "incremental"] = "average"
    confidence: float | None = 0.95
    """Confidence that new traffic meets the target too; None takes the estimate itself."""
    users: int = 800
    """Simulated users of one calibration rollout."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_positive(self, "step fine_step")
        require(
            self.confidence is None or 0.5 < self.confidence < 1, "confidence", self.confidence, "None or in (0.5, 1)"
        )
        require(self.users >= 2, "users", self.users, "at least 2")


@dataclass(frozen=True)
class EvaluationConfig:
    """Rollouts and metrics."""

    users: int | None = None
    """Fresh users of each multiplier; None: 2,000, or 1,000 where they differ and the optimum is solved for each."""
    rvr_window: int = 1000
    """Interactions of one window of the ROI violation rate."""
    rvr_stride: int | None = None
    """Interactions from one window to the next; None: a quarter of the window."""

    def __post_init__(self) -> None:
        require(self.rvr_window >= 1, "rvr_window", self.rvr_window, "at least 1")
        require(self.users is None or self.users >= 1, "users", self.users, "None or at least 1")
        require(self.rvr_stride is None or self.rvr_stride >= 1, "rvr_stride", self.rvr_stride, "None or at least 1")

    def window(self, interactions: int) -> int:
        """Window of the ROI violation rate on a stream; a shorter stream is one window."""
        return min(self.rvr_window, interactions)

    def stride(self, interactions: int) -> int:
        """Interactions from one window to the next."""
        return max(1, self.window(interactions) // 4) if self.rvr_stride is None else self.rvr_stride


@dataclass(frozen=True)
class RunConfig:
    """The whole of `goal run`."""

    environment: str | None = "calibrated"
    """Simulated environment: a preset (calibrated, paper, population) or a TOML file; None beside a log."""
    log: str | None = None
    """A log to learn from instead: Parquet file or folder, or CSV; needs the schema. The defaults below are those of
    simulated logs; `goal.effort.effort("default", simulated=False)` returns those of real ones."""
    schema: str | None = None
    """TOML file that names the roles of the log's columns."""
    roi_target: float = 3.0
    """Revenue per unit of cost to reach over all traffic."""
    seed: int = 0
    effort: Literal["default", "thorough"] = "default"
    """What `goal run --effort` took the defaults of everything below from (see `goal.effort.effort`)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int | None = None
    """Threads of PyTorch on the CPU; None leaves PyTorch's own choice."""
    maximum_amount: float | None = None
    """Largest amount that the policy may pay (the paper's C_max over the cost of a unit); None: the largest logged."""
    simulated_users: int = 10_000
    """Users of the simulated log."""
    vocabulary: VocabularyConfig = VocabularyConfig()
    network: NetworkConfig = NetworkConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    reward: RewardConfig = RewardConfig()
    scpo: ScpoConfig = ScpoConfig()
    constraint: ConstraintConfig = ConstraintConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def __post_init__(self) -> None:
        require_choices(self)
        require(
            math.isfinite(self.roi_target) and self.roi_target > 0, "roi_target", self.roi_target, "positive and finite"
        )
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "None or at least 1")
        cap = self.maximum_amount
        require(cap is None or 0 < cap < math.inf, "maximum_amount", cap, "None or positive and finite")
        require(self.simulated_users >= 1, "simulated_users", self.simulated_users, "at least 1")
        require(
            self.log is None or self.environment is None,
            "environment",
            self.environment,
            f"None beside log={self.log}: they exclude each other, leave one of them out",
        )
        require(
            (self.log is None) == (self.schema is None),
            "schema",
            self.schema,
            "--log and --schema together, or neither",
        )
