"""FedGen by hand on a linear model, and its generator's training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine.client import ClientRunner
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Record
from flcore.methods.fedgen import FedGen
from flcore.methods.kit.feature_generator import (
    FEATURE_GENERATOR,
    GENERATOR_OPTIMIZER,
    LABEL_COUNTS,
    LABEL_DISTRIBUTION,
    Heads,
)
from flcore.methods.types import MODEL, Replies, RoundContext

T = torch.tensor


def by_hand(lab: Any, pixels: list[list[int]], labels: list[int], encoder: bool = False, **changes: Any) -> Any:
    """A linear model for two classes that starts at zero, one client, full batches, learning rate 0.1."""
    return lab.linear(pixels, labels, [range(len(labels))], ([[1, 0], [0, 1]], [0, 1]), encoder, **changes)


def taught(experiment: Any, output: list[float], chances: list[float], model: Weights | None = None) -> Record:
    """A server whose generator says ``output`` whatever it is asked, and asks for labels with given chances."""
    server = Record(experiment.method.start_server(experiment.setting))
    weights = server[FEATURE_GENERATOR]
    params = {name: torch.zeros_like(value) for name, value in weights.params.items()}
    generator = Weights({**params, "network.3.bias": T(output)}, weights.buffers)
    return server | {
        MODEL: model or server[MODEL],
        FEATURE_GENERATOR: generator,
        LABEL_DISTRIBUTION: TensorDict({"p": T(chances)}),
    }


def test_generated_features_teach_the_head(lab: Any) -> None:
    """A = (2, 0) of class 0; G = (1, 1), asked for class 0. Head zero: all softmaxes are (1/2, 1/2), both losses ln 2.

    Round 2 (r = 1), γ = 10·0.98 = 9.8, B_gen = B; KL between equal answers is 0, with gradient 0. Row 0 has gradient
    (-1/2)·(2, 0) + 9.8·(-1/2)·(1, 1), its bias -1/2 - 4.9; learning rate 0.1: W_0 = (0.59, 0.49), b_0 = 0.54.
    """
    experiment = by_hand(lab, [[2, 0]], [0], method={"name": "fedgen"})
    reply, _ = lab.train(experiment, number=2, server=taught(experiment, [1.0, 1.0], [1.0, 0.0]))
    params = reply.message["model"].params
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.59, 0.49, -0.59, -0.49])
    assert params["head.bias"].tolist() == pytest.approx([0.54, -0.54])
    ln2 = math.log(2)
    assert reply.losses == pytest.approx({"cross_entropy": ln2, "generated": 9.8 * ln2, "divergence": 0.0}, abs=1e-5)


def test_fewer_generated_features_weigh_less(lab: Any) -> None:
    """B_gen/B = 50/100 halves γ: b_0 = 0.1·(0.5 + 9.8/2·0.5) = 0.295."""
    experiment = by_hand(lab, [[2, 0]], [0], method={"name": "fedgen", "client_gen_batch": 50})
    reply, _ = lab.train(experiment, number=2, server=taught(experiment, [1.0, 1.0], [1.0, 0.0]))
    assert reply.message["model"].params["head.bias"][0].item() == pytest.approx(0.295)


def test_answers_to_generated_features_are_targets(lab: Any) -> None:
    """Head row 0 = (0, ln 3): A = (2, 0) has logits (0, 0), G = (1, 1) has (ln 3, 0), softmax (3/4, 1/4).

    KL = 3/4·ln(3/2) + 1/4·ln(1/2) = 0.130812, its gradient on the logits of A (1/2 - 3/4) = -1/4. With β = 9.8 row 0
    has gradient (-1/2 - 9.8/4)·(2, 0) = (-5.9, 0) and its bias -2.95: W_0 = (0.59, ln 3), b_0 = 0.295, while G itself
    is no sample of a loss (γ = 0) and the target no function of the head (else W_01 would move).
    """
    experiment = by_hand(lab, [[2, 0]], [0], method={"name": "fedgen", "gamma": 0})
    head = Weights({"head.weight": T([[0.0, math.log(3)], [0.0, 0.0]]), "head.bias": torch.zeros(2)})
    reply, _ = lab.train(experiment, number=2, server=taught(experiment, [1.0, 1.0], [1.0, 0.0], head))
    params = reply.message["model"].params
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.59, math.log(3), -0.59, 0.0])
    assert params["head.bias"].tolist() == pytest.approx([0.295, -0.295])
    assert reply.losses["divergence"] == pytest.approx(9.8 * 0.130812, abs=1e-5)
    assert "generated" not in reply.losses


def test_generated_features_reach_neither_encoder_nor_generator(lab: Any) -> None:
    """Head row 0 = (0, 1): with γ alone the encoder moves as FedAvg's does."""
    model = Weights(
        {"encoder.1.weight": torch.eye(2), "head.weight": T([[0.0, 1.0], [0.0, 0.0]]), "head.bias": torch.zeros(2)}
    )
    found = {}
    for name, options in {"fedgen": {"beta": 0}, "fedavg": {}}.items():
        experiment = by_hand(lab, [[2, 0]], [0], True, method={"name": name, **options})
        server = taught(experiment, [1.0, 1.0], [1.0, 0.0], model) if name == "fedgen" else Record({MODEL: model})
        found[name] = lab.train(experiment, number=2, server=server)[0].message["model"].params
    assert torch.equal(found["fedgen"]["encoder.1.weight"], found["fedavg"]["encoder.1.weight"])
    assert not torch.equal(found["fedgen"]["encoder.1.weight"], torch.eye(2))
    assert not torch.equal(found["fedgen"]["head.weight"], found["fedavg"]["head.weight"])


