"""Scores by hand (evaluation.md sections 1 and 2, baselines.md sections 1 and 21)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flcore.core.errors import DataError
from flcore.data.dividing import make_partition
from flcore.data.partitioners import PARTITIONERS
from flcore.data.tasks import TaskStream
from flcore.evaluation.model_selection import global_model_of, personal_model, scoring_messages
from flcore.evaluation.scores import Scores
from flcore.evaluation.scoring import Scorer
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Prototypes, Weights
from flcore.io.records import Record, serialise
from flcore.methods.types import BATCHNORM
from tests.cases import quick

CLASSES = [[9, 0, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]]


def reader(order: tuple[int, ...] = (0, 1, 2, 3), scale: float = 1.0) -> Weights:
    """A linear model that says ``order[i]`` where pixel i is bright."""
    weight = torch.zeros(4, 4)
    for pixel, answer in enumerate(order):
        weight[answer, pixel] = scale
    return Weights({"head.weight": weight, "head.bias": torch.zeros(4)})


def federation(lab: Any, shown: list[int], labels: list[int], tests: list[list[int]], **changes: Any) -> Any:
    """Each client trains on one image of every class; test image i shows class shown[i] and is labelled labels[i]."""
    dataset = lab.toy_dataset(CLASSES, [0, 1, 2, 3], [CLASSES[c] for c in shown], labels)
    dataset = replace(dataset, meta=replace(dataset.meta, num_classes=4))
    partition = lab.by_hand(
        dataset, [[0, 1, 2, 3]] * len(tests), tests, changes.pop("vals", None), changes.pop("source", "test")
    )
    return lab.experiment(dataset, partition, lab.ToySpec(), **changes)


def score(experiment: Any, server: Record, client_states: Any = None, vote: bool = False) -> Scores:
    return Scorer(experiment).score(server, (client_states or {}).get if client_states else lambda k: {}, vote=vote)


SHOWN, LABELS = [0, 1, 2, 2, 1, 0, 0, 1], [0, 0, 2, 2, 1, 0, 0, 1]


def test_means_over_clients_and_over_samples(lab: Any) -> None:
    """Client 0: images 0, 1 of which 1 is mislabelled: 0.5. Client 1: images 2-7, all right: 1.0.

    mean_local (0.5 + 1)/2 = 0.75 whatever the sizes; pooled 7/8; population spread 0.25 (sample form: 0.354).
    Global: 7/8. Class 0: images 0, 1, 5, 6 of which 3 right; classes 1 and 2 right; class 3 has no test image.
    """
    found = score(federation(lab, SHOWN, LABELS, [[0, 1], [2, 3, 4, 5, 6, 7]]), {"model": reader()})
    assert found.local_accuracy == [0.5, 1.0]
    assert (found.mean_local, found.pooled_local, found.client_std) == (0.75, 0.875, 0.25)
    assert found.top1_global == 0.875
    assert found.class_accuracy == [0.75, 1.0, 1.0, None]
    assert json.loads(json.dumps(found.to_mapping(), allow_nan=False))["class_accuracy"][3] is None


def test_global_loss(lab: Any) -> None:
    """Right: logits (9, 0, 0, 0): ln(e⁹ + 3) - 9; the mislabelled one 9 more; mean over eight images."""
    found = score(federation(lab, SHOWN, LABELS, [[0], [1]]), {"model": reader()})
    right = math.log(math.exp(9) + 3) - 9
    assert found.loss_global == pytest.approx(right + 9 / 8, rel=1e-5)


def test_the_loss_of_probabilities_is_their_own(lab: Any) -> None:
    """Alone a member says what the model does. Two that swap 0 and 1 say 1/2 for both: ln 2 for six images of eight.

    Images 0, 1 (label 0, of class 0 and 1), 4, 5, 6, 7 have classes 0 or 1: p = (e⁹ + 1)/(2 (e⁹ + 3)) ≈ 1/2. Images 2
    and 3 are right in both: p = e⁹/(e⁹ + 3). A cross-entropy of probabilities taken for logits is at least 0.74.
    """
    method = {"name": "fedensemble", "combine": "probs"}
    experiment = federation(lab, SHOWN, LABELS, [[0], [1]], method=method)
    alone = score(experiment, {"model": reader(), "member_0000": reader()})
    assert alone.loss_global == pytest.approx(math.log(math.exp(9) + 3) - 9 + 9 / 8, rel=1e-5)
    swapped = {"model": reader(), "member_0000": reader(), "member_0001": reader((1, 0, 2, 3))}
    half, right = (math.exp(9) + 1) / (2 * (math.exp(9) + 3)), math.exp(9) / (math.exp(9) + 3)
    assert score(experiment, swapped).loss_global == pytest.approx(
        -(6 * math.log(half) + 2 * math.log(right)) / 8, rel=1e-5
    )


def test_scores_that_are_no_likelihoods_have_no_loss(lab: Any) -> None:
    """Minus distances to prototypes: they still answer, and right."""
    experiment = federation(lab, SHOWN, LABELS, [[0], [1]], method={"name": "fedmlp", "share": "extractor"})
    prototypes = Prototypes(9 * torch.eye(4), torch.ones(4, dtype=torch.bool))
    found = score(experiment, Record({"model": reader(), "prototypes": prototypes}))
    assert (found.top1_global, found.loss_global) == (0.875, None)


def test_answers_among_a_clients_own_classes(lab: Any) -> None:
    """The model confuses 0 with 1 and 2 with 3. Client 0 holds classes 0 and 2 in training, client 1 all.

    Client 0 is tested on an image of each of its classes: both wrong among all classes; without 1 and 3 to answer with,
    its scores for an image of 0 are 0 for both of its classes: the first, 0, is right; for 2 likewise 0: wrong. Half.
    Client 1 tests 0 and 1: both wrong either way. Means 0 and .25.
    """
    dataset = lab.toy_dataset(CLASSES, [0, 1, 2, 3], CLASSES, [0, 1, 2, 3])
    partition = lab.by_hand(dataset, [[0, 2], [0, 1, 2, 3]], [[0, 2], [0, 1]])
    found = score(lab.experiment(dataset, partition, lab.ToySpec()), {"model": reader((1, 0, 3, 2))})
    assert (found.mean_local, found.mean_local_own_classes) == (0.0, 0.25)


def test_a_client_without_test_data_is_left_out(lab: Any) -> None:
    found = score(federation(lab, SHOWN, LABELS, [[0, 1], [], [2, 3, 4, 5, 6, 7]]), {"model": reader()})
    assert found.local_accuracy == [0.5, None, 1.0]
    assert (found.mean_local, found.pooled_local, found.client_std) == (0.75, 0.875, 0.25)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_an_evaluation_asks_once_what_classes_clients_have_met(
    lab: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a pass over clients x classes: asked by each client, it grows with the square of their number."""
    asked = []
    met = TaskStream.met
    monkeypatch.setattr(TaskStream, "met", lambda stream, number: asked.append(number) or met(stream, number))
    experiment = federation(lab, SHOWN, LABELS, [[0, 1], [2, 3], [4, 5], [6, 7]], method__name=method)
    client_states = {client: {"model": reader()} for client in range(4)}
    found = score(experiment, {"model": reader()} if method == "fedavg" else {}, client_states)
    assert found.local_accuracy == [0.5, 1.0, 1.0, 1.0] and len(asked) == 1


