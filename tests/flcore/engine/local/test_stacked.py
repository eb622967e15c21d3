"""Many clients at once against one after the other; padding; what cannot be stacked; the same bytes whoever trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flcore.core.errors import ConfigError
from flcore.engine.client import ClientRunner
from flcore.engine.client_data import ClientData
from flcore.engine.exchange import Failure
from flcore.engine.local import compiled, cuda_graph, stacked
from flcore.engine.local.batchnorm import MaskedBatchNorm, maskable
from flcore.engine.local.cuda_graph import CudaGraphCompiler
from flcore.engine.local.plan import BatchPlan, plan_batches
from flcore.engine.local.samples import MadeSamples
from flcore.engine.local.serial import TrainJob
from flcore.engine.local.stacked import StackedTrainer
from flcore.io.records import Record, serialise
from flcore.methods import METHODS
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedprox import FedProx
from flcore.methods.local import Local
from flcore.methods.types import Batch, ClientContext, LossInputs, Phase
from tests.cases import quick

FEDGEN = {"name": "fedgen_cnn", "feature_dim": 8}
MODELS = {
    "batchnorm": FEDGEN,
    "dropout": {"name": "fedproto_cnn"},
    "projection": {"name": "fedcspc_cnn", "projection_dim": 16},
}


# Methods that train in steps; but for one that rounds to a few codes, which makes a step of a rounding.
_OTHERWISE = ("fedavg_q", "closed_head", "linear_probe", "protolda")  # no whole model comes back
TRAINED = [method for method in METHODS if not method.startswith(_OTHERWISE)]

STACKED = {"stack": True}
ENGINES = {
    "stacked": STACKED,
    "program": {"compile": "default"},
    "recorded": {**STACKED, "compile": "default"},
}


def captured_here(step: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """As a CUDA graph behaves: results are always found at the same places, which the next launch overwrites."""
    found = step()

    def replay() -> None:
        for place, value in zip(found, step(), strict=True):
            place.copy_(value)

    return found, replay


# Only a GPU trains by recorded programs: they belong to the slow part.
@pytest.fixture(params=["stacked", "program", pytest.param("recorded", marks=pytest.mark.slow)])
def engine(lab: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ways to train that agree with one client after the other; programs are called as they are, not compiled."""
    recorded = request.param == "recorded"
    monkeypatch.setattr(compiled, "Compiler", lambda folder: CudaGraphCompiler() if recorded else lab.DirectMaker())
    monkeypatch.setattr(cuda_graph, "capture", captured_here)
    return ENGINES[request.param]


def pair(lab: Any, engine: dict[str, Any] = STACKED, **changes: Any) -> tuple[Any, Any]:
    """The same experiment, trained one client after the other and in stacks of up to eight, or in another way."""
    return lab.experiment(**changes), lab.experiment(engine=engine, **changes)


def replies(lab: Any, experiment: Any, state: Any = None, client_state: Any = None, number: int = 1) -> dict[int, Any]:
    """One turn of all trainers, as one record each: message and memory together."""
    server = None if state is None else state.server
    client_states = {client: client_state(client) for client in experiment.trainers} if client_state else {}
    found = lab.train_stack(experiment, list(experiment.trainers), client_states, number=number, server=server)
    assert not any(isinstance(result, Failure) for result in found.values())
    return dict(found)


