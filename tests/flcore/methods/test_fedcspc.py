"""FedCSPC: steps by hand, limit cases to the bit, calibration, partners and answers (fedcspc.md section 8)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.io.messages import Count, Prototypes, TensorDict, Weights
from flcore.io.records import Payloads, Record, serialise
from flcore.math.prototypes.clustering import Drawn
from flcore.methods.fedcspc import ENCODER_PROTOTYPES, EXEMPLARS, POOL, FedCSPC, pooled
from flcore.methods.types import Replies, RoundContext
from tests.cases import quick

CSPC = {"name": "fedcspc_cnn", "projection_dim": 16}
# Small enough for a test; what is off is not evaluated.
QUICK = {"name": "fedcspc", "cal_epochs": 3, "n_aug": 1, "clusters": 2, "n_repeat": 2}
OFF = {"name": "fedcspc", "use_lrl": False, "use_ca": False, "use_kp": False}
UPLOAD = {"labels": torch.tensor([0]), "vectors": torch.tensor([[2.0, 0.0]])}


def close(values: Tensor, *expected: float) -> bool:
    return bool(torch.allclose(values.flatten(), torch.tensor(expected, dtype=torch.float32), atol=2e-6))


def prototypes(vectors: Tensor, labels: list[int], sources: list[int]) -> TensorDict:
    return TensorDict({"vectors": vectors, "labels": torch.tensor(labels), "sources": torch.tensor(sources)})


def at(experiment: Any, number: int = 1) -> RoundContext:
    """Round ``number``, as the server's steps see it."""
    return RoundContext(experiment.setting, number)


def calibrated(experiment: Any, server: Payloads, replies: Any, number: int = 1, **changes: Any) -> tuple[Weights, Any]:
    """The model that answers after a round's calibration, and its facts."""
    method = replace(experiment.method, **changes)
    after, facts = method.calibrate(Record(server), Replies(replies), at(experiment, number))
    return method.global_model(after), facts


def linear(lab: Any, method: dict[str, Any], encoder: bool = True) -> Any:
    """Client 0 holds (2, 0) of class 0, client 1 (0, 4) of class 1; head zero, one full batch, plain SGD at 0.1."""
    return lab.linear(encoder=encoder, method=method)


@pytest.mark.parametrize("base", quick(["fedavg", "moon"], 1))
def test_with_everything_off_it_is_the_base(lab: Any, base: str, tmp_path: Any) -> None:
    """Also with the calibration on, but without an epoch and without answers from it (section 8, 12)."""
    changes = {"model": CSPC, "federation__participation": 0.5, "local__momentum": 0.5}
    expected = lab.run(lab.experiment(**changes, method__name=base), tmp_path / "base")
    off = lab.run(lab.experiment(**changes, method={**OFF, "base": base}), tmp_path / "off")
    assert lab.same(off.state.server, expected.state.server)
    assert off.history == expected.history
    assert all(lab.same(off.client_state(client), expected.client_state(client)) for client in range(4))
    idle = lab.experiment(**changes, method={**QUICK, "base": base, "cal_epochs": 0, "use_lrl": False, "use_kp": False})
    run = lab.run(idle, tmp_path / "idle")
    answering = idle.method.global_model(run.state.server)
    assert lab.same({"model": answering}, expected.state.server) and lab.same(
        run.state.server.only("model"), {"model": answering}
    )
    assert [r["top1_global"] for r in run.history] == [r["top1_global"] for r in expected.history]


def test_exemplars_change_answers_and_not_training(lab: Any, tmp_path: Any) -> None:
    """So that a run with KP also tells what the head answers without it, as fedcspc.standin reads it."""
    with_kp = lab.run(lab.experiment(model=CSPC, method=QUICK), tmp_path / "with")
    without = lab.run(lab.experiment(model=CSPC, method={**QUICK, "use_kp": False}), tmp_path / "without")
    kept = [name for name in without.state.server if name != "exemplars"]
    assert lab.same(with_kp.state.server.only(*kept), without.state.server.only(*kept))
    heads = [record["alternatives"]["network"]["top1_global"] for record in with_kp.history]
    assert heads == [record["top1_global"] for record in without.history]


