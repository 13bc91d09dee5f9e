"""Router and expert kernels in Triton's interpreter: both layouts, every gradient against eager in fp64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from goal_kernels.routed_experts import (
    _launches,
    _plan,
    eager,
    load_balancing_loss,
    load_statistics,
    route_topk,
    routed_experts,
    triton,
)

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3}
CPU = torch.device("cpu")
NAMES = ("z", "condition", "gate_weight", "w1", "b1", "w2", "b2")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # exp overflows to inf


def inputs(
    tokens: int = 40,
    channels: int = 6,
    groups: int = 4,
    condition: int = 4,
    experts: int = 5,
    hidden: int = 8,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """z, condition, w1 and w2 in `dtype`; the router and the biases in fp32, as under autocast."""
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
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.25 for shape in shapes]
    low = (dtype, torch.float32, torch.float32, dtype, torch.float32, dtype, torch.float32)
    return [tensor.to(kind) for tensor, kind in zip(tensors, low, strict=True)]


def run(function, tensors: list[Tensor], upstream: list[Tensor] | None = None) -> list[Tensor]:
    """Output, weights, probabilities, and the gradients of all arguments."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, routing = function(*leaves)
    assert ((routing.experts >= 0) & (routing.experts < tensors[2].shape[0])).all()
    results = [out, routing.weights, routing.probabilities]
    if upstream is None:
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(result.shape, generator=generator).to(tensors[0].dtype) for result in results]
    upstream = [part.to(result.dtype) for part, result in zip(upstream, results, strict=True)]
    return [*results, *torch.autograd.grad(results, leaves, upstream)]


def check(tensors: list[Tensor], k: int, activation: str = "gelu_tanh") -> None:
    """Everything against eager in fp64, by relative L2 error."""
    ours = run(lambda *arguments: routed_experts(*arguments, k=k, activation=activation), tensors)
    exact = [tensor.double() for tensor in tensors]
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(part.shape, generator=generator).to(tensors[0].dtype) for part in ours[:3]]
    wanted = run(lambda *arguments: eager.routed_experts(*arguments, k=k, activation=activation), exact, upstream)
    names = ("out", "weights", "probabilities", *NAMES)
    for name, value, expected in zip(names, ours, wanted, strict=True):
        assert value.shape == expected.shape, name
        error = (value.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < RELATIVE_ERROR[tensors[0].dtype], f"{name}: {error}"


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Force the dense or the sorted layout, whatever the number of tokens, and fused experts whatever their sizes."""
    monkeypatch.setattr(_plan, "ALIGNMENT", 1)
    monkeypatch.setattr(_plan, "DENSE_PAIRS", 2**20 if request.param == "dense" else 0)
    return request.param


sorted_layout = pytest.mark.parametrize("layout", ["sorted"], indirect=True)
both_layouts = pytest.mark.parametrize("layout", ["dense", "sorted"], indirect=True)

# odd sizes, several tiles, groups of one token, no condition, one expert, all experts chosen
SHAPES = [
    ({"tokens": 33, "groups": 11, "channels": 17, "hidden": 40, "experts": 3}, 2, "silu"),
    ({"tokens": 20, "groups": 2, "experts": 18}, 3, "gelu"),
    ({"tokens": 18, "groups": 1, "experts": 1, "condition": 0}, 1, "gelu_tanh"),
    ({"tokens": 1, "groups": 1, "experts": 3}, 3, "relu"),
]


@both_layouts
@pytest.mark.parametrize(("shape", "k", "activation"), SHAPES)
def test_forward_and_gradients(layout: str, shape: dict[str, int], k: int, activation: str) -> None:
    check(inputs(**shape), k, activation)


@sorted_layout
def test_half_precision_beside_fp32_biases(layout: str) -> None:
    check(inputs(tokens=40, groups=4, experts=3, dtype=torch.float16), 2)


def test_the_plans_that_the_tests_mean_to_take() -> None:
    half = torch.float16
    assert _plan.plan(16, 16, 16, 4, 2, half, CPU).single and not _plan.plan(16, 16, 24, 4, 2, half, CPU).fused
    assert not _plan.plan(17, 16, 16, 4, 2, half, CPU).single and _plan.plan(4096, 128, 512, 4, 2, half, CPU).dense
    large = _plan.plan(32768, 256, 1024, 8, 2, half, CPU)
    assert not large.dense and large.fused and large.positions <= 32768 * 2 + 9 * 128
    assert not _plan.plan(32768, 257, 1024, 8, 2, half, CPU).fused
    for tokens in (1, 16, 17, 1000, 4096, 5000):
        plan = _plan.plan(tokens, 64, 64, 4, 2, half, CPU)
        assert plan.positions % plan.rows == 0 and plan.positions >= tokens * (4 if plan.dense else 2)


def test_one_launch_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "ALIGNMENT", 1)
    check(inputs(tokens=7, groups=7, channels=20, experts=3), 2)


def test_weights_by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "DENSE_PAIRS", 0)
    seen = []
    make = _launches.TensorDescriptor.from_tensor
    monkeypatch.setattr(
        _launches.TensorDescriptor, "from_tensor", lambda *arguments: seen.append(arguments) or make(*arguments)
    )
    check(inputs(tokens=20, groups=2, channels=16, hidden=128, experts=2, dtype=torch.float16), 1)
    assert len(seen) == 2


def test_weights_that_start_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views at odd offsets into a larger buffer: a descriptor wants its tensor on 16 bytes."""
    monkeypatch.setattr(_plan, "DENSE_PAIRS", 0)
    tensors = inputs(tokens=20, groups=2, channels=16, hidden=128, experts=2, dtype=torch.float16)
    views = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape).requires_grad_() for t in tensors]
    assert all(view.is_contiguous() and view.data_ptr() % 16 for view in views)
    results = []
    for leaves in (views, [tensor.requires_grad_() for tensor in tensors]):
        out, routing = routed_experts(*leaves, k=1)
        gradients = torch.autograd.grad(out.float().square().sum() + routing.probabilities[:, 0].sum(), leaves)
        results.append([out, *routing, *gradients])
    for value, expected in zip(*results, strict=True):
        assert torch.equal(value, expected)


