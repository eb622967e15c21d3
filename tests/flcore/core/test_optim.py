"""Optimisers and clipping against PyTorch's, by hand, and stacked; learning rates over rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.config.sections import LocalConfig
from flcore.core.optim import Adam, Sgd, clip_gradients
from flcore.engine.local.step import learning_rate, make_optimizer
from flcore.io.messages import TensorDict
from flcore.io.records import Key, load_record, save_record, serialise


def torch_twin(ours: Any, params: list[torch.Tensor]) -> Any:
    if isinstance(ours, Adam):
        return torch.optim.Adam(params, lr=ours.lr, betas=ours.betas, weight_decay=ours.weight_decay)
    return torch.optim.SGD(params, lr=ours.lr, momentum=ours.momentum, weight_decay=ours.weight_decay)


def five_steps(ours: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of both after each of five steps on the same gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    mine = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = [tensor.clone().requires_grad_() for tensor in mine]
    twin = torch_twin(ours, theirs)
    for _ in range(5):
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        for tensor, grad in zip(theirs, grads, strict=True):
            tensor.grad = grad.clone()
        twin.step()
        ours.step(mine, [grad.clone() for grad in grads])
        yield from zip(mine, [tensor.detach() for tensor in theirs], strict=True)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_sgd_is_torchs_to_the_bit(momentum: float, weight_decay: float) -> None:
    for mine, theirs in five_steps(Sgd(0.1, momentum, weight_decay)):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 1e-2}, {"betas": (0.5, 0.999)}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_adam_is_torchs(options: Any, fused: bool) -> None:
    """To a relative 1e-6: a few roundings of float32 (1.2e-7) per step may fall in another order."""
    for mine, theirs in five_steps(Adam(0.01, fused=fused, **options)):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def test_adam_by_hand() -> None:
    """Gradients (3, -2): m = 0.1·g, v = 0.001·g². Weight decay 0.5 at w = 4 turns -2 into 0."""
    params = {"w": torch.tensor([1.0, 4.0])}
    optimizer = Adam(0.1)
    optimizer.step(list(params.values()), [torch.tensor([3.0, -2.0])])
    assert params["w"].tolist() == pytest.approx([0.9, 4.1])
    state = optimizer.state(params)
    assert {name: value.tolist() for name, value in state.items()} == {
        "steps": [1],
        "first/w": pytest.approx([0.3, -0.2]),
        "second/w": pytest.approx([0.009, 0.004]),
    }
    decayed = [torch.tensor([1.0, 4.0])]
    Adam(0.1, 0.5).step(decayed, [torch.tensor([3.0, -2.0])])
    assert decayed[0].tolist() == pytest.approx([0.9, 4.0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("before", [0, 3])
def test_adam_goes_on_from_its_memory(before: int, fused: bool, tmp_path: Path) -> None:
    """Some steps, through a file, and two more: to the bit those of one optimiser; also before the first step.

    What is in the file is not moved by whoever goes on, and the names may come back in another order.
    """
    names = ("w", "b", "s")
    whole = dict(zip(names, gradients(0, 1.0), strict=True))
    parts = {name: value.clone() for name, value in whole.items()}
    one, first = Adam(0.1, 0.01, fused=fused), Adam(0.1, 0.01, fused=fused)
    for step in range(before):
        one.step(list(whole.values()), gradients(step + 1, 1.0))
        first.step(list(parts.values()), gradients(step + 1, 1.0))
    save_record(tmp_path / "state", {"optimizer": TensorDict(first.state(parts))})
    record, _ = load_record(tmp_path / "state")
    stored = TensorDict(dict(reversed(record[Key("optimizer", TensorDict)].named.items())))
    kept = serialise({"optimizer": stored})
    second = Adam(0.1, 0.01, fused=fused).restore(parts, stored.named)
    for step in range(before, before + 2):
        one.step(list(whole.values()), gradients(step + 1, 1.0))
        second.step(list(parts.values()), gradients(step + 1, 1.0))
    assert all(torch.equal(whole[name], parts[name]) for name in names)
    assert serialise({"optimizer": stored}) == kept
    assert second.state(parts)["steps"].tolist() == [before + 2]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {1: 0.8, 7: 0.8}),
        ("exponential", {1: 0.8, 2: 0.4, 4: 0.1}),  # 0.8·0.5^(t-1)
        ("step", {1: 0.8, 3: 0.8, 4: 0.4, 6: 0.4, 7: 0.2}),  # halved every three rounds
        ("cosine", {1: 0.8, 5: 0.4, 3: 0.4 * (1 + math.cos(math.pi / 4)), 8: 0.4 * (1 + math.cos(math.pi * 7 / 8))}),
    ],
)
def test_learning_rate_of_a_round(schedule: Any, expected: dict[int, float]) -> None:
    """lr 0.8, decay 0.5, every 3 rounds, of 8 rounds; cosine: 0.4·(1 + cos(π(t-1)/8)), 0.4 in round 5."""
    local = LocalConfig(lr=0.8, schedule=schedule, decay=0.5, decay_every=3)
    assert {number: learning_rate(local, number, 8) for number in expected} == pytest.approx(expected)


def test_the_configured_optimiser_is_made_afresh() -> None:
    sgd = make_optimizer(LocalConfig(lr=0.8, momentum=0.5, weight_decay=0.1, schedule="exponential", decay=0.5), 2, 8)
    assert sgd == Sgd(0.4, 0.5, 0.1)
    assert make_optimizer(LocalConfig(optimizer="adam", lr=0.1, weight_decay=0.2), 1, 8) == Adam(0.1, 0.2)


def test_the_schedule_reaches_training(lab: Any) -> None:
    """Toy model, one sample (2, 0) of class 0, from zero: round 3 at decay 0.5 moves by a quarter of 0.1."""
    dataset = lab.toy_dataset([[2, 0], [0, 1]], [0, 1], None, None)
    local = {"lr": 0.1, "schedule": "exponential", "decay": 0.5}
    experiment = lab.experiment(dataset, lab.by_hand(dataset, [[0], [1]]), lab.ToySpec(), local=local)
    reply, _ = lab.train(experiment, number=3)
    assert reply.message["model"].params["head.weight"][0, 0].item() == pytest.approx(0.025)


def gradients(seed: int, scale: float, clients: int = 0) -> list[torch.Tensor]:
    """Of a matrix, a vector and a matrix; with ``clients`` of so many in a stack."""
    generator = torch.Generator().manual_seed(seed)
    lead = (clients,) if clients else ()
    return [scale * torch.randn((*lead, *shape), generator=generator) for shape in ((3, 4), (5,), (2, 2))]


@given(st.integers(0, 99), st.sampled_from([1e-6, 0.1, 1.0, 1e3]), st.sampled_from([0.01, 1.0, 100.0]))
@settings(max_examples=40, deadline=None)
def test_clipping_is_torchs(seed: int, scale: float, limit: float) -> None:
    """PyTorch takes the norm of norms, we the root of all squares: a few roundings of float32 apart, 1e-6 relative."""
    ours = gradients(seed, scale)
    twins = [torch.zeros_like(grad).requires_grad_() for grad in ours]
    for twin, grad in zip(twins, ours, strict=True):
        twin.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(twins, limit)
    clip_gradients(ours, limit, stacked=False)
    for grad, twin in zip(ours, twins, strict=True):
        assert twin.grad is not None
        assert torch.allclose(grad, twin.grad, rtol=2e-6, atol=0)


def test_clients_of_a_stack_are_clipped_each_by_its_own_norm() -> None:
    """Client 0 has norm 5 and is halved, client 1 norm 1 and is left alone; as each alone would be, to the bit."""
    grads = [torch.tensor([[3.0, 0.0], [0.6, 0.0]]), torch.tensor([[4.0], [0.8]])]
    clip_gradients(grads, 2.5, stacked=True)
    assert torch.cat(grads, dim=1).flatten().tolist() == pytest.approx([1.5, 0.0, 2.0, 0.6, 0.0, 0.8], rel=1e-6)
    many = gradients(3, 1.0, clients=4)
    alone = [[grad[client].clone() for grad in many] for client in range(4)]
    clip_gradients(many, 0.5, stacked=True)
    for client in range(4):
        clip_gradients(alone[client], 0.5, stacked=False)
        assert all(torch.allclose(ours[client], own, rtol=1e-6) for ours, own in zip(many, alone[client], strict=True))


def test_a_scalar_parameter_of_a_stack_is_clipped() -> None:
    """A temperature, say: stacked it is [A]. Norms 5 and 1, limit 2.5: client 0 is halved, client 1 is left alone."""
    grads = [torch.tensor([3.0, 0.6]), torch.tensor([[4.0], [0.8]])]
    clip_gradients(grads, 2.5, stacked=True)
    assert grads[0].tolist() == pytest.approx([1.5, 0.6], rel=1e-6)


@pytest.mark.parametrize("make", [lambda: Sgd(0.1), lambda: Sgd(0.1, 0.9, 0.01), lambda: Adam(0.1, 0.01)])
def test_a_stack_of_optimisers_is_one_for_each(make: Any) -> None:
    """Three clients take 4, 3 and 1 steps; those who finish leave, and the others go on from their own moments."""
    steps = [4, 3, 1]
    start = gradients(0, 1.0, clients=3)
    all_grads = [gradients(step + 1, 1.0, clients=3) for step in range(4)]
    stacked, optimizer = [tensor.clone() for tensor in start], make()
    active = 3
    for step in range(4):
        still = sum(step < count for count in steps)
        if still < active:
            optimizer.keep(still)
            active = still
        optimizer.step([p[:active] for p in stacked], [grad[:active].clone() for grad in all_grads[step]])
    for client, count in enumerate(steps):
        alone, own = [tensor[client].clone() for tensor in start], make()
        for step in range(count):
            own.step(alone, [grad[client].clone() for grad in all_grads[step]])
        assert all(torch.equal(ours[client], tensor) for ours, tensor in zip(stacked, alone, strict=True)), client


@pytest.mark.parametrize(
    "make", [lambda: Sgd(0.1), lambda: Sgd(0.1, 0.9, 0.01), lambda: Adam(0.1), lambda: Adam(0.1, 0.01)]
)
def test_a_step_of_tensors_alone_is_the_same_step(make: Any) -> None:
    """Five steps that keep their memory to themselves, and five that are given it, and their numbers, each time."""
    generator = torch.Generator().manual_seed(0)
    own = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), ())]
    given_ = [tensor.clone() for tensor in own]
    ours, other = make(), make()
    memory, rates = other.memory(given_), other.rates(5)
    assert rates.dtype == torch.float32
    for step in range(5):
        grads = [torch.randn(tensor.shape, generator=generator) for tensor in own]
        ours.step(own, [grad.clone() for grad in grads])
        other.move(given_, grads, memory, rates[step])
        for one, two in zip(own, given_, strict=True):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)