def test_updates_are_measured_from_what_clients_received(lab: Any, tmp_path: Any) -> None:
    """Who sends back the calibrated model that it was sent has not moved: a norm of 0, and nothing to clip."""
    experiment = lab.experiment(model=CSPC, method=QUICK, federation__rounds=1, aggregation__clip=1.0)
    server = lab.run(experiment, tmp_path / "run").state.server
    sent = experiment.method.broadcast(server, 0, at(experiment, 2))["model"]
    assert lab.same(sent, experiment.method.global_model(server)) and not lab.same(sent, server["model"])
    replies = Replies({0: {"model": sent, "num_samples": Count(5)}})
    after, facts = experiment.method.server_steps()["aggregate"](server, replies, at(experiment, 2))
    assert facts == {"update_norm": 0, "clip_norm": 1, "clipped": 0}
    assert lab.same(after["model"], sent)


@pytest.mark.parametrize("options", [{}, {"feedback": False, "norm_match": True}])
def test_a_base_that_sends_differences(options: dict[str, Any]) -> None:
    """Clients never receive a model that the calibrated one could stand in for, or be asked for its norms."""
    refused = list(options)[-1] if options else "feedback"
    with pytest.raises(ValueError, match=rf"^{refused} = true: protolda_distilled .* set method\.{refused}=false"):
        FedCSPC(base="protolda_distilled", **options)
    assert FedCSPC(base="protolda_distilled", feedback=False).base_method.broadcasts_model is False


def test_a_model_without_a_projection(lab: Any, tmp_path: Any) -> None:
    """Nothing to calibrate: both contrasts would have no gradient. Without CA it trains, and its prototypes answer."""
    model = {"name": "fedgen_cnn", "feature_dim": 8}
    experiment = lab.experiment(model=model, method=QUICK)
    with pytest.raises(
        ConfigError, match=r"method\.use_ca = true: the model has no projection.* or set method\.use_ca"
    ):
        lab.run(experiment, tmp_path / "refused")
    with pytest.raises(ConfigError, match="no projection"):
        replace(experiment.method, eta=0.0).start_server(experiment.setting)
    run = lab.run(lab.experiment(model=model, method={**QUICK, "use_ca": False}), tmp_path / "run")
    assert set(run.history[1]["train_loss"]) == {"cross_entropy", "node", "angle", "edge"}
    assert set(run.history[1]["alternatives"]) == {"network", "knowledge"}


def test_the_base_is_a_parameter(lab: Any) -> None:
    """Over MOON the second round has MOON's term and FedCSPC's."""
    method = {**QUICK, "base": "moon", "base_settings": {"moon": {"method.mu": 2.0, "method.tau": 0.3}}}
    experiment = lab.experiment(model=CSPC, method=method)
    assert (experiment.method.base_method.mu, experiment.method.base_method.tau) == (2.0, 0.3)
    means = torch.randn(6, 84, generator=torch.Generator().manual_seed(0))
    server = {
        "model": experiment.setting.initial,
        "encoder_prototypes": Prototypes(means, torch.ones(6, dtype=torch.bool)),
    }
    client_state = {"previous": experiment.setting.initial}
    reply, kept = lab.train(experiment, number=2, server=server, client_state=client_state)
    assert set(reply.losses) == {"cross_entropy", "contrast", "node", "angle", "edge"}
    assert set(kept) == {"previous"}
    moon = lab.experiment(model=CSPC, method={"name": "moon", "mu": 2.0, "tau": 0.3}, local__steps=1)
    first = lab.experiment(model=CSPC, method=method, local__steps=1)
    alone, _ = lab.train(moon, number=2, client_state=client_state)
    both, _ = lab.train(first, number=2, server=server, client_state=client_state)
    for name in ("cross_entropy", "contrast"):
        assert both.losses[name] == alone.losses[name]


