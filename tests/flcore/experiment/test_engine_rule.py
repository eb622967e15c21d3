"""The rule for ``auto`` in the section engine and for workers, and what a run's name makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flcore
from flcore import running
from flcore.config import sections
from flcore.config.schema import Config
from flcore.config.sections import EngineConfig
from flcore.core.errors import ConfigError
from flcore.engine.local import compiled
from flcore.experiment.engine_rule import LARGE_STEP, MANY_STEPS, MUCH_WORK, rule, workers
from flcore.experiment.experiment import Experiment
from flcore.io.files import read_json, sealed, unsealed, write_json
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import Exchange, Phase

FEW = MANY_STEPS - 1


def forbidden() -> int:
    raise AssertionError("the size of a step is not needed")


@pytest.mark.parametrize(
    ("engine", "steps", "size", "stack", "compile_"),
    [
        ({}, MANY_STEPS, LARGE_STEP, False, "default"),
        ({}, MANY_STEPS, LARGE_STEP + 1, False, "none"),
        ({}, FEW, None, False, "none"),
        ({"stack": True}, MANY_STEPS, None, True, "none"),  # a stack on a CPU is not compiled
        ({"compile": "none"}, MANY_STEPS, None, False, "none"),
        ({"compile": "default"}, 1, None, False, "default"),
        # On a GPU the 50 clients of a round are one stack, whose steps count.
        ({"device": "cuda"}, 50 * MANY_STEPS, None, True, "default"),
        ({"device": "cuda"}, 50 * FEW, None, True, "graph"),
        ({"device": "cuda", "stack_size": 25}, 25 * MANY_STEPS, None, True, "default"),
        ({"device": "cuda", "stack": False}, MANY_STEPS, None, False, "default"),
        ({"device": "cuda", "stack": False}, FEW, None, False, "graph"),
        ({"device": "cuda", "compile": "none"}, MANY_STEPS, None, True, "none"),
    ],
)
def test_the_rule(engine: dict[str, Any], steps: int, size: int | None, stack: bool, compile_: str) -> None:
    choice = rule(EngineConfig(**engine), lambda: steps, 50, forbidden if size is None else lambda: size)
    assert (choice.stack, choice.compile) == (stack, compile_)
    assert choice.reason and "\n" not in choice.reason


@pytest.mark.parametrize(
    ("engine", "steps", "clients", "size", "count"),
    [
        ({}, MANY_STEPS, 10, 1, 4),
        ({}, FEW, 10, 1, 0),
        ({}, 100, 10, MUCH_WORK // 100, 4),  # few steps of a large model
        ({}, 100, 10, MUCH_WORK // 100 - 1, 0),
        ({}, MANY_STEPS, 3, 1, 3),  # a client trains on one worker
        ({}, MANY_STEPS, 1, 1, 0),
        ({"device": "cuda"}, MANY_STEPS, 10, 1, 0),
        ({"workers": 0}, MANY_STEPS, 10, 1, 0),
        ({"workers": 2}, 1, 10, 1, 2),
        ({"name": "ray"}, 1, 10, 1, 4),
    ],
)
def test_workers_of_a_run_on_four_cores(
    engine: dict[str, Any], steps: int, clients: int, size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "physical_cores", lambda: 4)
    assert workers(EngineConfig(**engine), lambda: steps, clients, lambda: size) == count


class TwoPhases(FedAvg):
    name = "two-phases"

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        return (Exchange(phases=(Phase(), Phase(steps=4), Phase(source="features"))),)


def test_steps_are_counted_by_phase(lab: Any) -> None:
    """Four clients, of whom half take part; batches of 16."""
    sizes = [len(indices) for indices in lab.experiment().trainers.values()]
    one_pass = sum(-(-size // 16) for size in sizes)
    assert lab.experiment(federation__rounds=7).client_steps() == 7 * one_pass
    assert lab.experiment(federation__rounds=7, local__epochs=3).client_steps() == 7 * 3 * one_pass
    assert lab.experiment(federation__rounds=7, local__steps=5).client_steps() == 7 * 5 * 4
    assert lab.experiment(federation={"rounds": 7, "participation": 0.5}, local__steps=5).client_steps() == 7 * 5 * 2
    # One pass and four steps, in two phases over the clients' own images: half of their sum.
    assert lab.experiment(algorithm=TwoPhases(), federation__rounds=8).client_steps() == 8 * (one_pass + 4 * 4) / 2


def test_multiply_adds_of_a_step(lab: Any) -> None:
    """One image of 16x16, and 16 of them in a mini-batch.

    6 maps of 8x8 by 9 weights each: 3,456; 16 maps of 4x4 by 6x9: 13,824; 256 to 8 numbers: 2,048; 8 to 6: 48.
    """
    assert lab.experiment().step_size() == 16 * (3_456 + 13_824 + 2_048 + 48)


def test_a_run_is_named_for_what_is_computed(lab: Any) -> None:
    """A client has four mini-batches at most a round, so 10,000 rounds are long; no compiler is asked for."""
    assert lab.config().identity()["engine"]["compile"] == "auto"
    for rounds, stands_for in ((3, "none"), (MANY_STEPS, "default")):
        decided = Experiment(lab.config(federation__rounds=rounds), lab.dataset, lab.partition).decided()
        explicit = lab.experiment(federation__rounds=rounds, engine={"stack": False, "compile": stands_for})
        assert decided.config == explicit.config and decided.hash == explicit.hash
        assert (
            decided.choice.compile == stands_for and f"{decided.client_steps():,} client steps" in decided.choice.reason
        )
        other = {"none": "default", "default": "none"}[stands_for]
        assert decided.hash != lab.experiment(federation__rounds=rounds, engine__compile=other).hash


def test_a_run_s_folder_says_what_auto_stood_for(lab: Any, tmp_path: Path) -> None:
    """Asked for in the other words, the same folder holds it; asked for compiled, it holds another run."""
    first = flcore.run(lab.config(), tmp_path)
    stored = read_json(tmp_path / "config.json", "")
    assert (stored["config"]["engine"]["stack"], stored["config"]["engine"]["compile"]) == (False, "none")
    assert stored["decision"]["compile"] == "none" and "client steps" in stored["decision"]["reason"]
    for words in ({}, {"engine__compile": "none"}):
        assert flcore.run(lab.config(**words), tmp_path) == first
    with pytest.raises(ConfigError, match=r"engine\.compile is none there"):
        flcore.run(lab.config(engine__compile="default"), tmp_path)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_long_run_is_refused_before_training(lab: Any, tmp_path: Path) -> None:
    """Serial steps would end with other bytes than its name promises. A short run needs no compiler."""
    for changes in ({"federation__rounds": MANY_STEPS}, {"engine__compile": "default"}):
        with pytest.raises(ConfigError) as refused:
            flcore.run(lab.config(**changes), tmp_path / "long")
        said = str(refused.value)
        assert "no-such-compiler" in said and "engine.compile=none" in said and "\n" not in said
    assert not (tmp_path / "long" / "config.json").exists()
    flcore.run(lab.config(federation__rounds=1), tmp_path / "short")


def test_without_a_folder_for_compiled_steps_a_long_run_is_refused_before_training(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has the cache folder's name; or there is no home, and no other folder is named."""
    monkeypatch.setattr(compiled, "compiler_missing", lambda: None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        flcore.run(lab.config(engine__compile="default"), tmp_path / "run")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match=r"^no home folder to keep caches in; name a folder in XDG_CACHE_HOME$"):
        flcore.run(lab.config(engine__compile="default"), tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_was_begun_with_a_compiler_is_not_resumed_without(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice works: without compiled steps it is another run, for which another folder is named."""
    config = lab.config(federation__rounds=MANY_STEPS)
    with monkeypatch.context() as patch:
        patch.setattr(running, "refuse_missing_compiler", lambda config: None)
        patch.setattr(running, "run_rounds", lambda *arguments, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            flcore.run(config, tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"engine\.compile=none, which is another run and needs another folder"):
        flcore.run(config, tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.compile is default there"):
        flcore.run(lab.config(federation__rounds=MANY_STEPS, engine__compile="none"), tmp_path)


def test_a_run_of_an_earlier_version_that_measured_is_refused_in_a_line(lab: Any, tmp_path: Path) -> None:
    """Its name is of ``auto``, which says no more what was computed."""
    flcore.run(lab.config(), tmp_path)
    stored = unsealed(read_json(tmp_path / "config.json", ""))
    for part in ("config", "identity"):
        stored[part]["engine"]["compile"] = "auto"
    write_json(tmp_path / "config.json", sealed({**stored, "config_hash": "0" * 64}))
    (tmp_path / "metrics.json").unlink()
    with pytest.raises(ConfigError, match=r"engine\.compile is auto there") as refused:
        flcore.run(lab.config(), tmp_path)
    assert "\n" not in str(refused.value)


def test_graphs_are_for_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"compile = graph"):
        Config.from_mapping({"engine": {"compile": "graph"}})
