"""scpo_loss against Python loops over tokens and vocabulary: value, gradient, masks, overflow, signs."""

from __future__ import annotations

import math
import os

import pytest
import torch

from goal_kernels.scpo_loss import ScpoLoss, scpo_loss

OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "kl_weight": 0.05}


def inputs(sequences=6, steps=4, vocabulary=7, *, seed=0, dtype=torch.float64, masked=True):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sequences, steps, vocabulary, generator=generator, dtype=torch.float64)
    reference = logits + 0.5 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (sequences, steps), generator=generator)
    if masked:
        hidden = torch.rand(logits.shape, generator=generator) < 0.3
        hidden.scatter_(-1, tokens[..., None], False)
        logits, reference = logits.masked_fill(hidden, -torch.inf), reference.masked_fill(hidden, -torch.inf)
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    old = chosen + 0.3 * torch.randn(chosen.shape, generator=generator, dtype=torch.float64)
    lengths = torch.arange(sequences) % steps + 1
    advantages = torch.randn(sequences, generator=generator, dtype=torch.float64)
    return {
        "logits": logits.to(dtype),
        "reference_logits": reference.to(dtype),
        "tokens": tokens,
        "old_log_probs": old.to(dtype),
        "lengths": lengths,
        "advantages": advantages.to(dtype),
    }


def log_softmax(row):
    total = math.log(math.fsum(math.exp(value) for value in row))
    return [value - total for value in row]


def loop(
    logits,
    reference_logits,
    tokens,
    old_log_probs,
    lengths,
    advantages,
    *,
    clip_low,
    clip_high,
    kl_weight,
    kl="exact",
    ratio="sequence",
):
    """The objective in Python floats, sign turned: what is minimised."""
    losses, divergences, entropies, ratios, low, high = [], [], [], [], 0, 0
    for g in range(len(lengths)):
        differences, divergence = [], 0.0
        for t in range(int(lengths[g])):
            p, q = log_softmax(logits[g, t].tolist()), log_softmax(reference_logits[g, t].tolist())
            token = int(tokens[g, t])
            differences.append(p[token] - float(old_log_probs[g, t]))
            entropies.append(-math.fsum(math.exp(value) * value for value in p if value > -math.inf))
            if kl == "exact":
                divergence += math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -math.inf)
            else:
                divergence += math.exp(q[token] - p[token]) - (q[token] - p[token]) - 1
        advantage = float(advantages[g])
        parts = [math.exp(math.fsum(differences))] if ratio == "sequence" else [math.exp(d) for d in differences]
        gains = []
        for value in parts:
            bounded = min(max(value, 1 - clip_low), 1 + clip_high)
            gains.append(min(value * advantage, bounded * advantage))
            low += value < 1 - clip_low and advantage < 0
            high += value > 1 + clip_high and advantage > 0
        ratios += parts
        losses.append(-math.fsum(gains) / len(gains) + kl_weight * divergence)
        divergences.append(divergence)
    values = (
        math.fsum(losses) / len(losses),
        math.fsum(divergences) / len(divergences),
        (low + high) / len(ratios),
        low / len(ratios),
        high / len(ratios),
        math.fsum(entropies) / len(entropies),
        min(ratios),
        max(ratios),
    )
    return ScpoLoss(*(torch.tensor(value, dtype=torch.float64) for value in values))


