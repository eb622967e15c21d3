"""Analyses of small federations: what is looked at, by hand where that is possible."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from flcore.analyses.base import FinishedRun, equal_per_class
from flcore.analyses.by_class import averaged_bodies, class_heatmap, class_heatmap_trained, confusion
from flcore.analyses.generated import generator_distances, tsne_generated
from flcore.analyses.gradcam import gradcam_cases
from flcore.analyses.registry import ANALYSES
from flcore.analyses.tsne import (
    clients_shown,
    embed,
    images_shown,
    tsne,
    tsne_calibration,
    tsne_calibration_trained,
    tsne_projections,
    tsne_prototypes,
    tsne_trained,
    with_calibrated_weights,
)
from flcore.config.analyses import SUMMARIES, with_snapshots, without_round
from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.evaluation.scoring import Scorer
from flcore.io.messages import Prototypes, Weights
from flcore.io.records import Record
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import FederationContext
from tests.cases import quick

CLASSES = [[9, 0, 0], [0, 9, 0], [0, 0, 9]]


@pytest.fixture(autouse=True)
def _few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is embedded is looked at here, not how well."""
    monkeypatch.setattr("flcore.analyses.tsne.ITERATIONS", 250)


def reader(order: tuple[int, ...] = (0, 1, 2)) -> Weights:
    """A linear model that says ``order[i]`` where pixel i is bright."""
    weight = torch.zeros(3, 3)
    for pixel, answer in enumerate(order):
        weight[answer, pixel] = 1
    return Weights({"head.weight": weight, "head.bias": torch.zeros(3)})


def federation(lab: Any, **changes: Any) -> Any:
    """Client 0 trains on classes 0, 1, client 1 on 1, 2; four test images show 0, 1, 1, 2, class 2's labelled 1.

    Client 0 is tested on images 0 and 1, client 1 on 2 and 3.
    """
    dataset = lab.toy_dataset(CLASSES + CLASSES[1:2], [0, 1, 2, 1], [CLASSES[i] for i in (0, 1, 1, 2)], [0, 1, 1, 1])
    dataset = replace(dataset, meta=replace(dataset.meta, num_classes=3, class_names=("a", "b", "c")))
    return lab.experiment(dataset, lab.by_hand(dataset, [[0, 1], [2, 3]], [[0, 1], [2, 3]]), lab.ToySpec(), **changes)


def finished(experiment: Any, server: Any, memories: Any = lambda client: {}) -> FinishedRun:
    """A run as its files would give it."""

    def memory(client: int) -> Record:
        return Record(memories(client))

    return FinishedRun(experiment, Record(server), memory)


def tiny_run(lab: Any, tmp: Any, **changes: Any) -> tuple[Any, Record, Any]:
    """A trained run of the tiny data."""
    experiment = lab.experiment(federation__rounds=1, **changes)
    done = lab.run(experiment, tmp)
    return experiment, done.state.server, done.client_state


def test_names_of_snapshots() -> None:
    names = with_snapshots(["tsne", "class_heatmap"], [10, 0])
    assert names[2:] == [f"{base}_round_{number}" for base in ("tsne", "class_heatmap") for number in (0, 10)]
    assert list(map(without_round, names)) == [
        *(("tsne", None), ("class_heatmap", None)),
        *(("tsne", 0), ("tsne", 10), ("class_heatmap", 0), ("class_heatmap", 10)),
    ]
    assert all(without_round(name) == (name, None) for name in SUMMARIES)


def test_every_name_has_an_entry_and_a_line() -> None:
    assert tuple(ANALYSES) == tuple(SUMMARIES)


