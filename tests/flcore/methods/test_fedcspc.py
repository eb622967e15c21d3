"""FedCSPC: steps by hand, limit cases to the bit, calibration, partners and answers (fedcspc.md section 8)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flcore.messages import Arrays, Count, Prototypes, Weights
from flcore.methods.fedcspc import (
    Drawn,
    FedCSPC,
    Partners,
    PrototypeSet,
    best_means,
    by_head_before,
    calibrated_part,
    fuse,
    pooled,
    similarities,
    to_unit_range,
)
from flcore.models import MODELS, build_model
from flcore.records import Record, serialise

CSPC = {"name": "fedcspc_cnn", "projection_dim": 16}
# Small enough for a test; what is off is not evaluated.
QUICK = {"name": "fedcspc", "cal_epochs": 3, "n_aug": 1, "clusters": 2, "n_repeat": 2}
OFF = {"name": "fedcspc", "use_lrl": False, "use_ca": False, "use_kp": False}
POOL = {"labels": torch.tensor([0]), "vectors": torch.tensor([[2.0, 0.0]])}


def same(first: Record, second: Record) -> bool:
    return serialise(first) == serialise(second)


def close(values: Tensor, *expected: float) -> bool:
    return bool(torch.allclose(values.flatten(), torch.tensor(expected, dtype=torch.float32), atol=2e-6))


def linear(lab: Any, method: dict[str, Any], encoder: bool = True) -> Any:
    """Client 0 holds (2, 0) of class 0, client 1 (0, 4) of class 1; head zero, one full batch, plain SGD at 0.1."""
    dataset = lab.toy_dataset([[2, 0], [0, 4]], [0, 1], None, None)
    partition = lab.by_hand(dataset, [[0], [1]], [[0, 1]] * 2)
    local = {"lr": 0.1, "batch_size": 100}
    return lab.experiment(dataset, partition, lab.ToySpec(encoder=encoder), local=local, method=method)


# ---- limit cases, to the bit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "model"), [("fedavg", CSPC), ("moon", {"name": "fedgen_cnn", "feature_dim": 8})])
def test_with_everything_off_it_is_the_base(lab: Any, base: str, model: dict[str, Any], tmp_path: Any) -> None:
    """Also with the calibration on, but without an epoch and without answers from it (section 8, 12)."""
    changes = {"model": model, "federation__participation": 0.5, "local__momentum": 0.5}
    expected = lab.run(lab.experiment(**changes, method__name=base), tmp_path / "base")
    off = lab.run(lab.experiment(**changes, method={**OFF, "base": base}), tmp_path / "off")
    assert same(off.state.server, expected.state.server)
    assert off.history == expected.history
    assert all(same(off.memory(client), expected.memory(client)) for client in range(4))
    idle = {**QUICK, "base": base, "cal_epochs": 0, "use_lrl": False, "use_kp": False}
    run = lab.run(lab.experiment(**changes, method=idle), tmp_path / "idle")
    assert same({"model": run.state.server["model"]}, {"model": expected.state.server["model"]})
    assert [r["top1_global"] for r in run.history] == [r["top1_global"] for r in expected.history]


def test_without_feedback_and_alignment_the_uncalibrated_model_is_fedavg(lab: Any, tmp_path: Any) -> None:
    """Section 11."""
    expected = lab.run(lab.experiment(model=CSPC), tmp_path / "fedavg")
    method = {**QUICK, "use_lrl": False, "feedback": False}
    experiment = lab.experiment(model=CSPC, method=method)
    run = lab.run(experiment, tmp_path / "fedcspc")
    sent = experiment.method.broadcast(run.state.server, 0, experiment.setting)
    assert same(sent, {"model": expected.state.server["model"]})
    uncalibrated = [record["alternatives"]["before_calibration"]["top1_global"] for record in run.history]
    assert uncalibrated == [record["top1_global"] for record in expected.history]
    assert not same({"model": run.state.server["model"]}, {"model": expected.state.server["model"]})


@pytest.mark.parametrize("base", ["fedavg", "moon"])
def test_the_first_round_trains_like_the_base(lab: Any, base: str) -> None:
    """Section 8, 13: there are no global prototypes yet."""
    changes = {"model": CSPC, "local__epochs": 2}
    expected, _ = lab.train(lab.experiment(**changes, method__name=base))
    found, _ = lab.train(lab.experiment(**changes, method={**QUICK, "base": base}))
    assert found.losses == expected.losses
    assert same({"model": found.message["model"]}, {"model": expected.message["model"]})


def test_the_base_is_a_parameter(lab: Any) -> None:
    """Over MOON the second round has MOON's term and FedCSPC's."""
    experiment = lab.experiment(model=CSPC, method={**QUICK, "base": "moon", "base_mu": 2.0, "base_tau": 0.3})
    assert (experiment.method.base_method.mu, experiment.method.base_method.tau) == (2.0, 0.3)
    means = torch.randn(6, 84, generator=torch.Generator().manual_seed(0))
    server = {"model": experiment.setting.initial, "prototypes": Prototypes(means, torch.ones(6, dtype=torch.bool))}
    memory = {"previous": experiment.setting.initial}
    reply, kept = lab.train(experiment, number=2, server=server, memory=memory)
    assert set(reply.losses) == {"cross_entropy", "contrast", "node", "angle", "edge"}
    assert set(kept) == {"previous"}
    moon = lab.experiment(model=CSPC, method={"name": "moon", "mu": 2.0, "tau": 0.3}, local__steps=1)
    first = lab.experiment(model=CSPC, method=dict(vars(experiment.method)) | {"name": "fedcspc"}, local__steps=1)
    alone, _ = lab.train(moon, number=2, memory=memory)
    both, _ = lab.train(first, number=2, server=server, memory=memory)
    for name in ("cross_entropy", "contrast"):
        assert both.losses[name] == alone.losses[name]


# ---- clients -----------------------------------------------------------------------------------------------------


def test_the_node_loss_moves_the_encoder(lab: Any) -> None:
    """f = (2, 0) of class 0, U = ((0, 1), (1, 0)), τ = 0.5: cosines 0 and 1, L_N = ln(1 + e²) = 2.126928.

    p = e²/(1 + e²) = 0.880797 is the share of class 1; ∇cos(f, U_1) = 0 as f points there, ∇cos(f, U_0) = (0, 1)/2, so
    dL/df = (1/τ)·(0.119203 − 1)·(0, 1/2) = (0, −0.880797). E_10 = 0.1·κ·0.880797·2. Through a head of zeros the
    cross-entropy gives E nothing.
    """
    method = {**QUICK, "kappa": 0.7, "w_angle": 0.0, "w_edge": 0.0}
    experiment = linear(lab, method)
    prototypes = Prototypes(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2, dtype=torch.bool))
    server = {"model": experiment.setting.initial, "prototypes": prototypes}
    reply, _ = lab.train(experiment, number=2, server=server)
    assert reply.losses == {
        "cross_entropy": pytest.approx(math.log(2)),
        "node": pytest.approx(0.7 * 2.126928, abs=1e-5),
    }
    moved = 0.1 * 0.7 * 0.880797 * 2
    assert reply.message["model"].params["encoder.1.weight"].flatten().tolist() == pytest.approx([1, 0, moved, 1])
    assert reply.message["model"].params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])


def test_the_alignment_reaches_the_encoder_alone(lab: Any) -> None:
    """One step: H and F get what FedAvg gives them, E more (section 4, 6)."""
    changes = {"model": CSPC, "local__steps": 1}
    experiment = lab.experiment(**changes, method=QUICK)
    means = torch.randn(6, 84, generator=torch.Generator().manual_seed(1))
    server = {"model": experiment.setting.initial, "prototypes": Prototypes(means, torch.ones(6, dtype=torch.bool))}
    expected, _ = lab.train(lab.experiment(**changes), number=2)
    found, _ = lab.train(experiment, number=2, server=server)
    for name, tensor in expected.message["model"].params.items():
        assert torch.equal(found.message["model"].params[name], tensor) == (not name.startswith("encoder."))


def test_messages(lab: Any) -> None:
    """q_k = Σ_c K_c·n_repeat prototypes of 84 scalars with int64 labels, of classes with two distinct features or more.

    Down: the model and, where they are used, the prototypes of the classes that have one, 84 scalars and an id each.
    """
    experiment = lab.experiment(model=CSPC, method={**QUICK, "clusters": 3, "n_repeat": 5})
    model = 4 * experiment.setting.initial.num_parameters
    reply, memory = lab.train(experiment)
    counts = experiment.label_counts(0, 1)
    count = int(counts.clamp_max(3).sum()) * 5
    assert {kind: size.bytes for kind, size in reply.up.items()} == {
        "model": model,
        "num_samples": 8,
        "prototypes": count * (84 * 4 + 8),
    }
    assert reply.up["prototypes"].scalars == count * 84
    assert {kind: size.bytes for kind, size in reply.down.items()} == {"model": model, "prototypes": 0}
    assert memory == {}
    held = Prototypes(torch.ones(6, 84), torch.tensor([True] * 4 + [False] * 2))
    later, _ = lab.train(experiment, server={"model": experiment.setting.initial, "prototypes": held}, number=2)
    assert later.down["prototypes"].bytes == 4 * (84 * 4 + 8)
    silent, _ = lab.train(lab.experiment(model=CSPC, method={**QUICK, "use_lrl": False}))
    assert set(silent.down) == {"model"}


def test_one_mean_per_class_without_clusters(lab: Any) -> None:
    """TPG (section 8, 11): the class means of the encoder's output in evaluation mode."""
    experiment = lab.experiment(model={"name": "fedgen_cnn", "feature_dim": 8}, method={**QUICK, "use_cpm": False})
    reply, _ = lab.train(experiment)
    sent = reply.message["prototypes"]
    own = torch.from_numpy(lab.partition.clients[0].train.copy())
    images, labels = (lab.dataset.train.images[own].float() / 255 - 0.3) / 0.3, lab.dataset.train.labels[own]
    encoded = experiment.setting.network.encode(images, reply.message["model"].values)
    assert sent["labels"].tolist() == labels.unique().tolist()
    for label, vector in zip(sent["labels"], sent["vectors"], strict=True):
        assert torch.allclose(vector, encoded[labels == label].mean(0), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"aux_ce": True},
        {"base": "moon", "base_mu": 1.0},
        {"angle_mode": "all", "edge_same": False, "edge_relative": False},
    ],
)
def test_stacked_clients(lab: Any, options: dict[str, Any]) -> None:
    """A second round within 1e-4 of the serial engine, in which every term and both frozen models are there."""
    changes = {"method": {**QUICK, **options}, "model": CSPC, "local__batch_size": 40}
    serial, stacked = lab.experiment(**changes), lab.experiment(**changes, engine__stack=True)
    means = torch.randn(6, 84, generator=torch.Generator().manual_seed(2))
    present = torch.tensor([True] * 5 + [False])
    server = {"model": serial.setting.initial, "prototypes": Prototypes(means * present.unsqueeze(1), present)}
    memories = {1: {"previous": serial.setting.initial}} if options.get("base") == "moon" else {}
    expected, found = (
        lab.train_stack(experiment, range(4), memories, number=2, server=server) for experiment in (serial, stacked)
    )
    for client in range(4):
        ours, theirs = (run[client][0] for run in (expected, found))
        for name, tensor in ours.message["model"].params.items():
            assert torch.allclose(tensor, theirs.message["model"].params[name], atol=1e-4), name
        assert theirs.losses == pytest.approx(ours.losses, abs=1e-4)
        assert torch.allclose(ours.message["prototypes"]["vectors"], theirs.message["prototypes"]["vectors"], atol=1e-3)
        assert min(ours.losses["angle"], ours.losses["edge"]) > 0


