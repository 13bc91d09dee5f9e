"""The policy: from a user's history and a multiplier to an amount, written token by token."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from goal.config import PolicyConfig
from goal.errors import ConfigurationError
from goal.log import FeatureScaling, History
from goal.model.choices import Choices
from goal.model.decoder import IncentiveDecoder, Memory
from goal.model.embedding import EventEmbedding, neutral_scaling
from goal.model.encoder import CausalStates, HistoryEncoder
from goal.model.generation import Generation, generate
from goal.model.saving import load, save
from goal.tokenizer import SOS


class Policy(nn.Module):
    """One policy for every multiplier (paper, Section "Autoregressive Incentive Generation").

    Args:
        config: shape of the network and rules of its amounts.
        scaling: measured on the training rows; None leaves features and amounts as they are.

    Example:
        >>> policy = Policy(PolicyConfig(vocabulary=(8.0, 4.0, 2.0, 1.0)))
        >>> sum(parameter.numel() for parameter in policy.parameters()) > 0
        True
    """

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling | None = None) -> None:
        super().__init__()
        self.config = config
        self.scaling = scaling or neutral_scaling(config)
        self._check_scaling()
        self.embedding = EventEmbedding(config, self.scaling)
        self.causal = CausalStates(config)
        self.encoder = HistoryEncoder(config)
        self.decoder = IncentiveDecoder(config)
        self.choices = Choices(config)
        values = self.choices.token_values
        weights = torch.log10(values + 1) + config.weight_smoothing
        self.register_buffer("token_weights", weights.to(torch.float32), persistent=False)

    token_weights: torch.Tensor
    """`(V,)`: omega of the weighted next-token loss, by token."""

    def _check_scaling(self) -> None:
        sizes = dict.fromkeys(("numeric_median", "numeric_mean", "numeric_std"), self.config.numeric_features)
        for name, size in {**sizes, "outcome_scale": self.config.outcomes}.items():
            if len(getattr(self.scaling, name)) != size:
                raise ConfigurationError(
                    f"scaling.{name} has {len(getattr(self.scaling, name))} entries, the policy has {size} such columns"
                )

    @property
    def single_step(self) -> bool:
        """Whether every amount is one token or none, so that the first step decides alone."""
        return self.choices.single_step

    def causal_states(self, history: History) -> torch.Tensor:
        """Encode a history without its multiplier: `(B, L, D)`, shared by all multipliers of a state.

        L is at most `config.window`: of a longer history the last events are read.
        """
        return self.causal(self.embedding(history.last(self.config.window)))

    def remember(self, causal_states: torch.Tensor, lengths: torch.Tensor, multiplier: torch.Tensor) -> Memory:
        """Encode causal states `(B, L, D)` of histories of ``lengths`` `(B,)` under multipliers `(B,)` for the decoder.

        A history longer than L lost its earliest events in `causal_states` and ends at L.
        """
        condition = self.encoder.embed_multiplier(multiplier)
        lengths = lengths.clamp(max=causal_states.shape[1])
        return self.decoder.remember(self.encoder(causal_states, condition), condition, lengths)

    def raw_logits(self, memory: Memory, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(B, m, T, V)` of what follows each of ``tokens`` `(B, m, T)`: not masked, weighting not corrected."""
        return self.decoder(memory, tokens)[0]

    def read(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Turn raw logits `(..., V)` into those of the policy: log omega taken off, what the rules forbid at -inf."""
        if self.config.correct_weighting:
            logits = logits - self.token_weights.log().to(logits.dtype)
        return logits.masked_fill(~mask, -math.inf)

    def score(self, memory: Memory, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(B, m, T, V)` of the policy after each of ``tokens`` `(B, m, T)`, which begin with SOS.

        Where the first step decides alone, it is computed once for all m, and later steps have one choice each.
        """
        mask = self.choices.teacher_forced(tokens)
        if self.single_step:
            first = self.raw_logits(memory, tokens[:, :1, :1])
            return self.read(first.expand(-1, tokens.shape[1], tokens.shape[2], -1), mask)
        return self.read(self.raw_logits(memory, tokens), mask)

    def score_every(self, memory: Memory) -> torch.Tensor:
        """Logits `(B, m, T, V)` of the policy at each place of the m sequences of `choices.tree`: every listed amount.

        The same as `score` of those sequences, with each shared beginning computed once.
        """
        tree = self.choices.tree
        assert tree is not None
        return self.read(tree.spread(self.decoder.score_tree(memory, tree)), tree.choices)

    def forward(self, history: History, multiplier: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Score token sequences (teacher forcing).

        Args:
            history: B windows, of which the last `config.window` events are read.
            multiplier: `(B,)`, at least 0.
            tokens: `(B, T)` ids beginning with SOS.

        Returns:
            Logits `(B, T, V)` of the token after each prefix; choices that the rules forbid are -inf.

        Raises:
            ValueError: a shape does not fit; the message names it.
        """
        self._check(history, multiplier)
        if tokens.ndim != 2 or len(tokens) != len(history) or not 1 <= tokens.shape[1] <= self.config.max_length:
            raise ValueError(
                f"tokens: shape {tuple(tokens.shape)} came; expected ({len(history)}, T) with T from 1 to "
                f"max_length={self.config.max_length}"
            )
        memory = self.remember(self.causal_states(history), history.lengths, multiplier)
        return self.score(memory, tokens[:, None])[:, 0]

    @torch.no_grad()
    def generate(
        self,
        history: History,
        multiplier: torch.Tensor,
        *,
        samples: int = 1,
        greedy: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Generation:
        """Write ``samples`` amounts for each of B states.

        Args:
            history: B windows, of which the last `config.window` events are read.
            multiplier: `(B,)`, at least 0.
            samples: sequences a state.
            greedy: take the most probable token at each step (paper, Eq. of the argmax); else draw it.
            temperature: divides the logits when drawing. `log_probs` are those of the policy at temperature 1.
            generator: source of randomness on the policy's device; None is the global one.

        Raises:
            ValueError: a shape or a setting does not fit; the message names it.
        """
        self._check(history, multiplier)
        if samples < 1 or not 0 < temperature < math.inf:
            raise ValueError(
                f"samples={samples}, temperature={temperature}: expected at least 1, and above 0 and finite"
            )
        memory = self.remember(self.causal_states(history), history.lengths, multiplier)
        return generate(self, memory, samples=samples, greedy=greedy, temperature=temperature, generator=generator)

    @torch.no_grad()
    def allocate(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        """Return the most probable amount of each state, `(B,)` float64, in the incentive's unit."""
        return self.generate(history, multiplier).amounts[:, 0]

    @torch.no_grad()
    def expert_usage(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        """Mean routing probability of each expert at the first step, `(layers, E)` (the paper's figure on experts)."""
        self._check(history, multiplier)
        memory = self.remember(self.causal_states(history), history.lengths, multiplier)
        start = torch.full((len(history), 1, 1), SOS, device=history.device)
        _, routing = self.decoder(memory, start)
        return torch.stack([probabilities.mean(dim=(0, 1)) for probabilities in routing])

    def _check(self, history: History, multiplier: torch.Tensor) -> None:
        config = self.config
        expected = (config.numeric_features, len(config.categorical_sizes), config.outcomes)
        came = (history.numeric.shape[-1], history.categorical.shape[-1], history.outcomes.shape[-1])
        if came != expected:
            raise ValueError(
                f"history: {came} numeric, categorical and outcome columns came; this policy was built for {expected}"
            )
        if not isinstance(multiplier, torch.Tensor):
            raise ValueError(f"multiplier: a {type(multiplier).__name__} came; expected a tensor ({len(history)},)")
        if multiplier.shape != history.lengths.shape:
            raise ValueError(
                f"multiplier: shape {tuple(multiplier.shape)} came; expected ({len(history)},), one a window"
            )
        # A GPU would have to be waited for to look at values.
        if multiplier.device.type == "cpu" and not torch.compiler.is_compiling():
            bad = ~(multiplier.isfinite() & (multiplier >= 0))
            if bad.any():
                raise ValueError(f"multiplier: {float(multiplier[bad][0])} came; expected finite numbers of at least 0")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights (safetensors), config.json, vocabulary.json and scaling.json into ``folder``."""
        save(self, Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Policy:
        """Read what `save_pretrained` wrote; the weights come back bit for bit.

        Raises:
            ConfigurationError: a file is absent or does not fit; the message names it.
        """
        return load(cls, Path(folder))
