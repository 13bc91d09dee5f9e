"""The SCPO kernels in Triton's interpreter: every statistic and the gradient against eager in fp64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from goal_kernels.scpo_loss import ScpoLoss, eager, scpo_loss, triton

OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "kl_weight": 0.05}
both_kinds = pytest.mark.parametrize("kl", ["exact", "k3"])
both_ratios = pytest.mark.parametrize("ratio", ["sequence", "token"])


def inputs(
    sequences: int = 6, steps: int = 4, vocabulary: int = 7, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Masked choices, junk in the padding, ratios on both sides of the clip."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sequences, steps, vocabulary, generator=generator)
    reference = logits + 0.5 * torch.randn(logits.shape, generator=generator)
    tokens = torch.randint(vocabulary, (sequences, steps), generator=generator)
    hidden = torch.rand(logits.shape, generator=generator) < 0.3
    hidden.scatter_(-1, tokens[..., None], False)
    logits, reference = logits.masked_fill(hidden, -torch.inf), reference.masked_fill(hidden, -torch.inf)
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    old = chosen + 0.3 * torch.randn(chosen.shape, generator=generator)
    lengths = torch.arange(sequences) % steps + 1
    padding = torch.arange(steps) >= lengths[:, None]
    return {
        "logits": logits.masked_fill(padding[..., None], torch.nan).to(dtype),
        "reference_logits": reference.masked_fill(padding[..., None], torch.inf).to(dtype),
        "tokens": tokens.masked_fill(padding, -1),
        "old_log_probs": old.masked_fill(padding, torch.nan),
        "lengths": lengths,
        "advantages": torch.randn(sequences, generator=generator),
    }


def run(function, tensors: dict[str, Tensor], upstream: float = 1.0, **options: object) -> list[Tensor]:
    logits = tensors["logits"].detach().clone().requires_grad_()
    result = function(**tensors | {"logits": logits}, **OPTIONS | options)
    factor = torch.tensor(upstream, dtype=result.loss.dtype)
    return [*result, *torch.autograd.grad(result.loss, logits, factor)]


def check(tensors: dict[str, Tensor], upstream: float = 1.0, error: float = 1e-5, **options: object) -> None:
    ours = run(scpo_loss, tensors, upstream, **options)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
    wanted = run(eager.scpo_loss, exact, upstream, **{"kl": "exact", "ratio": "sequence"} | options)
    for name, value, expected in zip(ScpoLoss._fields, ours, wanted, strict=False):
        torch.testing.assert_close(
            value.double(), expected, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    gradient, expected = ours[-1].double(), wanted[-1]
    assert (gradient - expected).norm() < error * expected.norm()
    assert (gradient[expected == 0] == 0).all()


# one program and several with a stride; vocabularies below, at and above a power of two
@both_ratios
@both_kinds
def test_matches_eager(kl: str, ratio: str) -> None:
    check(inputs(), kl=kl, ratio=ratio)


@pytest.mark.parametrize("shape", [(70, 3, 16), (5, 1, 33), (3, 5, 130)])
def test_shapes(shape: tuple[int, int, int]) -> None:
    check(inputs(*shape))
    check(inputs(*shape), kl="k3", ratio="token")


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_low_precision(dtype: torch.dtype, error: float) -> None:
    check(inputs(40, 3, 9, dtype=dtype), upstream=3.0, error=error)


def test_a_loss_scale_saves_fp16_gradients_from_underflow() -> None:
    """1/G alone is far below the smallest fp16 number times what a loss scale would lift."""
    tensors = inputs(20, 2, 4, dtype=torch.float16)
    tensors["advantages"] *= 1e-3
    check(tensors, upstream=65536.0, error=1e-3, kl_weight=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_upstream_gradients_multiply(dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype)
    one, minus_four, zero = (run(scpo_loss, tensors, upstream)[-1] for upstream in (1.0, -4.0, 0.0))
    torch.testing.assert_close(minus_four, -4 * one, atol=1e-6, rtol=2e-3)
    assert torch.equal(zero, torch.zeros_like(zero))


def test_a_retained_graph_gives_the_same_gradient_again() -> None:
    tensors = inputs()
    logits = tensors.pop("logits").requires_grad_()
    loss = scpo_loss(logits, **tensors, **OPTIONS).loss
    (first,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    (third,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, kept) and torch.equal(second, kept)
    torch.testing.assert_close(third * 3, kept)


def test_the_gradient_is_given_away_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs()
    logits = tensors.pop("logits").requires_grad_()
    loss = scpo_loss(logits, **tensors, **OPTIONS).loss

    def copied(self: Tensor) -> Tensor:
        raise AssertionError("copied")

    monkeypatch.setattr(Tensor, "clone", copied)
    torch.autograd.grad(loss, logits)


def test_nothing_of_the_size_of_the_logits_is_allocated_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(70, 3, 16, dtype=torch.float16)
    size, large = tensors["logits"].numel(), []

    def watch(allocate):
        def watched(*arguments, **options):
            tensor = allocate(*arguments, **options)
            if tensor.numel() >= size:
                large.append(tensor.dtype)
            return tensor

        return watched

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "zeros"),
        (Tensor, "new_empty"),
        (Tensor, "to"),
    ):
        monkeypatch.setattr(owner, name, watch(getattr(owner, name)))
    logits = tensors.pop("logits").requires_grad_()
    loss = triton.scpo_loss(logits, **tensors, **OPTIONS, kl="exact", ratio="sequence").loss
    assert large == [torch.float16]
    with torch.no_grad():
        triton.scpo_loss(logits, **tensors, **OPTIONS, kl="exact", ratio="sequence")
    assert large == [torch.float16], "no gradient was asked for"
    loss.backward()


@both_ratios
@both_kinds
def test_huge_differences_stay_finite(kl: str, ratio: str) -> None:
    tensors = inputs()
    padding = torch.arange(4) >= tensors["lengths"][:, None]
    tensors["old_log_probs"] = torch.where(torch.arange(6)[:, None] % 2 == 0, -500.0, 500.0).expand(6, 4)
    tensors["reference_logits"] = (200 * tensors["reference_logits"]).masked_fill(padding[..., None], 0.0)
    check(tensors, kl=kl, ratio=ratio)
    assert all(part.isfinite().all() for part in run(scpo_loss, tensors, kl=kl, ratio=ratio))


@both_kinds
def test_choices_masked_by_one_policy_alone(kl: str) -> None:
    tensors = inputs()
    tensors["reference_logits"][..., 0] = -torch.inf
    check(tensors, kl=kl)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_nan_logits_show_in_the_loss() -> None:
    for ratio in ("sequence", "token"):
        tensors = inputs()
        tensors["logits"][0, 0, 0] = torch.nan
        assert scpo_loss(**tensors, **OPTIONS, ratio=ratio).loss.isnan()


@pytest.mark.parametrize(("sequences", "steps"), [(0, 4), (3, 0)])
def test_zero_sizes(sequences: int, steps: int) -> None:
    tensors = {
        "logits": torch.zeros(sequences, steps, 5, requires_grad=True),
        "reference_logits": torch.zeros(sequences, steps, 5),
        "tokens": torch.zeros(sequences, steps, dtype=torch.int64),
        "old_log_probs": torch.zeros(sequences, steps),
        "lengths": torch.zeros(sequences, dtype=torch.int64),
        "advantages": torch.full((sequences,), 2.0),
    }
    result = scpo_loss(**tensors, **OPTIONS)
    assert result.loss == (-2.0 if sequences else 0.0)
    assert result.kl == result.entropy == result.clip_fraction == 0
    assert result.ratio_min == result.ratio_max == 1
    result.loss.backward()


def test_strides() -> None:
    tensors = inputs()
    expected = run(scpo_loss, tensors)
    strided = {name: torch.stack([value, value], dim=-1)[..., 0] for name, value in tensors.items()}
    for name in ("logits", "reference_logits"):
        strided[name] = strided[name].transpose(0, 2).contiguous().transpose(0, 2)
    for value, wanted in zip(run(scpo_loss, strided), expected, strict=True):
        assert torch.equal(value, wanted)
    tensors["reference_logits"] = tensors["logits"][:1].nan_to_num(nan=0.0, neginf=-torch.inf).expand(6, 4, 7)
    check(tensors)


def test_runs_give_the_same_bits() -> None:
    tensors = inputs(70, 3, 16)
    first, second = run(scpo_loss, tensors), run(scpo_loss, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_long_sequences_of_many_choices_run_in_eager() -> None:
    check(inputs(2, 9, 300))
    assert not triton.supports(torch.empty(2, 9, 300))


def test_opcheck() -> None:
    tensors = inputs()
    logits = tensors.pop("logits").requires_grad_()
    torch.library.opcheck(triton.scpo_loss_op, (logits, *tensors.values(), 0.2, 0.3, 0.05, True, False, True))
    torch.library.opcheck(triton.scale_op, (torch.randn(3, 4), torch.tensor(2.0), 0.5))


# torch 2.13 itself warns when inductor is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if os.environ.get("CI") == "true" else [])])
def test_compiles_to_one_graph(backend: str) -> None:
    tensors = inputs()

    def function(logits: Tensor, others: dict[str, Tensor]) -> Tensor:
        return scpo_loss(logits, **others, **OPTIONS).loss * 2

    logits = tensors.pop("logits").requires_grad_()
    loss = torch.compile(function, fullgraph=True, backend=backend)(logits, tensors)
    expected = function(logits, tensors)
    assert torch.equal(loss, expected)
    (ours,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(ours, wanted)


def test_offsets_beyond_two_to_the_31() -> None:
    """Sequences so far apart that an offset in elements does not fit 32 bits; the gaps are never touched."""
    code = """
import torch
from goal_kernels.backend import set_backend
from goal_kernels.scpo_loss import scpo_loss
set_backend("triton")
stride = 2**28
wide = torch.empty(10 * stride, dtype=torch.float16).as_strided((10, 2, 5), (stride, 5, 1))
assert 9 * stride > 2**31
wide.copy_(torch.randn(10, 2, 5))
others = (torch.zeros(10, 2, dtype=torch.int64), torch.full((10, 2), -1.5), torch.full((10,), 2), torch.ones(10))
options = dict(clip_low=0.2, clip_high=0.2, kl_weight=0.1)
near = wide.contiguous()
turned = torch.empty(5 * 2**29, dtype=torch.float16).as_strided((10, 2, 5), (2, 1, 2**29))
turned.copy_(near)
expected = scpo_loss(near, near, *others, **options)
for far in (wide, turned):
    for ours, wanted in zip(scpo_loss(far, far, *others, **options), expected):
        assert torch.equal(ours, wanted)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