@pytest.mark.parametrize(
    ("method", "scored"), [("local", False), ("gfpl", False), ("fedproto", True), ("fedavg", True)]
)
def test_a_run_that_could_have_no_score_is_refused(lab: Any, method: str, scored: bool, tmp_path: Any) -> None:
    """60 test images for 120 clients, none of whom has one: personal models have no score unless they vote."""
    make_partition(lab.dataset, PARTITIONERS["iid"](), num_clients=120, seed=3).save(tmp_path / "partition")
    opened = partial(Experiment.open, lab.config(method__name=method), lab.prepared, tmp_path / "partition")
    if scored:
        opened()
    else:
        with pytest.raises(
            DataError, match=rf"^partition: none of the 120 clients has a test image, and {method} has no"
        ):
            opened()


def test_personal_models_answer_for_their_clients(lab: Any) -> None:
    """Client 0 confuses 0 and 1: it says 1 for image 0 and 0 for image 1, both labelled 0: 0.5. Client 1 is right."""
    experiment = federation(lab, SHOWN, LABELS, [[0, 1], [2, 3]], method__name="local")
    client_states = {0: {"model": reader((1, 0, 2, 3))}, 1: {"model": reader()}}
    found = score(experiment, {}, client_states)
    assert found.local_accuracy == [0.5, 1.0]
    assert (found.top1_global, found.loss_global, found.class_accuracy) == (None, None, None)


