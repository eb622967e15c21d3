"""Scoring within a round: shared among workers, and states on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flcore.engine import round_scores
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.pool.executors import PoolExecutor
from flcore.evaluation import forward
from flcore.evaluation.forward import Forward
from flcore.evaluation.scoring import Scorer
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.fedavg import FedAvg, aggregate
from flcore.methods.types import MODEL, Before, Exchange, Leg, LocalModel, Phase, Predict, Replies, Stage
from flcore.models.base import Backbone

# ---- shared among workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    # Blocks of the global model, and every client's own.
    pytest.param({"method__name": "fedavg", "evaluation__private": True}, marks=pytest.mark.slow),
    {"method__name": "gfpl", "method__interval": 1, "method__first_exchange": 1},  # states on the way, several answers
    # What never travels is averaged, by whoever scores.
    pytest.param({"method__name": "fedper", "model__batchnorm": "local"}, marks=pytest.mark.slow),
], ids=["fedavg", "gfpl", "fedper"])  # fmt: skip
def test_who_scores_changes_no_byte(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Two workers answer parts of every scoring, a batch of seven images or a client at a time."""
    changes |= {"evaluation__batch_size": 7, "federation__rounds": 2}
    inline = lab.run(lab.experiment(**changes), tmp_path / "inline")
    parts: list[int] = []
    score = PoolExecutor.score

    def counted(self: Any, *arguments: Any) -> Any:
        parts.append(len(arguments[-1]))
        return score(self, *arguments)

    monkeypatch.setattr(PoolExecutor, "score", counted)
    monkeypatch.setattr(round_scores, "WORTH_SHARING", 0)
    pool = lab.run_in_pool(tmp_path / "pool", engine__workers=2, **changes)
    assert pool.bytes == inline.bytes
    assert parts and min(parts) >= 4