def test_configuration_knows_the_names_and_keeps_them_out_of_a_runs_identity() -> None:
    plain, asked = (Config.from_mapping({}), Config.from_mapping({"evaluation": {"analyses": ["tsne", "inversion"]}}))
    assert asked.evaluation.analyses == ("tsne", "inversion") and plain.evaluation.analyses == ()
    assert asked.identity() == plain.identity() and "every" in asked.identity()["evaluation"]
    assert Config.from_mapping(asked.to_mapping()) == asked
    with pytest.raises(ConfigError, match=r"analyses = \['tsnee'\]: did you mean 'tsne'\? expected one of class_"):
        Config.from_mapping({"evaluation": {"analyses": ["tsnee"]}})
    with pytest.raises(ConfigError, match="twice"):
        Config.from_mapping({"evaluation": {"analyses": ["tsne", "tsne"]}})


def test_equally_many_samples_of_every_class() -> None:
    """Classes 3, 5 and 8 with 4, 2 and 6 samples: two of each; or one where one is asked for."""
    labels = torch.tensor([8, 3, 8, 5, 3, 8, 8, 3, 8, 5, 3, 8])
    for asked, expected in ((9, 2), (1, 1)):
        rows = equal_per_class(labels, asked, 0, "test")
        assert labels[rows].tolist() == [3] * expected + [5] * expected + [8] * expected
        assert len(set(rows.tolist())) == len(rows)
    assert torch.equal(equal_per_class(labels, 9, 0, "test"), equal_per_class(labels, 9, 0, "test"))
    draws = {tuple(equal_per_class(labels, 1, seed, "test").tolist()) for seed in range(20)}
    assert len(draws) > 1


def table(result: Any) -> dict[tuple[str, str], list[float | None]]:
    found: dict[tuple[str, str], list[float | None]] = {}
    for row in result.rows:
        found.setdefault((row["model"], row["test"]), []).append(row["accuracy"])
    return found


def test_heatmap_of_a_global_model(lab: Any) -> None:
    """It reads what it sees. Client 0's images 0, 1: a, b right. Client 1's 2, 3: one of two b right. All: 1, 2/3."""
    found = class_heatmap(finished(federation(lab), {"model": reader()}))
    assert table(found) == {
        ("0", "own"): [1.0, 1.0, None],
        ("1", "own"): [None, 0.5, None],
        ("global", "all"): [1.0, pytest.approx(2 / 3), None],
    }
    assert {row["class"] for row in found.rows} == {"a", "b", "c"}
    assert sum(int(row["total"] or 0) for row in found.rows if row["test"] == "all") == 4


def test_heatmap_of_personal_models(lab: Any) -> None:
    """Client 0 reads right; client 1 swaps a and b: it is wrong on images 0, 1, 2, and says c for image 3 (b)."""
    memories = {0: {"model": reader()}, 1: {"model": reader((1, 0, 2))}}
    found = class_heatmap(finished(federation(lab, method__name="local"), {}, memories.__getitem__))
    assert table(found) == {
        ("0", "all"): [1.0, pytest.approx(2 / 3), None],
        ("0", "own"): [1.0, 1.0, None],
        ("1", "all"): [0.0, 0.0, None],
        ("1", "own"): [None, 0.0, None],
    }


def test_heatmap_of_models_as_they_were_trained(lab: Any) -> None:
    """Of a method with a global model: client 0 left training with one that swaps a and b, client 1 never trained.

    Client 0 is then wrong on a and b, all images of both (0 of 1, 0 of 3: c is said of nothing but image 3's class b).
    """
    run = finished(
        federation(lab, evaluation__private=True),
        {"model": reader()},
        {0: {"private_model": reader((1, 0, 2))}, 1: {}}.__getitem__,
    )
    assert ANALYSES["class_heatmap_trained"].refusal(run) is None
    assert table(class_heatmap_trained(run)) == {
        ("0", "all"): [0.0, 0.0, None],
        ("0", "own"): [0.0, 0.0, None],
        ("global", "all"): [1.0, pytest.approx(2 / 3), None],
    }
    untrained = finished(federation(lab, evaluation__private=True), {"model": reader()})
    assert ANALYSES["tsne_trained"].refusal(untrained) == "no client has trained a model yet"