def heads_of(weights: list[list[list[float]]], drawn: list[list[int]]) -> dict[int, Record]:
    """Replies of clients with given heads, without bias, and the classes they drew."""
    return {
        client: Record(
            {
                MODEL: Weights({"head.weight": T(head), "head.bias": torch.zeros(len(head))}),
                LABEL_COUNTS: TensorDict({"drawn": T(counts)}),
            }
        )
        for client, (head, counts) in enumerate(zip(weights, drawn, strict=True))
    }


TWO_HEADS = heads_of([[[3.0, 0.0], [-3.0, 0.0]], [[2.0, 1.0], [-2.0, -1.0]]], [[5, 0], [1, 4]])


def start(lab: Any, **options: Any) -> tuple[FedGen, Any, Record]:
    experiment = by_hand(lab, [[2, 0], [0, 2]], [0, 1], method={"name": "fedgen", **options})
    return experiment.method, experiment.setting, Record(experiment.method.start_server(experiment.setting))


def train(
    method: FedGen, server: Record, replies: dict[int, Record], setting: Any, number: int
) -> tuple[Record, dict[str, float]]:
    """The server after the generator's training in a round, and the facts."""
    after, facts = method.train_generator(server, Replies(replies), RoundContext(setting, number))
    return after, dict(facts)


def asked(server: Record) -> list[float]:
    return server[LABEL_DISTRIBUTION]["p"].tolist()


def test_the_generator_learns_what_the_heads_say(lab: Any) -> None:
    """Two classes are equally likely at first: about ln 2; 300 steps at 1e-3 leave a tenth. Steps are counted."""
    method, setting, server = start(lab, gen_steps=100, gen_lr=1e-3)
    losses = []
    for number in (1, 2, 3):
        server, facts = train(method, server, TWO_HEADS, setting, number)
        losses.append(facts["generator_fidelity"])
    assert losses[-1] < 0.07
    assert losses[-1] < losses[0]
    assert server[GENERATOR_OPTIMIZER]["steps"].tolist() == [300]
    assert asked(server) == [0.5, 0.5]
    assert {name for name in facts if name.startswith("generator_")} == {"generator_fidelity", "generator_diversity"}


@pytest.mark.parametrize(("number", "lr"), [(1, 3e-4), (11, 2.451218e-4)])
def test_learning_rate_of_the_generator(lab: Any, number: int, lr: float) -> None:
    """Adam's first step moves a weight by lr wherever the gradient is not tiny (fedpa.md fact 2 for round 11)."""
    method, setting, server = start(lab, gen_steps=1)
    after, _ = train(method, server, TWO_HEADS, setting, number)
    moves = [
        (after[FEATURE_GENERATOR].params[name] - value).abs().max().item()
        for name, value in server[FEATURE_GENERATOR].params.items()
    ]
    assert max(moves) == pytest.approx(lr, rel=1e-3)


def test_only_classes_that_were_drawn_are_asked_for(lab: Any) -> None:
    """Nobody drew class 1 in round 1: clients are not asked for it, until somebody has; then it stays."""
    method, setting, server = start(lab, gen_steps=2)
    one = heads_of([[[3.0, 0.0], [-3.0, 0.0]]], [[5, 0]])
    after, _ = train(method, server, one, setting, 1)
    assert asked(after) == [1, 0]
    both, _ = train(method, after, TWO_HEADS, setting, 2)
    assert asked(train(method, both, one, setting, 3)[0]) == [0.5, 0.5]


def test_what_the_generator_is_trained_on(lab: Any) -> None:
    """Fact 5 of fedpa.md: shares of three clients, whose replies come in another order; labels drawn in the round only.

    Client k's head is k everywhere. Counts [[9, 0], [0, 4], [0, 0]]; then without class 1.
    """
    seen: list[Any] = []

    class Watched(FedGen):
        def objective(self, server: Record, heads: Heads, passed: int) -> Any:
            terms = super().objective(server, heads, passed)

            def watched(outputs: Any, noise: Any, labels: Any) -> Any:
                seen.append((heads, set(labels.tolist())))
                return terms(outputs, noise, labels)

            return watched

    _, setting, server = start(lab)
    for counts in ([[9, 0], [0, 4], [0, 0]], [[9, 0], [1, 0], [0, 0]]):
        replies = heads_of([[[float(k)] * 2] * 2 for k in range(3)], counts)
        train(Watched(gen_steps=3), server, dict(reversed(replies.items())), setting, 1)
    heads, labels = seen[0]
    assert heads.params["weight"][:, 0, 0].tolist() == [0, 1, 2]
    assert heads.shares[:, 0].tolist() == pytest.approx([0.833333, 0.083333, 0.083333], abs=1e-6)
    assert heads.shares[:, 1].tolist() == pytest.approx([0.142857, 0.714286, 0.142857], abs=1e-6)
    assert labels == {0, 1}
    assert [labels for _, labels in seen[3:]] == [{0}] * 3


