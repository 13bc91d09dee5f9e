"""The group advantage kernel in Triton's interpreter, against eager."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from goal_kernels import backend
from goal_kernels.group_advantage import eager, group_advantage, triton

# infinite rewards, which eager leaves out as the kernel does
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# one program and several, groups of every kind of width, one row wider than a tile
@pytest.mark.parametrize("shape", [(3, 4, 5), (30, 7, 16), (2, 3, 1), (400, 2, 7), (1, 2, 2500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matches_eager(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    reward, cost = draw(*shape, dtype=dtype), draw(*shape, seed=1, dtype=dtype)
    reward[0, 0, 0] = torch.nan
    cost[0, 1, -1] = torch.inf
    reward[-1, -1, :] = 0.1
    cost[-1, -1, :] = 0.3
    multipliers = torch.linspace(0, 3, shape[1])
    out = group_advantage(reward, cost, multipliers, eps=1e-5, std_floor=0.3)
    expected = eager.group_advantage(reward, cost, multipliers, eps=1e-5, std_floor=0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert out[0, 0, 0] == out[0, 1, -1] == 0
    assert (out[-1, -1] == 0).all()
    assert out.dtype == torch.float32


@pytest.mark.parametrize("value", [0.1, 1e4 / 3, 1e30])
def test_equal_rewards_and_rounding_residue_give_exactly_zero(value: float) -> None:
    reward = torch.full((3, 1, 7), value)
    out = group_advantage(reward, reward / 3, torch.tensor([0.7]), eps=1e-12)
    assert torch.equal(out, torch.zeros_like(out))
    cost = draw(20, 1, 9).abs() * 1000
    reward = (5 + 0.37 * cost.double()).float()
    out = group_advantage(reward, cost, torch.tensor([0.37]), eps=1e-8)
    assert torch.equal(out, torch.zeros_like(out))


def test_one_valid_candidate_gives_zero() -> None:
    reward = torch.full((1, 2, 4), torch.nan)
    reward[0, 0, 2] = 3.0
    out = group_advantage(reward, torch.zeros(1, 2, 4), torch.ones(2))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_zero_sizes(shape: tuple[int, int, int]) -> None:
    assert group_advantage(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape[1])).shape == shape


def test_strides() -> None:
    reward, cost, multipliers = draw(6, 1, 4), draw(4, 3, 6, seed=1).transpose(0, 2), torch.arange(6.0)[::2]
    wide = reward.expand(6, 3, 4)
    out = group_advantage(wide, cost, multipliers)
    expected = group_advantage(wide.contiguous(), cost.contiguous(), multipliers.contiguous())
    assert torch.equal(out, expected)


def test_is_constant_and_repeatable() -> None:
    reward = draw(30, 7, 5).requires_grad_()
    first, second = (group_advantage(reward, draw(30, 7, 5, seed=1), torch.ones(7)) for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad


def test_opcheck_and_compilation() -> None:
    arguments = (draw(3, 2, 5), draw(3, 2, 5, seed=1), torch.tensor([0.5, 1.0]))
    torch.library.opcheck(triton.group_advantage_op, (*arguments, 1e-6, 0.0))
    compiled = torch.compile(group_advantage, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), group_advantage(*arguments))


def test_offsets_beyond_two_to_the_31() -> None:
    """States so far apart that an offset in elements does not fit 32 bits; the gaps are never touched."""
    code = """
import torch
from goal_kernels.backend import set_backend
from goal_kernels import backend
from goal_kernels.group_advantage import eager, group_advantage
set_backend("triton")
stride = 2**26
reward = torch.empty(40 * stride, dtype=torch.bfloat16).as_strided((40, 1, 3), (stride, 3, 1))
assert 39 * stride > 2**31
reward.copy_(torch.randn(40, 1, 3))
cost, multipliers = torch.rand(40, 1, 3), torch.ones(1)
expected = eager.group_advantage(reward.contiguous(), cost, multipliers)
torch.testing.assert_close(group_advantage(reward, cost, multipliers), expected, atol=1e-5, rtol=1e-5)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_tensor_that_the_kernel_does_not_take_runs_in_eager_and_is_announced_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_announced", set())
    reward, multipliers = draw(2, 3, 4).double(), torch.zeros(3, dtype=torch.float64)
    with caplog.at_level(logging.WARNING, logger="goal_kernels"):
        for _ in range(2):
            group_advantage(reward, reward, multipliers)
    lines = [record.message for record in caplog.records if "group_advantage" in record.message]
    assert lines == [f"group_advantage: eager runs for a tensor that its Triton kernels do not take ({triton.LIMITS})"]