def test_hidden_channels_shared_by_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "ALIGNMENT", 1)
    # the last block of hidden channels is not full, and fp32's blocks are smaller than fp16's
    check(inputs(tokens=20, groups=4, channels=20, experts=3, hidden=300), 2)
    check(inputs(tokens=20, groups=4, channels=20, experts=3, hidden=300, dtype=torch.float16), 2)
    assert _launches.hidden_split(_plan.plan(20, 20, 300, 3, 2, torch.float32, CPU)) == 2


def test_two_matmuls_for_wide_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "FUSED_CHANNELS", 16)
    check(inputs(tokens=20, groups=2, channels=24, experts=3, dtype=torch.float16), 2)


def test_parts_of_the_weight_gradient_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from goal_kernels.routed_experts import _launches_backward

    monkeypatch.setattr(_launches_backward, "multiprocessors", lambda device: 64)
    monkeypatch.setattr(_plan, "DENSE_PAIRS", 2**20)
    check(inputs(tokens=130, groups=2, experts=2), 1)
    monkeypatch.setattr(_plan, "DENSE_PAIRS", 0)
    check(inputs(tokens=150, groups=2, experts=2), 2)


def test_long_groups_and_conditions_in_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    from goal_kernels.routed_experts import _launches_backward

    monkeypatch.setattr(_launches_backward, "LONGEST_GROUP", 8)
    tensors = inputs(tokens=20, groups=2, experts=2)
    tensors[1] = torch.cat([tensors[1], tensors[1]], 0).t().contiguous().t()[1:3]
    check(tensors, 2)
    tensors[1] = tensors[1][:1].expand(2, 4)
    check(tensors, 2)


