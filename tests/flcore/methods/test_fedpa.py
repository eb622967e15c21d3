"""FedPA by hand, its ablation table, its generator, and its traffic (fedpa.md 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.engine.client import ClientRunner
from flcore.io.messages import Count, Prototypes, TensorDict, Weights
from flcore.io.records import Record, payload_sizes
from flcore.methods.fedpa import KNOWN_COUNTS, FedPA
from flcore.methods.kit.feature_generator import (
    FEATURE_GENERATOR,
    GENERATOR_OPTIMIZER,
    LABEL_COUNTS,
    LABEL_DISTRIBUTION,
    Heads,
)
from flcore.methods.types import MODEL, PROTOTYPES, ClientContext, Replies, RoundContext
from flcore.models import build_model, extract_weights
from flcore.models.cnn import FedGenCnn
from flcore.models.network import Network

T = torch.tensor
LN2 = math.log(2)


def by_hand(lab: Any, pixels: list[list[int]], labels: list[int], encoder: bool = True, **changes: Any) -> Any:
    """Encoder E = I, head zero, one client, full batches, learning rate 0.1."""
    return lab.linear(pixels, labels, [range(len(labels))], ([[1, 0], [0, 1]], [0, 1]), encoder, **changes)


def taught(experiment: Any, prototypes: Prototypes | None = None) -> Record:
    """A server whose generator says (1, 1) whatever it is asked, asks for class 0, and knows some prototypes."""
    server = Record(experiment.method.start_server(experiment.setting))
    if FEATURE_GENERATOR in server:
        weights = server[FEATURE_GENERATOR]
        params = {name: torch.zeros_like(value) for name, value in weights.params.items()}
        server |= {
            FEATURE_GENERATOR: Weights({**params, "network.3.bias": T([1.0, 1.0])}, weights.buffers),
            LABEL_DISTRIBUTION: TensorDict({"p": T([1.0, 0.0])}),
        }
    return server if prototypes is None else server | {PROTOTYPES: prototypes}


AT_ZERO = Prototypes(torch.zeros(2, 2), T([True, False]))


def step(lab: Any, prototypes: Prototypes = AT_ZERO, **options: Any) -> Any:
    """Round 2 of a client that holds A = (2, 0) of class 0: its reply."""
    experiment = by_hand(lab, [[2, 0]], [0], method={"name": "fedpa", **options})
    return lab.train(experiment, number=2, server=taught(experiment, prototypes))[0]


def test_a_step_with_everything(lab: Any) -> None:
    """A = (2, 0), class 0, φ^0 = (0, 0), G = (1, 1) asked for class 0; t = 1: λ_ge = 24.5, λ_po = 4.9.

    Head zero: both cross-entropies are ln 2; row 0 of the head has gradient -½·(2, 0) - 24.5·½·(1, 1), its bias
    -½ - 12.25: W_0 = (1.325, 1.225), b_0 = 1.275. L_po = (4 + 0)/2 = 2; its gradient on E is (2/2)·(2, 0)·xᵀ =
    ((4, 0), (0, 0)), times 4.9: E_00 = 1 - 1.96 = -0.96. No gradient of L_ge reaches E, none of L_po the head (fact
    12). The feature of A afterwards, (-1.92, 0), is the prototype that goes up.
    """
    reply = step(lab)
    params = reply.message["model"].params
    assert params["head.weight"].flatten().tolist() == pytest.approx([1.325, 1.225, -1.325, -1.225])
    assert params["head.bias"].tolist() == pytest.approx([1.275, -1.275])
    assert params["encoder.1.weight"].flatten().tolist() == pytest.approx([-0.96, 0, 0, 1])
    assert reply.losses == pytest.approx({"cross_entropy": LN2, "generated": 24.5 * LN2, "prototype_pull": 9.8})
    assert reply.message["prototypes"].means.tolist() == [[pytest.approx(-1.92), 0], [0, 0]]
    assert reply.message["prototypes"].present.tolist() == [True, False]
    assert reply.message["num_samples"] == Count(1)
    counts = reply.message["label_counts"].named
    assert (counts["held"].tolist(), counts["drawn"].tolist()) == ([1, 0], [1, 0])


def test_each_term_alone(lab: Any) -> None:
    """As above: without L_ge the head takes FedAvg's step (0.1, 0), without L_po the encoder stays at I."""
    without_ge, without_po = step(lab, use_ge=False), step(lab, use_po=False)
    assert without_ge.message["model"].params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])
    assert without_ge.message["model"].params["encoder.1.weight"][0, 0].item() == pytest.approx(-0.96)
    assert set(without_ge.losses) == {"cross_entropy", "prototype_pull"}
    assert without_po.message["model"].params["head.bias"][0].item() == pytest.approx(1.275)
    assert torch.equal(without_po.message["model"].params["encoder.1.weight"], torch.eye(2))
    assert set(without_po.losses) == {"cross_entropy", "generated"}


