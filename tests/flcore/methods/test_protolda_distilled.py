"""The taught network: its teacher is ProtoLDA's model, its loss by hand, its limit cases to the bit, what travels."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flcore.math.prototypes.discriminant import discriminant, discriminant_sums
from flcore.methods.protolda_distilled import TEACHER_LOGITS, ProtoLDADistilled
from flcore.methods.types import MODEL, Batch
from flcore.models.patch_dictionary import PatchDictionary

PLAIN = {"name": "fedproto_cnn"}  # no BatchNorm
TEACHER = {"model.atoms": 6, "model.patch": 5, "model.grid": 2, "method.wire": "float64"}


def taught(lab: Any, rounds: int = 1, participation: float = 1.0, model: Any = None, **method: Any) -> Any:
    federation = {"rounds": rounds, "participation": participation}
    settings = {"name": "protolda_distilled", "teacher": TEACHER, **method}
    return lab.experiment(model=model or PLAIN, method=settings, federation=federation)


@pytest.fixture(scope="module")
def protolda(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of the teacher alone."""
    model = {"name": "patch_dictionary", "atoms": 6, "patch": 5, "grid": 2}
    method = {"name": "protolda", "wire": "float64"}
    experiment = lab.experiment(model=model, method=method, federation={"rounds": 1})
    return lab.run(experiment, tmp_path_factory.mktemp("protolda") / "run")


@pytest.fixture(scope="module")
def quantised(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two rounds of quantised FedAvg."""
    experiment = lab.experiment(model=PLAIN, method={"name": "fedavg_q"}, federation={"rounds": 2})
    return lab.run(experiment, tmp_path_factory.mktemp("fedavg_q") / "run")


def test_clients_remember_what_protolda_answers(lab: Any, protolda: Any, tmp_path: Path) -> None:
    """And nothing else of it, nor does the server; also those that are not sampled for training."""
    run = lab.run(taught(lab, participation=0.5), tmp_path / "run")
    assert not any(name.startswith("teacher_") for name in run.state.server)
    teacher = protolda.state.server[MODEL]
    module = PatchDictionary(atoms=6, patch=5, grid=2).build((1, 8, 8), 6)
    module.load_state_dict(dict(teacher.params))
    meta, train = lab.dataset.meta, lab.dataset.train
    for client in range(4):
        client_state = run.client_state(client)
        assert TEACHER_LOGITS in client_state and not any(name.startswith("teacher_") for name in client_state)
        pixels = train.images[torch.from_numpy(lab.partition.clients[client].train.copy())].float() / 255
        mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (meta.mean, meta.std))
        with torch.no_grad():
            _, expected = module((pixels - mean) / std)
        torch.testing.assert_close(client_state[TEACHER_LOGITS]["logits"], expected, rtol=1e-4, atol=1e-4)


def test_its_bytes_are_the_teachers_and_those_of_quantised_fedavg(
    lab: Any, protolda: Any, quantised: Any, tmp_path: Path
) -> None:
    run = lab.run(taught(lab, rounds=2), tmp_path / "run")
    for way in ("bytes_up", "bytes_down"):
        teachers = {f"teacher_{name}": size for name, size in protolda.history[-1][way].items()}
        assert run.history[-1][way] == quantised.history[-1][way] | teachers


def test_loss_by_hand() -> None:
    """Logits (0, 0): softmax ½, ½. Answers (2 ln 3, 0) at T = 2: ¾, ¼, and KL = ¾ ln 1.5 + ¼ ln 0.5.

    Times λT² = 0.5·4. A padded sample does not count.
    """
    method = ProtoLDADistilled(weight=0.5, temperature=2.0)
    model = SimpleNamespace(features=lambda images: images, classify=lambda features: torch.zeros(2, 2))
    table = torch.tensor([[2 * math.log(3), 0.0], [50.0, 0.0]])
    batch = Batch(torch.zeros(2, 1), torch.tensor([0, 0]), torch.tensor([1.0, 0.0]), per_sample={"teacher": table})
    terms = method.loss(model, batch, {"weight": torch.tensor(0.5)})  # type: ignore[arg-type]
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert terms["distillation"].item() == pytest.approx(2 * divergence, abs=1e-6)
    assert terms["cross_entropy"].item() == pytest.approx(math.log(2))


def test_without_weight_it_is_quantised_fedavg(lab: Any, quantised: Any, tmp_path: Path) -> None:
    run = lab.run(taught(lab, rounds=2, weight=0), tmp_path / "run")
    assert all(torch.equal(value, run.state.server[MODEL].params[name])
               for name, value in quantised.state.server[MODEL].params.items())  # fmt: skip
    assert run.state.server.keys() == quantised.state.server.keys()
    assert run.history[-1]["bytes_up"] == quantised.history[-1]["bytes_up"]


def test_who_missed_the_lesson_trains_by_cross_entropy_alone(lab: Any) -> None:
    experiment = taught(lab, rounds=2)
    plain = lab.experiment(model=PLAIN, method={"name": "fedavg_q"}, federation={"rounds": 2})
    replies = [lab.train(one, number=2)[0] for one in (experiment, plain)]
    assert replies[0].losses["distillation"] == 0
    assert replies[0].losses["cross_entropy"] == replies[1].losses["cross_entropy"]


def test_a_stack_looks_up_the_same_answers(lab: Any, tmp_path: Path) -> None:
    """Clients of different sizes, several steps: what they were asked in a stack, they were asked alone."""
    model = {"name": "fedgen_cnn", "feature_dim": 8}
    losses = []
    for stack in (False, True):
        changes = {"model": model, "federation": {"rounds": 1}, "engine": {"stack": stack}}
        experiment = lab.experiment(method={"name": "protolda_distilled", "teacher": TEACHER}, **changes)
        losses.append(lab.run(experiment, tmp_path / str(stack)).history[0]["train_loss"])
    assert losses[0]["distillation"] > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_head_in_closed_form_on_the_trained_features(lab: Any, tmp_path: Path) -> None:
    """lda_head over it: the head is the discriminant of the trained body's features of all clients' images."""
    base = {"protolda_distilled": {"method.teacher": TEACHER}}
    method = {"name": "lda_head", "base": "protolda_distilled", "base_settings": base, "wire": "float64"}
    experiment = lab.experiment(model=PLAIN, method=method, federation={"rounds": 1})
    run = lab.run(experiment, tmp_path / "run")
    model = experiment.method.global_model(run.state.server)
    features, labels = [], []
    for client in range(4):
        rows = torch.from_numpy(lab.partition.clients[client].train.copy())
        meta = lab.dataset.meta
        pixels = lab.dataset.train.images[rows].float() / 255
        mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (meta.mean, meta.std))
        features.append(experiment.setting.network.features((pixels - mean) / std, run.state.server[MODEL].values))
        labels.append(lab.dataset.train.labels[rows])
    weight, _ = discriminant(discriminant_sums(torch.cat(features), torch.cat(labels), 6), 0.01)
    torch.testing.assert_close(model.params["head.weight"].double(), weight, rtol=1e-3, atol=1e-3)