def test_tokens_are_sorted_by_expert_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "DENSE_PAIRS", 0)
    monkeypatch.setattr(_launches, "ROUTER_TOKENS", 64)  # several router programs
    tokens, count, k = 200, 5, 2
    tensors = inputs(tokens=tokens, experts=count)
    _, weights, experts, _, dispatch = triton.experts_op(*tensors, k, "relu")
    shape = _plan.plan(tokens, 6, 8, count, k, torch.float32, CPU)
    rows = shape.rows
    offsets = dispatch[: count + 1].tolist()
    by_pair = dispatch[count + 1 : count + 1 + tokens * k]
    by_position = dispatch[count + 1 + tokens * k : shape.shares_start]
    shares = dispatch[shape.shares_start :][: shape.positions].view(torch.float32)
    tiles = dispatch[shape.shares_start + shape.positions :]
    assert all(offset % rows == 0 for offset in offsets)
    for expert in range(count):
        pairs = (experts.flatten() == expert).nonzero().squeeze(-1)
        mine = by_position[offsets[expert] : offsets[expert + 1]]
        assert torch.equal(mine[: len(pairs)].long(), pairs // k)
        assert (mine[len(pairs) :] == -1).all()
        assert (tiles[offsets[expert] // rows : offsets[expert + 1] // rows] == expert).all()
    assert (by_position[offsets[-1] :] == -1).all() and (tiles[offsets[-1] // rows :] == count).all()
    assert torch.equal(by_position[by_pair.long()], torch.arange(tokens * k, dtype=torch.int32) // k)
    assert torch.equal(shares[by_pair.long()], weights.flatten()) and not shares[by_position < 0].any()


@both_layouts
def test_an_expert_without_tokens_gets_exactly_zero_gradients(layout: str) -> None:
    tensors = inputs(tokens=20, experts=3)
    tensors[2][:] = 0
    tensors[1][:] = 1
    tensors[2][:2, 6:] = 1  # experts 0 and 1 win every token
    results = run(lambda *arguments: routed_experts(*arguments, k=2), tensors)
    for name, gradient in zip(NAMES, results[3:], strict=True):
        assert gradient.isfinite().all(), name
        if name in ("w1", "b1", "w2", "b2"):
            assert torch.equal(gradient[2:], torch.zeros_like(gradient[2:])), name
            assert gradient[:2].abs().sum() > 0, name


@both_layouts
def test_bad_logits_give_unique_ids_and_stay_in_their_row(layout: str) -> None:
    bad = torch.nan if layout == "dense" else torch.inf
    tensors = inputs(tokens=20, experts=5)
    clean, _ = routed_experts(*tensors, k=3)
    tensors[0][7, 0] = bad
    out, routing = routed_experts(*tensors, k=3)
    assert routing.experts.min() >= 0 and routing.experts.max() < 5
    assert all(len(set(row)) == 3 for row in routing.experts.tolist())
    others = [row for row in range(20) if row != 7]
    torch.testing.assert_close(out[others], clean[others], atol=1e-6, rtol=1e-6)
    assert out[7].isnan().any()


def test_ties_go_to_the_lowest_id() -> None:
    routing = route_topk(torch.zeros(20, 3), torch.zeros(1, 2), torch.ones(6, 5), k=3)
    assert torch.equal(routing.experts, torch.arange(3).expand(20, 3))


def test_route_topk_and_its_gradients() -> None:
    tensors = inputs(tokens=20, groups=4)[:3]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    gradients = []
    for function, arguments in ((route_topk, leaves), (eager.route_topk, exact)):
        routing = function(*arguments, k=2)
        loss = routing.weights[:, 0].square().sum() + load_balancing_loss(routing)
        gradients.append([*routing, *torch.autograd.grad(loss, arguments)])
    for value, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(value, expected.to(value.dtype), atol=1e-5, rtol=1e-4)
    assert load_statistics(route_topk(*tensors, k=2)).tokens.sum() == 40


@pytest.mark.parametrize("groups", [0, 3])
def test_no_tokens(groups: int) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(tokens=0, groups=groups)]
    out, routing = routed_experts(*tensors, k=2)
    assert out.shape == (0, 6) and routing.experts.shape == (0, 2)
    for gradient in torch.autograd.grad(out.sum() + routing.weights.sum(), tensors):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@sorted_layout
def test_strides_of_inputs_and_upstream_do_not_matter(layout: str) -> None:
    tensors = inputs(tokens=20, experts=2)
    strided = [torch.stack([tensor, tensor.flip(0)], dim=-1)[..., 0].mT.contiguous().mT for tensor in tensors]
    expected = run(lambda *arguments: routed_experts(*arguments, k=2), tensors)
    upstream = [torch.randn(part.shape, generator=torch.Generator().manual_seed(2)) for part in expected[:3]]
    turned = [part.t().contiguous().t() for part in upstream]
    for value, wanted in zip(
        run(lambda *arguments: routed_experts(*arguments, k=2), strided, turned),
        run(lambda *arguments: routed_experts(*arguments, k=2), tensors, upstream),
        strict=True,
    ):
        assert torch.equal(value, wanted)
    results = []
    for function in (routed_experts, eager.routed_experts):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out, _ = function(*leaves, k=2)
        loss = out.sum() + (torch.cat([out, 2 * out], 1) * torch.arange(12.0)).sum()
        results.append(torch.autograd.grad(loss, leaves))
    for value, wanted in zip(*results, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)


@sorted_layout
def test_runs_give_the_same_bits_and_tokens_do_not_depend_on_their_batch(layout: str) -> None:
    tensors = inputs(tokens=20, groups=20, experts=3)
    first, second = (run(lambda *arguments: routed_experts(*arguments, k=2), tensors) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    part, _ = routed_experts(tensors[0][3:20], tensors[1][3:20], *tensors[2:], k=2)
    torch.testing.assert_close(part, first[0][3:20], atol=1e-6, rtol=1e-6)


@sorted_layout
def test_opcheck(layout: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(tokens=6, groups=2, experts=3)]
    torch.library.opcheck(triton.experts_op, (*tensors, 2, "relu"))
    torch.library.opcheck(triton.route_op, (*tensors[:3], 2))
    tensors = [tensor.detach() for tensor in tensors]
    out, *routing = triton.experts_op(*tensors, 2, "relu")
    upstreams = (torch.ones_like(routing[0]), torch.ones_like(routing[2]))
    for given in (upstreams, (None, None)):
        torch.library.opcheck(triton.experts_backward_op, (out, *given, *tensors, *routing, "relu"))
        torch.library.opcheck(triton.route_backward_op, (*given, *tensors[:3], *routing[:3]))


# torch 2.13 itself warns when inductor is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if os.environ.get("CI") == "true" else [])])
@sorted_layout
def test_compiles_to_one_graph_under_autocast(layout: str, backend: str) -> None:
    tensors = inputs(tokens=20, experts=2)

    def function(*arguments: Tensor):
        with torch.autocast("cpu", torch.float16):
            return routed_experts(*arguments, k=2)

    ours = run(torch.compile(function, fullgraph=True, backend=backend), tensors)
    wanted = run(function, tensors)
    assert ours[0].dtype == torch.float16 and all(gradient.dtype == torch.float32 for gradient in ours[3:])
    for value, expected in zip(ours, wanted, strict=True):
        assert torch.equal(value, expected)


def test_offsets_beyond_two_to_the_31() -> None:
    """Rows that start further away than 32 bits reach; the rest of the memory is never touched."""
    script = """
import torch
from goal_kernels.routed_experts import _router
channels = 2**20
rows = 2**31 // channels + 4
values = torch.empty(rows, channels, dtype=torch.float16)  # 4 GB of address space, two rows of memory
values[-1, :32] = torch.arange(32)
values[-2, :32] = 1
out = torch.zeros(1, channels, dtype=torch.float16)
dispatch = torch.tensor([0, 0, 0, rows - 1, rows - 2], dtype=torch.int32)
_router.combine_kernel[(1,)](
    values, dispatch, out, 1, 1, channels, 2, K=2, SLOTS=2, DENSE=False, BM=1, BD=channels
)
assert torch.equal(out[0, :32], torch.arange(32) + 1), out[0, :32]

from goal_kernels.backend import set_backend
from goal_kernels.routed_experts import route_topk
set_backend("triton")
near = torch.randn(6, 5).half()
far = torch.empty(5 * 2**29, dtype=torch.float16).as_strided((6, 5), (1, 2**29)).copy_(near).requires_grad_()
z, gate_weight = torch.randn(6, 4).half(), torch.randn(3, 9).half()
results = []
for condition in (near.requires_grad_(), far):
    routing = route_topk(z, condition, gate_weight, k=2)
    results.append([*routing, *torch.autograd.grad(routing.weights[:, 0].sum(), condition)])
assert all(torch.equal(one, other) for one, other in zip(*results)), results
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
