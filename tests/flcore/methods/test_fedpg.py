"""FedPG's stages and messages by hand, and whether its images help (fedpg.md section 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flcore.analyses.generated import image_sheet
from flcore.data.dataset import prepare_dataset
from flcore.data.dividing import make_partition
from flcore.data.images import normalise
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Count, Prototypes
from flcore.io.records import Record, payload_sizes, serialise
from flcore.math.prototypes.class_means import class_means
from flcore.methods.fedpg import TARGETS
from flcore.methods.kit.image_generator import IMAGE_GENERATOR
from flcore.methods.kit.virtual_images import VIRTUAL
from flcore.methods.types import MODEL, NUM_SAMPLES, PROTOTYPES, Replies, RoundContext
from tests.cases import quick

SMALL = {"name": "fedpg", "gen_steps": 3, "gen_batch": 8, "noise_dim": 4, "n_virtual": 5, "virtual_batch": 8}


def uploads(experiment: Experiment, means: Tensor, present: Tensor) -> Replies:
    """One client's reply with these prototypes and the initial model."""
    own = Prototypes(torch.where(present.unsqueeze(1), means, 0.0), present)
    return Replies({0: {MODEL: experiment.setting.initial, NUM_SAMPLES: Count(1), PROTOTYPES: own}})


def started(experiment: Experiment) -> Record:
    return Record(experiment.method.start_server(experiment.setting))


def through_stages(
    experiment: Experiment, server: Record, replies: Replies, number: int
) -> tuple[Record, dict[str, float]]:
    """The server after the stages of a round, and their facts."""
    facts: dict[str, float] = {}
    for stage in experiment.method.server_steps().values():
        after, found = stage(server, replies, RoundContext(experiment.setting, number))
        server, facts = Record(after), facts | dict(found)
    return server, facts


def next_round(experiment: Experiment, server: Record, means: Tensor, present: Tensor) -> Record:
    """The server after the stages of round 2 on one client's prototypes."""
    return through_stages(experiment, server, uploads(experiment, means, present), 2)[0]


def first_round(
    lab: Any, present: tuple[bool, ...] = (True,) * 6, **changes: Any
) -> tuple[Experiment, Record, dict[str, float]]:
    """An experiment, its server after the stages of round 1 with random prototypes of the classes present, facts."""
    experiment = lab.experiment(**({"method": SMALL} | changes))
    means = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    replies = uploads(experiment, means, torch.tensor(present))
    return experiment, *through_stages(experiment, started(experiment), replies, 1)


def after_a_round(lab: Any, present: tuple[bool, ...] = (True,) * 6, **changes: Any) -> tuple[Experiment, Record]:
    """Likewise without facts."""
    return first_round(lab, present, **changes)[:2]


def test_supports_of_a_client_have_a_stream_of_their_own(lab: Any) -> None:
    """A prototype is a mean of m = 4 features of the *trained local* model, in evaluation mode."""
    experiment = lab.experiment(method=SMALL | {"support": 4})
    reply, _ = lab.train(experiment)
    again, _ = lab.train(lab.experiment(method=SMALL | {"support": 4}))
    sent = reply.message["prototypes"]
    assert torch.equal(sent.means, again.message["prototypes"].means)
    rows = experiment.training_indices(0, 1)
    images, labels = experiment.dataset.train.images[rows], experiment.dataset.train.labels[rows]
    normal = (images.float() / 255 - 0.3) / 0.3
    features = experiment.setting.network.features(normal, reply.message["model"].values)
    for label in sent.present.nonzero().flatten().tolist():
        own = features[labels == label]
        assert bool((sent.means[label] <= own.max(dim=0).values + 1e-5).all())
        assert bool((sent.means[label] >= own.min(dim=0).values - 1e-5).all())
        if len(own) <= 4:
            assert torch.allclose(sent.means[label], own.mean(dim=0), atol=1e-5)
    assert sent.present.tolist() == (torch.bincount(labels, minlength=6) > 0).tolist()


