"""route_topk and routed_experts against a Python loop over tokens, their gradients, and routers gone wrong."""

from __future__ import annotations

import math
import os

import pytest
import torch

from goal_kernels.routed_experts import eager, load_balancing_loss, load_statistics, route_topk, routed_experts

NAMES = ("z", "condition", "gate_weight", "w1", "b1", "w2", "b2")


def inputs(tokens=12, channels=6, groups=3, condition=4, experts=5, hidden=8, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (tokens, channels),
        (groups, condition),
        (experts, channels + condition),
        (experts, channels, hidden),
        (experts, hidden),
        (experts, hidden, channels),
        (experts, channels),
    )
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for shape in shapes)
    return {name: tensor.to(dtype) for name, tensor in zip(NAMES, tensors, strict=True)}


ACTIVATE = {
    "relu": lambda h: max(h, 0.0),
    "silu": lambda h: h / (1 + math.exp(-h)),
    "gelu": lambda h: 0.5 * h * (1 + math.erf(h / math.sqrt(2))),
    "gelu_tanh": lambda h: 0.5 * h * (1 + math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
}


def loop(z, condition, gate_weight, w1, b1, w2, b2, *, k, activation="gelu_tanh"):
    """The MoE equation, one token at a time."""
    per_group = z.shape[0] // condition.shape[0]
    out, ids, weights = torch.zeros_like(z), [], []
    for i, token in enumerate(z):
        logits = (gate_weight @ torch.cat([token, condition[i // per_group]])).tolist()
        exponentials = [math.exp(logit - max(logits)) for logit in logits]
        order = sorted(range(len(logits)), key=lambda e: (-exponentials[e], e))[:k]
        total = sum(exponentials[e] for e in order)
        ids.append(order)
        weights.append([exponentials[e] / total for e in order])
        for e, weight in zip(order, weights[-1], strict=True):
            hidden = token @ w1[e] + b1[e]
            hidden = torch.tensor([ACTIVATE[activation](h) for h in hidden.tolist()], dtype=z.dtype)
            out[i] += weight * (hidden @ w2[e] + b2[e])
    return out, torch.tensor(ids), torch.tensor(weights, dtype=z.dtype)


@pytest.mark.parametrize("activation", list(ACTIVATE))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_matches_the_loop(k, activation):
    tensors = inputs()
    out, routing = routed_experts(**tensors, k=k, activation=activation)
    expected, ids, weights = loop(**tensors, k=k, activation=activation)
    assert torch.equal(routing.experts, ids)
    torch.testing.assert_close(routing.weights, weights)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 1, "groups": 1},
        {"tokens": 6, "groups": 6},
        {"tokens": 5, "groups": 1, "channels": 1, "hidden": 1},
        {"tokens": 4, "groups": 2, "experts": 1},
        {"tokens": 4, "groups": 2, "condition": 0},
        {"tokens": 9, "groups": 3, "channels": 7, "hidden": 13, "experts": 3},
    ],
)
def test_odd_shapes(shape):
    tensors = inputs(**shape)
    k = min(2, tensors["gate_weight"].shape[0])
    torch.testing.assert_close(routed_experts(**tensors, k=k)[0], loop(**tensors, k=k)[0])


def test_gathering_and_dense_agree_with_gradients():
    tensors = inputs(tokens=300, groups=3)
    assert eager.GATHER_PAIRS < 300 * 2
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    upstream = torch.randn(300, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out, routing = routed_experts(**leaves, k=2)
    gradients = torch.autograd.grad(out, leaves.values(), upstream, retain_graph=True)
    experts = [leaves[name] for name in ("w1", "b1", "w2", "b2")]
    dense = eager.dense_mixture(leaves["z"], routing.weights, routing.experts, *experts, "gelu_tanh")
    torch.testing.assert_close(out, dense)
    for ours, expected in zip(gradients, torch.autograd.grad(dense, leaves.values(), upstream), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("gather", [False, True])
def test_gradcheck(monkeypatch, gather):
    monkeypatch.setattr(eager, "GATHER_PAIRS", 0 if gather else 1000)
    tensors = inputs(tokens=4, channels=3, groups=2, condition=2, experts=3, hidden=4, seed=3)

    def function(*arguments):
        out, routing = routed_experts(*arguments, k=2)
        return out, routing.weights, routing.probabilities

    assert torch.autograd.gradcheck(function, [tensor.requires_grad_() for tensor in tensors.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(dtype):
    tensors = inputs(dtype=dtype)
    tensors |= {name: tensors[name].float() for name in ("condition", "gate_weight", "b1", "b2")}
    out, routing = routed_experts(**tensors, k=2)
    assert out.dtype == dtype
    assert routing.weights.dtype == routing.probabilities.dtype == torch.float32
    exact, _ = routed_experts(**{name: tensor.double() for name, tensor in tensors.items()}, k=2)
    error = (out.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


def test_autocast_takes_its_dtype_and_leaves_the_router_in_fp32():
    tensors = inputs(dtype=torch.float32)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out, routing = routed_experts(**leaves, k=2)
    assert out.dtype == torch.bfloat16
    assert routing.probabilities.dtype == torch.float32
    out.float().square().sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32, name


def test_ties_go_to_the_lowest_id():
    z, condition, gate_weight = torch.zeros(7, 3), torch.zeros(1, 2), torch.ones(6, 5)
    assert torch.equal(route_topk(z, condition, gate_weight, k=3).experts, torch.arange(3).expand(7, 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_logits_give_unique_ids_in_range_and_stay_in_their_row(bad):
    tensors = inputs(tokens=6, groups=1)
    clean, _ = routed_experts(**tensors, k=3)
    tensors["z"][2, 0] = bad
    out, routing = routed_experts(**tensors, k=3)
    ids = routing.experts
    assert ids.min() >= 0 and ids.max() < 5
    assert all(len(set(row)) == 3 for row in ids.tolist())
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(out[others], clean[others])


@pytest.mark.parametrize("gather", [False, True])
def test_an_expert_without_tokens_gets_exactly_zero_gradients(monkeypatch, gather):
    monkeypatch.setattr(eager, "GATHER_PAIRS", 0 if gather else 1000)
    tensors = inputs(tokens=6, experts=4)
    tensors["gate_weight"][3] = 0
    tensors["gate_weight"][:3, :6] = 0
    tensors["condition"][:] = 1.0
    tensors["gate_weight"][:3, 6:] = 1.0  # experts 0 and 1 win every token, expert 3 loses all
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    out, routing = routed_experts(**leaves, k=2)
    assert load_statistics(routing).tokens.tolist() == [6, 6, 0, 0]
    out.sum().backward()
    for name in ("w1", "b1", "w2", "b2"):
        gradient = leaves[name].grad
        assert torch.equal(gradient[2:], torch.zeros_like(gradient[2:])), name
        assert gradient[:2].abs().sum() > 0


def test_no_tokens():
    tensors = {name: tensor.requires_grad_() for name, tensor in inputs(tokens=0).items()}
    out, routing = routed_experts(**tensors, k=2)
    assert out.shape == (0, 6) and routing.experts.shape == (0, 2) and routing.probabilities.shape == (0, 5)
    (out.sum() + load_balancing_loss(routing)).backward()
    assert all(torch.equal(tensor.grad, torch.zeros_like(tensor)) for tensor in tensors.values())
    assert load_statistics(routing).tokens.tolist() == [0] * 5
    without_groups = inputs(tokens=0, groups=0)
    assert routed_experts(**without_groups, k=2)[0].shape == (0, 6)


def test_strides_do_not_matter():
    tensors = inputs(tokens=300, groups=3)
    out, _ = routed_experts(**tensors, k=2)
    strided = {}
    for name, tensor in tensors.items():
        wide = torch.full((*tensor.shape, 3), torch.nan, dtype=tensor.dtype)
        wide[..., 1] = tensor
        strided[name] = wide[..., 1].mT.contiguous().mT
    torch.testing.assert_close(routed_experts(**strided, k=2)[0], out)


# Inductor still imports what torch deprecates: https://github.com/pytorch/pytorch/issues/174081
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if os.environ.get("CI") == "true" else [])])
def test_compiles_into_one_graph(backend):
    """Inductor, whose C++ compiler is slow, in CI only."""
    tensors = inputs()

    def function(**arguments):
        return routed_experts(**arguments, k=2)

    out, routing = torch.compile(function, fullgraph=True, backend=backend)(**tensors)
    expected, expected_routing = function(**tensors)
    torch.testing.assert_close(out, expected)
    assert torch.equal(routing.experts, expected_routing.experts)


def test_load_balancing_loss_is_one_when_even_and_counts_up_to_e():
    even = eager.Routing(torch.ones(4, 1), torch.arange(4)[:, None], torch.full((4, 4), 0.25))
    assert load_balancing_loss(even) == 1
    skewed = eager.Routing(torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int64), torch.eye(4)[:1].expand(4, 4))
    assert load_balancing_loss(skewed) == 4
    statistics = load_statistics(even)
    assert statistics.tokens.tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(statistics.entropy, torch.tensor(math.log(4)))
    assert load_statistics(skewed).entropy == 0


def test_load_balancing_gradient_lowers_the_crowded_expert():
    tensors = inputs()
    gate_weight = tensors["gate_weight"].requires_grad_()
    before = load_balancing_loss(route_topk(tensors["z"], tensors["condition"], gate_weight, k=2))
    (gradient,) = torch.autograd.grad(before, gate_weight)
    after = load_balancing_loss(route_topk(tensors["z"], tensors["condition"], gate_weight - 0.05 * gradient, k=2))
    assert after < before


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"z": [1.0]}, TypeError, "z is a list"),
        ({"z": torch.zeros(12, 6, dtype=torch.int64)}, TypeError, "z has dtype"),
        ({"z": torch.zeros(12)}, ValueError, r"z has shape \(12,\)"),
        ({"condition": torch.zeros(5, 4)}, ValueError, "12 tokens and condition 5 rows"),
        ({"condition": torch.zeros(0, 4)}, ValueError, "12 tokens and condition 0 rows"),
        ({"gate_weight": torch.zeros(5, 6)}, ValueError, "gate_weight has shape"),
        ({"w1": torch.zeros(5, 7, 8)}, ValueError, "w1 has shape"),
        ({"w1": torch.zeros(5, 6, 8).bfloat16()}, TypeError, "w1 has dtype"),
        ({"w2": torch.zeros(4, 8, 6)}, ValueError, "w2 has shape"),
        ({"b1": torch.zeros(5, 6)}, ValueError, "b1 has shape"),
        ({"b2": torch.zeros(5, 6, device="meta")}, ValueError, "b2 is on meta"),
        ({"k": 0}, ValueError, "k is 0"),
        ({"k": 6}, ValueError, "k is 6"),
        ({"k": 2.0}, TypeError, "k is 2.0"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
    ],
)
def test_mistakes_are_named(change, error, words):
    arguments = inputs(dtype=torch.float32) | {"k": 2} | change
    with pytest.raises(error, match=words):
        routed_experts(**arguments)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_debugging_names_the_token_with_bad_logits(monkeypatch, bad):
    tensors = inputs()
    tensors["z"][5, 2] = bad
    routed_experts(**tensors, k=2)
    monkeypatch.setenv("GOAL_KERNELS_DEBUG", "1")
    for call in (lambda: routed_experts(**tensors, k=2), lambda: route_topk(*list(tensors.values())[:3], k=2)):
        with pytest.raises(ValueError, match="1 of 12 tokens, first for token 5"):
            call()