def test_the_auxiliary_classifier_by_hand(lab: Any) -> None:
    """f = (2, 0) of class 0 through an auxiliary I: logits (2, 0), p_1 = 1/(1 + e²) = 0.119203, loss 0.126928.

    df = (−p_1, p_1), so that E_00 gets 0.1·2·p_1 and E_10 its negative; the weight gets 0.1·p_1·(2, 0) in row 0, the
    bias 0.1·p_1. The head of zeros moves as without it.
    """
    experiment = linear(lab, {**QUICK, "aux_ce": True})
    initial = experiment.setting.initial
    layer = {"extra.auxiliary.weight": torch.eye(2), "extra.auxiliary.bias": torch.zeros(2)}
    server = {"model": Weights({**initial.params, **layer}), "prototypes": Prototypes.empty(2, 2)}
    reply, _ = lab.train(experiment, server=server)
    assert reply.losses == {"cross_entropy": pytest.approx(math.log(2)), "auxiliary": pytest.approx(0.126928, abs=1e-6)}
    params, moved = reply.message["model"].params, 0.1 * 0.119203
    assert close(params["encoder.1.weight"], 1 + 2 * moved, 0, -2 * moved, 1)
    assert close(params["extra.auxiliary.weight"], 1 + 2 * moved, 0, -2 * moved, 1)
    assert close(params["extra.auxiliary.bias"], moved, -moved)
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])