def test_unsquared_pull(lab: Any) -> None:
    """‖(2, 0)‖ = 2 with gradient (1, 0)·xᵀ: E_00 = 1 - 0.1·4.9·2 = 0.02 (fedpa.md 7d)."""
    reply = step(lab, po_form="l2")
    assert reply.losses["prototype_pull"] == pytest.approx(9.8)
    assert reply.message["model"].params["encoder.1.weight"][0, 0].item() == pytest.approx(0.02, abs=1e-6)


def test_a_missing_prototype_pulls_nowhere(lab: Any) -> None:
    """Fact 8: the zero row of a class without prototype is no target."""
    reply = step(lab, Prototypes(T([[0.0, 0.0], [9.0, 9.0]]), T([False, True])))
    assert reply.losses["prototype_pull"] == 0
    assert torch.equal(reply.message["model"].params["encoder.1.weight"], torch.eye(2))


def turn_of(lab: Any, experiment: Any, server: Record, number: int) -> ClientContext:
    (exchange,) = experiment.method.round_exchanges(number, experiment.setting)
    return lab.receive(ClientRunner(experiment), number, exchange, 0, server, {})


@pytest.mark.parametrize(
    ("number", "ge", "po"),
    [(2, 24.5, 4.9), (11, 20.426820, 4.085364), (101, 3.315489, 0.663098), (174, None, 0.151733), (175, None, 0.15)],
)
def test_schedules(lab: Any, number: int, ge: float | None, po: float) -> None:
    """Fact 2, rounds counted from 1 here. B_gen/B multiplies λ_ge alone."""
    for options, share in (({}, 1.0), ({"client_gen_batch": 25}, 0.25)):
        experiment = by_hand(lab, [[2, 0]], [0], method={"name": "fedpa", **options})
        inputs = experiment.method.loss_inputs(turn_of(lab, experiment, taught(experiment, AT_ZERO), number))
        assert inputs["lambda_po"] == pytest.approx(po, abs=1e-6)
        if ge is not None:
            assert inputs["lambda_ge"] == pytest.approx(share * ge, abs=1e-6)


FUSE, TRAIN, LAST = "fuse-prototypes", "train-generator", "aggregate"
OWN = {"generator", "generator_optimizer"}


@pytest.mark.parametrize(
    ("ad", "ge", "po", "stages", "server", "sent"),
    [
        (False, False, False, [LAST], set(), set()),
        (False, False, True, [FUSE, LAST], {"prototypes"}, {"prototypes", "label_counts"}),
        (False, True, False, [TRAIN, LAST], OWN, {"label_counts"}),
        (True, True, False, [FUSE, TRAIN, LAST], OWN | {"prototypes"}, {"prototypes", "label_counts"}),
        (False, True, True, [FUSE, TRAIN, LAST], OWN | {"prototypes"}, {"prototypes", "label_counts"}),
        (True, True, True, [FUSE, TRAIN, LAST], OWN | {"prototypes"}, {"prototypes", "label_counts"}),
        (True, False, False, [LAST], set(), set()),  # L_ad without a generator is nothing
    ],
)
def test_ablation_table(
    lab: Any, ad: bool, ge: bool, po: bool, stages: list[str], server: set[str], sent: set[str], tmp_path: Any
) -> None:
    """The rows of table IV: what is off is neither computed, nor kept, nor sent; L_ad comes with the second round."""
    options = {"name": "fedpa", "use_ad": ad, "use_ge": ge, "use_po": po, "gen_steps": 2}
    experiment = gentle(lab, method=options, federation__rounds=2)
    assert list(experiment.method.server_steps()) == stages
    assert set(experiment.method.start_server(experiment.setting)) == {"model"} | server
    run = lab.run(experiment, tmp_path / "run")
    terms = {"cross_entropy"} | ({"generated"} if ge else set()) | ({"prototype_pull"} if po else set())
    assert set(run.history[1]["train_loss"]) == terms
    assert {kind.removesuffix("_buffers") for kind in run.state.up} == {"model", "num_samples"} | sent
    down = {kind.removesuffix("_buffers") for kind in run.state.down}
    assert down == {"model"} | ({"generator", "label_distribution"} if ge else set()) | (
        {"prototypes"} if po else set()
    )
    pushed = {"generator_adversarial"} if ad and ge else set()
    near = {"generator_distance"} if ge and (ad or po) else set()
    for record, more in zip(run.history, (set(), pushed), strict=True):
        facts = {name for name in record.get("server", {}) if name.startswith("generator_")}
        assert facts == ({"generator_fidelity", "generator_diversity"} | near | more if ge else set())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"lambda_ge0": 0}, {"prototypes"}),
        ({"lambda_po0": 0, "gamma_ad": 0}, OWN),
        ({"lambda_po0": 0}, OWN | {"prototypes"}),
    ],
)
def test_a_weight_of_zero_is_a_switch(lab: Any, options: Any, kept: set[str]) -> None:
    """The floors must not revive it (fedpa.md section 4)."""
    experiment = by_hand(lab, [[2, 0]], [0], method={"name": "fedpa", **options})
    assert set(experiment.method.start_server(experiment.setting)) == {"model"} | kept


