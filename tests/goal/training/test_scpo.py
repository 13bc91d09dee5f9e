"""SCPO: ratios, signs, both rollouts, and what it converges to."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goal import Policy
from goal.config import LoopConfig, ScpoConfig
from goal.data import Data
from goal.log import History
from goal.model.tree import with_start
from goal.reward import RewardModel, RewardTable
from goal.tokenizer import EOS, PAD
from goal.training import Loop, Scpo, StateSampler
from goal.training.scpo import Rollout, log_probs
from goal_kernels import group_advantage

MULTIPLIERS = torch.tensor([0.0, 1.0, 4.0])


class KnownReward(torch.nn.Module):
    """R is concave in the amount: the best one is 8, 6 and 0 under the three multipliers."""

    multipliers = MULTIPLIERS
    at = RewardModel.at

    def __init__(self) -> None:
        super().__init__()
        self.grid = torch.arange(11.0)

    def tabulate(self, history: History) -> RewardTable:
        reward = -0.25 * (self.grid - 8).square()
        shape = (len(history), 11, 3)
        cost = self.grid[None, :, None].expand(shape)
        return RewardTable(reward[None, :, None].expand(shape), cost, torch.ones(len(history), 1, 1))


def make(policy: Policy, data: Data, **changes: object) -> Scpo:
    config = dataclasses.replace(ScpoConfig(loop=LoopConfig(steps=150, batch_size=48, learning_rate=5e-3)), **changes)
    windows = data.windows(data.splits.training, policy.config.window)
    states = StateSampler(windows, clock=data.clock, horizon=data.schema.horizon)
    return Scpo(policy, KnownReward(), states, config)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("rollout", "listed"),
    [("shared", True), ("shared", False), ("per_multiplier", True), ("per_multiplier", False), ("exact", True)],
)
def test_the_first_ratio_is_exactly_one(rollout: str, listed: bool, policy: Policy, data: Data) -> None:
    if not listed:  # several tokens an amount, so masks matter at each step
        config = dataclasses.replace(policy.config, vocabulary=(4.0, 1.0), allowed_amounts=None, maximum_amount=10.0)
        torch.manual_seed(0)
        policy = Policy(config, data.scaling)
    stage = make(policy, data, rollout=rollout, updates_per_rollout=1)
    for _, metrics in stage.losses(torch.Generator().manual_seed(0), 0.0):
        assert float(metrics["ratio_min"]) == 1.0 and float(metrics["ratio_max"]) == 1.0
        assert abs(float(metrics["kl"])) < 1e-6  # the policy is its own reference
        assert float(metrics["clip_fraction"]) == 0.0


def test_it_finds_the_best_amount_of_every_multiplier(policy: Policy, data: Data) -> None:
    for rollout in ("per_multiplier", "exact"):
        torch.manual_seed(0)
        fresh = Policy(policy.config, data.scaling)
        Loop(ScpoConfig(loop=LoopConfig(steps=150, batch_size=48, learning_rate=5e-3)).loop).run(
            make(fresh, data, rollout=rollout)
        )
        history = data.windows(data.splits.training, fresh.config.window).batch(np.arange(0, 4000, 97))
        for multiplier, best in zip(MULTIPLIERS.tolist(), (8, 6, 0), strict=True):
            amounts = fresh.allocate(history, torch.full((len(history),), multiplier))
            assert (amounts - best).abs().mean() < 0.5, (rollout, multiplier, amounts)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 1000), st.floats(-100, 100), st.floats(-100, 100))
def test_advantages_do_not_see_currency_or_constants(scale: float, revenue: float, spent: float) -> None:
    generator = torch.Generator().manual_seed(0)
    reward, cost = torch.randn(2, 5, 3, 8, generator=generator, dtype=torch.float64)
    base = group_advantage(reward, cost, MULTIPLIERS.double(), eps=1e-12)
    moved = group_advantage(scale * (reward + revenue), scale * (cost + spent), MULTIPLIERS.double(), eps=1e-12)
    torch.testing.assert_close(moved, base, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 1000), st.floats(-100, 100))
def test_advantages_of_the_exact_rollout_do_not_see_them_either(scale: float, constant: float) -> None:
    stage = Scpo.__new__(Scpo)
    stage.config = ScpoConfig(advantage_epsilon=1e-12)
    generator = torch.Generator().manual_seed(0)
    utility = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64)
    probability = torch.rand(5, 3, 8, generator=generator, dtype=torch.float64)
    base = stage._expected_advantages(utility, probability)
    moved = stage._expected_advantages(scale * (utility + constant), probability)
    torch.testing.assert_close(moved, base, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rollout", ["exact", "shared", "per_multiplier"])
def test_training_is_the_same_in_another_currency_and_with_what_comes_in_anyway(
    rollout: str, policy: Policy, data: Data
) -> None:
    class Elsewhere(KnownReward):
        def tabulate(self, history: History) -> RewardTable:
            table = super().tabulate(history)
            return RewardTable(64 * (table.reward + 5), 64 * table.cost, 64 * table.unit_cost)

    history = data.windows(data.splits.training, policy.config.window).batch(np.arange(0, 4000, 97))
    logits = []
    for reward in (KnownReward(), Elsewhere()):
        torch.manual_seed(0)
        fresh = Policy(policy.config, data.scaling)
        stage = make(fresh, data, rollout=rollout)
        stage.reward = reward  # pyright: ignore[reportAttributeAccessIssue]
        Loop(LoopConfig(steps=10, batch_size=48, learning_rate=5e-3)).run(stage)
        tokens = torch.arange(3, 14)[None, :, None]
        with torch.no_grad():
            logits.append(stage._logits(fresh, history, with_start(tokens.expand(len(history) * 3, -1, -1))))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


LAG = 8


class LateReward(KnownReward):
    """Paying brings 1 where nothing was paid eight decisions ago, and loses 1 where something was."""

    def tabulate(self, history: History) -> RewardTable:
        shape = (len(history), 2, 3)
        late = (history.lengths - 1 - LAG).clamp(min=0)[:, None]
        paid = (history.incentives.gather(1, late)[:, 0] > 0) & (history.lengths > LAG)
        sign = 1 - 2 * paid.float()
        reward = sign[:, None, None] * torch.tensor([0.0, 1.0])[:, None]
        return RewardTable(reward.expand(shape), torch.zeros(shape), torch.zeros(len(history), 1, 1))


@pytest.mark.parametrize(("window", "finds"), [(16, True), (1, False)])
def test_what_was_paid_eight_decisions_ago_is_seen_in_a_window_alone(
    window: int, finds: bool, policy: Policy, data: Data
) -> None:
    """Nothing but the past tells: the log pays 0 or 10 at random and shows no fatigue."""
    generator = np.random.default_rng(0)
    log = dataclasses.replace(
        data.log, incentives=10.0 * generator.integers(0, 2, data.log.events), numeric=0 * data.log.numeric
    )
    data = dataclasses.replace(data, log=log)
    config = dataclasses.replace(
        policy.config, window=window, dilations=(1, 2, 4), allowed_amounts=(0.0, 10.0), dimension=32
    )
    torch.manual_seed(0)
    learner = Policy(config, data.scaling)
    windows = data.windows(data.splits.training, 16)
    reward = LateReward()
    reward.grid = torch.tensor([0.0, 10.0])
    settings = ScpoConfig(loop=LoopConfig(steps=150, batch_size=144, learning_rate=4e-3), pool=1, imagined=0.0)
    Loop(settings.loop).run(Scpo(learner, reward, StateSampler(windows, clock=None, horizon=None), settings))  # pyright: ignore[reportArgumentType]
    history = windows.batch(np.flatnonzero(log.locate(windows.rows)[1] > LAG)[::5])
    seen = history.last(window)
    paid = learner.allocate(seen, torch.zeros(len(history)))
    table = reward.tabulate(history)
    brought = table.reward[..., 0].gather(1, (paid > 0).long()[:, None]).mean()
    best = table.reward[..., 0].amax(dim=1).mean()
    assert (brought > 0.9 * best) if finds else (brought < 0.2 * best)


def test_the_sampled_gradient_is_on_average_that_of_every_group_there_is(
    policy: Policy, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 2 of the amounts 0, 1 and 4 = 3 + 1: nine groups, each as likely as the token tree says."""
    config = dataclasses.replace(policy.config, vocabulary=(3.0, 1.0), allowed_amounts=(0.0, 1.0, 4.0))
    torch.manual_seed(0)
    policy = Policy(config, data.scaling)
    stage = make(policy, data, rollout="per_multiplier", group_size=2)
    with torch.no_grad():  # off its reference, so that the KL pulls too
        for parameter in policy.decoder.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    stage.multipliers = torch.tensor([1.0])
    generator = torch.Generator().manual_seed(0)
    state = stage.states.draw(1, generator)

    def gradient(rollout: Rollout) -> torch.Tensor:
        policy.zero_grad()
        stage.loss(rollout, kl_weight=0.5)[0].backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).double()

    def repeated(times: int) -> History:
        return state.select(torch.zeros(times, dtype=torch.int64))

    sampled = torch.stack([gradient(stage.rollout(repeated(400), generator)) for _ in range(24)])
    amounts = torch.tensor(config.allowed_amounts, dtype=torch.float64)
    tokens = torch.tensor([[EOS, PAD, PAD], [4, EOS, PAD], [3, 4, EOS]])
    with torch.no_grad():
        logits = stage._logits(policy, state, with_start(tokens[None]))
        log_pi, _ = log_probs(logits, tokens[None], torch.tensor([[1, 2, 3]]))
    probability = log_pi[0].double().exp()
    assert float(probability.sum()) == pytest.approx(1) and float(probability.min()) > 0.02
    expected = torch.zeros_like(sampled[0])
    for pair in itertools.product(range(3), repeat=2):
        chosen = torch.tensor(pair)
        group = tokens[chosen][None], 1 + chosen[None], amounts[chosen][None, None]
        monkeypatch.setattr(stage, "_sequences", lambda history, generator, group=group: group)
        expected += probability[chosen].prod() * gradient(stage.rollout(state, generator))
    mean, error = sampled.mean(dim=0), sampled.std(dim=0) / len(sampled) ** 0.5
    assert float((mean - expected).norm() / expected.norm()) < 0.1
    off = (mean - expected).abs() / error.clamp(min=1e-3 * float(error.max()))
    assert float((off > 3).double().mean()) < 0.03 and float(off.max()) < 6