def test_a_client_that_never_took_part_answers_with_the_initial_model(lab: Any) -> None:
    """The initial toy model is zero: it says class 0. Client 1's images are labelled 2 and 0: 0.5."""
    experiment = federation(lab, SHOWN, LABELS, [[0], [2, 5]], method__name="local")
    assert score(experiment, {}, {0: {"model": reader()}, 1: {}}).local_accuracy == [1.0, 0.5]


def test_majority_vote_with_ties_to_the_smaller_class(lab: Any) -> None:
    """Image 0 (label 0): votes 3, 0, 0: class 0. Image 1 (label 1): 2, 1, 3: tie, class 1.

    Image 2 (label 3): 1, 2, 3: tie, class 1. So 2 of 3 right.
    """
    experiment = federation(lab, [0, 1, 2], [0, 1, 3], [[0], [1], [2]], method__name="fedproto")
    readers = [reader((3, 2, 1, 0)), reader((0, 1, 2, 3)), reader((0, 3, 3, 1))]
    client_states = {k: {"model": model} for k, model in enumerate(readers)}
    server = {"prototypes": Prototypes.empty(4, 4)}
    found = score(experiment, server, client_states, vote=True)
    assert found.top1_vote == pytest.approx(2 / 3)
    assert found.class_accuracy_vote == [1.0, 1.0, None, 0.0]
    # A vote is no global model.
    assert (found.top1_global, found.class_accuracy, found.loss_global) == (None, None, None)
    assert score(experiment, server, client_states).top1_vote is None  # only when asked for


def test_validation_scores_on_the_clients_validation_data(lab: Any) -> None:
    """Training images show their label. The model confuses 0 and 1, so images 0 and 1 are wrong, 2 and 3 right.

    Client 0 validates on 1 and 2: 0.5; client 1 on 3: 1. Together 2 of 3. Test images are never looked at.
    """
    experiment = federation(
        lab, SHOWN, LABELS, [[0], [1]], vals=[[1, 2], [3]], evaluation__split="validation", partition__validation=0.5
    )
    found = score(experiment, {"model": reader((1, 0, 2, 3))})
    assert found.local_accuracy == [0.5, 1.0]
    assert found.top1_global == pytest.approx(2 / 3)
    assert found.class_accuracy == [None, 0.0, 1.0, 1.0]


def test_local_split_tests_clients_on_their_own_data_and_the_model_on_the_official_test(lab: Any) -> None:
    """Confusing 0 and 1: client 0 is tested on training images 0, 2 (0.5), client 1 on 3 (1). Official test by hand:

    shown 0 1 2 2 1 0 0 1 gives 1 0 2 2 0 1 1 0 against 0 0 2 2 1 0 0 1: 3 of 8.
    """
    experiment = federation(lab, SHOWN, LABELS, [[0, 2], [3]], source="train")
    found = score(experiment, {"model": reader((1, 0, 2, 3))})
    assert found.local_accuracy == [0.5, 1.0]
    assert found.top1_global == 3 / 8