def test_training_changes_nothing_that_came_in(lab: Any) -> None:
    """Fact 12: P' = P bit for bit on the present classes, and the frozen model keeps its bits, statistics included."""
    present = (True, True, False, True, True, False)
    experiment, server = after_a_round(lab, present)
    before = {name: serialise({name: payload}) for name, payload in server.items()}
    after = next_round(experiment, server, torch.randn(6, 8), torch.tensor([True, False] * 3))
    assert {name: serialise({name: payload}) for name, payload in server.items()} == before
    assert torch.equal(server[TARGETS]["means"][list(present)], server[PROTOTYPES].means[list(present)])
    assert lab.same(after[MODEL], experiment.setting.initial)
    assert lab.apart(after[IMAGE_GENERATOR], server[IMAGE_GENERATOR]) > 0


def test_missing_classes_aim_where_they_did(lab: Any) -> None:
    """First N(0, I) rescaled to the mean norm of the present; afterwards last round's P'; all classes get images."""
    first = torch.tensor([True, True, True, True, False, False])
    second = torch.tensor([False, True, True, True, True, False])
    experiment, server = after_a_round(lab, tuple(first.tolist()))
    targets = server[TARGETS]
    norms = torch.linalg.vector_norm(server[PROTOTYPES].means[first], dim=1)
    assert torch.linalg.vector_norm(targets["means"][~first], dim=1).tolist() == pytest.approx(
        [norms.mean().item()] * 2
    )
    means = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))
    after = next_round(experiment, server, means, second)
    assert torch.equal(after[TARGETS]["means"][~second], targets["means"][~second])
    assert torch.equal(after[TARGETS]["means"][second], means[second])
    assert after[VIRTUAL]["labels"].tolist() == [label for label in range(6) for _ in range(5)]


def test_random_targets_are_drawn_anew_and_hardly_move(lab: Any) -> None:
    """The authors' mode: N(0, 1) whatever P is; 300 steps move it by Σ lr = 0.00429 at most, times Adam's ratio.

    Here with 20 steps of 2e-5, without decay: 4e-4, and at least one coordinate moves.
    """
    rounds = []
    for proto_lr in (0.0, 2e-5):
        options = SMALL | {"proto_init": "random", "proto_lr": proto_lr, "gen_lr": 2e-5, "gen_steps": 20}
        experiment, server = after_a_round(lab, method=options)
        after = next_round(experiment, server, torch.randn(6, 8), torch.ones(6, dtype=torch.bool))
        rounds.append([entry[TARGETS]["means"] for entry in (server, after)])
    fixed, moving = rounds
    assert not torch.allclose(fixed[0], fixed[1], atol=0.1)
    for start, end in zip(fixed, moving, strict=True):
        assert 0 < float((end - start).abs().max()) < 3 * 4e-4


def test_a_pull_to_the_prototypes_holds_moving_targets(lab: Any) -> None:
    """``d_form`` l2 has a gradient, d off has none: P' ends nearer to P with it; at proto_lr 0 d changes no bit."""
    shifts = {}
    for use_d in (True, False):
        options = {"use_d": use_d, "d_form": "l2", "proto_lr": 0.1, "gen_lr": 0.1, "gen_steps": 30}
        shifts[use_d] = first_round(lab, method=SMALL | options)[2]["target_shift"]
    assert 0 < shifts[True] < 0.9 * shifts[False]
    generators = [after_a_round(lab, method=SMALL | {"use_d": use_d})[1][IMAGE_GENERATOR] for use_d in (True, False)]
    assert lab.same(*generators)


def test_switches_of_the_generator(lab: Any) -> None:
    """GT-p and λ_s = 0 are the same; every other choice of the loss changes the generator."""
    trained: dict[str, Any] = {
        str(options): after_a_round(lab, method=SMALL | options)[1]["generator"]
        for options in (
            {},
            {"use_lp": False},
            {"lambda_s": 0.0},
            {"dce_dist": "l2"},
            {"dce_denominator": "negatives"},
            {"dce_scale": 0.5},
            {"gen_lr": 1e-3},
            {"gen_steps": 4},
            {"pixel_range": "authors"},
        )
    }
    assert lab.same(trained["{'use_lp': False}"], trained["{'lambda_s': 0.0}"])
    del trained["{'lambda_s': 0.0}"]
    names = list(trained)
    for one, name in enumerate(names):
        assert all(not lab.same(trained[name], trained[other]) for other in names[one + 1 :])