@pytest.mark.parametrize("model", MODELS)
def test_models_know_what_the_projection_reads(model: str) -> None:
    module = build_model(MODELS[model](), (3, 32, 32), 10).eval()
    assert module.encode(torch.zeros(1, 3, 32, 32)).shape == (1, module.encoded_dim)


def test_the_auxiliary_classifier_reads_the_encoder(lab: Any) -> None:
    """Section 2: 84·10 + 10 = 850 more parameters for ten classes, here 84·6 + 6; every other one starts the same.

    It trains from the first round on, whether or not the alignment is there, and no calibration touches it.
    """
    plain, experiment = (lab.experiment(model=CSPC, method={**QUICK, "aux_ce": on}) for on in (False, True))
    without, initial = plain.setting.initial, experiment.setting.initial
    assert initial.num_parameters - without.num_parameters == 84 * 6 + 6
    assert all(torch.equal(initial.params[name], tensor) for name, tensor in without.params.items())
    assert (
        sum(tensor.numel() for tensor in FedCSPC(aux_ce=True).extra_layers(256, 10, 84)["auxiliary"].parameters())
        == 850
    )
    reply, _ = lab.train(experiment)
    assert set(reply.losses) == {"cross_entropy", "auxiliary"}
    held = Prototypes(torch.ones(6, 84), torch.ones(6, dtype=torch.bool))
    later, _ = lab.train(experiment, server={"model": initial, "prototypes": held}, number=2)
    assert set(later.losses) == {"cross_entropy", "auxiliary", "node", "angle", "edge"}
    after = experiment.method.calibrate({"model": initial}, {0: reply.message}, experiment.setting, 1)["model"].params
    moved = {name.split(".")[0] for name, tensor in initial.params.items() if not torch.equal(after[name], tensor)}
    assert moved == {"projection", "head"}