def test_confusion_of_a_global_model(lab: Any) -> None:
    """It reads what it sees: images of a, b, b, c, labelled a, b, b, b: one b of three is taken for c."""
    found = confusion(finished(federation(lab), {"model": reader()}))
    assert found.arrays["counts"].tolist() == [[1, 0, 0], [0, 2, 1], [0, 0, 0]]
    assert found.arrays["class_names"].tolist() == ["a", "b", "c"]
    assert [tuple(row.values()) for row in found.rows] == [
        ("a", "a", 1, 1.0),
        ("b", "b", 2, pytest.approx(2 / 3)),
        ("b", "c", 1, pytest.approx(1 / 3)),
    ]


@pytest.mark.parametrize("method", quick(["fedensemble", "fedper", "fesem", "fedproto"], 2))
def test_clients_answer_in_analyses_as_they_are_scored(lab: Any, tmp_path: Any, method: str) -> None:
    """Accuracy by client and by class are sums over the rows of the heat maps.

    FedEnsemble's predictions are those of all members; a client's model as its training left it answers alone.
    """
    changes = {"method__inference": "prototypes"} if method == "fedproto" else {}
    run = finished(*tiny_run(lab, tmp_path, method__name=method, evaluation__private=True, **changes))
    scores = Scorer(run.experiment).score(run.server, run.client_states)

    def correct(result: Any, test: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row in result.rows:
            if row["test"] == test:
                found.setdefault(row["model"], []).append(row["correct"])
        return found

    own, trained = correct(class_heatmap(run), "own"), correct(class_heatmap_trained(run), "all")
    tested = [len(client.test) for client in run.experiment.partition.clients]
    assert [sum(own[str(client)]) for client in range(4)] == [
        round((accuracy or 0) * total) for accuracy, total in zip(scores.local_accuracy, tested, strict=True)
    ]
    assert [trained[str(client)] for client in range(4)] == scores.tasks["private_correct"]


def test_embedding_keeps_groups_together_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups far apart in 60 dimensions (so PCA is used): each point's nearest neighbour is of its own group."""
    monkeypatch.setattr("flcore.analyses.tsne.ITERATIONS", 1000)
    stream = torch.Generator().manual_seed(0)
    features = torch.randn(80, 60, generator=stream)
    features[40:] += 30
    points = embed(features)
    assert points.shape == (80, 2) and np.isfinite(points).all()
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1) + 1e9 * np.eye(80)
    nearest = distances.argmin(axis=1)
    assert ((nearest < 40) == (np.arange(80) < 40)).all()
    assert np.array_equal(points, embed(features))


def test_embedding_of_edge_cases() -> None:
    """Equal features have no direction; one dimension cannot start from two components; four points are enough."""
    assert not embed(torch.ones(9, 3)).any()
    assert np.isfinite(embed(torch.arange(6.0).unsqueeze(1))).all()
    assert np.isfinite(embed(torch.eye(4))).all()
    with pytest.raises(ValueError, match="at least 4"):
        embed(torch.eye(3))
    with pytest.raises(ValueError, match="finite"):
        embed(torch.full((5, 2), torch.nan))


def test_tsne_of_the_global_model(lab: Any, tmp_path: Any) -> None:
    """Sixty test images, ten of each of six classes; the accuracy is the run's own score."""
    experiment, server, memory = tiny_run(lab, tmp_path)
    arrays = tsne(finished(experiment, server, memory)).arrays
    assert arrays["embedding"].shape == (1, 60, 2)
    assert np.bincount(arrays["labels"]).tolist() == [10] * 6
    assert arrays["accuracies"].tolist() == [pytest.approx(lab_accuracy(experiment, server))]
    # All test images are shown here, so that the share of right predictions shown is the accuracy.
    assert (arrays["predictions"][0] == arrays["labels"]).mean() == pytest.approx(arrays["accuracies"][0])
    assert arrays["counts"].sum() == experiment.partition.counts.sum()


