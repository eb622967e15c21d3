"""Scoring at the end of a round: shared among workers, and each image encoded once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flcore.engine import rounds
from flcore.engine.pool.executors import PoolExecutor
from flcore.evaluation.forward import Forward
from flcore.evaluation.scoring import Scorer
from flcore.io.records import Record
from flcore.models.base import Backbone

# ---- shared among workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    # Blocks of the global model, and every client's own.
    pytest.param({"method__name": "fedavg", "evaluation__private": True}, marks=pytest.mark.slow),
    # States on the way, several answers.
    pytest.param({"method__name": "gfpl", "method__interval": 1, "method__first_exchange": 1}, marks=pytest.mark.slow),
    # What never travels is averaged, by whoever scores.
    pytest.param({"method__name": "fedper", "model__batchnorm": "local"}, marks=pytest.mark.slow),
], ids=["fedavg", "gfpl", "fedper"])  # fmt: skip
def test_who_scores_changes_no_byte(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Two workers answer parts of every scoring, a batch of seven images or a client at a time."""
    changes |= {"evaluation__batch_size": 7, "federation__rounds": 1}
    inline = lab.run(lab.experiment(**changes), tmp_path / "inline")
    parts: list[int] = []
    score = PoolExecutor.score

    def counted(self: Any, *arguments: Any) -> Any:
        parts.append(len(arguments[1]))
        return score(self, *arguments)

    monkeypatch.setattr(PoolExecutor, "score", counted)
    monkeypatch.setattr(rounds, "WORTH_SHARING", 0)
    pool = lab.run_in_pool(tmp_path / "pool", engine__workers=2, **changes)
    assert pool.bytes == inline.bytes
    assert max(parts) >= 4


@pytest.mark.slow
def test_little_is_scored_where_it_is(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty images: handing them to workers would cost more than it saves."""
    monkeypatch.setattr(PoolExecutor, "score", lambda *_: pytest.fail("workers were asked"))
    run = lab.run_in_pool(tmp_path / "pool", engine__workers=1, federation__rounds=1)
    assert len(run.history) == 1


# ---- each model encodes each image once --------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "ways"), [("gfpl", 5), ("fedcspc", 4)])
def test_an_image_is_encoded_once_for_all_answers(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, ways: int
) -> None:
    """GFPL answers with three heads and two sets of classes, FedCSPC with head, exemplars and both.

    And with the heads of before a retraining or calibration, which have the same encoder below. GFPL: each of four
    clients' own models sees the client's test images; FedCSPC: the global one the 60 of everybody.
    """
    changes = {
        "model": {"name": "fedcspc_cnn", "projection_dim": 12},
        "federation__rounds": 1,
        "method": {"name": method},
    }
    if method == "gfpl":
        changes["method"] |= {"interval": 1, "first_exchange": 0}
    experiment = lab.experiment(**changes)
    assert 1 + len(experiment.method.predictors()) == ways
    seen: Counter[str] = Counter()
    answers = Forward.answers

    def counting(self: Any, *arguments: Any) -> Any:
        seen["asked"] += len(arguments[1])
        encode = Backbone.encode

        def counted(module: Any, images: Tensor, dropout_masks: Any = None) -> Tensor:
            seen["encoded"] += len(images)
            return encode(module, images, dropout_masks)

        with monkeypatch.context() as patch:
            patch.setattr(Backbone, "encode", counted)
            return answers(self, *arguments)

    monkeypatch.setattr(Forward, "answers", counting)
    lab.run(experiment, tmp_path / "run")
    tested = sum(len(client.test) for client in lab.partition.clients) if method == "gfpl" else 60
    assert (seen["asked"], seen["encoded"]) == (tested, tested)


def test_memories_are_read_only_where_a_client_has_its_own_model(lab: Any, tmp_path: Path) -> None:
    """MOON's clients remember models, with which nobody answers."""
    experiment = lab.experiment(method__name="moon", federation__rounds=1)
    run = lab.run(experiment, tmp_path / "run")
    assert run.state.client_states
    asked: list[int] = []
    Scorer(experiment).score(run.state.server, lambda client: asked.append(client) or Record())  # type: ignore[func-returns-value]
    assert asked == []