def test_learning_rates_fall_step_by_step(lab: Any) -> None:
    """In units of lr, with decay 0.5 at every step, betas (0.5, 0.999) and gradients g, h.

    Step 1 moves every weight by 1 (its own gradient over its own size). Step 2 moves by 0.5·(g/3 + 2h/3) over
    √((g² + h²)/2), which is largest at h = 2g: 0.5·√(10/9) = 0.52705. So 1.52705 is the most, in each round: Adam is
    fresh.
    """
    options = {"gen_lr": 1e-3, "gen_decay": 0.5, "gen_decay_every": 1}
    for steps, most in ((1, 1e-3), (2, 1.52705e-3)):
        experiment = lab.experiment(method=SMALL | options | {"gen_steps": steps})
        server = started(experiment)
        replies = uploads(experiment, torch.randn(6, 8), torch.ones(6, dtype=torch.bool))
        for number in (1, 2):
            after, _ = through_stages(experiment, server, replies, number)
            before, trained = (entry[IMAGE_GENERATOR].params for entry in (server, after))
            moved = max(float((trained[name] - before[name]).abs().max()) for name in before)
            assert moved == pytest.approx(most, rel=1e-3)
            server = after


@pytest.mark.parametrize("kind", quick(["fc", "cnn"], 1))
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_the_virtual_images(lab: Any, kind: str, dtype: str) -> None:
    """n of every class in order, on 0 to 1 or 0 to 255, the same up to half a level; all as a client is sent them."""
    experiment, server = after_a_round(lab, method=SMALL | {"generator": kind, "virtual_dtype": dtype})
    _, reference = after_a_round(lab, method=SMALL | {"generator": kind})
    images = server[VIRTUAL]["images"]
    assert images.shape == (30, 1, 16, 16)
    assert images.dtype == getattr(torch, dtype)
    assert payload_sizes({VIRTUAL: server[VIRTUAL]})[VIRTUAL].bytes == images.element_size() * 30 * 256 + 8 * 30
    assert server[VIRTUAL]["labels"].tolist() == [label for label in range(6) for _ in range(5)]
    unit = 255 if dtype == "uint8" else 1
    plain = reference[VIRTUAL]["images"]
    assert float((images / unit - plain).abs().max()) <= 0.5 / 255 + 1e-6
    assert 0 <= float(plain.min()) < float(plain.max()) <= 1
    for client in range(4):
        assert (
            experiment.method.broadcast(server, client, RoundContext(experiment.setting, 2))[VIRTUAL] is server[VIRTUAL]
        )
    assert torch.equal(experiment.method.virtual_images(server, experiment.setting), images)


@pytest.mark.parametrize(("switch", "gone"), [("use_fa", "contrast"), ("use_ct", "virtual")])
def test_ablations_of_the_client(lab: Any, switch: str, gone: str) -> None:
    """LT-fa and LT-ct: one term goes, the other stays (section 7m)."""
    experiment, server = after_a_round(lab)
    reply, _ = lab.train(experiment, server=server, number=2)
    assert set(reply.losses) == {"cross_entropy", "virtual", "contrast"}
    ablated = lab.experiment(method=SMALL | {switch: False})
    other, _ = lab.train(ablated, server=server, number=2)
    assert set(other.losses) == {"cross_entropy", "virtual", "contrast"} - {gone}


def test_weights_multiply_the_terms(lab: Any) -> None:
    """At the first step of a round all is equal but the weights: w_v 0.5 halves, λ_c 10 multiplies by ten."""
    _, server = after_a_round(lab)
    losses = []
    for options in ({}, {"w_v": 0.5, "lambda_c": 10.0}):
        reply, _ = lab.train(lab.experiment(method=SMALL | options, local__steps=1), server=server, number=2)
        losses.append(reply.losses)
    assert losses[1]["virtual"] == pytest.approx(0.5 * losses[0]["virtual"])
    assert losses[1]["contrast"] == pytest.approx(10 * losses[0]["contrast"])
    assert losses[1]["cross_entropy"] == losses[0]["cross_entropy"]