# ---- the server's prototypes -------------------------------------------------------------------------------------


def upload(labels: list[int], *vectors: list[float]) -> Record:
    return {"prototypes": Arrays({"labels": torch.tensor(labels), "vectors": torch.tensor(vectors)})}


def test_global_prototypes_are_plain_means(lab: Any) -> None:
    """Class 0: (1 + 3 + 8)/3 = 4 over prototypes, not over clients; class 1 keeps 9; class 2 has none."""
    server = {"prototypes": Prototypes(torch.tensor([[7.0], [9.0], [0.0]]), torch.tensor([True, True, False]))}
    replies = {2: upload([0], [8.0]), 0: upload([0, 0], [1.0], [3.0])}
    setting = replace(lab.experiment().setting, num_classes=3)
    after = FedCSPC().fuse_prototypes(server, replies, setting, 2)
    assert after["prototypes"].means.flatten().tolist() == [4, 9, 0]
    assert after["prototypes"].present.tolist() == [True, True, False]
    assert set(after) == {"prototypes"}


def test_absent_clients_are_forgotten_unless_kept(lab: Any) -> None:
    """Client 1 answered first, then client 0 and 2, then client 1 again."""
    setting = replace(lab.experiment().setting, num_classes=1)
    for keep, expected in ((False, [1.0, 3.0, 5.0]), (True, [1.0, (1 + 2 + 3) / 3, (2 + 3 + 5) / 3])):
        server: Record = {"prototypes": Prototypes.empty(1, 1)}
        rounds = [{1: upload([0], [1.0])}, {0: upload([0], [2.0]), 2: upload([0], [4.0])}, {1: upload([0], [5.0])}]
        rounds[1] = {0: upload([0], [2.0]), 2: upload([0], [3.0])} if keep else {0: upload([0], [3.0])}
        for number, replies in enumerate(rounds):
            server = FedCSPC(keep_stale=keep).fuse_prototypes(server, replies, setting, number + 1)
            assert server["prototypes"].means.item() == pytest.approx(expected[number])
        assert ("pool" in server) == keep
    assert server["pool"]["sources"].tolist() == [0, 1, 2]


def test_pool_in_client_order() -> None:
    replies = {3: upload([1, 0], [3.0], [4.0]), 0: upload([1], [1.0])}
    pool = pooled({}, replies)
    assert pool["vectors"].flatten().tolist() == [1, 3, 4]
    assert pool["labels"].tolist() == [1, 1, 0]
    assert pool["sources"].tolist() == [0, 3, 3]


# ---- calibration -------------------------------------------------------------------------------------------------


def test_one_step_of_calibration_by_hand(lab: Any) -> None:
    """One prototype (2, 0) of class 0, head zero, rate 0.1: row 0 has gradient (−1/2)·(2, 0), as one local step has."""
    method = {"name": "fedcspc", "eta": 0.0, "cal_epochs": 1, "cal_weight_decay": 0.0}
    experiment = linear(lab, method)
    initial = experiment.setting.initial
    server = {"model": initial, "prototypes": Prototypes.empty(2, 2)}
    after = experiment.method.calibrate(server, {0: {"prototypes": Arrays(POOL)}}, experiment.setting, 1)
    assert after["model"].params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])
    assert after["model"].params["head.bias"].tolist() == pytest.approx([0.05, -0.05])
    assert torch.equal(after["model"].params["encoder.1.weight"], torch.eye(2))
    assert after["facts"].values["calibration_supervised"] == pytest.approx(math.log(2))
    assert after["facts"].values["prototypes"] == 1
    assert after["facts"].values["prototype_norm"] == 2
    assert same({"m": after["model_before"]}, {"m": calibrated_part(initial)})
    assert not initial.params["head.weight"].any()


def test_rates_of_the_schedule() -> None:
    """Section 5, 3, rounds counted from 0: 0.1 up to 5, 0.01 from 6 to 40, 0.001 afterwards."""
    rates = {number: FedCSPC().calibration_rate(number) for number in (1, 6, 7, 41, 42, 100)}
    assert rates == pytest.approx({1: 0.1, 6: 0.1, 7: 0.01, 41: 0.01, 42: 0.001, 100: 0.001})
    assert FedCSPC(cal_lr=0.02, cal_lr_schedule="constant").calibration_rate(100) == 0.02


def test_the_rate_falls_inside_a_calibration(lab: Any) -> None:
    """Two epochs of one step, the second at a tenth: W_00 = 0.1 after the first; then p = 1/(1 + e^0.5), 0.01·2p more.

    As in FedProx's second step, with logits that differ by 2·(0.2 + 0.05).
    """
    options = {"name": "fedcspc", "eta": 0.0, "cal_epochs": 2, "cal_decay_every": 1, "cal_weight_decay": 0.0}
    experiment = linear(lab, options)
    server = {"model": experiment.setting.initial}
    after = experiment.method.calibrate(server, {0: {"prototypes": Arrays(POOL)}}, experiment.setting, 1)
    expected = 0.1 + 0.01 * 2 / (1 + math.exp(0.5))
    assert after["model"].params["head.weight"][0, 0].item() == pytest.approx(expected)