def lab_accuracy(experiment: Any, server: Record) -> float:
    found = Scorer(experiment).score(server, lambda k: Record()).top1_global
    assert found is not None
    return found


@pytest.mark.slow
def test_projections_are_what_the_frame_is_asked_with(lab: Any, tmp_path: Any) -> None:
    """Unit vectors of the projection's length, of the images that :func:`tsne` shows."""
    changes = {"method__name": "gfpl", "method__projection_dim": 12}
    experiment, server, memory = tiny_run(lab, tmp_path, **changes)
    run = finished(experiment, server, memory)
    assert ANALYSES["tsne_projections"].refusal(run) is None
    shown, features = tsne_projections(run).arrays, tsne(run).arrays
    assert shown["embedding"].shape == (4, 60, 2)
    assert np.array_equal(shown["predictions"], features["predictions"])
    assert not np.allclose(shown["embedding"], features["embedding"])
    model = run.own_model(0)
    assert model is not None
    rows = run.projections(model, run.images)
    assert rows.shape == (len(run.images), 12)
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)))


def test_a_configuration_chooses_clients_classes_and_samples(lab: Any, tmp_path: Any) -> None:
    """Of sixty test images, ten of each of six classes: four of class 4 and four of class 1, under clients 2 and 0.

    The same four as where all classes are shown. Twelve of a class there are not: ten, and that is told.
    """
    chooses = {"tsne_clients": [2, 0], "tsne_classes": [4, 1], "tsne_samples": 4}
    asked = {f"evaluation__{key}": value for key, value in chooses.items()}
    experiment, server, memory = tiny_run(lab, tmp_path, method__name="local", **asked)
    result = tsne(finished(experiment, server, memory))
    arrays = result.arrays
    assert arrays["models"].tolist() == ["client 2", "client 0"]
    assert np.array_equal(arrays["counts"], experiment.partition.counts[[2, 0]])
    assert arrays["embedding"].shape == (2, 8, 2) and arrays["labels"].tolist() == [1] * 4 + [4] * 4
    names = experiment.dataset.meta.class_names
    assert result.notes[-1] == f"Images of each class: 4; of {names[1]}, {names[4]}."

    labels = experiment.dataset.test.labels
    everything = lab.experiment(evaluation__tsne_samples=4)
    rows = images_shown(finished(everything, server), labels)
    assert len(rows) == 6 * 4
    of_those = rows[torch.isin(labels[rows], torch.tensor([1, 4]))]
    assert torch.equal(images_shown(finished(experiment, server), labels), of_those)
    too_many = lab.experiment(method__name="local", federation__rounds=1, evaluation__tsne_samples=12)
    result = tsne(finished(too_many, server, memory))
    assert result.arrays["embedding"].shape == (4, 60, 2)
    assert result.notes[-1] == "Images of each class: 10, not 12: there are no more; of every class."


def test_what_is_shown_where_nothing_is_chosen(lab: Any) -> None:
    """1,000 images of each of six classes: 100 of each under one model; under 8 no more than 3000/(6·8) = 62.5: 62."""
    run = finished(lab.experiment(), {})
    labels = torch.arange(6).repeat(1000)
    assert len(images_shown(run, labels)) == 600
    assert len(images_shown(run, labels, models=8)) == 6 * 62
    # Who asks for 1,000 gets them.
    chosen_run = finished(lab.experiment(evaluation__tsne_samples=1000), {})
    assert len(images_shown(chosen_run, labels, models=8)) == 6000
    # The first four of those that have a model: not client 1.
    model = reader()
    assert list(clients_shown(run, lambda client: None if client == 1 else model)) == [0, 2, 3]
    many = finished(lab.experiment(partition__num_clients=4), {})
    assert list(clients_shown(many, lambda client: model)) == [0, 1, 2, 3]