def test_the_node_loss_moves_the_encoder(lab: Any) -> None:
    """f = (2, 0) of class 0, U = ((0, 1), (1, 0)), τ = 0.5: cosines 0 and 1, L_N = ln(1 + e²) = 2.126928.

    p = e²/(1 + e²) = 0.880797 is the share of class 1; ∇cos(f, U_1) = 0 as f points there, ∇cos(f, U_0) = (0, 1)/2, so
    dL/df = (1/τ)·(0.119203 − 1)·(0, 1/2) = (0, −0.880797). E_10 = 0.1·κ·0.880797·2. Through a head of zeros the
    cross-entropy gives E nothing.
    """
    method = {**QUICK, "kappa": 0.7, "w_angle": 0.0, "w_edge": 0.0}
    experiment = linear(lab, method)
    prototypes = Prototypes(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2, dtype=torch.bool))
    server = {"model": experiment.setting.initial, "encoder_prototypes": prototypes}
    reply, _ = lab.train(experiment, number=2, server=server)
    assert reply.losses == {
        "cross_entropy": pytest.approx(math.log(2)),
        "node": pytest.approx(0.7 * 2.126928, abs=1e-5),
    }
    moved = 0.1 * 0.7 * 0.880797 * 2
    assert reply.message["model"].params["encoder.1.weight"].flatten().tolist() == pytest.approx([1, 0, moved, 1])
    assert reply.message["model"].params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])


def test_messages(lab: Any) -> None:
    """q_k = Σ_c K_c·n_repeat prototypes of 84 scalars with int64 labels, of classes with two distinct features or more.

    Down: the model and, where they are used, the prototypes of the classes that have one, 84 scalars and an id each.
    """
    experiment = lab.experiment(model=CSPC, method={**QUICK, "clusters": 3, "n_repeat": 5})
    model = 4 * experiment.setting.initial.num_parameters
    reply, client_state = lab.train(experiment)
    counts = experiment.label_counts(0, 1)
    count = int(counts.clamp_max(3).sum()) * 5
    assert {kind: size.bytes for kind, size in reply.up.items()} == {
        "model": model,
        "num_samples": 8,
        "cluster_prototypes": count * (84 * 4 + 8),
    }
    assert reply.up["cluster_prototypes"].scalars == count * 84
    assert {kind: size.bytes for kind, size in reply.down.items()} == {"model": model, "encoder_prototypes": 0}
    assert client_state == {}
    held = Prototypes(torch.ones(6, 84), torch.tensor([True] * 4 + [False] * 2))
    later, _ = lab.train(experiment, server={"model": experiment.setting.initial, "encoder_prototypes": held}, number=2)
    assert later.down["encoder_prototypes"].bytes == 4 * (84 * 4 + 8)
    silent, _ = lab.train(lab.experiment(model=CSPC, method={**QUICK, "use_lrl": False}))
    assert set(silent.down) == {"model"}


def test_one_mean_per_class_without_clusters(lab: Any) -> None:
    """TPG (section 8, 11): the class means of the encoder's output in evaluation mode."""
    experiment = lab.experiment(
        model={"name": "fedgen_cnn", "feature_dim": 8}, method={**QUICK, "use_cpm": False, "use_ca": False}
    )
    reply, _ = lab.train(experiment)
    sent = reply.message["cluster_prototypes"]
    own = torch.from_numpy(lab.partition.clients[0].train.copy())
    images, labels = (lab.dataset.train.images[own].float() / 255 - 0.3) / 0.3, lab.dataset.train.labels[own]
    encoded = experiment.setting.network.encode(images, reply.message["model"].values)
    assert sent["labels"].tolist() == labels.unique().tolist()
    for label, vector in zip(sent["labels"], sent["vectors"], strict=True):
        assert torch.allclose(vector, encoded[labels == label].mean(0), atol=1e-5)