@pytest.fixture(scope="module")
def answered(lab: Any) -> tuple[Any, Record, dict[int, Record]]:
    """A round of the projection model: experiment, server after its aggregation, and replies."""
    experiment = lab.experiment(model=CSPC, method=QUICK)
    replies = {client: reply.message for client, (reply, _) in lab.train_stack(experiment, range(4)).items()}
    server = experiment.method.start_server(experiment.setting)
    for name in ("aggregate", "fuse-prototypes"):
        server = experiment.method.stages()[name](server, replies, experiment.setting, 1)
    return experiment, server, replies


@pytest.mark.parametrize("contrast", ["batch", "full"])
def test_calibration_moves_the_head_alone(answered: Any, contrast: Any) -> None:
    """Section 8, 12; the same twice, another in another round; what came in stays."""
    experiment, server, replies = answered
    method = replace(experiment.method, contrast=contrast)
    before = serialise(server)
    after = method.calibrate(server, replies, experiment.setting, 1)
    for name, tensor in after["model"].params.items():
        assert torch.equal(tensor, server["model"].params[name]) == name.startswith("encoder."), name
    assert serialise(server) == before
    assert same(after, method.calibrate(server, replies, experiment.setting, 1))
    assert not same(after, method.calibrate(server, replies, experiment.setting, 2))
    assert same({"m": after["model_before"]}, {"m": calibrated_part(server["model"])})
    facts = after["facts"].values
    assert {"calibration_supervised", "calibration_contrast", "calibration_mixed"} < set(facts)
    assert all(math.isfinite(value) for value in facts.values())


def test_terms_of_the_calibration(answered: Any) -> None:
    """Without PA, or with η = 0, the terms are gone; more epochs fit the prototypes better."""
    experiment, server, replies = answered

    def facts(**changes: Any) -> Any:
        method = replace(experiment.method, **changes)
        return method.calibrate(server, replies, experiment.setting, 1)["facts"].values

    assert "calibration_mixed" not in facts(use_pa=False)
    assert {name for name in facts(eta=0.0) if name.startswith("calibration")} == {"calibration_supervised"}
    long = {"eta": 0.0, "cal_epochs": 300, "cal_decay_every": 300}
    assert facts(**long)["calibration_supervised"] < facts(cal_epochs=1)["calibration_supervised"] - 0.05


@pytest.mark.parametrize("draws", [1, 3])
def test_mixed_prototypes_by_hand(lab: Any, draws: int) -> None:
    """Section 8, 4 and 5: u = (1, 2), (3, 2), (0, 0), H = identity: 2.881966, a mean over draws; here twice, η = 0.1.

    Anchor 1 with partners 0 and 2: u⁺ = (1, 2) − (2, 0)/2 = (0, 2), u⁻ = (3, 2) − (3, 2)/2: 3 − √13/2 + 1 = 2.197224.
    Anchor 2 has no negative and does not count.
    """
    experiment = linear(lab, {"name": "fedcspc", "n_aug": draws})
    pool = PrototypeSet(torch.tensor([[1.0, 2], [3, 2], [0, 0]]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0]))
    same, other = (torch.tensor(partners).unsqueeze(1).expand(-1, draws) for partners in ([1, 0, 2], [2, 2, 0]))
    usable = torch.tensor([[True], [True], [False]])
    method, setting = experiment.method, experiment.setting
    for rows, expected in (([0], 2.881966), ([0, 1, 2], (2.881966 + 2.197224) / 2)):
        terms = method.calibration_loss(
            setting.network, setting.initial.values, pool, torch.tensor(rows), Drawn(same, other, usable)
        )
        assert terms["mixed"].item() == pytest.approx(0.1 * expected, abs=1e-6)
        assert terms["supervised"].item() == pytest.approx(math.log(2))


def test_one_large_batch_contrasts_with_all(answered: Any) -> None:
    """A mini-batch of everything is the full set, up to the order of sums."""
    experiment, server, replies = answered
    found = [
        replace(experiment.method, cal_batch=10**6, contrast=contrast, cal_epochs=1).calibrate(
            server, replies, experiment.setting, 1
        )["facts"].values["calibration_contrast"]
        for contrast in ("batch", "full")
    ]  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_calibration_that_diverges_says_so(answered: Any) -> None:
    experiment, server, replies = answered
    with pytest.raises(ArithmeticError, match=r"calibration diverged .* lower method\.cal_lr"):
        replace(experiment.method, cal_lr=1e30).calibrate(server, replies, experiment.setting, 1)


# ---- prototypes of the averaged model's length ---------------------------------------------------------------------


