"""engine.stack = auto: measured with a clock that is an argument, remembered, and without influence on the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine.local import choice as stacking
from flcore.engine.local.choice import StackDecision, decide, default_cache, measure
from flcore.experiment import Experiment
from flcore.methods.fedavg import FedAvg
from flcore.methods.vocabulary import Leg


class Speeds:
    """A clock that stands still but for training: so many seconds per client and step, or per step of a stack."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, serial: float, stacked: float) -> None:
        self.now, self.measured = 0.0, 0
        speeds = self

        class Serial(stacking.SerialTrainer):
            def train(self, *arguments: Any) -> Any:
                outcomes = super().train(*arguments)
                speeds.now += serial * sum(outcome.steps for outcome in outcomes)
                return outcomes

        class Stacked(stacking.StackedTrainer):
            def train(self, *arguments: Any) -> Any:
                outcomes = super().train(*arguments)
                speeds.now += stacked * max(outcome.steps for outcome in outcomes)
                speeds.measured += 1
                return outcomes

        monkeypatch.setattr(stacking, "SerialTrainer", Serial)
        monkeypatch.setattr(stacking, "StackedTrainer", Stacked)

    def __call__(self) -> float:
        return self.now


def auto(lab: Any, **changes: Any) -> Experiment:
    return lab.experiment(engine__stack="auto", **changes)


@pytest.mark.parametrize(
    ("stacked", "expected", "faster"),
    [
        (1.0, True, 4.0),  # four clients in the time of one
        (3.5, True, 4 / 3.5),
        (3.8, False, 4 / 3.8),  # 1.05 times as fast is not worth it
        (8.0, False, 0.5),
    ],
)
def test_the_faster_one_is_taken(
    lab: Any, stacked: float, expected: bool, faster: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients at one second per client and step, or so many seconds per step of all four."""
    decision = measure(auto(lab), Speeds(monkeypatch, 1.0, stacked))
    assert decision.stack is expected
    assert decision.serial == pytest.approx(1.0)
    assert decision.stacked == pytest.approx(4 / stacked)
    assert decision.reason == f"stacks of 4 take {faster:.2f} times the serial steps per second"


def test_a_decision_is_remembered(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the given file; another method, model or batch size is measured for itself."""
    cache, clock = tmp_path / "deep" / "stack.json", Speeds(monkeypatch, 1.0, 1.0)
    first = decide(auto(lab), cache, clock)
    measured = clock.measured
    assert measured > 0
    assert decide(auto(lab), cache, clock) == first
    assert clock.measured == measured
    assert list(json.loads(cache.read_text()).values()) == [vars(first)]
    for changes in (
        {"method__name": "fedproto"}, {"model": {"name": "fedproto_cnn"}}, {"local__batch_size": 8},
        {"engine": {"stack": "auto", "stack_size": 2}},
    ):  # fmt: skip
        before = clock.measured
        decide(lab.experiment(**{"engine__stack": "auto", **changes}), cache, clock)
        assert clock.measured > before, changes
    assert len(json.loads(cache.read_text())) == 5
    assert [path.name for path in cache.parent.iterdir()] == ["stack.json"]
    # What does not change the speed of a step is not measured again.
    before = clock.measured
    assert decide(auto(lab, seed=7, federation__rounds=9, local__lr=0.5), cache, clock) == first
    assert clock.measured == before


def test_what_is_remembered_is_believed(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, clock = tmp_path / "stack.json", Speeds(monkeypatch, 1.0, 1.0)
    assert decide(auto(lab), cache, clock).stack
    known = json.loads(cache.read_text())
    (key,) = known
    cache.write_text(json.dumps({key: {"stack": False, "serial": 1.0, "stacked": 2.0, "reason": "by hand"}}))
    assert decide(auto(lab), cache, clock) == StackDecision(False, 1.0, 2.0, "by hand")


@dataclass(frozen=True)
class Branching(FedAvg):
    name = "branching"

    def loss(self, model: Any, batch: Any, context: Any) -> Any:
        terms = super().loss(model, batch, context)
        return terms if terms["cross_entropy"] > 0 else {"cross_entropy": torch.zeros(())}


@dataclass(frozen=True)
class Silent(FedAvg):
    name = "silent"

    def legs(self, round_number: int, setting: Any) -> tuple[Leg, ...]:
        return (Leg("ask", phases=()), Leg())


@dataclass(frozen=True)
class Mute(FedAvg):
    """Nobody trains."""

    def legs(self, round_number: int, setting: Any) -> tuple[Leg, ...]:
        return (Leg("ask", phases=()),)


def test_what_cannot_be_stacked_is_not(lab: Any) -> None:
    decision = measure(auto(lab, algorithm=Branching()))
    assert (decision.stack, decision.serial, decision.stacked) == (False, None, None)
    assert "branching cannot be trained on stacked clients" in decision.reason
    alone = measure(auto(lab, method__name="central"))
    assert alone == StackDecision(False, None, None, "no two clients fit into a stack")
    one = measure(lab.experiment(engine={"stack": "auto", "stack_size": 1}))
    assert one == StackDecision(False, None, None, "no two clients fit into a stack")
    mute = measure(auto(lab, algorithm=Mute()))
    assert mute == StackDecision(False, None, None, "nothing is trained in the first round")


def test_a_leg_that_trains_nothing_is_passed_over(lab: Any) -> None:
    """What is measured is the training behind it, as behind FedMLP's report of counts."""
    assert measure(auto(lab, algorithm=Silent())).serial is not None


def test_a_round_without_clients_decides_nothing(lab: Any) -> None:
    assert not measure(auto(lab, federation__dropout=0.999)).stack


@pytest.mark.parametrize("stack", [False, True])
def test_measuring_changes_nothing_of_the_run(lab: Any, stack: bool, tmp_path: Path) -> None:
    """The bytes of a run decided after measuring are those of one that was told so, but for the name of the run."""
    changes = {"method__name": "fedproto", "data__augmentation": "crop_flip", "model": {"name": "fedproto_cnn"}}
    told = lab.run(replace(auto(lab, **changes), stack=stack), tmp_path / "told").bytes
    experiment = auto(lab, **changes)
    generator = torch.random.get_rng_state()
    decide(experiment, tmp_path / "stack.json")
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert lab.run(replace(experiment, stack=stack), tmp_path / "measured").bytes == told
    direct = lab.run(lab.experiment(engine__stack=stack, **changes), tmp_path / "direct").bytes
    assert direct["history.jsonl"] == told["history.jsonl"]


def test_auto_has_to_be_decided_before_training(lab: Any) -> None:
    with pytest.raises(ValueError, match=r"^engine\.stack = auto is not decided yet$"):
        auto(lab).stacked  # noqa: B018
    assert replace(auto(lab), stack=True).stacked
    assert not replace(auto(lab), stack=False).stacked
    assert replace(lab.experiment(), stack=True).stacked is False  # what the file says goes before


def test_where_decisions_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "protofl" / "stack.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "protofl" / "stack.json"
