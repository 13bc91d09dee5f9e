"""group_advantage against a Python loop, and the groups that have no spread to divide by."""

from __future__ import annotations

import math
import os

import pytest
import torch

from goal_kernels.group_advantage import group_advantage


def loop(reward, cost, multipliers, eps=1e-6, std_floor=0.0):
    """Algorithm 3 in Python floats; NaN and infinite entries are left out and get 0."""
    out = torch.zeros(reward.shape, dtype=torch.float64)
    for s in range(reward.shape[0]):
        for j in range(reward.shape[1]):
            values = [
                float(r) - float(multipliers[j]) * float(c) for r, c in zip(reward[s, j], cost[s, j], strict=True)
            ]
            kept = [value for value in values if math.isfinite(value)]
            if not kept or max(kept) == min(kept):
                continue
            mean = math.fsum(kept) / len(kept)
            std = math.sqrt(math.fsum((value - mean) ** 2 for value in kept) / len(kept))
            for i, value in enumerate(values):
                if math.isfinite(value):
                    out[s, j, i] = (value - mean) / (max(std, std_floor) + eps)
    return out


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 1, 2), (2, 7, 16), (2, 3, 1)])
def test_matches_the_loop(generator, dtype, shape):
    reward = torch.randn(shape, generator=generator).to(dtype)
    cost = torch.rand(shape, generator=generator).to(dtype)
    multipliers = torch.linspace(0, 3, shape[1])
    out = group_advantage(reward, cost, multipliers, std_floor=0.1)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.double(), loop(reward, cost, multipliers, std_floor=0.1), atol=2e-5, rtol=2e-5)


def test_sign_more_reward_is_better_and_cost_is_worse_under_pressure():
    reward, cost = torch.tensor([[[1.0, 2.0]] * 2]), torch.tensor([[[0.0, 5.0]] * 2])
    free, dear = group_advantage(reward, cost, torch.tensor([0.0, 1.0]))[0]
    assert free[1] > 0 > free[0]
    assert dear[0] > 0 > dear[1]


def test_each_group_has_its_own_statistics(generator):
    reward = torch.randn(4, 3, 6, generator=generator)
    cost = torch.zeros_like(reward)
    whole = group_advantage(reward, cost, torch.zeros(3))
    moved = reward.clone()
    moved[1, 2] = 100 * moved[1, 2] - 7
    other = group_advantage(moved, cost, torch.zeros(3))
    torch.testing.assert_close(other, whole, atol=1e-4, rtol=1e-4)
    kept = torch.ones(4, 3, dtype=torch.bool)
    kept[1, 2] = False
    assert torch.equal(other[kept], whole[kept])


@pytest.mark.parametrize("value", [0.1, 1e4 / 3, -7e-8, 1e30])
@pytest.mark.parametrize("candidates", [1, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(value, candidates):
    reward = torch.full((2, 3, candidates), value)
    out = group_advantage(reward, torch.full_like(reward, value / 3), torch.tensor([0.0, 0.7, 3.0]), eps=1e-12)
    assert torch.equal(out, torch.zeros_like(reward))


def test_equality_hidden_by_rounding_gives_exactly_zero(generator):
    # reward - multiplier * cost is 5 on paper for every candidate, and off by a few units in the last place in fp32
    cost = torch.rand(50, 1, 9, generator=generator) * 1000
    multipliers = torch.tensor([0.37])
    reward = (5.0 + 0.37 * cost.double()).float()
    spread = reward - multipliers[:, None] * cost
    assert spread.amax() > spread.amin()
    out = group_advantage(reward, cost, multipliers, eps=1e-8)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_large_common_offset_keeps_the_differences(generator):
    differences = torch.randint(0, 5, (6, 2, 8), generator=generator).float()
    reward = 1e6 + differences
    out = group_advantage(reward, torch.zeros_like(reward), torch.zeros(2))
    torch.testing.assert_close(out, group_advantage(differences, torch.zeros_like(reward), torch.zeros(2)))


def test_std_floor_replaces_a_smaller_std():
    reward = torch.tensor([[[0.0, 0.02]]])
    out = group_advantage(reward, torch.zeros_like(reward), torch.zeros(1), std_floor=1.0)
    torch.testing.assert_close(out, torch.tensor([[[-0.01, 0.01]]]), atol=1e-6, rtol=1e-4)


def test_nan_and_infinite_rewards_are_left_out(generator):
    reward = torch.randn(3, 2, 6, generator=generator)
    cost = torch.rand(3, 2, 6, generator=generator)
    reward[0, 0, 1] = torch.nan
    cost[1, 1, 2] = torch.nan
    reward[2, 0, :] = torch.nan
    reward[2, 1, 1:] = torch.nan  # one valid candidate
    reward[0, 1, 0] = torch.inf
    multipliers = torch.tensor([0.5, 2.0])
    out = group_advantage(reward, cost, multipliers)
    assert out.isfinite().all()
    assert out[0, 0, 1] == out[1, 1, 2] == out[0, 1, 0] == 0
    assert torch.equal(out[2], torch.zeros(2, 6))
    torch.testing.assert_close(out.double(), loop(reward, cost, multipliers), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_zero_sizes(shape):
    out = group_advantage(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape[1]))
    assert out.shape == shape


def test_strides_and_constancy(generator):
    reward = torch.randn(5, 1, 4, generator=generator, requires_grad=True)
    cost = torch.rand(4, 3, 5, generator=generator).transpose(0, 2)
    wide = reward.expand(5, 3, 4)
    out = group_advantage(wide, cost, torch.arange(6.0)[::2])
    expected = loop(wide.detach(), cost, torch.arange(6.0)[::2])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert not out.requires_grad


# Inductor still imports what torch deprecates: https://github.com/pytorch/pytorch/issues/174081
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if os.environ.get("CI") == "true" else [])])
def test_compiles_into_one_graph(backend, generator):
    """Inductor, whose C++ compiler is slow, in CI only."""
    reward, cost = torch.randn(2, 3, 4, generator=generator), torch.rand(2, 3, 4, generator=generator)
    compiled = torch.compile(group_advantage, fullgraph=True, backend=backend)
    multipliers = torch.tensor([0.0, 1.0, 2.0])
    ours, expected = compiled(reward, cost, multipliers), group_advantage(reward, cost, multipliers)
    torch.testing.assert_close(ours, expected)
    # Inductor adds up in an order of its own
    assert backend == "inductor" or torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"reward": [1.0]}, TypeError, "reward is a list"),
        ({"reward": torch.zeros(2, 3, 4, dtype=torch.int64)}, TypeError, "reward has dtype"),
        ({"reward": torch.zeros(2, 3)}, ValueError, "reward has shape"),
        ({"cost": torch.zeros(2, 3, 5)}, ValueError, "cost has shape"),
        ({"multipliers": torch.zeros(4)}, ValueError, "multipliers has shape"),
        ({"cost": torch.zeros(2, 3, 4, device="meta")}, ValueError, "cost is on meta"),
        ({"eps": 0.0}, ValueError, "eps is 0"),
        ({"std_floor": -1.0}, ValueError, "std_floor is -1"),
        ({"std_floor": "small"}, TypeError, "std_floor is 'small'"),
    ],
)
def test_mistakes_are_named(change, error, words):
    arguments = {"reward": torch.zeros(2, 3, 4), "cost": torch.zeros(2, 3, 4), "multipliers": torch.zeros(3)} | change
    with pytest.raises(error, match=words):
        group_advantage(**arguments)