def test_norms_are_those_of_the_received_encoder(lab: Any) -> None:
    """E = 3I was received: ‖(6, 0)‖ = 6 at client 0; training has moved its own E. One scalar more goes up."""
    experiment = linear(lab, {**QUICK, "norm_match": True})
    initial = experiment.setting.initial
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    model = Weights({**initial.params, "encoder.1.weight": 3 * torch.eye(2), "head.weight": head})
    server = {"model": model, "prototypes": Prototypes.empty(2, 2)}
    reply, _ = lab.train(experiment, server=server)
    assert reply.message["encoder_norm"]["mean"].tolist() == [6]
    assert not torch.equal(reply.message["model"].params["encoder.1.weight"], 3 * torch.eye(2))
    assert reply.message["prototypes"]["vectors"][0, 0] > 6
    assert (reply.up["encoder_norm"].scalars, reply.up["encoder_norm"].bytes) == (1, 4)
    for options in ({"norm_match": False}, {"norm_match": True, "use_ca": False, "use_kp": False}):
        silent, _ = lab.train(linear(lab, {**QUICK, **options}), server=server)
        assert "encoder_norm" not in silent.message


def test_norms_with_private_statistics(lab: Any) -> None:
    """Nobody's statistics travel: the received parameters are asked with those of the client."""
    model = {"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": "local"}
    experiment = lab.experiment(model=model, method={**QUICK, "norm_match": True, "use_lrl": False})
    reply, memory = lab.train(experiment)
    own = torch.from_numpy(lab.partition.clients[0].train.copy())
    images = (lab.dataset.train.images[own].float() / 255 - 0.3) / 0.3
    values = {**experiment.setting.initial.params, **memory["batchnorm"].buffers}
    expected = experiment.setting.network.encode(images, values).norm(dim=1).mean()
    assert torch.allclose(reply.message["encoder_norm"]["mean"], expected, rtol=1e-4)
    other = experiment.setting.network.encode(images, experiment.setting.initial.values).norm(dim=1).mean()
    assert not torch.allclose(other, expected, rtol=1e-2)


def norms(*means: float, sizes: tuple[int, ...]) -> dict[int, Record]:
    """Replies of clients that have one prototype each, (4, 0), (6, 0), ... of class 0."""
    return {
        client: {
            **upload([0], [4.0 + 2 * client, 0.0]),
            "encoder_norm": Arrays({"mean": torch.tensor([mean])}),
            "num_samples": Count(size),
        }
        for client, (mean, size) in enumerate(zip(means, sizes, strict=True))
    }


def test_rescaled_prototypes(lab: Any) -> None:
    """Norms 1 and 3 of 3 and 1 samples: 1.5; prototypes (4, 0), (6, 0) have 5: times 0.3 they are (1.2, 0), (1.8, 0).

    u_g is their own mean (5, 0); with H = identity and everything right e_0 is (1.5, 0).
    """
    method = FedCSPC(norm_match=True)
    experiment = linear(lab, {"name": "fedcspc"})
    setting, replies = experiment.setting, norms(1.0, 3.0, sizes=(3, 1))
    pool, facts = method.fitting_pool({}, replies)
    assert close(pool["vectors"], 1.2, 0, 1.8, 0)
    assert facts == {"prototype_norm": 5, "norm_factor": pytest.approx(0.3)}
    server: Record = {"model": setting.initial, "prototypes": Prototypes.empty(2, 2)}
    fused = method.fuse_prototypes(server, replies, setting, 1)
    assert fused["prototypes"].means[0].tolist() == [5, 0]
    assert close(method.build_exemplars(fused, replies, setting, 1)["exemplars"].means[0], 1.5, 0)
    raw, facts = FedCSPC().fitting_pool({}, replies)
    assert raw["vectors"].flatten().tolist() == [4, 0, 6, 0]
    assert facts == {"prototype_norm": 5}


def test_calibration_on_rescaled_prototypes(lab: Any) -> None:
    """A prototype (4, 0) at a norm of 2 is (2, 0): the step of `test_one_step_of_calibration_by_hand`."""
    method = {"name": "fedcspc", "eta": 0.0, "cal_epochs": 1, "cal_weight_decay": 0.0, "norm_match": True}
    experiment = linear(lab, method)
    server = {"model": experiment.setting.initial, "prototypes": Prototypes.empty(2, 2)}
    after = experiment.method.calibrate(server, norms(2.0, sizes=(7,)), experiment.setting, 1)
    assert after["model"].params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])
    assert after["facts"].values["norm_factor"] == 0.5
    assert after["facts"].values["prototype_norm"] == 4


def test_prototypes_at_zero_stay_there() -> None:
    replies = {0: {**norms(2.0, sizes=(1,))[0], **upload([0], [0.0, 0.0])}}
    pool, facts = FedCSPC(norm_match=True).fitting_pool({}, replies)
    assert pool["vectors"].tolist() == [[0, 0]]
    assert facts["norm_factor"] == 1