def test_without_any_prototype_nothing_is_trained(lab: Any) -> None:
    experiment, server = after_a_round(lab, (False,) * 6)
    assert "targets" not in server
    assert "virtual" not in server
    assert lab.same(server[IMAGE_GENERATOR], started(experiment)[IMAGE_GENERATOR])
    assert set(experiment.method.broadcast(server, 0, RoundContext(experiment.setting, 2))) == {"model"}
    assert experiment.method.virtual_images(server, experiment.setting) is None
    assert experiment.method.generated_features(server, experiment.setting, 2, torch.Generator()) is None


def test_after_the_last_round_nothing_is_trained(lab: Any, tmp_path: Any) -> None:
    two = lab.run(lab.experiment(method=SMALL, federation__rounds=3), tmp_path / "three")
    assert ["server" in record for record in two.history] == [True, True, False]
    assert two.state.server["shipping"] == Count(0)
    assert "virtual" in two.state.server  # of the round before, for the sheet


def downlink(model: int, images: int, pixels: int, sampled: int, rounds: int) -> int:
    """Fact 13: 4·m·S·R + (4·C·n_v·I + 8·C·n_v)·S·(R - 1) bytes."""
    return 4 * model * sampled * rounds + (4 * images * pixels + 8 * images) * sampled * (rounds - 1)


def test_bytes(lab: Any, tmp_path: Any) -> None:
    """Down by the formula, which gives fact 13's figure; up 4·m + 8 a client, and 4·d + 8 per prototype.

    BatchNorm's two counters of 8 bytes, which the fact leaves out, would be 16·5·12 = 960 more there.

    fedproto_cnn at 1x16x16 with 6 classes: 260 + 5,020 + 20·1·1 · 50 + 50 + 50·6 + 6 = 6,636 scalars, d = 50, no
    BatchNorm; C·n_v = 30, I = 256; two of four clients in three rounds.
    """
    assert downlink(38_474, 640, 64, 5, 12) == 18_526_560
    changes = {"model": {"name": "fedproto_cnn"}, "federation__participation": 0.5}
    experiment = lab.experiment(method=SMALL, **changes)
    assert experiment.setting.initial.num_parameters == 6636
    run = lab.run(experiment, tmp_path / "run")
    last = run.history[-1]
    assert sum(last["bytes_down"].values()) == downlink(6636, 30, 256, 2, 3)
    assert last["bytes_down"]["virtual"] == (4 * 30 * 256 + 8 * 30) * 2 * 2
    assert last["bytes_up"]["model"] == 4 * 6636 * 6
    assert last["bytes_up"]["num_samples"] == 8 * 6
    held = [int((experiment.label_counts(k, 1) > 0).sum()) for r in run.history for k in r["participants"]]
    assert last["bytes_up"]["prototypes"] == sum(held) * (4 * 50 + 8)


def test_the_last_round_with_virtual_images(lab: Any, tmp_path: Any) -> None:
    """``stop_round`` = 2 of 4: images in round 2 alone, prototypes up in rounds 1 and 2, one training."""
    run = lab.run(lab.experiment(method=SMALL | {"stop_round": 2}, federation__rounds=4), tmp_path / "run")
    assert ["virtual" in record["train_loss"] for record in run.history] == [False, True, False, False]
    assert ["server" in record for record in run.history] == [True, False, False, False]
    down = [record["bytes_down"].get("virtual", 0) for record in run.history]
    assert down == [0] + [(4 * 30 * 256 + 8 * 30) * 4] * 3
    up = [record["bytes_up"]["prototypes"] for record in run.history]
    assert 0 < up[0] < up[1] == up[2] == up[3]