def test_by_writer_the_model_is_tested_on_the_writers_who_take_part(lab: Any) -> None:
    """Training images 0..3 are of writers 7, 7, 8, 9; clients train on 0, 1 and 2, so writers 7 and 8 take part.

    Test images 0..7 are of writers 7, 8, 9, 9, 9, 7, 8, 9; confusing 0 and 1 is right on 2 and 3 (class 2), which are
    of writer 9, and on 1 (shown 1, labelled 0). Of images 0, 1, 5, 6 that is 1 of 4; of all eight it would be 3.
    Client 0 is tested on images 1, 5 (0.5), client 1 on image 2, whoever wrote it (1).
    """
    experiment = federation(lab, SHOWN, LABELS, [[1, 5], [2]])
    writers, tests = torch.tensor([7, 7, 8, 9]), torch.tensor([7, 8, 9, 9, 9, 7, 8, 9])
    data = replace(
        experiment.dataset,
        train=replace(experiment.dataset.train, groups=writers),
        test=replace(experiment.dataset.test, groups=tests),
    )
    own = [
        replace(client, train=np.array(rows))
        for client, rows in zip(experiment.partition.clients, ([0, 1], [2]), strict=True)
    ]
    parameters = {**experiment.partition.parameters, "name": "by_group"}
    partition = replace(experiment.partition, clients=tuple(own), parameters=parameters)
    found = score(replace(experiment, dataset=data, partition=partition), {"model": reader((1, 0, 2, 3))})
    assert found.top1_global == 1 / 4
    assert found.local_accuracy == [0.5, 1.0]


@pytest.mark.parametrize(
    ("method", "batchnorm"),
    quick(((method, norm) for norm in ("aggregate", "frozen") for method in ("fedproto", "fedavg", "local")), 2),
)
def test_scores_do_not_depend_on_the_evaluation_batch(lab: Any, method: str, batchnorm: str, tmp_path: Any) -> None:
    changes = {"method__name": method, "model__batchnorm": batchnorm, "federation__rounds": 1}
    run = lab.run(lab.experiment(**changes), tmp_path / "run")
    found = []
    for batch_size in (1, 7, 512):
        experiment = lab.experiment(**changes, evaluation__batch_size=batch_size)
        scores = Scorer(experiment).score(run.state.server, run.client_state, vote=True)
        found.append(replace(scores, loss_global=round(scores.loss_global or 0, 4)))
    assert found[0] == found[1] == found[2]
    assert found[0].mean_local == run.history[-1]["mean_local"]


def private(mean: float) -> Record:
    buffers = {
        "encoder.1.running_mean": torch.full((6,), mean),
        "encoder.1.running_var": torch.ones(6),
        "encoder.1.num_batches_tracked": torch.tensor(3),
        "encoder.4.running_mean": torch.zeros(16),
        "encoder.4.running_var": torch.ones(16),
        "encoder.4.num_batches_tracked": torch.tensor(3),
    }
    return Record({BATCHNORM: Weights({}, buffers)})


def test_private_statistics_are_averaged_for_the_global_model(lab: Any) -> None:
    """Clients 0 and 1 hold 43 and 50 samples: mean (43·1 + 50·2)/93 = 143/93.

    Clients 2 and 3 never took part: they answer with the statistics everybody starts from, mean 0.
    """
    assert [len(client.train) for client in lab.partition.clients][:2] == [43, 50]
    experiment = lab.experiment(model__batchnorm="local")
    server = Record({"model": experiment.setting.initial.without_buffers()})
    client_states = {0: private(1.0), 1: private(2.0), 2: Record(), 3: Record()}
    models = [global_model_of(experiment, server, client_states.__getitem__)]
    sent = scoring_messages(experiment, server, range(4))
    models += [personal_model(experiment, sent[client], client_states[client]) for client in range(4)]
    means = [model.buffers["encoder.1.running_mean"][0].item() for model in models if model is not None]
    assert means == pytest.approx([143 / 93, 1.0, 2.0, 0.0, 0.0])


