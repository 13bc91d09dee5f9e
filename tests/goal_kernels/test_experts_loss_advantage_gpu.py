"""Expert, loss and advantage kernels on a GPU: bf16 and fp16 at real sizes, graph capture, repeatability."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from goal_kernels import group_advantage, routed_experts, scpo_loss
from goal_kernels.group_advantage import eager as eager_advantage
from goal_kernels.routed_experts import eager as eager_experts
from goal_kernels.scpo_loss import eager as eager_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
RELATIVE_ERROR = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "kl_weight": 0.05}
# One worker of xdist runs what needs most of the card's memory, one test after another (--dist loadgroup)
memory = pytest.mark.xdist_group("memory")


def experts_arguments(
    tokens: int, channels: int, hidden: int, experts: int, dtype: torch.dtype, groups: int, device: str = "cuda"
) -> list[Tensor]:
    """Biases and router in fp32 beside tokens and experts in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (tokens, channels),
        (groups, 24),
        (experts, channels + 24),
        (experts, channels, hidden),
        (experts, hidden),
        (experts, hidden, channels),
        (experts, channels),
    )
    low = (dtype, dtype, torch.float32, dtype, torch.float32, dtype, torch.float32)
    return [
        (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, kind).requires_grad_()
        for shape, kind in zip(shapes, low, strict=True)
    ]


def with_gradients(function: Callable[..., Tensor], arguments: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = function(*arguments)
    return [out, *torch.autograd.grad(out, arguments, upstream.to(out.dtype))]


# one launch, dense with tiles of 64 and 128, sorted, two matmuls, odd sizes with many experts
@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize(
    ("tokens", "channels", "hidden", "experts", "k"),
    [
        (1, 128, 512, 4, 2),
        (16, 64, 128, 4, 2),
        (1000, 96, 200, 8, 2),
        (4096, 128, 512, 4, 2),
        (9000, 256, 512, 8, 2),
        (5000, 320, 136, 4, 1),
        (3000, 50, 70, 30, 3),
    ],
)
def test_experts(tokens: int, channels: int, hidden: int, experts: int, k: int, dtype: torch.dtype) -> None:
    groups = tokens // 8 if tokens % 8 == 0 else 1
    arguments = experts_arguments(tokens, channels, hidden, experts, dtype, groups)
    exact = [argument.detach().double().requires_grad_() for argument in arguments]
    upstream = torch.randn(tokens, channels, device="cuda").to(dtype)
    ours = with_gradients(lambda *tensors: routed_experts(*tensors, k=k)[0], arguments, upstream)
    wanted = with_gradients(lambda *tensors: eager_experts.routed_experts(*tensors, k=k)[0], exact, upstream)
    names = ("out", "z", "condition", "gate_weight", "w1", "b1", "w2", "b2")
    for name, value, expected in zip(names, ours, wanted, strict=True):
        error = ((value.double() - expected).norm() / expected.norm().clamp(min=1e-20)).item()
        # k = 1: the only weight is 1, and the router's gradient zero but for rounding
        if k > 1 or name not in ("condition", "gate_weight"):
            assert error < RELATIVE_ERROR[dtype], f"{name}: {error}"


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize("kl", ["exact", "k3"])
@pytest.mark.parametrize(("steps", "vocabulary"), [(8, 64), (4, 14), (3, 500)])
def test_loss(steps: int, vocabulary: int, kl: str, dtype: torch.dtype) -> None:
    tensors = loss_arguments(3000, steps, vocabulary, dtype)
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in tensors.items()}
    exact["logits"].requires_grad_()
    for ratio in ("sequence", "token"):
        ours = scpo_loss(**tensors, **OPTIONS, kl=kl, ratio=ratio)
        wanted = eager_loss.scpo_loss(**exact, **OPTIONS, kl=kl, ratio=ratio)
        for value, expected in zip(ours, wanted, strict=True):
            torch.testing.assert_close(value.double(), expected, atol=1e-4, rtol=1e-4)
        (gradient,) = torch.autograd.grad(ours.loss, tensors["logits"])
        (expected,) = torch.autograd.grad(wanted.loss, exact["logits"])
        assert (gradient.double() - expected).norm() < RELATIVE_ERROR[dtype] * expected.norm()