def test_the_exact_rollout_weighs_a_beginning_by_how_often_it_is_written(policy: Policy, data: Data) -> None:
    """KL and entropy over the amounts 0, 1, 3 and 4 = 3 + 1, the second token of which is seldom asked for."""
    config = dataclasses.replace(policy.config, vocabulary=(3.0, 1.0), allowed_amounts=(0.0, 1.0, 3.0, 4.0))
    torch.manual_seed(0)
    policy = Policy(config, data.scaling)
    stage = make(policy, data, rollout="exact", updates_per_rollout=1)
    with torch.no_grad():
        for parameter in policy.decoder.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    generator = torch.Generator().manual_seed(0)
    history = stage.states.draw(3, generator)
    tokens = torch.tensor([[EOS, PAD, PAD], [4, EOS, PAD], [3, EOS, PAD], [3, 4, EOS]])
    lengths = torch.tensor([[1, 2, 2, 3]])
    whole = make(policy, data, rollout="per_multiplier")  # reads every token, and not the tree of their beginnings
    tokens = tokens.expand(9, -1, -1)
    log_pi, log_reference = (
        log_probs(whole._logits(each, history, with_start(tokens)), tokens, lengths)[0].detach().double()
        for each in (policy, stage.reference)
    )
    torch.testing.assert_close(log_pi.exp().sum(dim=1), torch.ones(9).double())
    rollout = stage.rollout(history, generator)
    loss, metrics = stage.loss(rollout._replace(advantages=torch.zeros(9, 4)), kl_weight=0.5)
    kl = (log_pi.exp() * (log_pi - log_reference)).sum(dim=1).mean()
    assert float(kl) > 0.01
    assert float(metrics["kl"]) == pytest.approx(float(kl), rel=1e-4)
    assert float(loss.detach()) == pytest.approx(0.5 * float(kl), rel=1e-4)
    assert float(metrics["entropy"]) == pytest.approx(float(-(log_pi.exp() * log_pi).sum(dim=1).mean()), rel=1e-4)