def test_the_auxiliary_classifier_by_hand(lab: Any) -> None:
    """f = (2, 0) of class 0 through an auxiliary I: logits (2, 0), p_1 = 1/(1 + e²) = 0.119203, loss 0.126928.

    df = (−p_1, p_1), so that E_00 gets 0.1·2·p_1 and E_10 its negative; the weight gets 0.1·p_1·(2, 0) in row 0, the
    bias 0.1·p_1. The head of zeros moves as without it.
    """
    experiment = linear(lab, {**QUICK, "aux_ce": True})
    initial = experiment.setting.initial
    layer = {"extra.auxiliary.weight": torch.eye(2), "extra.auxiliary.bias": torch.zeros(2)}
    server = {"model": Weights({**initial.params, **layer}), "encoder_prototypes": Prototypes.empty(2, 2)}
    reply, _ = lab.train(experiment, server=server)
    assert reply.losses == {"cross_entropy": pytest.approx(math.log(2)), "auxiliary": pytest.approx(0.126928, abs=1e-6)}
    params, moved = reply.message["model"].params, 0.1 * 0.119203
    assert close(params["encoder.1.weight"], 1 + 2 * moved, 0, -2 * moved, 1)
    assert close(params["extra.auxiliary.weight"], 1 + 2 * moved, 0, -2 * moved, 1)
    assert close(params["extra.auxiliary.bias"], moved, -moved)
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])


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
    later, _ = lab.train(experiment, server={"model": initial, "encoder_prototypes": held}, number=2)
    assert set(later.losses) == {"cross_entropy", "auxiliary", "node", "angle", "edge"}
    after, _ = calibrated(experiment, {"model": initial}, {0: reply.message})
    moved = {
        name.split(".")[0] for name, tensor in initial.params.items() if not torch.equal(after.params[name], tensor)
    }
    assert moved == {"projection", "head"}


def upload(labels: list[int], *vectors: list[float]) -> dict[str, Any]:
    return {"cluster_prototypes": TensorDict({"labels": torch.tensor(labels), "vectors": torch.tensor(vectors)})}


def gathered(lab: Any, num_classes: int, server: Payloads, replies: Any, **options: Any) -> Record:
    """The server behind its stage on prototypes."""
    setting = replace(lab.experiment().setting, num_classes=num_classes)
    after, _ = FedCSPC(**options).gather_prototypes(Record(server), Replies(replies), RoundContext(setting, 2))
    return after


def test_global_prototypes_are_plain_means(lab: Any) -> None:
    """Class 0: (1 + 3 + 8)/3 = 4 over prototypes, not over clients; class 1 keeps 9; class 2 has none."""
    held = Prototypes(torch.tensor([[7.0], [9.0], [0.0]]), torch.tensor([True, True, False]))
    replies = {2: upload([0], [8.0]), 0: upload([0, 0], [1.0], [3.0])}
    after = gathered(lab, 3, {"encoder_prototypes": held, "calibrated": Weights({})}, replies)
    assert after[ENCODER_PROTOTYPES].means.flatten().tolist() == [4, 9, 0]
    assert after[ENCODER_PROTOTYPES].present.tolist() == [True, True, False]
    assert set(after) == {"encoder_prototypes"}  # what the last round calibrated is over