def loss_arguments(sequences: int, steps: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sequences, steps, vocabulary, generator=generator)
    tokens = torch.randint(vocabulary, (sequences, steps), generator=generator)
    hidden = (torch.rand(logits.shape, generator=generator) < 0.2).scatter(-1, tokens[..., None], False)
    logits = logits.masked_fill(hidden, -torch.inf)
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return {
        "logits": logits.to("cuda", dtype).requires_grad_(),
        "reference_logits": (logits + 0.3 * torch.randn(logits.shape, generator=generator)).to("cuda", dtype),
        "tokens": tokens.cuda(),
        "old_log_probs": (chosen + 0.1 * torch.randn(chosen.shape, generator=generator)).cuda(),
        "lengths": torch.randint(1, steps + 1, (sequences,), generator=generator).cuda(),
        "advantages": torch.randn(sequences, generator=generator).cuda(),
    }


@pytest.mark.parametrize("candidates", [1, 7, 16, 300])
def test_advantage(candidates: int) -> None:
    reward, cost = torch.randn(200, 7, candidates, device="cuda"), torch.rand(200, 7, candidates, device="cuda")
    reward[3, 2, 0] = torch.nan
    multipliers = torch.linspace(0, 3, 7, device="cuda")
    expected = eager_advantage.group_advantage(reward, cost, multipliers)
    torch.testing.assert_close(group_advantage(reward, cost, multipliers), expected, atol=1e-4, rtol=1e-4)
    turned = cost.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(group_advantage(reward, turned, multipliers), group_advantage(reward, cost, multipliers))


@pytest.mark.parametrize("tokens", [16, 1000, 20000])
def test_experts_in_a_graph_give_the_bits_of_a_run_outside(tokens: int) -> None:
    arguments = experts_arguments(tokens, 64, 128, 4, torch.bfloat16, groups=1)
    upstream = torch.randn(tokens, 64, device="cuda").bfloat16()
    captured_equals_run(lambda: with_gradients(lambda *t: routed_experts(*t, k=2)[0], arguments, upstream))


@pytest.mark.parametrize(("kl", "ratio"), [("exact", "sequence"), ("k3", "token")])
def test_loss_and_advantage_in_a_graph_give_the_bits_of_a_run_outside(kl: str, ratio: str) -> None:
    tensors = loss_arguments(1000, 4, 30, torch.bfloat16)

    def step() -> list[Tensor]:
        result = scpo_loss(**tensors, **OPTIONS, kl=kl, ratio=ratio)
        return [*result, *torch.autograd.grad(3 * result.loss, tensors["logits"])]

    captured_equals_run(step)
    reward = torch.randn(50, 7, 16, device="cuda")
    captured_equals_run(lambda: [group_advantage(reward, reward.flip(0), torch.ones(7, device="cuda"))])


# Inductor still imports what torch deprecates: https://github.com/pytorch/pytorch/issues/174081
compiles = pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")


@compiles
@pytest.mark.parametrize("tokens", [16, 1000, 20000])
def test_compiled_experts_give_the_bits_of_eager_mode(tokens: int) -> None:
    arguments = experts_arguments(tokens, 64, 128, 4, torch.bfloat16, groups=1)
    upstream = torch.randn(tokens, 64, device="cuda").bfloat16()

    def experts(*tensors: Tensor) -> Tensor:
        return routed_experts(*tensors, k=2)[0]

    values = with_gradients(torch.compile(experts, fullgraph=True), arguments, upstream)
    for value, expected in zip(values, with_gradients(experts, arguments, upstream), strict=True):
        assert torch.equal(value, expected)


