"""Safe constrained policy optimisation (paper, Section "SCPO" and Algorithm 3).

Shapes: S states, n multipliers, m candidates, T tokens, V vocabulary; G = S * n * m sequences.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from goal.config import ScpoConfig
from goal.errors import ConfigurationError
from goal.log import History
from goal.model import Policy
from goal.model.tree import TokenTree, with_start
from goal.reward import RewardModel, RewardTable
from goal.training.imagination import ImaginedStates
from goal.training.states import StateSampler
from goal.training.transitions import Transitions
from goal_kernels import group_advantage, scpo_loss

JUDGED = 3
"""Multipliers, drawn afresh each time, under which the states of a pool are judged."""
NO_KL = 1e-4
"""A geometric fall never gets to 0; a weight of 0 is approached by way of this one."""


class Rollout(NamedTuple):
    """Candidates of one batch of states with all that the updates need."""

    history: History
    inputs: torch.Tensor
    """`(S * n, m, T)` ids from SOS on."""
    targets: torch.Tensor
    """`(S * n, m, T)` ids up to EOS."""
    lengths: torch.Tensor
    """`(S * n, m)`, EOS counted."""
    logits: torch.Tensor
    """`(S * n, m, T, V)` under the weights that took the candidates; the first update differentiates them."""
    old_log_probs: torch.Tensor
    """`(S * n, m, T)`."""
    reference_logits: torch.Tensor
    """`(S * n, m, T, V)`."""
    advantages: torch.Tensor
    """`(S * n, m)`."""
    metrics: dict[str, torch.Tensor]


class Scpo:
    """The stage: samples candidates, scores them with the reward model, updates the policy against its frozen start.

    Args:
        policy: trained in place; its weights at this moment are the reference.
        reward: gives R and C; frozen.
        states: draws the states.
        config: the settings.
        transitions: of the log, where a share of the states is to be the policy's own (see `ImaginedStates`).
    """

    name = "scpo"

    def __init__(
        self,
        policy: Policy,
        reward: RewardModel,
        states: StateSampler,
        config: ScpoConfig,
        *,
        transitions: Transitions | None = None,
    ) -> None:
        self.reference = copy.deepcopy(policy).requires_grad_(False).eval()
        # Dropout stays off: a ratio between two different masks would not be one between policies.
        self.policy = policy.eval()
        self.module: nn.Module = policy
        self.imagined: ImaginedStates | None = None
        self.reward = reward.requires_grad_(False).eval()
        self.states = states
        self.config = config
        self.multipliers = reward.multipliers
        self.source = config.rollout
        if self.source == "auto":
            self.source = "exact" if policy.config.allowed_amounts is not None else "per_multiplier"
        if self.source == "exact" and policy.config.allowed_amounts is None:
            raise ConfigurationError("rollout='exact': needs a policy with allowed_amounts; take 'per_multiplier'")
        self.most_states = 2 * config.loop.batch_size
        if self.source == "exact":
            read = 1 + policy.config.window + len(self._tree)
            self.most_states = max(1, config.most_tokens // (len(self.multipliers) * read))
        self.per_step = max(1, min(round(config.loop.batch_size / len(self.multipliers)), self.most_states // 2))
        """States of one step."""
        pool = config.pool if self.source == "exact" else 1
        self.drawn = max(self.per_step, min(pool * self.per_step, self.most_states))
        """States of which they are chosen."""
        own = math.ceil(config.imagined * self.drawn)
        if transitions is not None and own:
            self.imagined = ImaginedStates(
                transitions, self.multipliers, count=own, steps=config.imagined_steps, length=states.windows.length
            )
            self.module = nn.ModuleDict({"policy": policy, "imagined": self.imagined})

    @property
    def _tree(self) -> TokenTree:
        """All that the policy may write (exact rollout)."""
        assert self.policy.choices.tree is not None
        return self.policy.choices.tree

    def after_step(self) -> None:
        """Nothing follows a step."""

    def losses(
        self, generator: torch.Generator, progress: float
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """One rollout, then a loss for each update on it."""
        history, table = self.draw(generator)
        rollout = self.rollout(history, generator, table=table)
        kl_weight = self.kl_weight(progress)
        for update in range(self.config.updates_per_rollout):
            yield self.loss(rollout, kl_weight=kl_weight, logits=None if update else rollout.logits)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> tuple[History, RewardTable]:
        """Draw states with their rewards, those where the policy still loses most first (exact rollout only).

        The log's behaviour rarely meets the states that a good policy lives in, and a policy that is right in the
        common ones can be wrong in those for long. From `pool` times as many states (or as `most_tokens` allow), half
        of the chance goes by the expected loss against the best amount under a few of the multipliers, each one's
        relative to its mean, and half is uniform.
        """
        history, count, pool = self._states(generator), self.per_step, self.drawn
        table = self.reward.tabulate(history)
        if pool == count:
            return history, table
        some = torch.randperm(len(self.multipliers), generator=generator)[:JUDGED].to(history.device)
        tokens, lengths, amounts = self._candidates(history, generator)
        groups = (torch.arange(pool, device=history.device)[:, None] * len(self.multipliers) + some).flatten()
        logits = self._logits(self.policy, history, with_start(tokens[groups]), self.multipliers[some])
        log_pi, _ = log_probs(logits, tokens[groups], lengths[groups])
        value = self.reward.at(table, amounts)
        utility = (value.reward - self.multipliers[:, None] * value.cost)[:, some]
        loss = utility.amax(dim=-1) - (log_pi.view_as(utility).exp() * utility).sum(dim=-1)
        score = (loss / loss.mean(dim=0).clamp(min=1e-9)).clamp(min=0).mean(dim=1)
        chance = (score + score.mean() + 1e-9).cpu()
        chosen = torch.multinomial(chance, count, generator=generator).to(history.device)
        return history.select(chosen), RewardTable(*(part[chosen] for part in table))

    def _states(self, generator: torch.Generator) -> History:
        """States of the log, and of the policy's own making if they are imagined."""
        if self.imagined is None:
            return self.states.draw(self.drawn, generator)
        own = self.states.at_any_step(self.imagined.draw(self.policy, generator), generator)
        return History.cat([self.states.draw(self.drawn - len(own), generator), own])

    def kl_weight(self, progress: float) -> float:
        """Weight of the KL: from its start to its end geometrically over the first half, then constant.

        While it is large the policy stays soft and the network has time to learn which states differ; without it the
        policy settles on one amount for all of them first, and the clip lets it leave that by a few per cent a rollout.
        """
        start, end = self.config.kl_weight_start, self.config.kl_weight
        if start <= end or progress >= 0.5:
            return end
        return start * (max(end, NO_KL) / start) ** (2 * progress)

    def _seen(self, history: History) -> History:
        """What the policy sees of a window, cut before it is repeated; the reward model may read more."""
        return history.last(self.policy.config.window)

    def _logits(
        self, policy: Policy, history: History, tokens: torch.Tensor, multipliers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits `(S * n, m, T, V)`, n of ``multipliers``; the convolution runs once a state, not once a multiplier."""
        multipliers = self.multipliers if multipliers is None else multipliers
        count = len(multipliers)
        states = policy.causal_states(history).repeat_interleave(count, dim=0)
        lengths = history.lengths.repeat_interleave(count)
        memory = policy.remember(states, lengths, multipliers.repeat(len(history)))
        return policy.score_every(memory) if self.source == "exact" else policy.score(memory, tokens)

    def rollout(self, history: History, generator: torch.Generator, *, table: RewardTable | None = None) -> Rollout:
        """Take m candidates for every (state, multiplier) and compute their advantages (Eqs. of r_lambda and A).

        Args:
            history: S states.
            generator: of the candidates, on the CPU.
            table: rewards of the states, if they are at hand.
        """
        tokens, lengths, amounts = self._candidates(history, generator)
        inputs = with_start(tokens)
        logits = self._logits(self.policy, history, inputs)
        with torch.no_grad():
            reference = self._logits(self.reference, history, inputs)
            log_pi, old = log_probs(logits, tokens, lengths)
            table = self.reward.tabulate(history) if table is None else table
            advantages, metrics = self._advantages(table, amounts, log_pi.view(amounts.shape))
        return Rollout(
            history, inputs, tokens, lengths, logits, old, reference, advantages.flatten(0, 1), metrics
        )  # fmt: skip

    def _advantages(
        self, table: RewardTable, amounts: torch.Tensor, log_pi: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Advantages `(S, n, m)` of amounts that the policy writes with `log_pi`, and metrics."""
        config, value = self.config, self.reward.at(table, amounts)
        utility = value.reward - self.multipliers[:, None] * value.cost
        advantages = group_advantage(
            value.reward, value.cost, self.multipliers, eps=config.advantage_epsilon, std_floor=config.std_floor
        )
        weight = torch.ones_like(advantages)
        if self.source == "exact":
            weight = log_pi.exp()
            teaches = (advantages != 0).any(dim=-1, keepdim=True)
            advantages = self._expected_advantages(utility, weight).where(teaches, 0)
        elif self.source == "shared":
            log_mu = log_pi.logsumexp(dim=1, keepdim=True) - math.log(len(self.multipliers))
            weight = (log_pi - log_mu).exp().clamp(max=config.importance_cap)
        metrics = self._describe(advantages, weight, amounts, utility)
        return advantages * weight if self.source == "shared" else advantages, metrics

    def _candidates(
        self, history: History, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens `(S * n, m, T)` up to EOS, lengths `(S * n, m)` and amounts `(S, n, m)`."""
        tokens, lengths, amounts = self._sequences(history, generator)
        if self.policy.single_step:
            # What follows the first token has one choice: it adds nothing to ratio, KL or gradient.
            tokens, lengths = tokens[..., :1], lengths.clamp(max=1)
        return tokens, lengths, amounts

    def _sequences(
        self, history: History, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, count, states = self.config, len(self.multipliers), len(history)
        if self.source == "exact":
            tree, groups = self._tree, states * count
            tokens, lengths = tree.sequences.expand(groups, -1, -1), tree.lengths.expand(groups, -1)
            return tokens, lengths, self.policy.choices.allowed.expand(states, count, -1)
        if self.source == "shared":
            # mu, the mixture over the multipliers: each candidate's multiplier is drawn afresh.
            chosen = torch.randint(count, (states, config.group_size), generator=generator).to(history.device)
            generated = self.policy.generate(
                self._seen(history).repeat_interleave(config.group_size), self.multipliers[chosen.flatten()],
                samples=1, greedy=False, generator=self._device_generator(generator),
            )  # fmt: skip
            tokens = generated.tokens[:, 0].unflatten(0, (states, config.group_size)).repeat_interleave(count, dim=0)
            lengths = generated.lengths[:, 0].unflatten(0, (states, config.group_size)).repeat_interleave(count, dim=0)
            amounts = generated.amounts[:, 0].unflatten(0, (states, 1, config.group_size)).expand(-1, count, -1)
            return tokens, lengths, amounts
        generated = self.policy.generate(
            self._seen(history).repeat_interleave(count), self.multipliers.repeat(states),
            samples=config.group_size, greedy=False, generator=self._device_generator(generator),
        )  # fmt: skip
        return generated.tokens, generated.lengths, generated.amounts.unflatten(0, (states, count))

    def _expected_advantages(self, utility: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
        """Advantages `(S, n, m)` of all m amounts, each times m * its weight.

        The limit of a group that grows: mean and standard deviation are the policy's own, and the weight turns the mean
        over the amounts into an expectation; positive weights pass through the clipped surrogate. Amounts better than
        the policy's mean get `exploration` on top of their probability: a policy that has all but settled on the
        second best still learns of the best. Worse amounts get none, since pushing them down pushes up whatever the
        policy has settled on.
        """
        count = probability.shape[-1]
        probability = probability / probability.sum(dim=-1, keepdim=True)
        deviation = utility - (probability * utility).sum(dim=-1, keepdim=True)
        std = (probability * deviation.square()).sum(dim=-1, keepdim=True).sqrt()
        weight = torch.where(deviation > 0, probability + self.config.exploration / count, probability)
        advantages = deviation / (std.clamp(min=self.config.std_floor) + self.config.advantage_epsilon)
        return advantages * weight * count

    def loss(
        self, rollout: Rollout, *, kl_weight: float, logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The clipped surrogate with KL (paper, Eq. of L_SCPO) of a rollout under the present weights.

        In the exact rollout the group holds every amount once, so the KL is that of the distributions over amounts: a
        mean over the group would count a beginning that the policy never writes as much as one that it always does.

        Args:
            rollout: from `rollout`.
            kl_weight: weight of the KL.
            logits: `(S * n, m, T, V)` under the present weights, if they are at hand.
        """
        config, is_exact = self.config, self.source == "exact"
        logits = self._logits(self.policy, rollout.history, rollout.inputs) if logits is None else logits
        result = scpo_loss(
            logits.flatten(0, 1),
            rollout.reference_logits.flatten(0, 1),
            rollout.targets.flatten(0, 1),
            rollout.old_log_probs.flatten(0, 1),
            rollout.lengths.flatten(),
            rollout.advantages.flatten(),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_weight=0.0 if is_exact else kl_weight,
            kl=config.kl,
            ratio=config.ratio,
        )
        loss, kl, entropy = result.loss, result.kl, result.entropy
        if is_exact:
            log_pi, _ = log_probs(logits, rollout.targets, rollout.lengths)
            reference, _ = log_probs(rollout.reference_logits, rollout.targets, rollout.lengths)
            kl = (log_pi.exp() * (log_pi - reference)).sum(dim=-1).mean()
            entropy = -(log_pi.exp() * log_pi).sum(dim=-1).mean()
            loss = loss + kl_weight * kl
        metrics = {
            "kl": kl.detach(),
            "clip_fraction": result.clip_fraction.detach(),
            "entropy": entropy.detach(),
            "ratio_max": result.ratio_max.detach(),
            "ratio_min": result.ratio_min.detach(),
        }
        return loss, {**rollout.metrics, **metrics}

    def _describe(
        self, advantages: torch.Tensor, weight: torch.Tensor, amounts: torch.Tensor, utility: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The policy's mean amount at each multiplier, its expected utility, and how many groups teach nothing."""
        weight = weight / weight.sum(dim=-1, keepdim=True)
        amount = (weight * amounts).sum(dim=-1).mean(dim=0)
        metrics = {
            "zero_variance_share": (advantages == 0).all(dim=-1).float().mean(),
            "utility": (weight * utility).sum(dim=-1).mean(),
        }
        for index, multiplier in enumerate(self.multipliers.tolist()):
            metrics[f"amount@{multiplier:g}"] = amount[index]
        return metrics

    def _device_generator(self, generator: torch.Generator) -> torch.Generator:
        device = self.multipliers.device
        if device.type == "cpu":
            return generator
        seed = int(torch.randint(2**62, (), generator=generator))
        return torch.Generator(device=device).manual_seed(seed)


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of whole sequences `(G, m)` and of their tokens `(G, m, T)`."""
    by_token = logits.float().log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
    inside = torch.arange(tokens.shape[-1], device=tokens.device) < lengths[..., None]
    return by_token.where(inside, 0).sum(dim=-1), by_token