def assert_close(
    serial: dict[int, Any], stacked: dict[int, Any], initial: Any, distance: Any, tolerance: float
) -> None:
    """Every array within the tolerance of its largest value, equal steps, equal losses; and something has moved."""
    assert list(serial) == list(stacked)
    for client, (reply, client_state) in serial.items():
        other, other_memory = stacked[client]
        assert distance({**reply.message}, {**other.message}) < tolerance
        assert distance({**client_state}, {**other_memory}) < tolerance
        assert (reply.steps, reply.has_state, reply.up, reply.down) == (
            other.steps, other.has_state, other.up, other.down,
        )  # fmt: skip
        assert other.losses == pytest.approx(dict(reply.losses), rel=tolerance, abs=1e-6)
        model = reply.message.get("model") or client_state["model"]
        parts = replace(initial, params={name: initial.params[name] for name in model.params}, buffers={})  # sent ones
        assert distance({"m": replace(model, buffers={})}, {"m": parts}) > 10 * tolerance


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_stacks_of_all_sizes_share_a_program(
    lab: Any, distance: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cohort of four: stacks of 4, 3 and 1 are trained by a program for 4, to what they are without it."""
    sizes = []

    class Noting(lab.DirectMaker):  # type: ignore[misc, name-defined]
        def make(self, function: Any, example: Any, moved: int, facts: Any) -> Any:
            sizes.append(len(example[0]))
            return super().make(function, example, moved, facts)

    monkeypatch.setattr(compiled, "Compiler", lambda folder: Noting())
    settings = {"method": {"name": method, **({"proto_mode": "running"} if method == "fedproto" else {})}}
    plain = lab.experiment(engine=STACKED, **settings)
    programs = ClientRunner(lab.experiment(engine=ENGINES["recorded"], **settings))
    for clients in ([0, 1, 2, 3], [2, 0, 3], [1]):
        expected = lab.train_stack(plain, clients)
        found = programs.train(lab.work(programs.experiment, clients), clients, lambda client: Record())
        assert list(found) == clients
        for client, (reply, client_state) in found.items():
            assert distance({**reply.message}, {**expected[client][0].message}) < 1e-5
            assert distance({**client_state}, {**expected[client][1]}) < 1e-5
            assert reply.losses == pytest.approx(dict(expected[client][0].losses), rel=1e-5)
    assert sizes == [4]


# ---- one step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *quick([(method, None) for method in TRAINED], [("fedprox", None), ("fedproto", None)]),
        ("fedproto", "dropout"),
        ("fedproto", "projection"),
    ],
)
def test_one_step_of_every_method(
    lab: Any, distance: Any, method: str, model: str | None, engine: dict[str, Any], tmp_path: Path
) -> None:
    """In round 2, so that anchors and prototypes are there: 1e-5 of each array's largest value.

    SCAFFOLD answers (w_g - w) / (steps · lr): the rounding of weights of 0.2, 1e-8, is 1e-7 of gradients of 0.003.
    """
    changes = {"method__name": method, "model": MODELS[model] if model else lab.model_of(method), "local__lr": 0.1}
    before = lab.run(lab.experiment(**changes, federation__rounds=1), tmp_path / "one")
    found = [
        replies(lab, experiment, before.state, before.client_state, number=2)
        for experiment in pair(lab, engine, **changes, local__steps=1)
    ]
    initial = lab.experiment(**changes).setting.initial
    assert_close(*found, initial, distance, 1e-4 if method == "scaffold" else 1e-5)


UNEQUAL = [3, 16, 21, 2, 37]

VARIANTS: dict[str, dict[str, Any]] = {
    "padding": {},
    "batchnorm local": {"model": {**FEDGEN, "batchnorm": "local"}},
    "batchnorm frozen": {"model": {**FEDGEN, "batchnorm": "frozen"}},
    "dropout": {"model": MODELS["dropout"]},
    "augmentation": {"model": MODELS["projection"], "data__augmentation": "crop_flip_rot"},
    "momentum and decay": {"local__momentum": 0.9, "local__weight_decay": 0.01},
    "adam": {"model": MODELS["projection"], "local__optimizer": "adam", "local__lr": 1e-3},
    "clip": {"local__clip": 0.05},
    "proximal": {"method": {"name": "fedprox", "mu": 1.0}},
    "steps": {"local__steps": 5},
}


def unequal(
    lab: Any, engine: dict[str, Any] = STACKED, sizes: Sequence[int] = UNEQUAL, **changes: Any
) -> tuple[Any, Any]:
    """Clients of so many samples: other numbers of steps, and a last mini-batch of another size, each."""
    ends = np.cumsum(sizes)
    clients = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * len(sizes))
    return pair(lab, engine, partition=partition, **changes)


@pytest.mark.parametrize("variant", quick(VARIANTS, ["padding", "batchnorm local", "momentum and decay"]))
def test_a_turn_of_unequal_clients(lab: Any, distance: Any, variant: str, engine: dict[str, Any]) -> None:
    """Two passes over 2 to 37 samples in batches of 16: up to six steps, the last of 2 to 5 samples: 1e-4.

    A rounding of 6e-8 grows with each step; Adam divides a gradient by its size, which enlarges small ones.
    """
    changes = {"local__epochs": 2, **VARIANTS[variant]}
    serial, stacked = unequal(lab, engine, **changes)
    tolerance = 1e-3 if variant == "adam" else 1e-4
    assert_close(replies(lab, serial), replies(lab, stacked), serial.setting.initial, distance, tolerance)


# ---- phases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadThenBody(Local):
    """FedRep's order: the head for two passes, then the body for three steps; then the head on vectors of its own."""

    name = "head-then-body"

    def phases(self) -> tuple[Phase, ...]:
        return (
            Phase(("head.",), epochs=2),
            Phase(("encoder.",), steps=3),
            Phase(("head.",), source="own", loss=self.on_vectors),
        )

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        """As many vectors as the client has samples, at most 20."""
        count = min(int(ctx.class_counts.sum()), 20)
        vectors = torch.randn(count, ctx.setting.feature_dim, generator=ctx.stream("vectors"))
        return {"own": {"inputs": vectors, "labels": torch.arange(count) % ctx.setting.num_classes}}

    def on_vectors(self, model: Any, batch: Batch, context: LossInputs) -> Any:
        from flcore.math.losses.basic import cross_entropy

        return {"vectors": cross_entropy(model.classify(batch.images), batch.labels, batch.weight)}


@pytest.mark.parametrize("model", quick([FEDGEN, MODELS["projection"]], 1), ids=["batchnorm", "projection"])
def test_phases_of_unequal_clients(lab: Any, distance: Any, model: Any, engine: dict[str, Any]) -> None:
    """Momentum, clipping and decay start afresh in each phase; frozen parts and their statistics do not move at all."""
    changes = {"local": {"lr": 0.05, "batch_size": 16, "momentum": 0.9, "clip": 1.0, "weight_decay": 0.01}}
    serial, stacked = unequal(lab, engine, algorithm=HeadThenBody(), model=model, **changes)
    first, second = replies(lab, serial), replies(lab, stacked)
    assert_close(first, second, serial.setting.initial, distance, 1e-4)
    assert set(second[4][0].losses) == {"cross_entropy", "vectors"}
    projection = {name: t for name, t in serial.setting.initial.params.items() if name.startswith("projection.")}
    for _, client_state in second.values():
        assert all(torch.equal(client_state["model"].params[name], tensor) for name, tensor in projection.items())


# ---- BatchNorm and padding ---------------------------------------------------------------------------------------


@given(
    real=st.integers(2, 6),
    padding=st.integers(0, 4),
    dims=st.sampled_from([(), (3,), (2, 3)]),
    affine=st.booleans(),
    junk=st.sampled_from([0.0, 1.0, -1e4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_masked_batchnorm_is_batchnorm_of_the_real_samples(
    real: int, padding: int, dims: tuple[int, ...], affine: bool, junk: float, seed: int
) -> None:
    """Outputs, gradients and running statistics, twice over, for 2-, 3- and 4-dimensional inputs.

    To 1e-5, times 1/σ of the channel with the least spread, which is what normalising enlarges roundings by.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(dims)](4, affine=affine, momentum=0.3)
    if affine:
        with torch.no_grad():
            plain.weight.copy_(torch.rand(4, generator=generator))
            plain.bias.copy_(torch.rand(4, generator=generator))
    masked = maskable(nn.Sequential(type(plain)(4, affine=affine, momentum=0.3)))
    masked[0].load_state_dict(plain.state_dict())  # type: ignore[index]
    masked[0].mask = (torch.arange(real + padding) < real).float()  # type: ignore[index]
    for _ in range(2):
        values = 2 + 3 * torch.randn(real, 4, *dims, generator=generator)
        padded = torch.cat([values, torch.full((padding, 4, *dims), junk)])
        values.requires_grad_(), padded.requires_grad_()
        wanted = torch.randn(real, 4, *dims, generator=generator)
        spread = values.detach().transpose(0, 1).flatten(1).var(dim=1, correction=0).min().sqrt().item()
        tolerance = 1e-5 * max(1.0, 1 / (spread + 3e-3))
        expected, found = plain(values), masked(padded)[:real]
        assert torch.allclose(found, expected, atol=tolerance)
        gradient = torch.autograd.grad((expected * wanted).sum(), values)[0]
        other = torch.autograd.grad((found * wanted).sum(), padded)[0]
        assert torch.allclose(other[:real], gradient, atol=tolerance)
        assert not other[real:].any()
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(masked[0].state_dict()[name], tensor, atol=1e-5), name  # type: ignore[index]


def test_without_a_mask_and_in_evaluation_it_is_pytorchs() -> None:
    plain, masked = nn.BatchNorm2d(3), maskable(nn.Sequential(nn.BatchNorm2d(3)))[0]  # type: ignore[index]
    assert isinstance(masked, MaskedBatchNorm)
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(masked(images), plain(images))
    masked.mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert torch.equal(masked.eval()(images), plain.eval()(images))
    assert all(torch.equal(masked.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


def test_a_cumulative_average_cannot_be_stacked() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.stack: BatchNorm with a cumulative average cannot be stacked"):
        maskable(nn.Sequential(nn.BatchNorm2d(3, momentum=None)))


@pytest.mark.parametrize("model", MODELS)
def test_what_stands_in_the_padding_changes_nothing(
    lab: Any, distance: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding is a client's first sample; with its last one instead every reply is the same, to 1e-6."""
    _, unequally_many = unequal(lab, model=MODELS[model], method={"name": "fedprox", "mu": 1.0})
    before = replies(lab, unequally_many)
    used = []

    def other_padding(*arguments: Any) -> BatchPlan:
        plan, last = plan_batches(*arguments), torch.tensor([layout.size - 1 for layout in arguments[-1]])
        real = torch.arange(plan.positions.shape[2]) < plan.sizes.t().unsqueeze(2)
        used.append(int((~real).sum()))
        return replace(plan, positions=torch.where(real, plan.positions, last.unsqueeze(1)))

    monkeypatch.setattr(stacked, "plan_batches", other_padding)
    after = replies(lab, unequally_many)
    assert used
    for client, (reply, _) in before.items():
        assert distance(reply.message, after[client][0].message) < 1e-6


@given(st.lists(st.integers(2, 12), min_size=2, max_size=5), st.integers(2, 6), st.integers(0, 3))
@settings(max_examples=4, deadline=None)
def test_neighbours_do_not_matter(lab: Any, distance: Any, sizes: list[int], batch_size: int, seed: int) -> None:
    """A client in a stack is what it is alone in one, whatever its neighbours' sizes: 1e-5 after one pass."""
    ends = np.cumsum(sizes)
    clients = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * len(sizes))
    local = {"lr": 0.05, "batch_size": batch_size, "momentum": 0.5}
    experiment = lab.experiment(partition=partition, seed=seed, local=local, engine__stack=True)
    together = lab.train_stack(experiment, range(len(sizes)))
    for client in range(len(sizes)):
        alone = lab.train_stack(experiment, [client])[client]
        assert alone[0].steps == together[client][0].steps
        assert distance(alone[0].message, together[client][0].message) < 1e-5


def test_no_client_of_a_stack_reaches_another(lab: Any) -> None:
    """Client 1 diverges; what the others say is, to the bit, what they say next to a client 1 that does not."""

    @dataclass(frozen=True)
    class Diverging(FedAvg):
        poison: float = 0.0

        def initial_weights(self, ctx: ClientContext) -> Any:
            start = super().initial_weights(ctx)
            if ctx.client != 1:
                return start
            return replace(start, params={name: tensor + self.poison for name, tensor in start.params.items()})

    found = [
        lab.train_stack(lab.experiment(algorithm=Diverging(poison=poison), engine__stack=True), range(4))
        for poison in (0.0, float("nan"))
    ]
    assert isinstance(found[1][1], Failure)
    for client in (0, 2, 3):
        assert serialise(found[0][client][0].message) == serialise(found[1][client][0].message)


def test_a_stack_shares_its_seconds_by_steps(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one per reading: one second of training by shares, and one for each reply."""
    ticks = iter(range(100))
    experiment = lab.experiment(local__steps=None, local__epochs=1, engine__stack=True)
    monkeypatch.setattr("flcore.engine.client.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    worker = ClientRunner(experiment)
    replies = [reply for reply, _ in lab.train_stack(experiment, [3, 1], worker=worker).values()]
    total = sum(reply.steps for reply in replies)
    for reply in replies:
        assert reply.seconds == pytest.approx(reply.steps / total + 1, rel=1e-12)


# ---- the same bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients_per_task", quick([2, 1, None], 1))
@pytest.mark.parametrize("workers", quick([3, 0], 1))
def test_how_stacks_are_handed_out_changes_no_byte(
    lab: Any, workers: int, clients_per_task: int | None, tmp_path: Path
) -> None:
    """Tasks for so many workers, finished in any order on threads; worker processes are in test_pool."""
    changes = {"method__name": "fedproto", "federation__rounds": 2, "data__augmentation": "crop_flip"}
    expected = lab.run(lab.experiment(**changes, engine={"stack": True, "stack_size": 2}), tmp_path / "plain").bytes
    engine = {"stack": True, "stack_size": 2, "workers": workers, "clients_per_task": clients_per_task}
    found = lab.run(lab.experiment(**changes, engine=engine), tmp_path / "handed", orchestrator=lab.Threaded())
    assert found.bytes == expected


# ---- what cannot be stacked --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shaped(FedAvg):
    """A context that is not the same shape, or not the same names, or not the same number, for every client."""

    name = "shaped"
    how: str = "shapes"

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        if self.how == "shapes":
            return {"anchors": torch.zeros(ctx.client + 1, 2)}
        if self.how == "names":
            return {"anchors": torch.zeros(2)} if ctx.client else {}
        return {"scale": float(ctx.client)}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shapes", r"anchors of the loss has different shapes \[\(1, 2\), \(2, 2\)\] at different clients"),
        ("names", r"loss needs \[.*client \d's \["),
        ("numbers", "scale of the loss is a number that differs between clients; make it a tensor"),
    ],
)
def test_contexts_that_differ_are_refused(lab: Any, how: str, words: str) -> None:
    experiment = lab.experiment(algorithm=Shaped(how=how), engine__stack=True)
    with pytest.raises(ConfigError, match=r"^engine\.stack = true: .*shaped.*" + words + r".*use engine\.stack=false"):
        lab.train_stack(experiment, [0, 1])
    assert len(lab.train_stack(lab.experiment(algorithm=Shaped(how=how)), [0, 1])) == 2


def test_the_refusal_names_the_client_that_differs(lab: Any) -> None:
    """Clients 0, 1, 2 with 43, 50 and 62 samples; only client 0 needs nothing. In the stack it stands last."""
    experiment = lab.experiment(algorithm=Shaped(how="names"), engine__stack=True, local__batch_size=4)
    with pytest.raises(ConfigError, match=r"client 0's loss needs \[\]"):
        lab.train_stack(experiment, [0, 1, 2])


@dataclass(frozen=True)
class Branching(FedAvg):
    """A loss that looks at a value in Python."""

    name = "branching"
    how: str = "if"

    def loss(self, model: Any, batch: Batch, context: LossInputs) -> Any:
        terms = super().loss(model, batch, context)
        value = terms["cross_entropy"]
        if self.how == "if" and value > 0:
            return {"cross_entropy": 2 * value}
        if self.how == "item":
            return {"cross_entropy": value * value.item()}
        if self.how == "rows":
            return {"cross_entropy": model.classify(model.features(batch.images)[batch.labels == 0]).square().mean()}
        return terms


@pytest.mark.parametrize("how", ["if", "item", "rows"])
def test_a_loss_that_branches_on_values_is_refused(lab: Any, how: str) -> None:
    algorithm = Branching(how=how)
    expected = (
        r"^engine\.stack = true: branching cannot be trained on stacked clients with fedgen_cnn \(.+\); use engine"
    )
    with pytest.raises(ConfigError, match=expected):
        lab.train_stack(lab.experiment(algorithm=algorithm, engine__stack=True), range(4))
    assert len(lab.train_stack(lab.experiment(algorithm=algorithm), range(4))) == 4


@dataclass(frozen=True)
class Constants(FedProx):
    """A context of every allowed kind: shared tensors, own tensors, nested mappings, equal numbers and words."""

    name = "constants"

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        own = torch.full((), 1.0 + ctx.client)
        return {**super().loss_inputs(ctx), "factor": 3.0, "word": "plain", "deep": {"own": {"scale": own}, "n": 2}}

    def loss(self, model: Any, batch: Batch, context: LossInputs) -> Any:
        assert (context["factor"], context["word"], context["deep"]["n"]) == (3.0, "plain", 2)
        terms = super().loss(model, batch, context)
        features = model.features(batch.images).square().mean(dim=1)
        weight = torch.ones(len(batch.labels)) if batch.weight is None else batch.weight
        scale = context["deep"]["own"]["scale"] * context["factor"] * 1e-3
        terms["shrink"] = scale * (features * weight).sum() / weight.sum()
        return terms


def test_contexts_of_every_kind(lab: Any, distance: Any) -> None:
    serial, stacked = unequal(lab, algorithm=Constants(mu=1.0))
    first = replies(lab, serial)
    assert_close(first, replies(lab, stacked), serial.setting.initial, distance, 1e-4)
    assert "shrink" in first[0][0].losses


@dataclass(frozen=True)
class Drawn(FedAvg):
    """Mixes each sample with the next by a random share of the step."""

    name = "drawn"

    def random_inputs(self, ctx: ClientContext, steps: int, generator: torch.Generator) -> Any:
        return {"share": torch.rand(steps, generator=generator)}

    def loss(self, model: Any, batch: Batch, context: LossInputs) -> Any:
        terms = super().loss(model, batch, context)
        return {name: value * (0.5 + batch.random_inputs["share"]) for name, value in terms.items()}


def test_random_numbers_of_a_method_are_the_clients_own(lab: Any, distance: Any) -> None:
    serial, stacked = unequal(lab, algorithm=Drawn())
    assert_close(replies(lab, serial), replies(lab, stacked), serial.setting.initial, distance, 1e-4)


# ---- frozen models in a loss -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anchored(FedAvg):
    """Pulls features to those of the received model, asked through ``weights`` in evaluation mode, part by part."""

    name = "anchored"

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        return {"anchor": ctx.received["model"].values}  # type: ignore[attr-defined]

    def loss(self, model: Any, batch: Batch, context: LossInputs) -> Any:
        terms = super().loss(model, batch, context)
        anchor = context["anchor"]
        fixed = model.project(model.encode(batch.images, anchor), anchor)
        gap = (model.features(batch.images) - fixed).square().mean(dim=1)
        weight = torch.ones(len(batch.labels)) if batch.weight is None else batch.weight
        terms["anchor"] = (gap * weight).sum() / weight.sum()
        return terms


@pytest.mark.parametrize("model", MODELS)
def test_a_frozen_model_in_the_loss(lab: Any, distance: Any, model: str) -> None:
    serial, stacked = unequal(lab, algorithm=Anchored(), model=MODELS[model])
    first = replies(lab, serial)
    assert_close(first, replies(lab, stacked), serial.setting.initial, distance, 1e-4)
    assert first[4][0].losses["anchor"] > 0  # client 4 takes three steps: after the first it has left the anchor


def test_the_samples_of_a_stack_are_those_of_its_clients() -> None:
    """What is taken at positions: inputs and labels row by row."""
    samples = MadeSamples(torch.arange(6.0).reshape(3, 2), torch.tensor([4, 5, 6]))
    assert samples.inputs(torch.tensor([2, 0])).tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert samples.labels.tolist() == [4, 5, 6]


def test_a_trainer_without_phases_gives_back_what_it_was_given(lab: Any) -> None:
    experiment = lab.experiment(engine__stack=True)
    worker = ClientRunner(experiment)
    server = experiment.method.start_server(experiment.setting)
    exchange = experiment.method.round_exchanges(1, experiment.setting)[0]
    contexts = [lab.receive(worker, 1, exchange, client, server, {}) for client in (0, 1)]
    data = ClientData.of(experiment, [0, 1], 1)
    outcomes = StackedTrainer(experiment).train(TrainJob(contexts, data, [experiment.setting.initial] * 2, [], 0))
    for outcome in outcomes:
        assert serialise({"m": outcome.weights}) == serialise({"m": experiment.setting.initial})
        assert (outcome.steps, dict(outcome.losses), outcome.drawn.sum()) == (0, {}, 0)