@compiles
@pytest.mark.parametrize(("kl", "ratio"), [("exact", "sequence"), ("k3", "token")])
def test_compiled_loss_gives_the_loss_of_eager_mode(kl: str, ratio: str) -> None:
    tensors = loss_arguments(1000, 4, 30, torch.bfloat16)

    def loss(logits: Tensor, others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(scpo_loss(logits, **others, **OPTIONS, kl=kl, ratio=ratio))

    logits = tensors.pop("logits")
    values, expected = torch.compile(loss, fullgraph=True)(logits, tensors), loss(logits, tensors)
    for value, wanted in zip(values, expected, strict=True):
        assert torch.equal(value, wanted)
    (value,), (wanted,) = (torch.autograd.grad(3 * result[0], logits) for result in (values, expected))
    torch.testing.assert_close(value, wanted)


@compiles
def test_compiled_advantage_gives_the_bits_of_eager_mode() -> None:
    reward, multipliers = torch.randn(50, 7, 16, device="cuda"), torch.ones(7, device="cuda")
    compiled = torch.compile(group_advantage, fullgraph=True)
    assert torch.equal(
        compiled(reward, reward.flip(0), multipliers), group_advantage(reward, reward.flip(0), multipliers)
    )


def captured_equals_run(function: Callable[[], list[Tensor]]) -> None:
    expected = [value.detach().clone() for value in function()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = function()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(value, wanted) for value, wanted in zip(values, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_of_the_input_is_used() -> None:
    arguments = experts_arguments(40, 32, 64, 4, torch.bfloat16, groups=1, device="cuda:1")
    out, _ = routed_experts(*arguments, k=2)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    expected, _ = eager_experts.routed_experts(*arguments, k=2)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@memory
def test_experts_of_more_than_two_to_the_31_elements() -> None:
    """Tokens past the 31-bit edge, forward and backward: those before are zero and so is their upstream gradient."""
    channels, last = 128, 64
    tokens = 2**31 // channels + last
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    near = experts_arguments(last, channels, 16, 2, torch.bfloat16, groups=1)
    z, upstream = (torch.zeros(tokens, channels, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    near_upstream = torch.randn(last, channels, device="cuda").bfloat16()
    z[-last:], upstream[-last:] = near[0].detach(), near_upstream

    def experts(*tensors: Tensor) -> Tensor:
        return routed_experts(*tensors, k=1)[0]

    out, grad_z, _, _, *grads = with_gradients(experts, [z.requires_grad_(), *near[1:]], upstream)
    wanted_out, wanted_z, _, _, *wanted = with_gradients(experts, near, near_upstream)
    assert not grad_z[:-last].any()
    values = (out[-last:], grad_z[-last:], *grads)
    for value, expected in zip(values, (wanted_out, wanted_z, *wanted), strict=True):
        assert (value.double() - expected.double()).norm() < 2e-2 * expected.double().norm()


@memory
def test_loss_of_more_than_two_to_the_31_logits() -> None:
    steps, vocabulary, last = 8, 32, 5
    sequences = 2**31 // (steps * vocabulary) + last
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    logits = torch.zeros(sequences, steps, vocabulary, dtype=torch.bfloat16, device="cuda")
    logits[-last:] = torch.randn(last, steps, vocabulary, device="cuda")
    slopes = []
    for part in (logits, logits[-last:].clone()):
        count = len(part)
        tokens = torch.ones(count, steps, dtype=torch.int64, device="cuda")
        old, lengths = torch.full((count, steps), -3.5, device="cuda"), torch.full((count,), steps, device="cuda")
        loss = scpo_loss(part.requires_grad_(), part.flip(-1), tokens, old, lengths, lengths.float(), **OPTIONS).loss
        (slope,) = torch.autograd.grad(loss, part)
        slopes.append(slope[-last:].float() * count)
    torch.testing.assert_close(*slopes, atol=1e-2, rtol=2e-2)