def test_images_stop_also_behind_a_round_that_nobody_answers(lab: Any) -> None:
    """It has no stages, so that round 2's images lie at the server in round 3; what goes down is the model alone."""
    experiment, server = after_a_round(lab, method=SMALL | {"stop_round": 2})
    sent = {
        number: experiment.method.broadcast(server, 0, RoundContext(experiment.setting, number)) for number in (2, 3)
    }
    assert {number: set(message) for number, message in sent.items()} == {2: {MODEL, VIRTUAL}, 3: {MODEL}}


def test_features_for_analyses(lab: Any) -> None:
    experiment, server = after_a_round(lab)
    found = experiment.method.generated_features(server, experiment.setting, 3, torch.Generator().manual_seed(0))
    assert found is not None
    features, labels = found
    assert features.shape == (18, 8)
    assert labels.tolist() == [label for label in range(6) for _ in range(3)]


def test_the_sheet(lab: Any) -> None:
    """Two classes of three 1×2 images: the first two of each, white lines between; 0.5 is level 128 (127.5 to even)."""
    levels = torch.tensor([[0.0, 1.0], [0.5, 0.2], [0.9, 0.9], [0.4, 0.6], [0.8, 0.0], [0.9, 0.9]])
    images = levels.reshape(6, 1, 1, 2)
    expected = [[0, 255, 255, 128, 51], [255] * 5, [102, 153, 255, 204, 0]]
    for given in (images, (255 * images).round().to(torch.uint8)):
        sheet = image_sheet(given, 2, 2)
        assert sheet.dtype == np.uint8
        assert sheet[:, :, 0].tolist() == expected
    assert image_sheet(images.repeat(1, 3, 4, 1), 2, 9).shape == (4 + 1 + 4, 3 * 2 + 2, 3)
    experiment, server = after_a_round(lab)
    made = experiment.method.virtual_images(server, experiment.setting)
    assert image_sheet(made, 6, 12).shape == (6 * 17 - 1, 5 * 17 - 1, 1)


@pytest.mark.slow
def test_generated_images_reach_the_prototypes_of_digits(lab: Any, tmp_path: Any) -> None:
    """Fact 14: the extractor of four FedAvg rounds, 2 classes per client; P from 8 of 10 classes; lr 1e-3, 100 steps.

    Nearest-prototype accuracy of D' is at least 0.95; from an untrained generator, whose images are all one grey, one
    prototype wins for every label: 1/8.
    """
    dataset = prepare_dataset(SOURCES["digits"]())
    partition = make_partition(dataset, PARTITIONERS["classes_per_client"](classes=2), num_clients=10, seed=0)
    changes = {
        "model": {"name": "fedgen_cnn", "feature_dim": 64},
        "local": {"lr": 0.1, "batch_size": 64, "epochs": 2, "clip": 5.0},
        "partition__num_clients": 10,
    }
    federation = {"rounds": 4, "participation": 0.5}
    averaged = lab.run(
        lab.experiment(dataset, partition, method__name="fedavg", federation=federation, **changes), tmp_path / "run"
    )
    accuracy = {}
    for steps in (0, 100):
        method = {"name": "fedpg", "gen_lr": 1e-3, "gen_steps": steps}
        experiment = lab.experiment(dataset, partition, method=method, federation__rounds=9, **changes)
        setting, model = experiment.setting, averaged.state.server[MODEL]
        known = dataset.train.labels < 8
        images = normalise(dataset.train.images[known], dataset.meta.mean, dataset.meta.std)
        prototypes = class_means(setting.network.features(images, model.values), dataset.train.labels[known], 10)
        server = started(experiment) | {MODEL: model, PROTOTYPES: prototypes}
        for stage in ("train-generator", "generate-images"):
            server, facts = experiment.method.server_steps()[stage](server, Replies({}), RoundContext(setting, 5))
        accuracy[steps] = facts["nearest_prototype_accuracy"]
    assert accuracy[0] == pytest.approx(1 / 8, abs=0.05)
    assert accuracy[100] >= 0.95


def test_a_generator_that_diverges_is_named(lab: Any) -> None:
    with pytest.raises(ArithmeticError, match=r"generator diverged .* lower method\.gen_lr"):
        after_a_round(lab, method=SMALL | {"gen_lr": 1e30, "gen_steps": 8})