def test_preset_of_the_authors() -> None:
    """Their order of stages."""
    assert list(FedPA(preset="authors").server_steps()) == [TRAIN, LAST, FUSE]
    assert list(FedPA(gen_proto="old").server_steps()) == [TRAIN, LAST, FUSE]


def gentle(lab: Any, **changes: Any) -> Any:
    """The tiny federation with a learning rate at which weights of 25 do not blow up."""
    options = changes.pop("method", {"name": "fedpa"})
    return lab.experiment(method=options, **({"local__lr": 0.01} | changes))


PIXELS, LABELS = [[3, 4], [0, 1], [0, 3], [0, 5]], [0, 1, 1, 1]


def sent(lab: Any, number: int = 1, seed: int = 0, **options: Any) -> Prototypes:
    """What goes up from a client with one sample of class 0 and three of class 1, features as given (no encoder)."""
    experiment = by_hand(lab, PIXELS, LABELS, False, seed=seed, method={"name": "fedpa", "use_ge": False, **options})
    server = Record(experiment.method.start_server(experiment.setting))
    return lab.train(experiment, number=number, server=server)[0].message[PROTOTYPES]


def test_terms_of_the_generator() -> None:
    """t = 1: weights 24.5, 1, -0.15. L_ad 7.25 (fact 7), diversity of the numbers of fact 6; at t = 0 no L_ad."""
    heads = Heads({"weight": torch.zeros(2, 2, 2), "bias": torch.zeros(2, 2)}, torch.full((2, 2), 0.5))
    server = Record({PROTOTYPES: Prototypes(T([[0.0, 0.0], [0.0, 2.0]]), T([True, True]))})
    far, labels = T([[3.0, 4.0], [0.0, 0.0]]), T([0, 1])
    terms = FedPA().objective(server, heads, 1)(far, torch.zeros(2, 2), labels)
    assert {name: weight for name, (weight, _) in terms.items()} == pytest.approx(
        {"fidelity": 24.5, "diversity": 1.0, "adversarial": -0.15, "distance": 0.0}
    )
    assert terms["fidelity"][1].item() == pytest.approx(LN2)
    assert terms["adversarial"][1].item() == pytest.approx(7.25)
    capped = FedPA(ad_cap=5.0).objective(server, heads, 1)(far, torch.zeros(2, 2), labels)
    assert capped["adversarial"][1].item() == pytest.approx(3.5)  # (5 + 2)/2
    unsquared = FedPA(po_form="l2").objective(server, heads, 1)(far, torch.zeros(2, 2), labels)
    assert unsquared["adversarial"][1].item() == pytest.approx(3.5)  # (5 + 2)/2
    first = FedPA().objective(server, heads, 0)(far, torch.zeros(2, 2), labels)
    assert {name: weight for name, (weight, _) in first.items()} == {
        "fidelity": 25.0,
        "diversity": 1.0,
        "distance": 0.0,
    }

    spread, noise, labels = T([[0.0, 0], [1, 1], [2, 0]]), T([[0.0, 1], [1, 1], [0, 0]]), T([0, 0, 1])
    for options, expected in (
        ({}, 0.894839),
        ({"div_mask": "inter"}, 0.716531),
        ({"div_mask": "all"}, 0.641180),
        ({"div_metric": "norms"}, 0.730322),
        ({"preset": "authors"}, 0.716531),
    ):
        found = FedPA(**options).objective(server, heads, 1)(spread, noise, labels)
        assert found["diversity"][1].item() == pytest.approx(expected, abs=1e-6)