def test_absent_clients_are_forgotten_unless_kept(lab: Any) -> None:
    """Client 1 answered first, then client 0 and 2, then client 1 again."""
    for keep, expected in ((False, [1.0, 3.0, 5.0]), (True, [1.0, (1 + 2 + 3) / 3, (2 + 3 + 5) / 3])):
        server = Record({"encoder_prototypes": Prototypes.empty(1, 1)})
        rounds = [{1: upload([0], [1.0])}, {0: upload([0], [2.0]), 2: upload([0], [4.0])}, {1: upload([0], [5.0])}]
        rounds[1] = {0: upload([0], [2.0]), 2: upload([0], [3.0])} if keep else {0: upload([0], [3.0])}
        for number, replies in enumerate(rounds):
            server = gathered(lab, 1, server, replies, keep_stale=keep)
            assert server[ENCODER_PROTOTYPES].means.item() == pytest.approx(expected[number])
        assert ("prototype_pool" in server) == keep
    assert server[POOL]["sources"].tolist() == [0, 1, 2]


def test_pool_in_client_order() -> None:
    pool = pooled(Record(), Replies({3: upload([1, 0], [3.0], [4.0]), 0: upload([1], [1.0])}))
    assert pool["vectors"].flatten().tolist() == [1, 3, 4]
    assert pool["labels"].tolist() == [1, 1, 0]
    assert pool["sources"].tolist() == [0, 3, 3]


def test_one_step_of_calibration_by_hand(lab: Any) -> None:
    """One prototype (2, 0) of class 0, head zero, rate 0.1: row 0 has gradient (−1/2)·(2, 0), as one local step has."""
    method = {"name": "fedcspc", "eta": 0.0, "cal_epochs": 1, "cal_weight_decay": 0.0}
    experiment = linear(lab, method)
    initial = experiment.setting.initial
    after, facts = calibrated(experiment, {"model": initial}, {0: {"cluster_prototypes": TensorDict(UPLOAD)}})
    assert after.params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])
    assert after.params["head.bias"].tolist() == pytest.approx([0.05, -0.05])
    assert torch.equal(after.params["encoder.1.weight"], torch.eye(2))
    assert facts == {"calibration_supervised": pytest.approx(math.log(2)), "prototypes": 1, "prototype_norm": 2}
    assert not initial.params["head.weight"].any()


def test_rates_of_the_schedule() -> None:
    """Section 5, 3, rounds counted from 0: 0.1 up to 5, 0.01 from 6 to 40, 0.001 afterwards."""
    rates = {passed: FedCSPC().round_rate(passed) for passed in (0, 5, 6, 40, 41, 100)}
    assert rates == pytest.approx({0: 0.1, 5: 0.1, 6: 0.01, 40: 0.01, 41: 0.001, 100: 0.001})
    assert FedCSPC(cal_lr=0.02, cal_lr_schedule="constant").round_rate(100) == 0.02


def test_the_rate_falls_inside_a_calibration(lab: Any) -> None:
    """Two epochs of one step, the second at a tenth: W_00 = 0.1 after the first; then p = 1/(1 + e^0.5), 0.01·2p more.

    As in FedProx's second step, with logits that differ by 2·(0.2 + 0.05).
    """
    options = {"name": "fedcspc", "eta": 0.0, "cal_epochs": 2, "cal_decay_every": 1, "cal_weight_decay": 0.0}
    experiment = linear(lab, options)
    server = {"model": experiment.setting.initial}
    after, _ = calibrated(experiment, server, {0: {"cluster_prototypes": TensorDict(UPLOAD)}})
    expected = 0.1 + 0.01 * 2 / (1 + math.exp(0.5))
    assert after.params["head.weight"][0, 0].item() == pytest.approx(expected)


@pytest.fixture(scope="module")
def answered(lab: Any) -> tuple[Any, Record, Replies]:
    """A round of the projection model: experiment, server in front of its calibration, and replies."""
    experiment = lab.experiment(model=CSPC, method=QUICK)
    replies = Replies({client: reply.message for client, (reply, _) in lab.train_stack(experiment, range(4)).items()})
    server = Record(experiment.method.start_server(experiment.setting))
    for name in ("aggregate", "gather-prototypes"):
        server, _ = experiment.method.server_steps()[name](server, replies, at(experiment))
    return experiment, server, replies