def test_little_is_scored_where_it_is(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty images: handing them to workers would cost more than it saves."""
    monkeypatch.setattr(PoolExecutor, "score", lambda *_: pytest.fail("workers were asked"))
    run = lab.run_in_pool(tmp_path / "pool", engine__workers=1, federation__rounds=1)
    assert len(run.history) == 1


# ---- each model encodes each image once --------------------------------------------------------------------------


def test_no_more_than_so_many_encoders_are_kept(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GFPL's clients each have one: there is room for one of four, or for none; figures are as with room for all."""
    settings = {"name": "gfpl", "interval": 1, "first_exchange": 0}
    experiment = lab.experiment(method=settings, model={"name": "fedcspc_cnn"}, federation__rounds=2)
    encoder = [value for name, value in experiment.setting.initial.values.items() if name.startswith("encoder.")]
    size = sum(tensor.nbytes for tensor in encoder)
    kept: list[int] = []
    keep = Forward._keep

    def counted(self: Any, *arguments: Any) -> None:
        keep(self, *arguments)
        kept.append(len(self._encoded))

    monkeypatch.setattr(Forward, "_keep", counted)
    whole = lab.run(experiment, tmp_path / "whole").history
    assert max(kept) == 4
    for room, most in ((2 * size - 1, 1), (size - 1, 0)):
        kept.clear()
        monkeypatch.setattr(forward, "MOST_KEPT", room)
        assert lab.run(experiment, tmp_path / str(room)).history == whole
        assert max(kept) == most


def test_blocks_of_one_encoder_count_it_once(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 images for everybody in blocks of ten: six ranges and one encoder, in less room than two encoders take."""
    experiment = lab.experiment(
        method={"name": "ccvr", "epochs": 1, "per_class": 2}, model={"name": "fedcspc_cnn"}, evaluation__batch_size=10
    )
    values = experiment.setting.initial.values
    size = sum(tensor.nbytes for name, tensor in values.items() if name.startswith("encoder."))
    monkeypatch.setattr(forward, "MOST_KEPT", 2 * size - 1)
    scorer = Scorer(experiment)
    scorer.score(Record(experiment.method.start_server(experiment.setting)), lambda client: Record())
    assert list(scorer._forward._encoded) == [(start, start + 10) for start in range(0, 60, 10)]


@pytest.mark.parametrize(("method", "ways"), [("gfpl", 4), ("fedcspc", 3)])
def test_an_image_is_encoded_once_for_all_answers(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, ways: int
) -> None:
    """GFPL answers with three heads and two sets of classes, FedCSPC with head, exemplars and both.

    GFPL: each of four clients' own models sees the client's test images; FedCSPC: the global one the 60 of everybody.
    States on the way (before retraining, before calibration) are other models with the same encoder: two are asked, one
    encodes.
    """
    changes = {
        "model": {"name": "fedcspc_cnn", "projection_dim": 12},
        "federation__rounds": 1,
        "method": {"name": method},
    }
    if method == "gfpl":
        changes["method"] |= {"interval": 1, "first_exchange": 0}
    experiment = lab.experiment(**changes)
    assert 1 + len(experiment.method.alternatives()) == ways
    seen: Counter[str] = Counter()
    answers = Forward.answers

    def counting(self: Any, *arguments: Any) -> Any:
        seen["asked"] += len(arguments[1])
        encode = Backbone.encode

        def counted(module: Any, images: Tensor, drops: Any = None) -> Tensor:
            seen["encoded"] += len(images)
            return encode(module, images, drops)

        with monkeypatch.context() as patch:
            patch.setattr(Backbone, "encode", counted)
            return answers(self, *arguments)

    monkeypatch.setattr(Forward, "answers", counting)
    lab.run(experiment, tmp_path / "run")
    tested = sum(len(client.test) for client in lab.partition.clients) if method == "gfpl" else 60
    assert (seen["asked"], seen["encoded"]) == (2 * tested, tested)


def test_memories_are_read_only_where_a_client_has_its_own_model(lab: Any, tmp_path: Path) -> None:
    """MOON's clients remember models, with which nobody answers."""
    experiment = lab.experiment(method__name="moon", federation__rounds=1)
    run = lab.run(experiment, tmp_path / "run")
    assert run.state.memories
    asked: list[int] = []
    Scorer(experiment).score(run.state.server, lambda client: asked.append(client) or Record())  # type: ignore[func-returns-value]
    assert asked == []


# ---- states on the way -------------------------------------------------------------------------------------------


def says(label: int) -> Predict:
    """A way to answer that says one class always."""

    def predict(model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        return torch.eye(6)[label].expand(len(images), 6)

    return predict


def biased(server: Record, label: int) -> Record:
    """The model with a head that says one class always."""
    model = server[MODEL]
    head = {"head.weight": torch.zeros_like(model.params["head.weight"]), "head.bias": torch.eye(6)[label]}
    return server | {MODEL: Weights({**model.params, **head}, model.buffers)}


@dataclass(frozen=True)
class Steered(FedAvg):
    """Says class 1 after aggregation, class 2 after stage two, class 3 after a leg for all that only answers."""

    name: ClassVar[str] = "steered"

    def legs(self, round_number: int, setting: Any) -> tuple[Leg, ...]:
        second = (Leg("ask-all", who="all", phases=(), stages=("three",)),) if round_number != 2 else ()
        return (Leg("train", phases=(Phase(),), stages=("one", "two")), *second)

    def stages(self) -> Mapping[str, Stage]:
        def stage(label: int) -> Stage:
            def run(server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, dict[str, float]]:
                after, _ = aggregate(server, replies, exchange) if label == 1 else (server, {})
                return biased(after, label), {f"stage_{label}": float(exchange.round)}

            return run

        return {"one": stage(1), "two": stage(2), "three": stage(3)}

    def score_before(self) -> Mapping[str, Before]:
        return {
            "before_two": Before("two"),
            "before_asking": Before("ask-all"),
            "before_three": Before("three", predict=says(5)),
            "never": Before("no-such-step"),
        }


def shares(lab: Any) -> list[float]:
    """Share of each class in the test set: what a model gets right that says this class always."""
    return [float((lab.dataset.test.labels == label).float().mean()) for label in range(6)]


@pytest.mark.parametrize("durability", ["reply", "leg"])
def test_states_are_scored_where_they_stand(lab: Any, tmp_path: Path, durability: str) -> None:
    """In front of stage two: class 1. In front of the second leg: class 2. In front of three, answered otherwise: 5.

    Round 2 has no second leg: those labels carry the round's own score, class 2.
    """
    run = lab.run(lab.experiment(algorithm=Steered(), engine__durability=durability), tmp_path / "run")
    share = shares(lab)

    def found(record: Any) -> list[float]:
        names = ("before_two", "before_asking", "before_three", "never")
        return [record["alternatives"][name]["top1_global"] for name in names]

    first, second, third = run.history
    assert first["top1_global"] == pytest.approx(share[3]) == third["top1_global"]
    assert found(first) == found(third) == pytest.approx([share[1], share[2], share[5], share[3]])
    assert second["top1_global"] == pytest.approx(share[2])
    assert found(second) == pytest.approx([share[1], share[2], share[2], share[2]])
    assert (first["server"], second["server"]) == (
        {"stage_1": 1, "stage_2": 1, "stage_3": 1},
        {"stage_1": 2, "stage_2": 2},
    )


def stopped_at_the_second_leg(lab: Any) -> Any:
    """An orchestrator whose process ends where the second leg of a round begins."""

    class StopAt(lab.Threaded):  # type: ignore[name-defined,misc]
        def map(self, name: str, function: Any, items: Any) -> Any:
            if name == "ask-all":
                raise KeyboardInterrupt
            return super().map(name, function, items)

    return StopAt()


def test_killed_between_legs_the_scores_are_not_lost(lab: Any, tmp_path: Path) -> None:
    """Stopped when the second leg of round 1 begins, and gone on with by a new process: the bytes of one go."""
    whole = lab.run(lab.experiment(algorithm=Steered()), tmp_path / "whole")

    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.experiment(algorithm=Steered()), tmp_path / "run", None, stopped_at_the_second_leg(lab))
    assert Checkpoint(tmp_path / "run").read_state().scored.keys() == {"before_two"}
    assert lab.run(lab.experiment(algorithm=Steered()), tmp_path / "run").bytes == whole.bytes


def test_the_last_rounds_states_stay_for_analyses(lab: Any, tmp_path: Path) -> None:
    """What the server held in front of stage two of round 3 says class 1; nothing of earlier rounds is kept."""
    run = lab.run(lab.experiment(algorithm=Steered()), tmp_path / "run")
    kept = run.checkpoint.aside.kept()
    assert kept.keys() == {"before_two", "before_asking", "before_three"}
    assert kept["before_two"][MODEL].params["head.bias"].tolist() == torch.eye(6)[1].tolist()
    assert lab.run(lab.experiment(method__name="local"), tmp_path / "local").checkpoint.aside.kept() == {}


def test_a_snapshot_has_the_states_of_its_round(lab: Any, tmp_path: Path) -> None:
    """Of rounds 1 (not evaluated), 2 (one leg: no state in front of the second) and 0 (no leg).

    In front of stage two: class 1. In front of the second leg, and of stage three in it: class 2.
    """
    asked = {"algorithm": Steered(), "evaluation__every": 2, "evaluation__snapshots": [0, 1, 2]}
    run = lab.run(lab.experiment(**asked), tmp_path / "run")
    kept = {number: run.checkpoint.aside.round(number) for number in (0, 1, 2)}
    labels = {
        number: {
            name: record[MODEL].params["head.bias"].argmax().item()
            for name, record in records.items()
            if name.startswith("before.")
        }
        for number, records in kept.items()
    }
    assert labels == {
        0: {},
        1: {"before.before_two": 1, "before.before_asking": 2, "before.before_three": 2},
        2: {"before.before_two": 1},
    }
    assert [record["round"] for record in run.history] == [2, 3]

    # Stopped behind the first leg of round 1, whose state is kept; the rest of the round adds to it.
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.experiment(**asked), tmp_path / "stopped", None, stopped_at_the_second_leg(lab))
    found = [path.name for path in (tmp_path / "stopped" / "rounds").glob("0001.*")]
    assert found == ["0001.before.before_two.safetensors"]
    again = lab.run(lab.experiment(**asked), tmp_path / "stopped")
    assert again.bytes == run.bytes and "0001.before.before_two.safetensors" in run.bytes