def replies_of_heads(present: list[bool]) -> dict[int, Record]:
    """Two clients that classify by the first coordinate, and hold and drew both classes."""
    head = {"head.weight": T([[3.0, 0.0], [-3.0, 0.0]]), "head.bias": torch.zeros(2)}
    prototypes = Prototypes(T([[1.0, 0.0], [-1.0, 0.0]]) * T(present).unsqueeze(1), T(present))
    counts = TensorDict({"held": T([6, 4]), "drawn": T([3, 2])})
    return {client: Record({MODEL: Weights(head), PROTOTYPES: prototypes, LABEL_COUNTS: counts}) for client in (0, 1)}


def trained(
    lab: Any, rounds: int = 3, present: tuple[bool, bool] = (True, True), **options: Any
) -> tuple[Record, dict[str, float]]:
    """The server after some rounds of its own work, and the facts of the last one."""
    experiment = by_hand(lab, [[2, 0], [0, 2]], [0, 1], False, method={"name": "fedpa", **options})
    server = Record(experiment.method.start_server(experiment.setting))
    replies = Replies(replies_of_heads(list(present)))
    for number in range(1, rounds + 1):
        facts: dict[str, float] = {}
        for name, stage in experiment.method.server_steps().items():
            if name != LAST:
                server, found = stage(server, replies, RoundContext(experiment.setting, number))
                facts |= found
    return server, facts


@pytest.mark.slow
def test_the_generator_satisfies_the_heads_and_leaves_the_prototypes(lab: Any) -> None:
    """200 steps at 1e-3: classes are told apart; with L_ad the second coordinate, which no head reads, runs away.

    Steps: 4 rounds of 50 (fact 13).
    """
    options = {"gen_lr": 1e-3, "rounds": 4}
    (server, pushed), (_, free) = trained(lab, **options), trained(lab, use_ad=False, **options)
    _, capped = trained(lab, ad_cap=1e-6, **options)
    assert pushed["generator_fidelity"] < 0.1
    assert pushed["generator_distance"] > free["generator_distance"] + 0.05
    assert capped["generator_distance"] == pytest.approx(free["generator_distance"], abs=1e-4)
    assert server[GENERATOR_OPTIMIZER]["steps"].tolist() == [200]


def test_which_prototypes_the_generator_sees(lab: Any) -> None:
    """``old``: none in the first round, so no distance to note; ``new``: those that were just sent."""
    assert "generator_distance" not in trained(lab, rounds=1, gen_proto="old")[1]
    assert "generator_distance" in trained(lab, rounds=1)[1]
    assert "generator_distance" in trained(lab, rounds=2, gen_proto="old")[1]
    _, nobody = trained(lab, rounds=2, present=(False, False))
    assert "generator_distance" not in nobody
    assert nobody["generator_adversarial"] == 0


def test_distance_is_a_root_of_mean_squares() -> None:
    """‖(3, 4)‖ = 5 and ‖(0, 1)‖ = 1; class 1 has no prototype: √((25 + 1)/2) = √13. Of class 1 alone there is none."""
    heads = Heads({"weight": torch.zeros(2, 2, 2), "bias": torch.zeros(2, 2)}, torch.full((2, 2), 0.5))
    server = Record({PROTOTYPES: Prototypes(torch.zeros(2, 2), T([True, False]))})
    terms = FedPA().objective(server, heads, 1)
    outputs, noise = T([[3.0, 4.0], [0.0, 1.0], [100.0, 0.0]]), torch.zeros(3, 2)
    weight, distance = terms(outputs, noise, T([0, 0, 1]))["distance"]
    assert (weight, distance.item()) == (0.0, pytest.approx(math.sqrt(13)))
    assert "distance" not in terms(outputs, noise, T([1, 1, 1]))