@pytest.mark.parametrize("contrast", ["batch", "full"])
def test_calibration_moves_the_head_alone(lab: Any, answered: Any, contrast: Any) -> None:
    """Section 8, 12; the same twice, another in another round; what came in stays."""
    experiment, server, replies = answered
    before = serialise(server)
    after, facts = calibrated(experiment, server, replies, contrast=contrast)
    for name, tensor in after.params.items():
        assert torch.equal(tensor, server["model"].params[name]) == name.startswith("encoder."), name
    assert serialise(server) == before
    again, another = (calibrated(experiment, server, replies, number, contrast=contrast)[0] for number in (1, 2))
    assert lab.same(again, after)
    assert not lab.same(another, after)
    assert {"calibration_supervised", "calibration_contrast", "calibration_mixed"} < set(facts)
    assert all(math.isfinite(value) for value in facts.values())


def test_terms_of_the_calibration(answered: Any) -> None:
    """Without PA, or with η = 0, the terms are gone; more epochs fit the prototypes better."""

    def facts(**changes: Any) -> Any:
        return calibrated(*answered, **changes)[1]

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
    pool = prototypes(torch.tensor([[1.0, 2], [3, 2], [0, 0]]), [0, 0, 1], [0, 0, 0])
    same, other = (torch.tensor(partners).unsqueeze(1).expand(-1, draws) for partners in ([1, 0, 2], [2, 2, 0]))
    usable = torch.tensor([[True], [True], [False]])
    method, setting = experiment.method, experiment.setting
    for chosen, expected in (([0], 2.881966), ([0, 1, 2], (2.881966 + 2.197224) / 2)):
        rows = torch.tensor(chosen)
        terms = method.calibration_loss(
            setting.network, setting.initial.values, pool, rows, Drawn(same, other, usable).rows(rows)
        )
        assert terms["mixed"].item() == pytest.approx(0.1 * expected, abs=1e-6)
        assert terms["supervised"].item() == pytest.approx(math.log(2))


def test_the_full_contrast_of_a_mini_batch(lab: Any) -> None:
    """Section 8, 7, of rows 3 and 1 among all four: 0.875692, and 1 has no positive; B·n pairs, not n²."""
    experiment = linear(lab, {"name": "fedcspc", "contrast": "full", "eta": 1.0, "use_pa": False})
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, -0.6]])
    pool = prototypes(points, [0, 1, 0, 0], [0, 0, 1, 0])
    setting, shapes = experiment.setting, []

    class Shapes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            shapes.extend([result.shape] if isinstance(result, Tensor) else [])
            return result

    with Shapes():
        terms = experiment.method.calibration_loss(
            setting.network, setting.initial.values, pool, torch.tensor([3, 1]), None
        )
    assert terms["contrast"].item() == pytest.approx(0.875692, abs=1e-6)
    assert (2, 4) in shapes and (4, 4) not in shapes


def test_a_calibration_that_diverges_says_so(answered: Any) -> None:
    with pytest.raises(ArithmeticError, match=r"calibration diverged .* lower method\.cal_lr"):
        calibrated(*answered, cal_lr=1e30)


def test_norms_are_those_of_the_received_encoder(lab: Any) -> None:
    """E = 3I was received: ‖(6, 0)‖ = 6 at client 0; training has moved its own E. One scalar more goes up."""
    experiment = linear(lab, {**QUICK, "norm_match": True})
    initial = experiment.setting.initial
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    model = Weights({**initial.params, "encoder.1.weight": 3 * torch.eye(2), "head.weight": head})
    server = {"model": model, "encoder_prototypes": Prototypes.empty(2, 2)}
    reply, _ = lab.train(experiment, server=server)
    assert reply.message["encoder_norm"]["mean"].tolist() == [6]
    assert not torch.equal(reply.message["model"].params["encoder.1.weight"], 3 * torch.eye(2))
    assert reply.message["cluster_prototypes"]["vectors"][0, 0] > 6
    assert (reply.up["encoder_norm"].scalars, reply.up["encoder_norm"].bytes) == (1, 4)
    for options in ({"norm_match": False}, {"norm_match": True, "use_ca": False, "use_kp": False}):
        silent, _ = lab.train(linear(lab, {**QUICK, **options}), server=server)
        assert "encoder_norm" not in silent.message