def test_what_is_chosen_belongs_to_an_analysis_and_not_to_the_run() -> None:
    """So that a run of another picture is the same run; its earlier pictures are known to be of another choice."""
    plain = Config.from_mapping({})
    asked = Config.from_mapping({"evaluation": {"tsne_clients": [0, 1], "tsne_classes": [3, 5], "tsne_samples": 200}})
    assert asked.identity() == plain.identity()
    assert Config.from_mapping(asked.to_mapping()) == asked
    said = {"clients": [0, 1], "classes": [3, 5], "samples": 200}
    assert asked.evaluation.shown_by("tsne") == asked.evaluation.shown_by("tsne_trained_round_3") == said
    assert asked.evaluation.shown_by("tsne_prototypes_round_3") == asked.evaluation.shown_by("gradcam") == {}
    assert plain.evaluation.shown_by("tsne") == {}


def test_before_and_after_calibration(lab: Any, tmp_path: Any) -> None:
    """A head that always said class 3 before: 10 of 60 right. The rest of the model is the calibrated one."""
    experiment, server, memory = tiny_run(lab, tmp_path)
    head = {name: torch.zeros_like(v) for name, v in server["model"].params.items() if name.startswith("head.")}
    head["head.bias"][3] = 1
    model = server["model"]
    before = Weights({**model.params, **head}, model.buffers)
    calibrated = Weights({name: model.params[name] for name in head})
    both = {"model": before, "calibrated_head": calibrated}
    kept = finished(lab.experiment(method__name="ccvr"), both, memory)
    arrays = tsne_calibration(kept).arrays
    assert arrays["models"].tolist() == ["before calibration", "after calibration"]
    assert arrays["accuracies"].tolist() == pytest.approx([1 / 6, lab_accuracy(experiment, server)])
    # The encoder is the same, and so are both embeddings.
    assert np.array_equal(arrays["embedding"][0], arrays["embedding"][1])
    found = gradcam_cases(kept)
    counts = {row["case"]: int(row["count"] or 0) for row in found.rows}
    assert sum(counts.values()) == 60 and counts["kept right"] + counts["broken"] == 10
    assert (found.arrays["predicted_before"] == 3).all()
    assert len(found.arrays["images"]) == sum(min(count, 3) for count in counts.values())
    # No weights, no map; and the calibrated model has maps that reach 1 or stay empty.
    assert not found.arrays["before"].any()
    assert set(np.unique(found.arrays["after"].max(axis=(1, 2)))) <= {0.0, 1.0}