# ---- partners ----------------------------------------------------------------------------------------------------


def prototype_set(labels: list[int], sources: list[int]) -> PrototypeSet:
    return PrototypeSet(torch.zeros(len(labels), 1), torch.tensor(labels), torch.tensor(sources))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(0, 10**6),
)
def test_partners(cells: list[tuple[int, int]], seed: int) -> None:
    """Section 5, 3: of the same client where there is one, the same label and not itself, and another label."""
    labels, sources = [label for label, _ in cells], [source for _, source in cells]
    drawn = Partners(prototype_set(labels, sources)).draw(4, torch.Generator().manual_seed(seed))
    for item, (label, source) in enumerate(cells):
        alike = [j for j, cell in enumerate(cells) if cell == (label, source) and j != item] or [item]
        unlike = [k for k, cell in enumerate(cells) if cell[0] != label and cell[1] == source]
        anywhere = [k for k, cell in enumerate(cells) if cell[0] != label]
        assert set(drawn.same[item].tolist()) <= set(alike)
        assert bool(drawn.usable[item]) == bool(anywhere)
        if anywhere:
            assert set(drawn.other[item].tolist()) <= set(unlike or anywhere)


def test_every_partner_is_drawn_equally_often() -> None:
    """Item 0 of client 5 (labels 1, 1, 1, 2, 3, 3): partners 1 and 2 of its label, 3, 4, 5 of others.

    2,000 draws: shares 1/2 and 1/3 with standard deviations of 0.011.
    """
    pool = prototype_set([1, 1, 1, 2, 3, 3, 2], [5, 5, 5, 5, 5, 5, 6])
    drawn = Partners(pool).draw(2000, torch.Generator().manual_seed(0))
    same_shares = torch.bincount(drawn.same[0], minlength=7) / 2000
    other_shares = torch.bincount(drawn.other[0], minlength=7) / 2000
    assert torch.allclose(same_shares, torch.tensor([0, 1 / 2, 1 / 2, 0, 0, 0, 0]), atol=0.05)
    assert torch.allclose(other_shares, torch.tensor([0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0]), atol=0.05)


# ---- answers -----------------------------------------------------------------------------------------------------

LOGITS, COSINES = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.2, 0.9, 0.1]])


@pytest.mark.parametrize(
    ("share", "expected", "winner"),
    [
        (0.0, (0.665241, 0.244728, 0.090031), 0),
        (0.1, (0.615741, 0.289293, 0.094966), 0),
        (0.3, (0.516742, 0.378422, 0.104837), 0),
        (0.5, (0.417742, 0.467550, 0.114707), 1),
        (1.0, (0.170244, 0.690372, 0.139384), 1),
    ],
)
def test_fusion_of_probabilities(share: float, expected: tuple[float, ...], winner: int) -> None:
    """Section 8, 9."""
    fused = fuse(LOGITS, COSINES, share, 0.5, "softmax")
    assert close(fused, *expected)
    assert fused.argmax().item() == winner


def test_other_fusions() -> None:
    """Authors: section 8, 9, whose network has weight 0.1. Min-max: (1, 1/2, 0) and (1/8, 1, 0), half of each."""
    assert close(fuse(LOGITS, COSINES, 0.9, 0.5, "authors"), 1.542642, 5.544683, 1.099262)
    assert close(fuse(LOGITS, COSINES, 0.5, 0.5, "minmax"), 0.5625, 0.75, 0)


def test_a_class_without_exemplar() -> None:
    """Its knowledge probability is 0: softmax over the others, 1/(1 + e^1.6) = 0.167982 for cosines 0.9 and 0.1."""
    missing = torch.tensor([[-torch.inf, 0.9, 0.1]])
    assert close(fuse(LOGITS, missing, 1.0, 0.5, "softmax"), 0, 1 - 0.167982, 0.167982)
    assert close(fuse(LOGITS, missing, 0.9, 0.5, "authors"), 0.2, 0.1 + 0.9 * math.exp(1.8), 0.9 * math.exp(0.2))
    assert close(fuse(LOGITS, missing, 0.5, 0.5, "minmax"), 0.5, 0.75, 0)
    assert close(to_unit_range(torch.tensor([[-torch.inf, 3.0, -torch.inf]])), 0, 0, 0)


def test_exemplars_are_means_of_what_is_right() -> None:
    """Class 0: the right one of 1 and 3; class 1: none is right, both count; class 2 has none."""
    exemplars = best_means(
        torch.tensor([[1.0], [3.0], [4.0], [8.0]]),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([True, False, False, False]),
        3,
    )
    assert exemplars.means.flatten().tolist() == [1, 6, 0]
    assert exemplars.present.tolist() == [True, True, False]