def test_a_client_is_asked_once_for_what_the_global_model_lacks(lab: Any) -> None:
    """Whatever the number of blocks of shared images."""
    experiment = lab.experiment(model__batchnorm="local", evaluation__batch_size=30)
    asked: list[int] = []

    def client_states(client: int) -> Record:
        asked.append(client)
        return Record()

    Scorer(experiment).score(Record({"model": experiment.setting.initial}), client_states)
    assert asked == [0, 1, 2, 3]


def test_a_scoring_message_costs_what_it_is_serialised_to(lab: Any, tmp_path: Any) -> None:
    """FedProto that answers by prototypes, all of 4 clients in each of rounds 1 and 2: 4 times what the server holds.

    A client without test data is sent them too. Training's bytes are those of FedProto that answers by its head.
    """
    runs = [
        lab.run(
            lab.experiment(method__name="fedproto", method__inference=way, federation__rounds=rounds),
            tmp_path / f"{way}-{rounds}",
        )
        for way, rounds in (("prototypes", 1), ("prototypes", 2), ("classifier", 2))
    ]
    sizes = [len(serialise({"prototypes": run.state.server["prototypes"]})) for run in runs[:2]]
    down = [record["bytes_eval_down"] for record in runs[1].history]
    assert down == [{"prototypes": 4 * sizes[0]}, {"prototypes": 4 * (sizes[0] + sizes[1])}]
    assert [record["bytes_eval_up"] for record in runs[1].history] == [{}, {}]
    assert [record["bytes_down"] for record in runs[1].history] == [record["bytes_down"] for record in runs[2].history]
    assert runs[2].history[-1]["bytes_eval_down"] == {}


def test_what_clients_send_to_be_scored_is_counted_in_evaluated_rounds(lab: Any, tmp_path: Any) -> None:
    """FedPer, rounds 2 and 3 of 3 are evaluated: each time 4 clients get the body and send head and sample count.

    The head has 8 × 6 weights and 6 biases: 4 × (48 + 6) = 216 bytes; a count has 8. The body: all other parameters.
    """
    model = {"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": "frozen"}
    experiment = lab.experiment(model=model, method__name="fedper", federation__rounds=3, evaluation__every=2)
    run = lab.run(experiment, tmp_path / "run")
    body = 4 * experiment.setting.initial.num_parameters - 216
    assert [(record["round"], record["bytes_eval_up"], record["bytes_eval_down"]) for record in run.history] == [
        (2, {"model": 4 * 216, "num_samples": 4 * 8}, {"model": 4 * body}),
        (3, {"model": 8 * 216, "num_samples": 8 * 8}, {"model": 8 * body}),
    ]


def test_the_centralised_model_is_scored_with_its_own_statistics(lab: Any, tmp_path: Any) -> None:
    experiment = lab.experiment(method__name="central", model__batchnorm="local")
    run = lab.run(experiment, tmp_path / "run")
    model = global_model_of(experiment, run.state.server, lambda client: Record())
    name = "encoder.1.running_mean"
    # The only trainer stands at the server, so its statistics are the server's, whatever the policy for clients.
    assert model is not None and torch.equal(model.buffers[name], run.state.server["model"].buffers[name])
    assert not torch.equal(model.buffers[name], experiment.setting.initial.buffers[name])


def test_clients_that_share_validation_data(lab: Any) -> None:
    """Image 2 validates both clients; each finds its own rows: client 0 has 0 (wrong) and 2, client 1 has 2 and 3."""
    experiment = federation(
        lab, SHOWN, LABELS, [[0], [1]], vals=[[0, 2], [2, 3]], evaluation__split="validation", partition__validation=0.5
    )
    assert score(experiment, {"model": reader((1, 0, 2, 3))}).local_accuracy == [0.5, 1.0]


def test_no_validation_sample_at_all(lab: Any) -> None:
    """partition.validation = 0.1 of clients with four samples of four classes sets nothing aside."""
    experiment = federation(
        lab, SHOWN, LABELS, [[0], [1]], vals=[[], []], evaluation__split="validation", partition__validation=0.1
    )
    with pytest.raises(DataError, match="validation sample"):
        score(experiment, {"model": reader()})