def test_local_models_before_and_after_calibration(lab: Any) -> None:
    """Two clients' encoders that show images elsewhere, under their own heads and under the calibrated one.

    Pixels are features (three), and there is no encoder, so the head is all of a model: client 0 reads a, b, c right,
    client 1 swaps a and b; the average says c of everything, the calibrated model reads right. Four images of each of
    a, b, c, of which a and b are shown: 8 of 12.

    Before: client 0 is right on 12/12, client 1 on the four of c: 4/12, the average on the same: 4/12. After: both
    have the calibrated head in place of theirs: 12/12, as the calibrated model itself.
    """
    dataset = lab.toy_dataset(CLASSES, [0, 1, 2], [CLASSES[i // 4] for i in range(12)], [i // 4 for i in range(12)])
    dataset = replace(dataset, meta=replace(dataset.meta, num_classes=3, class_names=("a", "b", "c")))
    partition = lab.by_hand(dataset, [[0, 1], [1, 2]], [[0], [1]])
    asked = {"evaluation__private": True, "evaluation__tsne_classes": [0, 1]}
    asked["method__name"] = "ccvr"
    experiment = lab.experiment(dataset, partition, lab.ToySpec(), **asked)
    always_c = Weights({"head.weight": torch.zeros(3, 3), "head.bias": torch.tensor([0.0, 0, 1])})
    memories = {0: {"private_model": reader()}, 1: {"private_model": reader((1, 0, 2))}}
    run = finished(experiment, {"model": always_c, "calibrated_head": reader()}, memories.__getitem__)
    assert ANALYSES["tsne_calibration_trained"].refusal(run) is None
    result = tsne_calibration_trained(run)
    arrays = result.arrays
    assert arrays["embedding"].shape == (2, 2, 8, 2) and arrays["labels"].tolist() == [0] * 4 + [1] * 4
    assert arrays["accuracies"].tolist() == [[1.0, pytest.approx(1 / 3)], [1.0, 1.0]]
    assert arrays["global_accuracies"].tolist() == [pytest.approx(1 / 3), 1.0]
    swapped = [1] * 4 + [0] * 4
    assert arrays["predictions"].tolist() == [[[0] * 4 + [1] * 4, swapped], [[0] * 4 + [1] * 4] * 2]
    assert arrays["models"].tolist() == ["client 0", "client 1"]
    # Who has no model is told of; where nobody has, there is nothing to show.
    memories[1] = {}
    both, second = ([0, 1], [1])
    shown = finished(lab.experiment(dataset, partition, lab.ToySpec(), **asked, evaluation__tsne_clients=both),
                     run.server, memories.__getitem__)  # fmt: skip
    assert "Client 1 has not trained a model yet." in tsne_calibration_trained(shown).notes
    assert tsne_trained(shown).arrays["models"].tolist() == ["client 0"]
    nobody = replace(shown, experiment=lab.experiment(dataset, partition, lab.ToySpec(), **asked,
                                                      evaluation__tsne_clients=second))  # fmt: skip
    for name in ("tsne_trained", "tsne_calibration_trained"):
        assert ANALYSES[name].refusal(nobody) == "of clients 1 none has trained a model yet"


def test_calibrated_parts_replace_a_clients_own_whole() -> None:
    """The calibration moved the projection's weight alone: its bias comes along, encoder, head and statistics stay."""

    def model(encoder: float, weight: float, bias: float, head: float) -> Weights:
        named = {
            "encoder.0.weight": encoder,
            "projection.0.weight": weight,
            "projection.0.bias": bias,
            "head.bias": head,
        }
        return Weights({name: torch.tensor([value]) for name, value in named.items()}, {"n": torch.tensor([encoder])})

    patched = with_calibrated_weights(model(1, 2, 3, 4), before=model(5, 6, 7, 8), after=model(5, 60, 7, 8))
    assert {name: float(value) for name, value in patched.params.items()} == {
        "encoder.0.weight": 1, "projection.0.weight": 60, "projection.0.bias": 7, "head.bias": 4
    }  # fmt: skip
    assert float(patched.buffers["n"]) == 1


def test_prototypes_over_a_clients_features(lab: Any) -> None:
    """Client 0 has twelve samples of class 0 and eight of class 1, client 1 five of each: client 0 is shown.

    Pixels are features. Class 0's lie at two places, (i, 0) and (i, 50): its mean is in between, two clusters are the
    two places. Prototypes: 1 + 2 + 4 per class, and the server's of class 1 only: 20 + 14 + 1 points.
    """
    zeros = [[i, 50 * (i % 2)] for i in range(12)]
    ones = [[200 + i, 7 * i] for i in range(8)]
    rest = [[20 * i, 90] for i in range(10)]
    dataset = lab.toy_dataset(zeros + ones + rest, [0] * 12 + [1] * 8 + [0, 1] * 5, [[0, 0], [200, 0]], [0, 1])
    partition = lab.by_hand(dataset, [list(range(20)), list(range(20, 30))], [[0], [1]])
    experiment = lab.experiment(dataset, partition, lab.ToySpec())
    server = {
        "model": Weights({"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}),
        "prototypes": Prototypes(torch.tensor([[0.0, 0], [204, 24]]), torch.tensor([False, True])),
        "other": Prototypes.empty(2, 5),
    }
    arrays = tsne_prototypes(finished(experiment, server, lambda k: {})).arrays
    assert int(arrays["client"]) == 0 and arrays["embedding"].shape == (35, 2)
    sizes = {(label, k): int(((arrays["labels"] == label) & (arrays["clusters"] == k)).sum())
             for label in (0, 1) for k in (0, 1, 2, 4, -1)}  # fmt: skip
    assert sizes == {(0, 0): 12, (0, 1): 1, (0, 2): 2, (0, 4): 4, (0, -1): 0,
                     (1, 0): 8, (1, 1): 1, (1, 2): 2, (1, 4): 4, (1, -1): 1}  # fmt: skip


@dataclass(frozen=True)
class Generating(FedAvg):
    """FedAvg with features drawn around a corner per class."""

    name: ClassVar[str] = "generating"

    def generated_features(
        self, server: Record, setting: FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        labels = torch.arange(setting.num_classes).repeat_interleave(count)
        corners = 100 * torch.eye(setting.num_classes, setting.feature_dim)
        noise = torch.randn(len(labels), setting.feature_dim, generator=generator)
        return corners[labels] + noise, labels


@pytest.mark.slow
def test_generator_distances(lab: Any, tmp_path: Any) -> None:
    """Means of classes lie 100·√2 = 141.4 apart. Within a class: mean of |x - y| for x, y ~ N(0, I₈): √2·√2·Γ(4.5)/Γ(4)
    = 2·11.632/6 = 3.877. The noise is the same each time, whatever the run's seed.
    """
    experiment, server, memory = tiny_run(lab, tmp_path, algorithm=Generating())
    result = generator_distances(finished(experiment, server, memory))
    rows = {(row["features"], row["space"]): row for row in result.rows}
    assert set(rows) == {(which, space) for which in ("generated", "real") for space in ("feature", "tsne")}
    made = rows["generated", "feature"]
    assert made["intra"] == pytest.approx(3.877, rel=0.02)
    assert made["centroid_inter"] == pytest.approx(141.4, rel=0.01)
    assert made["nearest_distance"] is not None and rows["real", "feature"]["nearest_distance"] is None
    other = lab.experiment(federation__rounds=1, algorithm=Generating(), seed=9)
    again = generator_distances(finished(other, server, memory)).rows[0]
    assert (again["intra"], again["inter"]) == (made["intra"], made["inter"])


def test_bodies_are_averaged_by_samples_and_answer_by_the_nearest_prototype(lab: Any) -> None:
    """Prototypes are the three images themselves. Client 0's body is the identity, client 1's exchanges pixels 0 and 2.

    Images 0, 1, 1, 2 are labelled 0, 1, 1, 1: the identity is right but for the last, 3 of 4; the exchange takes image
    0 for class 2: 2 of 4. Of 1 and 3 training samples the mean is 1/4 and 3/4: image 0 becomes (9/4, 0, 27/4), nearer
    to (0, 0, 9): 2 of 4. (By clients it would be a tie, which goes to class 0: 3 of 4.)
    """
    dataset = lab.toy_dataset(CLASSES + CLASSES[1:2], [0, 1, 2, 1], [CLASSES[i] for i in (0, 1, 1, 2)], [0, 1, 1, 1])
    dataset = replace(dataset, meta=replace(dataset.meta, num_classes=3, class_names=("a", "b", "c")))
    partition = lab.by_hand(dataset, [[0], [1, 2, 3]], [[0, 1], [2, 3]])
    experiment = lab.experiment(dataset, partition, lab.ToySpec(encoder=True), method__name="fedproto")
    (body,) = (name for name in experiment.setting.initial.params if not name.startswith("head"))
    bodies = [torch.eye(3), torch.eye(3)[[2, 1, 0]]]

    def memory(client: int) -> Any:
        return {"model": Weights({**experiment.setting.initial.params, body: bodies[client]})}

    known = Prototypes(9 * torch.eye(3), torch.tensor([True, True, True]))
    result = averaged_bodies(finished(experiment, {"prototypes": known}, memory))
    rights: dict[Any, Any] = {}
    for row in result.rows:
        rights.setdefault(row["model"], []).append((row["class"], row["correct"], row["total"]))
    assert rights["0"] == [("a", 1, 1), ("b", 2, 3), ("c", 0, 0)]
    assert rights["1"] == rights["global"] == [("a", 0, 1), ("b", 2, 3), ("c", 0, 0)]
    assert (
        "50.00 % with the mean of clients' bodies (global), 62.50 % in the mean of the bodies shown" in result.notes[0]
    )
    assert ANALYSES["averaged_bodies"].refusal(finished(experiment, {"prototypes": known}, memory)) is None
    local = federation(lab, method__name="local")
    assert ANALYSES["averaged_bodies"].refusal(finished(local, {})) == "the server of local holds no prototypes"


def test_what_a_run_allows_and_why_not(lab: Any) -> None:
    experiment = federation(lab)
    server = {"model": reader()}
    reasons = {name: analysis.refusal(finished(experiment, server)) for name, analysis in ANALYSES.items()}
    assert {name for name, reason in reasons.items() if reason is None} == {
        *("class_heatmap", "confusion", "tsne_prototypes", "inversion", "inversion_search")
    }
    # One image of class 0 and three of class 1: one of each can be shown.
    assert reasons["tsne"] == "a t-SNE needs 4 images, and 2 can be shown"
    without = finished(federation(lab, evaluation__tsne_classes=[1, 2]), server)
    assert ANALYSES["tsne"].refusal(without) == "no test image shows class 2 of evaluation.tsne_classes"
    assert reasons["averaged_bodies"] == "fedavg has a global model"
    assert reasons["tsne_trained"] == "clients' own models are kept where evaluation.private is true"
    assert reasons["tsne_projections"] == "fedavg compares features themselves, if anything"
    assert reasons["gradcam"] == "fedavg has no state before a calibration"
    assert reasons["virtual_images"] == "the server of fedavg holds no virtual images"
    assert reasons["generator_distances"] == "the server of fedavg holds nothing that generates features"
    kept = finished(federation(lab, method__name="ccvr"), {**server, "calibrated_head": reader((1, 0, 2))})
    assert ANALYSES["gradcam"].refusal(kept) == "toy has no convolution"
    assert ANALYSES["tsne_calibration"].refusal(kept) == reasons["tsne"]
    ccvr = ANALYSES["gradcam"].refusal(finished(federation(lab, method__name="ccvr"), server))
    assert ccvr == "ccvr did not calibrate then"
    local = federation(lab, method__name="local")
    assert ANALYSES["inversion"].refusal(finished(local, {})) == "local has no global model"
    assert ANALYSES["class_heatmap"].refusal(finished(local, {})) is None


def test_confusion_of_personal_models_adds_up_clients(lab: Any) -> None:
    """Client 0 reads a, b right. Client 1 swaps a and b: its images, a b and a c, both labelled b, are an a and a c."""
    memories = {0: {"model": reader()}, 1: {"model": reader((1, 0, 2))}}
    found = confusion(finished(federation(lab, method__name="local"), {}, memories.__getitem__))
    assert found.arrays["counts"].tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert "no global model" in found.notes[0]


def test_generated_and_real_features_together(lab: Any, tmp_path: Any) -> None:
    experiment, server, memory = tiny_run(lab, tmp_path, algorithm=Generating())
    arrays = tsne_generated(finished(experiment, server, memory)).arrays
    made = arrays["generated"]
    assert arrays["embedding"].shape == (120, 2) and made.sum() == 60
    assert np.bincount(arrays["labels"][made]).tolist() == np.bincount(arrays["labels"][~made]).tolist() == [10] * 6