@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("kl", ["exact", "k3"])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_the_loop(kl, ratio, masked):
    tensors = inputs(masked=masked)
    ours = scpo_loss(**tensors, **OPTIONS, kl=kl, ratio=ratio)
    expected = loop(**tensors, **OPTIONS, kl=kl, ratio=ratio)
    assert expected.clip_fraction > 0
    for name in ScpoLoss._fields:
        torch.testing.assert_close(
            getattr(ours, name), getattr(expected, name), msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("kl", ["exact", "k3"])
def test_gradcheck(kl, ratio):
    tensors = inputs(4, 3, 5, masked=False)
    logits = tensors.pop("logits").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: scpo_loss(x, **tensors, **OPTIONS, kl=kl, ratio=ratio).loss, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(dtype):
    tensors = inputs(dtype=dtype)
    logits = tensors["logits"].requires_grad_()
    result = scpo_loss(**tensors, **OPTIONS)
    result.loss.backward()
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in tensors.items()}
    exact["logits"].requires_grad_()
    expected = scpo_loss(**exact, **OPTIONS)
    expected.loss.backward()
    assert all(field.dtype == torch.float32 and field.dim() == 0 for field in result)
    torch.testing.assert_close(result.loss.double(), expected.loss, atol=1e-5, rtol=1e-5)
    assert logits.grad.dtype == dtype
    error = (logits.grad.double() - exact["logits"].grad).norm() / exact["logits"].grad.norm()
    assert error < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


def test_only_the_loss_has_a_gradient():
    tensors = inputs()
    for name in ("logits", "reference_logits", "old_log_probs", "advantages"):
        tensors[name].requires_grad_()
    result = scpo_loss(**tensors, **OPTIONS)
    assert result.loss.requires_grad
    assert not any(field.requires_grad for field in result[1:])
    result.loss.backward()
    assert tensors["logits"].grad is not None
    assert all(tensors[name].grad is None for name in ("reference_logits", "old_log_probs", "advantages"))


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(ratio):
    tensors = inputs(masked=False)
    logits = tensors["logits"].requires_grad_()
    chosen = logits.log_softmax(-1).gather(-1, tensors["tokens"][..., None]).squeeze(-1)
    tensors["old_log_probs"] = chosen.detach()
    valid = torch.arange(4) < tensors["lengths"][:, None]
    weight = tensors["advantages"][:, None] * valid
    if ratio == "token":
        weight = weight / tensors["lengths"][:, None]
    (expected,) = torch.autograd.grad(-(weight * chosen).sum() / 6, logits)
    result = scpo_loss(**tensors, clip_low=0.2, clip_high=0.2, kl_weight=0.0, ratio=ratio)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    torch.testing.assert_close(gradient, expected)
    assert result.ratio_min == result.ratio_max == 1 and result.clip_fraction == 0


def test_a_step_raises_what_has_a_positive_advantage():
    tensors = inputs(masked=False)
    tensors["advantages"] = torch.ones(6, dtype=torch.float64)
    logits = tensors["logits"].requires_grad_()
    tensors["old_log_probs"] = logits.log_softmax(-1).gather(-1, tensors["tokens"][..., None]).squeeze(-1).detach()
    (gradient,) = torch.autograd.grad(scpo_loss(**tensors, **OPTIONS | {"kl_weight": 0.0}).loss, logits)
    valid = torch.arange(4) < tensors["lengths"][:, None]
    assert (gradient.gather(-1, tensors["tokens"][..., None]).squeeze(-1)[valid] < 0).all()


@pytest.mark.parametrize("kl", ["exact", "k3"])
def test_the_kl_is_minimised(kl):
    tensors = inputs(masked=False)
    tensors["advantages"] = torch.zeros(6, dtype=torch.float64)
    logits = tensors.pop("logits").requires_grad_()
    result = scpo_loss(logits, **tensors, **OPTIONS | {"kl_weight": 1.0}, kl=kl)
    torch.testing.assert_close(result.loss.detach(), result.kl)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert scpo_loss(logits - 0.1 * gradient, **tensors, **OPTIONS, kl=kl).kl < result.kl
    same = scpo_loss(tensors["reference_logits"], **tensors, **OPTIONS, kl=kl)
    torch.testing.assert_close(same.kl, torch.zeros_like(same.kl), atol=1e-12, rtol=0)