def test_exemplars_follow_the_calibration(answered: Any) -> None:
    """They are made by the model as it is after `calibrate`, and never sent."""
    experiment, server, replies = answered
    method, setting = experiment.method, experiment.setting
    assert list(method.stages()) == ["aggregate", "fuse-prototypes", "calibrate", "build-exemplars"]
    after = method.build_exemplars(method.calibrate(server, replies, setting, 1), replies, setting, 1)
    pool = pooled({}, replies)
    projected = setting.network.project(pool["vectors"], after["model"].values)
    right = setting.network.classify(projected, after["model"].values).argmax(1) == pool["labels"]
    for label in pool["labels"].unique():
        chosen = (pool["labels"] == label) & right
        chosen = chosen if chosen.any() else pool["labels"] == label
        assert torch.allclose(after["exemplars"].means[label], projected[chosen].mean(0), atol=1e-4)
    assert set(method.broadcast(after, 0, setting)) == {"model", "prototypes"}


class Doubling:
    """E is the identity, H doubles, F is the identity; asked with other weights it multiplies by -1."""

    def encode(self, images: Tensor) -> Tensor:
        return images

    def project(self, encoded: Tensor, weights: Any = None) -> Tensor:
        return encoded * (2 if weights is None else -1)

    def features(self, images: Tensor) -> Tensor:
        return self.project(images)

    def classify(self, features: Tensor, weights: Any = None) -> Tensor:
        return features


def test_predictions() -> None:
    """The image (1, 0.5) has logits (2, 1); exemplars (0, 1) and (1, 1) have cosines 0.447214 and 0.948683."""
    model: Any = Doubling()
    image = torch.tensor([[1.0, 0.5]])
    exemplars = Prototypes(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([True, True]))
    server: Record = {"exemplars": exemplars, "model_before": Weights({})}
    method = FedCSPC(lambda_p=0.7)
    assert close(method.predict(model, image, {}, None), 2, 1)
    assert close(similarities(model.features(image), server), 0.447214, 0.948683)  # type: ignore[arg-type]
    head, knowledge = LOGITS[:, :2].softmax(1), (torch.tensor([[0.447214, 0.948683]]) / 0.5).softmax(1)
    expected = 0.3 * head + 0.7 * knowledge
    assert torch.allclose(method.predict(model, image, server, None).exp(), expected, atol=1e-6)
    ways = method.alternatives()
    assert close(ways["network"](model, image, server, None), 2, 1)
    assert close(ways["knowledge"](model, image, server, None), 0.447214, 0.948683)
    assert close(ways["before_calibration"](model, image, server, None), -1, -0.5)
    assert close(by_head_before(model, image, {}, None), 2, 1)
    assert list(FedCSPC(use_kp=False).alternatives()) == ["before_calibration"]
    assert FedCSPC(use_kp=False, use_ca=False).alternatives() == {}


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"base": "moon", "fusion": "minmax", "keep_stale": True},
        {"use_cpm": False, "fusion": "authors", "contrast": "full"},
        {"use_ca": False, "feedback": False},
        {"norm_match": True, "keep_stale": True},
    ],
)
def test_odd_clients_give_numbers(lab: Any, options: dict[str, Any], tmp_path: Any) -> None:
    """One class only; one sample; fewer samples than a batch; classes 4 and 5 that nobody holds; half take part."""
    labels = lab.dataset.train.labels
    of = [torch.nonzero(labels == label).flatten().tolist() for label in range(4)]
    clients = [of[0], of[1][:1], of[1][1:4] + of[2][:4], of[3]]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 4)
    changes = {"model": CSPC, "method": {**QUICK, **options}, "federation__participation": 0.5}
    run = lab.run(lab.experiment(partition=partition, **changes), tmp_path / "run")
    assert run.state.failures == ()
    for payload in run.state.server.values():
        arrays = payload.arrays().values()
        assert all(bool(torch.isfinite(tensor).all()) for tensor in arrays if tensor.is_floating_point())
    assert all(math.isfinite(record["loss_global"]) for record in run.history)


def test_one_class_in_the_whole_round(lab: Any) -> None:
    """No prototype has another label: L_ACL has no negative and counts nothing; the contrast has positives only."""
    experiment = linear(lab, {**QUICK, "cal_epochs": 1})
    server = {"model": experiment.setting.initial}
    replies = {0: {"prototypes": Arrays(POOL), "num_samples": Count(1)}}
    facts = experiment.method.calibrate(server, replies, experiment.setting, 1)["facts"].values
    assert facts["calibration_mixed"] == 0
    assert facts["calibration_contrast"] == 0


def test_sources_are_the_clients(answered: Any) -> None:
    """The contrast tells clients apart: with everybody's prototypes under one id it has another value."""
    experiment, server, replies = answered
    method = replace(experiment.method, cal_epochs=1, cal_batch=10**6)
    apart = method.calibrate(server, replies, experiment.setting, 1)["facts"].values["calibration_contrast"]
    pool = pooled({}, replies)
    merged = {0: {"prototypes": Arrays({name: pool[name] for name in ("labels", "vectors")})}}
    together = method.calibrate(server, merged, experiment.setting, 1)["facts"].values["calibration_contrast"]
    assert abs(apart - together) > 1e-4
