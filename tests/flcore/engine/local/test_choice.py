"""engine.stack and engine.compile = auto: measured with a clock that is an argument, and harmless to the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.core.errors import ConfigError, RunError
from flcore.engine.client import ClientRunner
from flcore.engine.local import choice as stacking
from flcore.engine.local.choice import EngineDecision, decide, default_cache, measure_speed
from flcore.engine.local.compiled import CompiledTrainer
from flcore.engine.local.compiler import Compiler
from flcore.engine.local.program import CacheMissError
from flcore.experiment.experiment import EngineChoice, Experiment
from flcore.io.records import Record
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import Exchange


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
    decision, waiting = measure_speed(auto(lab), Speeds(monkeypatch, 1.0, stacked))
    assert waiting is None
    assert (decision.stack, decision.compile) == (expected, False)
    assert decision.serial == pytest.approx(1.0)
    assert decision.stacked == pytest.approx(4 / stacked)
    assert decision.reason == f"stacks of 4 take {faster:.2f} times the serial steps per second"


def test_a_decision_is_remembered(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the given file; another method, model or batch size is measured for itself."""
    cache, clock = tmp_path / "deep" / "engine", Speeds(monkeypatch, 1.0, 1.0)
    first = decide(auto(lab), cache, clock)
    measured = clock.measured
    assert measured > 0
    assert decide(auto(lab), cache, clock) == first
    assert clock.measured == measured
    assert [json.loads(path.read_text()) for path in cache.glob("*.json")] == [vars(first)]
    for changes in (
        {"method__name": "fedproto"}, {"model": {"name": "fedproto_cnn"}}, {"local__batch_size": 8},
        {"engine": {"stack": "auto", "stack_size": 2}},
    ):  # fmt: skip
        before = clock.measured
        decide(lab.experiment(**{"engine__stack": "auto", **changes}), cache, clock)
        assert clock.measured > before, changes
    assert len(list(cache.glob("*.json"))) == 5
    # What does not change the speed of a step is not measured again.
    before = clock.measured
    assert decide(auto(lab, seed=7, federation__rounds=9, local__lr=0.5), cache, clock) == first
    assert clock.measured == before