def test_separate_clips_take_the_gradient_away():
    logits = torch.zeros(4, 1, 2, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[2.0], [2.0], [0.5], [0.5]], dtype=torch.float64).log() + math.log(0.5)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)  # ratios .5, .5, 2, 2
    result = scpo_loss(
        logits,
        logits.detach(),
        torch.zeros(4, 1, dtype=torch.int64),
        old,
        torch.ones(4, dtype=torch.int64),
        advantages,
        clip_low=0.1,
        clip_high=0.4,
        kl_weight=0.0,
    )
    torch.testing.assert_close(result.loss.item(), -(0.5 - 0.9 + 1.4 - 2.0) / 4)
    assert (result.clip_fraction, result.clip_fraction_low, result.clip_fraction_high) == (0.5, 0.25, 0.25)
    result.loss.backward()
    moved = logits.grad.abs().sum(dim=(1, 2)) > 0
    assert moved.tolist() == [True, False, False, True]


def test_padding_is_never_read():
    tensors = inputs()
    logits = tensors.pop("logits")
    padding = torch.arange(4) >= tensors["lengths"][:, None]
    clean = logits.clone().requires_grad_()
    expected = scpo_loss(clean, **tensors, **OPTIONS)
    expected.loss.backward()
    for junk in (torch.nan, torch.inf, -torch.inf):
        dirty = logits.masked_fill(padding[..., None], junk).requires_grad_()
        others = tensors | {
            "reference_logits": tensors["reference_logits"].masked_fill(padding[..., None], junk),
            "old_log_probs": tensors["old_log_probs"].masked_fill(padding, junk),
            "tokens": tensors["tokens"].masked_fill(padding, -1),
        }
        result = scpo_loss(dirty, **others, **OPTIONS)
        result.loss.backward()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, expected, strict=True))
        assert torch.equal(dirty.grad, clean.grad)
        assert (dirty.grad[padding] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("kl", ["exact", "k3"])
def test_huge_differences_stay_finite(kl, ratio, dtype):
    tensors = inputs(dtype=dtype, masked=False)
    tensors["old_log_probs"] = torch.where(torch.arange(6)[:, None] % 2 == 0, -500.0, 500.0).expand(6, 4).to(dtype)
    tensors["reference_logits"] = tensors["reference_logits"] * 200
    logits = tensors["logits"].requires_grad_()
    result = scpo_loss(**tensors, **OPTIONS, kl=kl, ratio=ratio)
    result.loss.backward()
    assert all(field.isfinite() for field in result)
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("kl", ["exact", "k3"])
def test_choices_masked_by_one_policy_alone_have_no_part_in_the_kl(kl):
    tensors = inputs(masked=False)
    masked = tensors["reference_logits"].clone()
    masked[..., 0] = -torch.inf
    tensors["tokens"] = tensors["tokens"].clamp(min=1)
    logits = tensors.pop("logits").requires_grad_()
    result = scpo_loss(logits, **tensors | {"reference_logits": masked}, **OPTIONS, kl=kl)
    result.loss.backward()
    assert result.kl.isfinite() and logits.grad.isfinite().all()


def test_a_single_choice_has_no_gradient():
    tensors = inputs(masked=False)
    logits = torch.full_like(tensors["logits"], -torch.inf).scatter(-1, tensors["tokens"][..., None], 0.0)
    logits.requires_grad_()
    result = scpo_loss(**tensors | {"logits": logits, "reference_logits": logits.detach()}, **OPTIONS)
    result.loss.backward()
    assert result.kl == result.entropy == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_nan_logits_show_in_the_loss():
    tensors = inputs()
    tensors["logits"][0, 0, 0] = torch.nan
    assert scpo_loss(**tensors, **OPTIONS).loss.isnan()


@pytest.mark.parametrize(("sequences", "steps"), [(0, 4), (3, 0), (0, 0)])
def test_zero_sizes(sequences, steps):
    logits = torch.zeros(sequences, steps, 5, requires_grad=True)
    result = scpo_loss(
        logits,
        torch.zeros(sequences, steps, 5),
        torch.zeros(sequences, steps, dtype=torch.int64),
        torch.zeros(sequences, steps),
        torch.zeros(sequences, dtype=torch.int64),
        torch.full((sequences,), 2.0),
        **OPTIONS,
    )
    assert result.loss == (-2.0 if sequences else 0.0)
    assert result.kl == result.entropy == 0 and result.ratio_min == result.ratio_max == 1
    result.loss.backward()
    assert logits.grad.shape == logits.shape


def test_strides_and_upstream_gradient():
    tensors = inputs()
    logits = tensors.pop("logits")
    straight = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(3 * scpo_loss(straight, **tensors, **OPTIONS).loss, straight)
    turned = logits.transpose(0, 2).contiguous().requires_grad_()
    wide = {name: torch.stack([value, value], dim=-1)[..., 0] for name, value in tensors.items()}
    result = scpo_loss(turned.transpose(0, 2), **wide, **OPTIONS)
    (gradient,) = torch.autograd.grad(result.loss, turned, torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(gradient.transpose(0, 2), expected)


# Inductor still imports what torch deprecates: https://github.com/pytorch/pytorch/issues/174081
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if os.environ.get("CI") == "true" else [])])
@pytest.mark.parametrize(("kl", "ratio"), [("exact", "sequence"), ("k3", "token")])
def test_compiles_into_one_graph_with_the_same_result(kl, ratio, backend):
    """Inductor, whose C++ compiler is slow, in CI only."""
    # Under the compiler padding is masked instead of dropped: the other of the two row layouts.
    tensors = inputs()
    padding = torch.arange(4) >= tensors["lengths"][:, None]
    tensors["logits"] = tensors["logits"].masked_fill(padding[..., None], torch.nan)
    tensors["tokens"] = tensors["tokens"].masked_fill(padding, -1)

    def function(logits, others):
        return scpo_loss(logits, **others, **OPTIONS, kl=kl, ratio=ratio)

    logits = tensors.pop("logits").requires_grad_()
    result = torch.compile(function, fullgraph=True, backend=backend)(logits, tensors)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    expected = function(logits, tensors)
    (expected_gradient,) = torch.autograd.grad(expected.loss, logits)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": 1.0}, TypeError, "logits is a float"),
        ({"logits": torch.zeros(6, 4)}, ValueError, "logits has shape"),
        ({"logits": torch.zeros(6, 4, 0)}, ValueError, "V, the last axis of logits"),
        ({"reference_logits": torch.zeros(6, 4, 6)}, ValueError, "reference_logits has shape"),
        ({"tokens": torch.zeros(6, 4)}, TypeError, "tokens has dtype"),
        ({"tokens": torch.full((6, 4), 7)}, ValueError, "tokens holds 7"),
        ({"tokens": torch.full((6, 4), -1)}, ValueError, "tokens holds -1"),
        ({"old_log_probs": torch.zeros(6, 3)}, ValueError, "old_log_probs has shape"),
        ({"lengths": torch.zeros(5, dtype=torch.int64)}, ValueError, "lengths has shape"),
        ({"lengths": torch.full((6,), 5)}, ValueError, "lengths holds 5"),
        ({"advantages": torch.zeros(6, device="meta")}, ValueError, "advantages is on meta"),
        ({"clip_low": -0.1}, ValueError, "clip_low is -0.1"),
        ({"kl_weight": "much"}, TypeError, "kl_weight is 'much'"),
        ({"kl": "k2"}, ValueError, "kl is 'k2'"),
        ({"ratio": "word"}, ValueError, "ratio is 'word'"),
    ],
)
def test_mistakes_are_named(change, error, words):
    with pytest.raises(error, match=words):
        scpo_loss(**inputs() | OPTIONS | change)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_debugging_names_the_token_without_a_distribution(monkeypatch, bad):
    tensors = inputs()
    monkeypatch.setenv("GOAL_KERNELS_DEBUG", "1")
    scpo_loss(**tensors, **OPTIONS)
    tensors["logits"][0, 3] = bad  # padding
    scpo_loss(**tensors, **OPTIONS)
    tensors["reference_logits"][3, 2] = bad
    with pytest.raises(ValueError, match="reference_logits gives 1 tokens no distribution, first step 2 of sequence 3"):
        scpo_loss(**tensors, **OPTIONS)
