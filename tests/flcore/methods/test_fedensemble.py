"""FedEnsemble: what members say together, that training is FedAvg's, and the permutation (baselines.md section 13)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights
from flcore.io.messages import Count, TensorDict, Weights
from flcore.io.records import Payloads, Record, serialise
from flcore.methods.fedensemble import (
    MEMBER_ASSIGNMENT,
    MEMBER_STATISTICS,
    FedEnsemble,
    member_slot,
    members_of,
    shuffled,
)
from flcore.methods.types import MODEL, NUM_SAMPLES, Replies, RoundContext

T = torch.tensor


def by_hand(lab: Any, clients: list[list[int]], **changes: Any) -> Any:
    """A linear model that starts at zero, full batches, learning rate 0.1: A = (2, 0) of class 0, B = (0, 4) of 1."""
    return lab.linear([[2, 0], [0, 4], [0, 4], [0, 4]], [0, 1, 1, 1], clients, **changes)


def saying(*logits: float) -> Weights:
    """A linear model of two pixels that says the same to every image."""
    return Weights({"head.weight": torch.zeros(len(logits), 2), "head.bias": T([float(value) for value in logits])})


def answer(lab: Any, members: list[Weights], classes: Tensor | None = None, **options: Any) -> list[float]:
    """Scores of an ensemble of models for three classes; w_g says (0, 0, 9)."""
    dataset = lab.toy_dataset([[2, 0], [0, 4], [1, 1]], [0, 1, 2], None, None)
    experiment = lab.experiment(dataset, lab.by_hand(dataset, [[0, 1, 2]], [[0]]), lab.ToySpec())
    server = {member_slot(k): member for k, member in enumerate(members)}
    asked = FedEnsemble(**options).predict
    return lab.scores(experiment, saying(0, 0, 9), dataset.test.images[:1], server, classes, asked)[0].tolist()


def test_logits_add_up(lab: Any) -> None:
    """Test fact (a): (4, 0, 0), (0, 3, 2.9), (0, 3, 2.9): sums (4, 6, 5.8)."""
    members = [saying(4, 0, 0), saying(0, 3, 2.9), saying(0, 3, 2.9)]
    assert answer(lab, members) == pytest.approx([4, 6, 5.8])
    probs = answer(lab, members, combine="probs")
    assert probs == pytest.approx([0.338535, 0.346961, 0.314504], abs=1e-6)
    assert probs[1] - probs[0] == pytest.approx(0.0084, abs=5e-5)


def test_one_member_is_that_model(lab: Any) -> None:
    """Test fact (b), for everybody and for a client alike; without members the given model answers."""
    assert answer(lab, [saying(1, 2, 0)]) == [1, 2, 0]
    assert answer(lab, [saying(1, 2, 0)], classes=T([True, True, True])) == [1, 2, 0]
    assert answer(lab, []) == [0, 0, 9]


def test_members_are_taken_in_order_of_their_numbers() -> None:
    server = Record({member_slot(k): saying(float(k)) for k in (10_000, 2, 999)}) | {MODEL: saying(7.0)}
    assert [values["head.bias"].item() for values in members_of(server)] == [2, 999, 10_000]


def test_a_member_with_batchnorm_answers_as_the_model_itself(lab: Any) -> None:
    """Statistics belong to a member: the answers of the loaded model and of the same weights as a member agree."""
    experiment = lab.experiment(method__name="fedensemble")
    weights, images = lab.train(experiment)[0].message[MODEL], lab.dataset.test.images
    as_member = lab.scores(experiment, experiment.setting.initial, images, {member_slot(0): weights})
    assert torch.allclose(as_member, lab.scores(experiment, weights, images), atol=1e-5)


def test_members_are_those_who_were_sampled(lab: Any, tmp_path: Any) -> None:
    federation = {"participation": 0.5, "rounds": 2}
    run = lab.run(lab.experiment(method__name="fedensemble", federation=federation), tmp_path / "ensemble")
    met = sorted({client for record in run.history for client in record["participants"]})
    assert sorted(run.state.server) == [f"member_{client:04d}" for client in met] + ["model"]


def test_a_member_is_what_the_client_uploaded(lab: Any, tmp_path: Any) -> None:
    """Client 0 holds A: W_0 = (0.1, 0), b_0 = 0.05; client 1 three B: W_0 = (0, -0.2), b_0 = -0.05.

    Together they say A: 2·0.1·(row 0) = 0.2 + 0.05 - 0.05 = 0.2 for class 0, -0.2 for class 1.
    """
    run = lab.run(by_hand(lab, [[0], [1, 2, 3]], method={"name": "fedensemble"}), tmp_path / "run")
    first, second = (run.state.server[f"member_{k:04d}"].params for k in (0, 1))
    assert first["head.weight"][0].tolist() == pytest.approx([0.1, 0])
    assert second["head.weight"][0].tolist() == pytest.approx([0, -0.2])
    experiment = by_hand(lab, [[0], [1, 2, 3]], method={"name": "fedensemble"})
    start = experiment.setting.initial
    scores = lab.scores(experiment, start, experiment.dataset.train.images[:1], run.state.server)
    assert scores[0].tolist() == pytest.approx([0.2, -0.2])


def test_one_model_alone_is_w_g_or_a_clients_own(lab: Any) -> None:
    """Its own as soon as it has one."""
    method, setting = FedEnsemble(), lab.experiment().setting
    server = Record({MODEL: saying(1.0), member_slot(3): saying(2.0)})
    own = lab.client_model(method, server, 0, Record({MODEL: saying(3.0)}), setting)
    assert own is not None and own.params["head.bias"].item() == 3
    before = lab.client_model(method, server, 0, Record(), setting)
    assert before is not None and before.params["head.bias"].item() == 1
    asked = [FedEnsemble(), FedEnsemble(absent_clients="global"), FedEnsemble(variant="permutation")]
    assert [m.predicts_from_client_state for m in asked] == [True, False, False]
    assert [m.can_be_base for m in asked] == [False, False, False]


def test_the_ensemble_is_scored_for_clients_too(lab: Any, tmp_path: Any) -> None:
    """Client 0 knows class 0 alone, client 1 class 1: alone each calls everything by its own class, together neither.

    Client 0 says class 0 to B by its bias, client 1 class 1 to A. Summed, the biases are opposite, and the pixels of A,
    which client 0 alone reads, and of B, which client 1 alone reads, decide. FedPA compares ``pooled_local``. Asked for
    what it says by itself (A_loc), client 0 gets the one A right and no B, client 1 the three B.
    """
    changes = {"method": {"name": "fedensemble"}, "federation": {"rounds": 1}, "local": {"lr": 0.5, "epochs": 10}}
    run = lab.run(by_hand(lab, [[0], [1, 2, 3]], **changes, evaluation__private=True), tmp_path / "run")
    record = run.history[-1]
    assert (record["top1_global"], record["pooled_local"], record["local_accuracy"]) == (1.0, 1.0, [1.0, 1.0])
    alone = record["alternatives"]["single_model"]
    assert (alone["pooled_local"], alone["mean_local"]) == (0.5, 0.5)
    assert record["private_correct"] == [[1, 0], [0, 3]]


def test_members_are_asked_once_about_an_image(lab: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they say of everybody's images is looked up for clients, whose own images are among them."""
    asked: list[int] = []
    predict = FedEnsemble.predict

    def counted(self: FedEnsemble, model: Any, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.append(len(images))
        return predict(self, model, images, *rest)

    monkeypatch.setattr(FedEnsemble, "predict", counted)
    experiment = by_hand(lab, [[0], [1, 2, 3]], method={"name": "fedensemble"}, federation={"rounds": 1})
    run = lab.run(experiment, tmp_path / "run")
    assert run.history[-1]["pooled_local"] is not None
    assert sum(asked) == len(experiment.dataset.test.labels)


def with_statistics(lab: Any, variant: str, batchnorm: str, federation: Any = None, **method: Any) -> Any:
    return lab.experiment(
        method={"name": "fedensemble", "variant": variant, "models": 2} | method,
        model={"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": batchnorm},
        federation={"rounds": 2} | (federation or {}),
    )


def test_a_member_has_the_statistics_of_its_client(lab: Any, tmp_path: Any) -> None:
    """FedPA's setting: training is FedAvg's with private statistics, members answer with those of their clients.

    They travel apart from the model, 192 bytes a client and round, which are no scalars. (Four clients, two rounds.)
    """
    experiment = with_statistics(lab, "clients", "local")
    run = lab.run(experiment, tmp_path / "run")
    plain = lab.experiment(method__name="fedavg", model=experiment.config.to_mapping()["model"], federation__rounds=2)
    averaged = lab.run(plain, tmp_path / "fedavg")
    assert serialise({MODEL: run.state.server[MODEL]}) == serialise(averaged.state.server)
    for client in range(4):
        member, own = run.state.server[member_slot(client)], run.client_state(client)[MODEL]
        assert serialise({"m": member}) == serialise({"m": own})
        assert not torch.equal(member.values["encoder.1.running_mean"], torch.zeros(6))
    record, other = run.history[-1], averaged.history[-1]
    assert record["bytes_up"] == other["bytes_up"] | {"member_buffers": 8 * 192}
    assert (record["bytes_down"], record["scalars_up"]) == (other["bytes_down"], other["scalars_up"])
    rows = torch.cat([torch.from_numpy(client.test.copy()) for client in lab.partition.clients])
    said = lab.scores(experiment, experiment.setting.initial, lab.dataset.test.images[rows], run.state.server)
    right = (said.argmax(dim=1) == lab.dataset.test.labels[rows]).float().mean().item()
    assert record["pooled_local"] == pytest.approx(right)


def test_a_client_that_did_not_train_answers_with_the_model_that_it_was_sent(lab: Any) -> None:
    """Clients 0 and 2 (n = 1, 3) were sent 1 and return 4 and 8; client 1 holds 1. Then w_g = (1·4 + 3·8)/4 = 7.

    In the next round client 1 (n = 2) returns 5, and the others hold 7, not what they trained before.
    """
    experiment = by_hand(lab, [[0], [1], [2]], method={"name": "fedensemble", "absent_clients": "global"})
    server = Record({MODEL: saying(1.0)})
    rounds = [({0: (4.0, 1), 2: (8.0, 3)}, [4, 1, 8], 7), ({1: (5.0, 2)}, [7, 5, 7], 5)]
    for number, (uploads, members, average) in enumerate(rounds, start=1):
        sent = {client: {MODEL: saying(value), NUM_SAMPLES: Count(size)} for client, (value, size) in uploads.items()}
        for step in experiment.method.server_steps().values():
            server, _ = step(server, Replies(sent), RoundContext(experiment.setting, number))
        assert [values["head.bias"].item() for values in members_of(server)] == members
        assert server[MODEL].params["head.bias"].item() == average


def test_a_copy_of_the_global_model_has_its_clients_statistics(lab: Any, tmp_path: Any) -> None:
    """In FedPA's code a message overwrites all of a client's model but its BatchNorm statistics.

    Clients 1 and 3 train, then 0 and 2.
    """
    runs = []
    for rounds in (1, 2):
        federation = {"participation": 0.5, "sampler": "round_robin", "rounds": rounds}
        experiment = with_statistics(lab, "clients", "local", federation, absent_clients="global")
        runs.append(lab.run(experiment, tmp_path / str(rounds)))
    before, after = (run.state.server for run in runs)
    assert [run.history[-1]["participants"] for run in runs] == [[1, 3], [0, 2]]
    for client in (1, 3):
        member, last = after[member_slot(client)], before[member_slot(client)]
        assert serialise({"m": Weights(member.params, {})}) == serialise({"m": before[MODEL]})
        assert serialise({"m": Weights({}, member.buffers)}) == serialise({"m": Weights({}, last.buffers)})
        assert not torch.equal(last.values["encoder.1.running_mean"], torch.zeros(6))


def test_an_averaged_member_has_averaged_statistics(lab: Any) -> None:
    """Model 0 trained by clients 0 (n = 1) and 1 (n = 3): running mean (1·4 + 3·8)/4 = 7. Nobody has model 1."""
    experiment = with_statistics(lab, "permutation", "local")
    method, initial = experiment.method, experiment.setting.initial
    server = Record(method.start_server(experiment.setting)) | {
        MEMBER_ASSIGNMENT: TensorDict({"model": T([0, 0, 1, 1])})
    }
    replies: dict[int, Payloads] = {}
    for client, value, size in ((0, 4.0, 1), (1, 8.0, 3)):
        statistics = {name: torch.full_like(tensor, value) for name, tensor in initial.buffers.items()}
        upload = {
            MODEL: initial.without_buffers(),
            MEMBER_STATISTICS: Weights({}, statistics),
            NUM_SAMPLES: Count(size),
        }
        replies[client] = upload
    held, _ = method.server_steps()["aggregate"](server, Replies(replies), RoundContext(experiment.setting, 1))
    after = Record(held)
    assert set(after[member_slot(0)].buffers["encoder.1.running_mean"].tolist()) == {7.0}
    assert after[member_slot(1)] is server[member_slot(1)]
    expected = average_weights({0: initial, 1: initial}, {0: 1, 1: 3}).params
    assert all(torch.equal(after[member_slot(0)].params[name], tensor) for name, tensor in expected.items())


def test_every_model_goes_to_its_share_of_the_clients(lab: Any) -> None:
    """12 clients, 5 models: 2 or 3 each; another deal every round and seed; the same for the same."""
    setting = replace(lab.experiment().setting, num_clients=12)
    method = FedEnsemble(variant="permutation")
    deals = [method.assignment(number, setting)["model"] for number in range(1, 21)]
    for deal in deals:
        assert sorted(torch.bincount(deal, minlength=5).tolist()) == [2, 2, 2, 3, 3]
    assert len({tuple(deal.tolist()) for deal in deals}) > 15
    assert torch.equal(deals[0], method.assignment(1, setting)["model"])
    assert not torch.equal(deals[0], method.assignment(1, replace(setting, seed=1))["model"])


def test_models_start_apart(lab: Any) -> None:
    """Model 0 is the initial one; others hold the same values, tensor by tensor, in other places."""
    initial = lab.experiment().setting.initial
    assert shuffled(initial, 0, 5) is initial
    first, second = shuffled(initial, 1, 5), shuffled(initial, 2, 5)
    for name, value in initial.params.items():
        assert torch.equal(first.params[name].flatten().sort().values, value.flatten().sort().values)
        assert first.params[name].shape == value.shape
    for ours, theirs in ((first, second), (first, initial), (first, shuffled(initial, 1, 6))):
        assert not torch.equal(ours.params["head.weight"], theirs.params["head.weight"])
    assert serialise({"m": first}) == serialise({"m": shuffled(initial, 1, 5)})


def test_a_model_is_averaged_over_those_who_had_it(lab: Any) -> None:
    """Clients 0 and 2 (n = 1, 3) had model 1: (1·4 + 3·8)/4 = 7. Model 0: client 1. Model 2: nobody, stays."""
    experiment = by_hand(lab, [[0], [1], [2]], method={"name": "fedensemble", "variant": "permutation", "models": 3})
    method = experiment.method
    deal = TensorDict({"model": T([1, 0, 1])})
    server = Record({MEMBER_ASSIGNMENT: deal}) | {member_slot(m): saying(-1.0 - m) for m in range(3)}
    uploads = ((0, 4.0, 1), (1, 5.0, 2), (2, 8.0, 3))
    replies = Replies({client: {MODEL: saying(value), NUM_SAMPLES: Count(size)} for client, value, size in uploads})
    ctx = RoundContext(experiment.setting, 1)
    held, facts = method.server_steps()["aggregate"](server, replies, ctx)
    after = Record(held)
    assert [values["head.bias"].item() for values in members_of(after)] == [5, 7, -3]
    assert torch.equal(after[MEMBER_ASSIGNMENT]["model"], method.assignment(2, experiment.setting)["model"])
    assert (server[MEMBER_ASSIGNMENT], facts) == (deal, {})
    assert method.broadcast(server, 2, ctx) == {MODEL: server[member_slot(1)]}


def test_the_ensemble_answers_for_clients_too(lab: Any, tmp_path: Any) -> None:
    options = {"name": "fedensemble", "variant": "permutation", "models": 2}
    run = lab.run(lab.experiment(method=options, federation__rounds=2), tmp_path / "run")
    assert run.state.client_states == {}
    assert set(run.state.server) == {"member_0000", "member_0001", "assignment"}
    record = run.history[-1]
    rows = torch.cat([torch.from_numpy(client.test.copy()) for client in lab.partition.clients])
    experiment = lab.experiment(method=options, federation__rounds=2)
    scores = lab.scores(experiment, experiment.setting.initial, lab.dataset.test.images[rows], run.state.server)
    right = (scores.argmax(dim=1) == lab.dataset.test.labels[rows]).float().mean().item()
    assert record["pooled_local"] == pytest.approx(right)
    assert all(math.isfinite(loss) for loss in record["train_loss"].values())