def test_where_nothing_was_drawn_nothing_is_trained(lab: Any) -> None:
    method, setting, server = start(lab)
    nobody = heads_of([[[3.0, 0.0], [-3.0, 0.0]]], [[0, 0]])
    after, facts = train(method, server, nobody, setting, 1)
    assert after is server
    assert facts == {}


def test_terms_of_the_generator() -> None:
    """α = 2, η = 3 on the numbers of baselines.md 6 (a); heads say (0, 0): cross-entropy ln 2 whatever the shares."""
    method = FedGen(alpha=2.0, eta=3.0)
    heads = Heads({"weight": torch.zeros(2, 2, 2), "bias": torch.zeros(2, 2)}, torch.full((2, 2), 0.5))
    outputs, noise = T([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]), T([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    terms = method.objective(Record(), heads, 4)(outputs, noise, T([0, 0, 1]))
    assert {name: weight for name, (weight, _) in terms.items()} == {"fidelity": 2.0, "diversity": 3.0}
    assert terms["fidelity"][1].item() == pytest.approx(math.log(2))
    assert terms["diversity"][1].item() == pytest.approx(0.641180, abs=1e-6)
    without = FedGen(eta=0).objective(Record(), heads, 4)(outputs, noise, T([0, 0, 1]))
    assert set(without) == {"fidelity"}


def test_features_for_analyses(lab: Any) -> None:
    """Every class before anybody was taught, then those that clients ask for; one batch, grouped by class."""
    method, setting, server = start(lab, gen_steps=2)
    features, labels = method.generated_features(server, setting, 3, torch.Generator().manual_seed(0))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert features.shape == (6, 2) and len(features.unique(dim=0)) == 6
    one, _ = train(method, server, heads_of([[[3.0, 0.0], [-3.0, 0.0]]], [[5, 0]]), setting, 1)
    assert method.generated_features(one, setting, 2, torch.Generator())[1].tolist() == [0, 0]
    off = FedGen(gamma=0, beta=0)
    assert off.generated_features(Record(off.start_server(setting)), setting, 3, torch.Generator()) is None


def gentle(lab: Any, **changes: Any) -> Any:
    """The tiny federation with a learning rate at which weights of 10 do not blow up."""
    options = changes.pop("method", {"name": "fedgen"})
    return lab.experiment(method=options, **({"local__lr": 0.01} | changes))


def test_a_step_less_client_asks_for_nothing(lab: Any) -> None:
    experiment = by_hand(lab, [[2, 0]], [0], method={"name": "fedgen"})
    server = taught(experiment, [1.0, 1.0], [1.0, 0.0])
    ctx = replace(turn_of(lab, experiment, server), round=2)
    drawn = experiment.method.random_inputs(ctx, 0, torch.Generator())
    assert {name: tuple(value.shape) for name, value in drawn.items()} == {
        "features": (0, 100, 2),
        "labels": (0, 100),
        "noise": (0, 100, 32),
    }


def turn_of(lab: Any, experiment: Any, server: Record) -> Any:
    """The first client's turn of round 1."""
    (exchange,) = experiment.method.round_exchanges(1, experiment.setting)
    return lab.receive(ClientRunner(experiment), 1, exchange, 0, server, {})


def test_the_generators_quality_is_noted_every_round(lab: Any, tmp_path: Path) -> None:
    """FedPA's table V per round: the same noise each time, so a generator that stands still keeps its figures."""
    run = lab.run(lab.experiment(method__name="fedgen", local__lr=0.01), tmp_path / "run")
    noted = [record["server"] for record in run.history]
    assert all({"generated_intra", "generated_inter", "generated_centroid_inter"} <= set(facts) for facts in noted)
    assert len({facts["generated_inter"] for facts in noted}) == len(noted)  # it does not stand still
    experiment = lab.experiment(method__name="fedgen", local__lr=0.01)
    again = experiment.method.quality(run.state.server, experiment.setting)
    assert again == {name: value for name, value in noted[-1].items() if name.startswith("generated_")}


def test_a_generator_that_diverges_stops_the_run(lab: Any) -> None:
    method, setting, server = start(lab, gen_lr=1e30)
    with pytest.raises(ArithmeticError, match=r"generator diverged \(fidelity .*lower method\.gen_lr"):
        train(method, server, TWO_HEADS, setting, 1)