def norms(*means: float, sizes: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """Replies of clients that have one prototype each, (4, 0), (6, 0), ... of class 0."""
    return {
        client: {
            **upload([0], [4.0 + 2 * client, 0.0]),
            "encoder_norm": TensorDict({"mean": torch.tensor([mean])}),
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
    setting, replies = experiment.setting, Replies(norms(1.0, 3.0, sizes=(3, 1)))
    pool, facts = method.fitting_pool(Record(), replies)
    assert close(pool["vectors"], 1.2, 0, 1.8, 0)
    assert facts == {"prototypes": 2, "prototype_norm": 5, "norm_factor": pytest.approx(0.3)}
    server = Record({"model": setting.initial, "encoder_prototypes": Prototypes.empty(2, 2)})
    fused, _ = method.gather_prototypes(server, replies, at(experiment))
    assert fused[ENCODER_PROTOTYPES].means[0].tolist() == [5, 0]
    assert close(method.build_exemplars(fused, replies, at(experiment))[0][EXEMPLARS].means[0], 1.5, 0)
    raw, facts = FedCSPC().fitting_pool(Record(), replies)
    assert raw["vectors"].flatten().tolist() == [4, 0, 6, 0]
    assert facts == {"prototypes": 2, "prototype_norm": 5}


def test_prototypes_at_zero_stay_there() -> None:
    replies = Replies({0: {**norms(2.0, sizes=(1,))[0], **upload([0], [0.0, 0.0])}})
    pool, facts = FedCSPC(norm_match=True).fitting_pool(Record(), replies)
    assert pool["vectors"].tolist() == [[0, 0]]
    assert facts["norm_factor"] == 1


def sent(lab: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Labels and vectors of a client with features (0, 0), (2, 0), (4, 0), (6, 0) of class 0 and (9, 9) of class 1."""
    pixels, method = [[0, 0], [2, 0], [4, 0], [6, 0], [9, 9]], {**QUICK, "n_repeat": 1, **options}
    experiment = lab.linear(pixels, [0, 0, 0, 0, 1], [range(5)], method=method)
    server = {"model": experiment.setting.initial, "encoder_prototypes": Prototypes.empty(2, 2)}
    reply, _ = lab.train(experiment, server=server)
    arrays = reply.message["cluster_prototypes"]
    return arrays["labels"], arrays["vectors"]


def test_prototypes_are_means_of_enough_samples(lab: Any) -> None:
    """Two clusters {0, 2}, {4, 6}: means of half of each are single samples. Of two samples and r = 1/2 a cluster has

    to have four: one cluster, a mean of two of it; class 1 has one sample and is silent. Class means are of four.
    """
    labels, vectors = sent(lab)
    assert labels.tolist() == [0, 0, 1]
    assert set(vectors[:2, 0].tolist()) <= {0.0, 2.0, 4.0, 6.0}
    labels, vectors = sent(lab, min_count=2)
    assert labels.tolist() == [0]
    assert vectors[0, 0].item() in {1.0, 2.0, 3.0, 4.0, 5.0}
    labels, _ = sent(lab, min_count=3)
    assert labels.tolist() == []  # six samples would be needed
    for least, classes in ((2, [0]), (4, [0]), (5, [])):
        labels, vectors = sent(lab, use_cpm=False, min_count=least)
        assert labels.tolist() == classes
    assert sent(lab, use_cpm=False, min_count=4)[1].tolist() == [[3, 0]]


def test_nobody_sends_a_prototype(lab: Any, tmp_path: Any) -> None:
    """Then nothing is calibrated, and the base answers; its run is untouched."""
    changes = {"model": CSPC, "federation__rounds": 2}
    expected = lab.run(lab.experiment(**changes), tmp_path / "base")
    run = lab.run(lab.experiment(**changes, method={**QUICK, "min_count": 1000}), tmp_path / "run")
    assert lab.same(run.state.server.only("model"), expected.state.server)
    assert "calibrated" not in run.state.server
    assert [r["top1_global"] for r in run.history] == [r["top1_global"] for r in expected.history]
    assert run.history[-1]["server"] == {"prototypes": 0}


def test_exemplars_follow_the_calibration(answered: Any) -> None:
    """They are made by the model as it is after `calibrate`, and never sent."""
    experiment, server, replies = answered
    method, setting = experiment.method, experiment.setting
    assert list(method.server_steps()) == ["aggregate", "gather-prototypes", "calibrate", "build-exemplars"]
    after, _ = method.calibrate(server, replies, at(experiment))
    after, _ = method.build_exemplars(after, replies, at(experiment))
    values, pool = method.global_model(after).values, pooled(Record(), replies)
    projected = setting.network.project(pool["vectors"], values)
    right = setting.network.classify(projected, values).argmax(1) == pool["labels"]
    for label in set(pool["labels"].tolist()):
        chosen = (pool["labels"] == label) & right
        chosen = chosen if chosen.any() else pool["labels"] == label
        assert torch.allclose(after[EXEMPLARS].means[label], projected[chosen].mean(0), atol=1e-4)
    assert set(method.broadcast(after, 0, at(experiment, 2))) == {"model", "encoder_prototypes"}


class Doubling:
    """Features are twice the image, and the logits."""

    asked: ClassVar[list[Tensor]] = []

    def features(self, images: Tensor) -> Tensor:
        self.asked.append(images)
        return images * 2

    def classify(self, features: Tensor) -> Tensor:
        return features


def test_predictions() -> None:
    """The image (1, 0.5) has logits (2, 1); exemplars (0, 1) and (1, 1) have cosines 0.447214 and 0.948683."""
    model: Any = Doubling()
    image = torch.tensor([[1.0, 0.5]])
    exemplars = Prototypes(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([True, True]))
    server = Record({"exemplars": exemplars})
    method = FedCSPC(lambda_p=0.7)
    assert close(method.predict(model, image, Record(), None), 2, 1)
    cosines = torch.tensor([[0.447214, 0.948683]])
    expected = 0.3 * torch.tensor([[2.0, 1.0]]).softmax(1) + 0.7 * (cosines / 0.5).softmax(1)
    assert torch.allclose(method.predict(model, image, server, None).exp(), expected, atol=1e-6)
    ways = method.predictors()
    assert list(ways) == ["network", "knowledge", "before_calibration"]
    assert close(ways["network"](model, image, server, None), 2, 1)
    assert close(method.predict_private(model, image, server, None), 2, 1)  # no client has the exemplars
    assert close(ways["knowledge"](model, image, server, None), 0.447214, 0.948683)
    assert close(ways["knowledge"](model, image, Record(), None), 2, 1)
    assert all(asked is image for asked in model.asked)  # so that the scorer encodes it once
    assert close(ways["before_calibration"](model, image, server, None), 2, 1)
    assert list(FedCSPC(use_kp=False).predictors()) == ["before_calibration"]
    assert list(FedCSPC(use_ca=False).predictors()) == ["network", "knowledge"]


def test_one_class_in_the_whole_round(lab: Any) -> None:
    """No prototype has another label: L_ACL has no negative and counts nothing; the contrast has positives only."""
    experiment = linear(lab, {**QUICK, "cal_epochs": 1})
    _, facts = calibrated(
        experiment, {"model": experiment.setting.initial}, {0: {"cluster_prototypes": TensorDict(UPLOAD)}}
    )
    assert (facts["calibration_mixed"], facts["calibration_contrast"]) == (0, 0)