def test_kl_is_minimised(policy: Policy, data: Data) -> None:
    """With equal rewards only the KL pulls: a policy pushed off its reference comes back."""
    stage = make(policy, data, kl_weight=1.0, updates_per_rollout=1)
    with torch.no_grad():
        policy.decoder.tokens.weight[EOS] += torch.linspace(-1, 1, 16)
    optimiser = torch.optim.SGD(policy.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    history = stage.states.draw(16, generator)
    rollout = stage.rollout(history, generator)._replace(advantages=torch.zeros(48, 11))
    divergences = []
    for _ in range(20):
        loss, metrics = stage.loss(rollout, kl_weight=1.0)
        divergences.append(float(metrics["kl"]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert divergences[0] > 0.01 and divergences[-1] < 0.5 * divergences[0]


def test_a_drawn_clock_moves_the_whole_window(data: Data) -> None:
    windows = data.windows(data.splits.training, 4)
    sampler = StateSampler(windows, clock=2, horizon=100)
    history = sampler.draw(200, torch.Generator().manual_seed(0))
    last = history.numeric[torch.arange(200), history.lengths - 1, 2] * 100
    assert torch.allclose(last, last.round(), atol=1e-3) and last.min() < 5 and last.max() > 95
    full = history.lengths == 4
    late = full & (last > 4)
    steps = history.numeric[late][:, :, 2].diff(dim=1) * 100
    torch.testing.assert_close(steps, torch.ones_like(steps), rtol=0, atol=1e-3)


def test_states_where_most_is_lost_are_drawn_first(policy: Policy, data: Data) -> None:
    stage = make(policy, data, rollout="exact", pool=8)
    generator = torch.Generator().manual_seed(0)

    class ByFatigue(KnownReward):
        """Only states of low fatigue have anything to lose."""

        def tabulate(self, history: History) -> RewardTable:
            table = super().tabulate(history)
            fatigue = history.numeric[torch.arange(len(history)), history.lengths - 1, 0]
            return RewardTable(table.reward * (fatigue < 1.5)[:, None, None], 0 * table.cost, 0 * table.unit_cost)

    stage.reward = ByFatigue()  # pyright: ignore[reportAttributeAccessIssue]
    drawn = [stage.draw(generator)[0] for _ in range(6)]
    share = torch.cat([h.numeric[torch.arange(len(h)), h.lengths - 1, 0] < 1.5 for h in drawn]).float().mean()
    everywhere = (data.log.numeric[:, 0] < 1.5).mean()
    assert 0 < everywhere < 0.3 and share > 2 * everywhere


def test_the_weight_of_the_kl_falls_to_its_end(policy: Policy, data: Data) -> None:
    for end in (0.0, 0.01):
        stage = make(policy, data, kl_weight_start=0.3, kl_weight=end)
        weights = [stage.kl_weight(progress) for progress in np.linspace(0, 1, 21)]
        assert weights[0] == pytest.approx(0.3) and weights[10:] == [end] * 11
        assert all(a > b for a, b in itertools.pairwise(weights[:11]))


def test_moving_the_clock_leaves_the_padding_empty(data: Data) -> None:
    windows = data.windows(data.splits.training, 8)
    states = StateSampler(windows, clock=data.clock, horizon=data.schema.horizon)
    history = states.draw(400, torch.Generator().manual_seed(0))
    assert (history.lengths < 8).any()
    history.validate()


def test_a_step_scores_no_more_than_so_many_tokens(policy: Policy, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy.choices.tree is not None
    read = 1 + policy.config.window + len(policy.choices.tree)
    stage = make(policy, data, most_tokens=len(MULTIPLIERS) * read * 8)
    drawn: list[int] = []
    draw = stage.states.draw
    monkeypatch.setattr(stage.states, "draw", lambda size, generator: drawn.append(size) or draw(size, generator))
    generator = torch.Generator().manual_seed(0)
    next(iter(stage.losses(generator, 0.0)))
    assert drawn == [8]  # the pool, from which half are kept
    assert len(stage.draw(generator)[0]) == 4