def test_labels_by_frequency_use_the_latest_counts(lab: Any) -> None:
    """Client 0 holds (6, 4), later (1, 1); client 1 (6, 4): 12:8, then 7:5. Nothing is counted twice."""
    experiment = by_hand(lab, [[2, 0], [0, 2]], [0, 1], False, method={"name": "fedpa", "gen_label_dist": "frequency"})
    method, setting = experiment.method, replace(experiment.setting, num_clients=2)
    replies = replies_of_heads([True, True])
    server = Record(method.start_server(setting))
    server |= method.known_labels(server, Replies(replies), setting)
    assert server[LABEL_DISTRIBUTION]["p"].tolist() == pytest.approx([0.6, 0.4])
    later = Replies({0: replies[0] | {LABEL_COUNTS: TensorDict({"held": T([1, 1]), "drawn": T([1, 1])})}})
    server |= method.known_labels(server, later, setting)
    assert server[LABEL_DISTRIBUTION]["p"].tolist() == pytest.approx([7 / 12, 5 / 12])
    assert KNOWN_COUNTS not in method.broadcast(server, 0, RoundContext(setting, 2))
    uniform = Record(FedPA().known_labels(Record(), Replies(replies), setting))
    assert uniform[LABEL_DISTRIBUTION]["p"].tolist() == [0.5, 0.5]


@dataclass(frozen=True)
class Client:
    """A client that has every class and was not trained."""

    weights: Weights
    num_classes: int
    num_samples: int = 26
    steps: int = 1

    def features(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.num_classes, 32), torch.arange(self.num_classes)

    def encoded(self) -> tuple[Tensor, Tensor]:
        return self.features()

    def drawn_labels(self) -> Tensor:
        return torch.ones(self.num_classes, dtype=torch.int64)


@pytest.mark.parametrize(
    ("num_classes", "model", "generator", "up", "down"),
    [(10, 26_434, 19_744, 26_764, 46_508), (26, 26_962, 23_840, 27_820, 51_660)],
    ids=["mnist", "emnist"],
)
def test_traffic_of_the_paper(lab: Any, num_classes: int, model: int, generator: int, up: int, down: int) -> None:
    """Facts 1 and 10. Counts are integers, which our ledger does not call scalars: K of them stand in the figure up.

    A second K of them goes up unless ``counts: held``: fedpa.md 4.6 weighs prototypes by the samples a client holds,
    heads by those it drew.
    """
    module = build_model(FedGenCnn(), (1, 28, 28), num_classes)
    initial = extract_weights(module)
    setting = replace(
        lab.experiment().setting,
        num_classes=num_classes,
        feature_dim=32,
        image_shape=(1, 28, 28),
        initial=initial,
        network=Network(module),
    )
    method = FedPA()
    counts = torch.ones(num_classes, dtype=torch.int64)
    server, ctx = Record(method.start_server(setting)), RoundContext(setting, 1)
    ctx = ClientContext(setting, 1, class_counts=counts, received=Record(method.broadcast(server, 0, ctx)))
    message = Record(method.reply(ctx, Client(initial, num_classes))[0])
    assert message[MODEL].num_parameters == model
    assert sum(size.scalars for size in payload_sizes(message).values()) == up - num_classes
    assert payload_sizes(message)["label_counts"].bytes == 2 * num_classes * 8
    alike = replace(method, counts="held")
    as_printed = payload_sizes(alike.reply(ctx, Client(initial, num_classes))[0])
    assert sum(size.scalars for size in as_printed.values()) + as_printed["label_counts"].bytes // 8 == up

    for stage in method.server_steps().values():
        after, _ = stage(server, Replies({0: message}), ctx)
        server = Record(after)
    broadcast = Record(method.broadcast(server, 0, RoundContext(setting, 2)))
    assert broadcast[FEATURE_GENERATOR].num_parameters == generator
    assert sum(size.scalars for size in payload_sizes(broadcast).values()) == down
    assert payload_sizes(broadcast)["generator_buffers"].bytes == 2 * 256 * 4 + 8
    assert set(broadcast) == {"model", "generator", "label_distribution", "prototypes"}


def test_clients_that_hold_one_class_in_turn(lab: Any, tmp_path: Any) -> None:
    """A prototype outlives the rounds in which its only holder is not sampled."""
    labels = lab.dataset.train.labels
    clients = [(labels == c).nonzero().flatten().tolist()[:8] for c in range(4)]
    partition = lab.by_hand(lab.dataset, clients, [range(10)] * 4)
    changes = {"federation__participation": 0.25, "federation__rounds": 6, "local__epochs": 1}
    run = lab.run(gentle(lab, partition=partition, method={"name": "fedpa", "gen_steps": 2}, **changes), tmp_path / "r")
    met = {client for record in run.history for client in record["participants"]}
    present = run.state.server[PROTOTYPES].present.tolist()
    assert present == [client in met for client in range(4)] + [False, False]
    assert len(met) > 1