def test_what_is_remembered_is_believed(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, clock = tmp_path / "engine", Speeds(monkeypatch, 1.0, 1.0)
    assert decide(auto(lab), cache, clock).stack
    (known,) = cache.glob("*.json")
    known.write_text(json.dumps({"stack": False, "compile": False, "serial": 1.0, "reason": "by hand"}))
    assert decide(auto(lab), cache, clock) == EngineDecision(False, False, 1.0, reason="by hand")


@dataclass(frozen=True)
class Branching(FedAvg):
    name = "branching"

    def loss(self, model: Any, batch: Any, context: Any) -> Any:
        terms = super().loss(model, batch, context)
        return terms if terms["cross_entropy"] > 0 else {"cross_entropy": torch.zeros(())}


@dataclass(frozen=True)
class Silent(FedAvg):
    name = "silent"

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        return (Exchange("ask", phases=()), Exchange())


@dataclass(frozen=True)
class Mute(FedAvg):
    """Nobody trains."""

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        return (Exchange("ask", phases=()),)


def test_what_cannot_be_stacked_is_not(lab: Any) -> None:
    decision, _ = measure_speed(auto(lab, algorithm=Branching()))
    assert (decision.stack, decision.serial, decision.stacked) == (False, None, None)
    assert "branching cannot be trained on stacked clients" in decision.reason
    alone, _ = measure_speed(auto(lab, method__name="central"))
    assert alone == EngineDecision(False, False, reason="no two clients fit into a stack")
    one, _ = measure_speed(lab.experiment(engine={"stack": "auto", "stack_size": 1}))
    assert one == EngineDecision(False, False, reason="no two clients fit into a stack")
    mute, _ = measure_speed(auto(lab, algorithm=Mute()))
    assert mute == EngineDecision(False, False, reason="nothing is trained in the first round")


def test_a_leg_that_trains_nothing_is_passed_over(lab: Any) -> None:
    """What is measured is the training behind it, as behind FedMLP's report of counts."""
    assert measure_speed(auto(lab, algorithm=Silent()))[0].serial is not None


def test_a_method_that_looks_up_what_clients_remember_is_measured(lab: Any) -> None:
    """Rows of a teacher's answers stand beside a batch, of each of the clients that are trained at once."""
    teacher = {"model.atoms": 6, "model.patch": 5, "model.grid": 2}
    changes = {"method": {"name": "protolda_distilled", "teacher": teacher}, "model": {"name": "fedgen_cnn"}}
    decision, _ = measure_speed(auto(lab, **changes))
    assert decision.serial is not None and decision.stacked is not None


@pytest.mark.parametrize("augmentation", ["none", "crop_flip"])
def test_what_is_measured_is_the_program_of_the_run(
    lab: Any, augmentation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedNTD's teacher is asked once per sample, or where images change in every step; rounds need no other program."""
    machine = Machine(lab, monkeypatch, tmp_path, compiled=0.1, there=True)
    names: list[str] = []
    monkeypatch.setattr(lab.DirectMaker, "make", remembering(names, lab.DirectMaker.make))
    machine.measure(method__name="fedntd", data__augmentation=augmentation)
    measured = set(names)
    experiment = lab.experiment(method__name="fedntd", data__augmentation=augmentation, engine__compile="default")
    trainer = CompiledTrainer(experiment, lab.DirectMaker())
    ClientRunner(experiment, trainer).train(lab.work(experiment, [0]), [0], lambda client: Record())
    assert set(names) == measured and len(measured) == 1


def remembering(names: list[str], make: Any) -> Any:
    """A maker's function that also writes down of what it makes programs."""

    def noted(step_compiler: Any, function: Any, example: Any, moved: int, facts: Any) -> Any:
        names.append(repr((facts, [tuple(tensor.shape) for tensor in example])))
        return make(step_compiler, function, example, moved, facts)

    return noted


def test_a_round_without_clients_decides_nothing(lab: Any) -> None:
    assert not measure_speed(auto(lab, federation__dropout=0.999))[0].stack


@pytest.mark.slow
@pytest.mark.parametrize("stack", [False, True])
def test_measuring_changes_nothing_of_the_run(lab: Any, stack: bool, tmp_path: Path) -> None:
    """The bytes of a run decided after measuring are those of one that was told so, but for the name of the run."""
    changes = {"method__name": "fedproto", "data__augmentation": "crop_flip", "model": {"name": "fedproto_cnn"}}
    told = lab.run(replace(auto(lab, **changes), choice=EngineChoice(stack, False)), tmp_path / "told").bytes
    experiment = auto(lab, **changes)
    generator = torch.random.get_rng_state()
    decide(experiment, tmp_path / "engine")
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert lab.run(replace(experiment, choice=EngineChoice(stack, False)), tmp_path / "measured").bytes == told
    direct = lab.run(lab.experiment(engine__stack=stack, **changes), tmp_path / "direct").bytes
    assert direct["history.jsonl"] == told["history.jsonl"]


def test_auto_has_to_be_decided_before_training(lab: Any) -> None:
    for undecided in (auto(lab), lab.experiment(engine__compile="auto")):
        with pytest.raises(ValueError, match=r"^engine\.stack or engine\.compile = auto is not decided yet$"):
            undecided.stacked  # noqa: B018
        for choice in (EngineChoice(True, False), EngineChoice(False, True)):
            decided = replace(undecided, choice=choice)
            assert (decided.stacked, decided.compiled) == (choice.stack, choice.compile)


# ---- compiled steps ----------------------------------------------------------------------------------------------


class Machine:
    """A machine whose compiler takes no time of ours: programs are called as they are, at so many seconds a step."""

    def __init__(
        self,
        lab: Any,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        *,
        compiled: float,
        there: bool,
        serial: float = 1.0,
    ) -> None:
        self.lab, self.speeds, self.folder = lab, Speeds(monkeypatch, serial, 1.0), folder
        self.made, self.traced = 0, False
        machine = self

        class Fake(Compiler):
            def make(self, function: Any, example: Any, moved: int, facts: Any) -> Any:
                machine.traced |= not self._new and self._trace
                if not there and not self._new:
                    raise CacheMissError
                machine.made += self._new
                return lab.DirectMaker().make(function, example, moved, facts)

        class Compiled(stacking.CompiledTrainer):
            def train(self, *arguments: Any) -> Any:
                outcomes = super().train(*arguments)
                machine.speeds.now += compiled * sum(outcome.steps for outcome in outcomes)
                return outcomes

        monkeypatch.setattr(stacking, "Compiler", Fake)
        monkeypatch.setattr(stacking, "CompiledTrainer", Compiled)
        monkeypatch.setattr(stacking, "compiler_missing", lambda: None)

    def measure(self, **changes: Any) -> tuple[EngineDecision, float | None]:
        return measure_speed(self.lab.experiment(engine__compile="auto", **changes), self.speeds, self.folder)


@pytest.mark.parametrize(("seconds", "expected"), [(0.25, True), (0.95, False), (3.0, False)])
def test_compiled_steps_are_taken_where_they_are_faster(
    lab: Any, seconds: float, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second a step serially, so many compiled; 0.95 is 1.05 times as fast, which is not worth it."""
    decision, waiting = Machine(lab, monkeypatch, tmp_path, compiled=seconds, there=True).measure()
    assert (decision.stack, decision.compile, waiting) == (False, expected, None)
    assert decision.compiled == pytest.approx(1 / seconds)
    assert decision.compile_seconds is None
    assert decision.reason == f"compiled steps take {1 / seconds:.2f} times the serial steps per second"


@pytest.mark.parametrize(("known", "rounds", "expected"), [(None, 20, True), (None, 5, False), (2000.0, 20, False)])
def test_compiling_is_waited_for_where_the_run_gives_it_back(
    lab: Any, known: float | None, rounds: int, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients of 30 images, two steps of 16 each, one second a step: 8 s a round, of which 40 % is hoped for.

    20 rounds give 64 s, more than the 60 s that compiling takes as far as anybody knows, or less than the 2,000 s that
    it is known to take; 5 rounds give 16 s. What a short run decides does not hold for a longer one.
    """
    clients = [range(end - 30, end) for end in (30, 60, 90, 120)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 4)
    if known is not None:
        (tmp_path / "one.json").write_text(json.dumps({"terms": ["cross_entropy"], "seconds": known}))
    machine = Machine(lab, monkeypatch, tmp_path, compiled=0.25, there=False)
    changes = {"federation": {"rounds": rounds}, "local": {"epochs": 1, "batch_size": 16}}
    decision, waiting = machine.measure(partition=partition, **changes)
    assert (decision.compile, waiting, machine.made > 0) == (expected, None if expected else 8 * rounds, expected)
    if not expected:
        about = f"{known or 60:.0f} s, which {8 * rounds} s of training do not repay"
        assert decision.reason == f"compiling takes about {about}"


@pytest.mark.parametrize(("step", "expected"), [(1.0, False), (1.5, True)])
def test_a_graph_of_another_step_is_looked_for_where_this_run_alone_gives_that_back(
    lab: Any, step: float, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 steps in one round: 8 or 12 s, of which 40 % is hoped for; twice the 2 s of a trace are asked for.

    Runs before it do not count: a hundred short ones would each trace for nothing until somebody compiles.
    """
    clients = [range(end - 30, end) for end in (30, 60, 90, 120)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 4)
    machine = Machine(lab, monkeypatch, tmp_path, compiled=0.25, there=False, serial=step)
    changes = {"federation": {"rounds": 1}, "local": {"epochs": 1, "batch_size": 16}, "engine__compile": "auto"}
    measure_speed(lab.experiment(partition=partition, **changes), machine.speeds, tmp_path, spent=100.0)
    assert machine.traced == expected


def test_runs_that_were_too_short_count_for_the_next_ones(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 s a round, of which 40 % is hoped for: three runs of 7 rounds (22.4 s each) repay 60 s, two do not."""
    clients = [range(end - 30, end) for end in (30, 60, 90, 120)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 4)
    machine = Machine(lab, monkeypatch, tmp_path, compiled=0.25, there=False)
    changes = {"federation": {"rounds": 7}, "local": {"epochs": 1, "batch_size": 16}, "engine__compile": "auto"}
    found = [
        decide(lab.experiment(partition=partition, seed=seed, **changes), tmp_path / "engine", machine.speeds, tmp_path)
        for seed in range(4)
    ]
    assert [decision.compile for decision in found] == [False, False, True, True]
    assert ["56 s" in found[0].reason, "112 s" in found[1].reason] == [True, True]
    assert not list((tmp_path / "engine").glob("*.spent"))


@pytest.mark.parametrize(
    ("rounds", "spent", "fails", "tried", "waiting"),
    [
        (100, 0.0, False, [False, True], None),
        (70, 0.0, False, [False], 28.0),
        (70, 10.0, False, [False, True], None),
        (100, 0.0, True, [False, True, False], None),
    ],
)
def test_on_a_gpu_kernels_are_fused_where_recorded_ones_would_take_longer(
    lab: Any, rounds: int, spent: float, fails: bool, tried: list[bool], waiting: float | None, monkeypatch: Any
) -> None:
    """Four clients, two steps each: 8 steps a round, a twentieth of a second each as recorded; fusing takes 30 s.

    100 rounds are 40 s of recorded steps, 70 rounds 28 s; with 10 s of earlier runs these are long enough too. Where
    kernels cannot be fused they are recorded as they are, and that is for good.
    """
    clients = [range(end - 30, end) for end in (30, 60, 90, 120)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 4)
    asked: list[bool] = []

    class Probe:
        def __init__(self, experiment: Any, exchange: Any, clients: Any, clock: Any) -> None:
            self.clients = clients

        def seconds(self, trainer: Any, count: int, steps: int) -> float:
            return {"serial": 1.0, "stacked": 0.2, "compiled": 0.05}[trainer] * count * steps

    def recorded(experiment: Any, probe: Any, *, fuse: bool, reasons: list[str]) -> dict[str, str]:
        asked.append(fuse)
        if fuse and fails:
            reasons.append("no")
        return {} if fuse and fails else {"compiled": "compiled"}

    monkeypatch.setattr(stacking, "StepTimer", Probe)
    monkeypatch.setattr(stacking, "SerialTrainer", lambda experiment: "serial")
    monkeypatch.setattr(stacking, "_stacked", lambda *arguments: {"stacked": "stacked"})
    monkeypatch.setattr(stacking, "_tried", recorded)
    monkeypatch.setattr(stacking, "stacks", lambda *arguments: [[0, 1, 2, 3]])
    engine = {"stack": "auto", "compile": "auto"}
    changes = {"federation": {"rounds": rounds}, "local": {"epochs": 1, "batch_size": 16}, "engine": engine}
    here = lab.experiment(partition=partition, **changes)
    there = replace(here, config=replace(here.config, engine=replace(here.config.engine, device="cuda")))
    there.__dict__["setting"] = here.setting  # made where there is a device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    decision, left = measure_speed(there, spent=spent)
    assert (decision.choice, asked) == (EngineChoice(True, True, tried[-1]), tried)
    assert left == (None if waiting is None else pytest.approx(waiting))


@pytest.mark.parametrize("stack", [False, True, "auto"])
def test_without_a_compiler_compiled_steps_are_refused_and_auto_does_without(
    lab: Any, stack: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose name says that it is compiled is; how stacks are decided changes nothing of that."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = "no C++ compiler (no-such-compiler) on this machine"
    with pytest.raises(ConfigError) as refused:
        decide(lab.experiment(engine={"compile": "default", "stack": stack}), tmp_path / "engine")
    cure = "install one, or use engine.compile=auto, which then compiles nothing"
    assert str(refused.value) == f"engine.compile = default: {missing}; {cure}"
    decision = decide(lab.experiment(engine={"compile": "auto", "stack": stack}), tmp_path / "engine")
    assert missing in decision.reason
    assert not decision.compile and (stack == "auto" or decision.stack == stack)


@pytest.fixture
def compiler_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler, also where none is installed; nobody calls it.

    Not by a variable of the environment: PyTorch reads these once, and what it found would be the process's.
    """
    monkeypatch.setattr(stacking, "compiler_missing", lambda: None)


@pytest.mark.usefixtures("compiler_there")
def test_a_loss_that_cannot_be_traced_is_left_as_it_is(lab: Any, tmp_path: Path) -> None:
    """Tracing is real here; it ends before anything would be compiled."""
    changes = {"algorithm": Branching(), "federation__rounds": 100_000}
    decision, waiting = measure_speed(lab.experiment(engine__compile="auto", **changes), programs=tmp_path)
    assert (decision.compile, waiting) == (False, None)
    assert decision.reason.startswith("not compiled: ")


@pytest.mark.usefixtures("compiler_there")
def test_a_failing_compiler_decides_against_compiling(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        raise RunError("engine.compile: the compiler failed (by hand)")

    monkeypatch.setattr(Compiler, "make", failing)
    decision, waiting = measure_speed(lab.experiment(engine__compile="auto"), programs=tmp_path)
    assert not decision.compile and waiting is not None
    assert decision.reason == "engine.compile: the compiler failed (by hand)"


def test_folders_that_cannot_be_written_to_are_done_without(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where they should be: stacks are measured all the same, steps are not compiled."""
    (tmp_path / "file").touch()
    cache, programs = tmp_path / "file" / "engine", tmp_path / "file" / "steps"
    decision = decide(auto(lab), cache, Speeds(monkeypatch, 1.0, 1.0))
    assert decision.stack
    assert decision.reason.endswith(f"; not remembered ({tmp_path / 'file'}: File exists)")
    monkeypatch.setattr(stacking, "compiler_missing", lambda: None)
    monkeypatch.setattr(stacking, "_expected_seconds", lambda folder: 0.0)
    decision = decide(lab.experiment(engine__compile="auto"), cache, programs=programs)
    assert not decision.compile
    assert f"'{programs}'" in decision.reason or f"'{programs.parent}'" in decision.reason


def test_who_has_no_home_is_asked_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match=r"^no home folder to keep caches in; name a folder in XDG_CACHE_HOME$"):
        default_cache()


def test_where_decisions_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "protofl" / "engine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "protofl" / "engine"
