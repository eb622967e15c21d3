"""One experiment and many: the same bytes however they are carried out, nothing twice, nothing lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flcore import running
from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, RunError
from flcore.core.host import physical_cores
from flcore.engine.pool import child
from flcore.engine.pool.task import StoppedError
from flcore.experiment.run_folder import RunFiles
from flcore.io.locks import run_lock
from pipelines.execution import bodies, one_run, run_pool
from pipelines.execution.bodies import carry_out_all, comparison, experiment
from pipelines.execution.one_run import PlacedRun
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.execution.progress import Lines, Watcher
from pipelines.execution.run_pool import RunPool
from pipelines.execution.steps import InlineSteps
from pipelines.plan.comparison import comparison_plan, heard_in_part
from pipelines.plan.grid import sweep_plan
from pipelines.plan.params import override, with_variants
from pipelines.runs import memory
from pipelines.runs.cache import ENVIRONMENT_VARIABLE, kind_of
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs
from pipelines.tuning.comparing import compare_methods
from tests.cases import quick
from tests.following import NoFollower
from tests.one_process import ThisProcess

SMALL: dict[str, Any] = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 2},
    "compare": {"methods": ["local", "fedavg"], "seeds": [0, 1], "baseline": "fedavg"},
    "tracking": {"enabled": False},
}
RESULTS = ("model.safetensors", "server.safetensors", "history.jsonl", "metrics.json", "curves.csv")


class Recorded(InlineSteps):
    """Remembers the names of steps outside rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def call(self, name: str, function: Any, *arguments: Any) -> Any:
        self.names.append(name)
        return function(*arguments)

    def together(self, works: Any, at_once: int) -> Any:
        self.returned = super().together(map(self._named, works), at_once)
        return self.returned

    def _named(self, work: Any) -> Any:
        self.names.append(work.name)
        return work


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))


def operation(steps: Any = None, watcher: Any = None) -> tuple[Operation, NoFollower]:
    told = NoFollower()
    return Operation(steps or InlineSteps(), watcher or Watcher(), told), told  # type: ignore[arg-type]


def restarting() -> Operation:
    """One that discards what is damaged or of other code."""
    return replace(operation()[0], restart=True)


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in RESULTS}


def every_result(folder: Path) -> dict[str, str]:
    """Digests of all files of a run but those that say where and how fast it was carried out."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    names = files.keys() - {"config.json", "timing.json", "inputs.json", ".running"}
    assert names >= {*RESULTS}
    return {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in names}


# ---- one run -----------------------------------------------------------------------------------------------------


def test_an_experiment_has_named_steps_and_a_folder_named_for_all_it_depends_on() -> None:
    steps = Recorded()
    how, told = operation(steps)
    outcome = experiment(Config.from_mapping(SMALL), None, how)
    about = json.loads((outcome.directory / "config.json").read_text())
    assert outcome.directory == Path("runs") / f"fedavg-s0-{about['config_hash'][:8]}"
    assert "tracking" not in about["config"]
    assert steps.names == [
        "prepare-data", "partition-data", "aggregate", "evaluate", "aggregate", "evaluate", "evaluate", "report",
    ]  # fmt: skip
    assert told.followed == told.finished == [outcome.directory.name]
    assert sorted(path.name for path in outcome.directory.iterdir()) == [
        "clients", "config.json", "curves.csv", "history.jsonl", "inputs.json", "metrics.json", "model.safetensors",
        "seal.json", "server.safetensors", "timing.json",
    ]  # fmt: skip


def test_the_same_run_elsewhere_is_taken_from_where_it_is() -> None:
    """Its bytes and its log are there at once; the place in which it was trained may then go."""
    first = experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    how, told = operation()
    second = experiment(Config.from_mapping(SMALL), Path("two"), how)
    assert second.was_finished and not first.was_finished
    assert told.followed == [] and told.finished == ["two"]
    assert digests(Path("one")) == digests(Path("two"))
    other, _ = operation()
    assert not experiment(Config.from_mapping({**SMALL, "seed": 1}), Path("three"), other).was_finished


@pytest.mark.slow
def test_a_run_is_trained_again_with_workers_where_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of local training and aggregation, as often as asked; the number of workers changes no byte."""
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    monkeypatch.setenv("PROTOFL_CACHE", "another")
    steps = Recorded()
    config = Config.from_mapping({**SMALL, "engine": {"workers": 2}})
    second = experiment(config, Path("two"), operation(steps)[0])
    assert not second.was_finished and steps.names.count("aggregate") == 2
    assert digests(Path("one")) == digests(Path("two"))
    third = experiment(config, Path("two"), operation()[0])
    assert third.was_finished  # in its own folder it has


@pytest.mark.usefixtures("_in_this_process")
def test_what_is_edited_while_a_command_runs_fails_the_runs_that_have_not_begun(plugin: Path) -> None:
    """Two seeds; the plug-in is edited when the first has ended."""
    raw = {**SMALL, "plugins": [str(plugin)], "compare": {"methods": ["mine"], "seeds": [0, 1], "baseline": "mine"}}
    how, told = operation()
    original = told.finish

    def edit(directory: Path) -> Any:
        plugin.write_text(plugin.read_text() + "# a remark\n")
        return original(directory)

    told.finish = edit  # type: ignore[method-assign]
    runs, failed = carry_out_all(comparison_plan(raw).runs, Path("all"), how)
    assert [run.is_finished for run in runs] == [True, False]
    assert list(failed) == ["mine seed 1"] and "mine.py was edited" in failed["mine seed 1"]


def test_no_worker_begins_with_what_was_edited(plugin: Path) -> None:
    raw = {**SMALL, "plugins": [str(plugin)], "method": {"name": "mine"}}
    inputs = Inputs(Path("prepared"), Path("partition"))
    run = PlacedRun(Config.from_mapping(raw), inputs, Path("run"), "hash", "code", "mine")
    plugin.write_text(plugin.read_text() + "# a remark\n")
    with RunPool(1, Watcher()) as pool:
        error = pool.carry_out(run)
        assert pool.held_idle() == 0  # no process was started
    assert isinstance(error, RunError) and "mine.py was edited" in str(error)


def test_the_process_of_a_run_whose_watcher_failed_trains_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer for the first run while the second waits for it."""
    processes: list[Process] = []

    class Process:
        number, has_ended = 0, False

        def __init__(self, place: int) -> None:
            self.place = place
            processes.append(self)

        def carry_out(self, run: PlacedRun, watcher: Watcher, *_: Any, **__: Any) -> None:
            watcher.round(run.label, 1, None)

        def end(self) -> None:
            self.has_ended = True

    class Unread(Watcher):
        def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
            if label == "first":
                raise SystemExit(1)

    monkeypatch.setattr(run_pool, "_Worker", Process)
    inputs = Inputs(Path("prepared"), Path("partition"))
    first, second = (
        PlacedRun(Config.from_mapping(SMALL), inputs, Path("run"), "hash", "code", label)
        for label in ("first", "second")
    )
    with RunPool(1, Unread()) as pool:
        with pytest.raises(SystemExit):
            pool.carry_out(first)
        assert pool.carry_out(second) is None
        assert [(process.place, process.has_ended) for process in processes] == [(0, True), (0, False)]


def test_two_commands_for_one_comparison_are_not_at_work_at_once() -> None:
    steps = Recorded()
    with run_lock(Path("all")), pytest.raises(RunError, match="all: another process is at work"):
        compare_methods(comparison_plan(SMALL), Path("all"), operation(steps)[0])
    plan = sweep_plan(SMALL, ["local.lr=0.1,0.2"], None)
    with run_lock(Path("grid")), pytest.raises(RunError, match="grid: another process is at work"):
        comparison(plan, Path("grid"), operation(steps)[0], {})
    assert steps.names == []


class TriedTwice(InlineSteps):
    """Tries a step again that the disk refused."""

    def call(self, name: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError:
            return function(*arguments)


@pytest.mark.parametrize("what", ["run", "comparison"])
def test_a_page_that_the_disk_refused_is_asked_for_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower fails at first, and not when there is room again."""
    how, told = operation(TriedTwice())
    failures = iter([OSError(errno.ENOSPC, "No space left on device")])

    def full_at_first() -> dict[str, str]:
        for failure in failures:
            raise failure
        return {"store": "a store"}

    monkeypatch.setattr(told, "wait", full_at_first)
    if what == "run":
        outcome = experiment(Config.from_mapping(SMALL), Path("one"), how)
    else:
        outcome = comparison(comparison_plan(SMALL, ["local"], [0]), Path("one"), how, {"name": ""})
    assert outcome.report is not None and outcome.store == "a store"


@pytest.mark.parametrize("out", ["mine", "."])
def test_a_run_that_is_found_elsewhere_does_not_empty_a_folder_of_somebody_else(
    out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    for name in ("notes.txt", "thesis/ch1.tex"):
        path = Path("mine", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    if out == ".":
        monkeypatch.chdir("mine")
    steps = Recorded()
    with pytest.raises(ConfigError, match=r"holds notes\.txt and thesis, which a run would not"):
        experiment(Config.from_mapping(SMALL), Path(out), operation(steps)[0])
    assert steps.names == []
    assert (tmp_path / "mine/thesis/ch1.tex").read_text() == (tmp_path / "mine/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("out", [".", "link", "noted", "one/again"])
def test_a_run_that_is_found_elsewhere_comes_to_folders_that_cannot_be_replaced(
    out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder one is in, a link, one with notes beside half a run, one inside the folder that would be copied."""
    first = experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    Path("empty").mkdir()
    if out == "link":
        Path("link").symlink_to("empty")
    elif out == "noted":
        experiment(Config.from_mapping(SMALL), Path("noted"), operation()[0])
        Path("noted/notes.txt").write_text("mine")
        Path("noted/metrics.json").unlink()
    elif out == ".":
        monkeypatch.chdir("empty")
    experiment(Config.from_mapping(SMALL), Path(out), operation()[0])
    assert digests(Path(out)) == digests(tmp_path / first.directory)
    assert out != "noted" or Path("noted/notes.txt").read_text() == "mine"
    assert out != "link" or Path("link").is_symlink()


def test_a_comparison_leaves_a_run_alone_and_a_run_a_comparison() -> None:
    steps = Recorded()
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    before = every_result(Path("one"))
    for plan in (comparison_plan(SMALL), sweep_plan(SMALL, ["local.lr=0.1"])):
        with pytest.raises(ConfigError, match=f"^one: holds a run, not a {plan.kind}; choose another --out"):
            comparison(plan, Path("one"), operation(steps)[0], {"name": "x"})
    assert every_result(Path("one")) == before
    Path("many/runs").mkdir(parents=True)
    Path("many/comparison.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^many: holds a comparison, not a run; choose another --out"):
        experiment(Config.from_mapping(SMALL), Path("many"), operation(steps)[0])
    assert steps.names == []


class Listening(Watcher):
    """Remembers what a person should know."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.usefixtures("_in_this_process")
def test_rows_of_one_round_that_hears_a_part_of_the_clients_are_named() -> None:
    """An override takes the place of what `compare.settings` says of a method: all clients in its only round."""
    settings = {"fedprox": {"federation.rounds": 1, "federation.participation": 1.0}}
    raw = {**SMALL, "compare": {"methods": ["fedavg", "local", "fedprox"], "seeds": [0], "settings": settings}}
    halved = override(raw, ["federation.participation=0.5"])
    assert heard_in_part(comparison_plan(raw).runs) is None
    alike = override(halved, ["federation.rounds=1"])
    assert heard_in_part(comparison_plan(alike).runs) is None  # a comparison of single rounds
    heard = Listening()
    comparison(comparison_plan(halved), Path("out"), operation(watcher=heard)[0], {"name": "x"})
    [said] = heard.said
    assert said.startswith("federation.participation = 0.5: fedprox has one round")


@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_a_device_that_is_not_there_is_refused_before_data_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    raw, steps = {**SMALL, "engine": {"device": "cuda"}}, Recorded()
    how, out = operation(steps)[0], Path("one")
    asked = {
        "run": lambda: experiment(Config.from_mapping(raw), out, how),
        "comparison": lambda: comparison(comparison_plan(raw), out, how, {}),
    }
    with pytest.raises(ConfigError, match=r"^engine\.device = cuda: no CUDA device on this machine"):
        asked[kind]()
    assert steps.names == []
    assert not Path("one").exists()


def test_a_folder_of_another_run_is_refused_before_data_are_read() -> None:
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    steps = Recorded()
    with pytest.raises(ConfigError, match="one: holds a run with another configuration"):
        experiment(Config.from_mapping({**SMALL, "local": {"lr": 0.3}}), Path("one"), operation(steps)[0])
    assert steps.names == []


def test_results_of_other_code_stay_until_restart_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of results of two versions of the code would compare the versions; which goes is for people to say.

    Neither training nor the same run elsewhere, by today's code, takes their place.
    """
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    monkeypatch.setattr(one_run, "code_fingerprint", lambda config: "another")
    experiment(Config.from_mapping(SMALL), Path("two"), operation()[0])
    before = every_result(Path("one"))
    with pytest.raises(
        RunError, match=r"^one: was finished by a different version of the code.*; choose .* or --restart"
    ):
        experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    assert every_result(Path("one")) == before
    assert not experiment(Config.from_mapping(SMALL), Path("one"), restarting()).was_finished
    assert every_result(Path("one")) == before


def test_damaged_results_are_refused_until_restart_is_said() -> None:
    """A byte too many in the history. What is whole stays, whatever is said."""
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    expected = every_result(Path("one"))
    with Path("one/history.jsonl").open("ab") as file:
        file.write(b"x")
    before = every_result(Path("one"))
    with pytest.raises(DataError, match=r"^one/history\.jsonl: damaged, .*; run it again with restart=True"):
        experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    assert every_result(Path("one")) == before
    assert not experiment(Config.from_mapping(SMALL), Path("one"), restarting()).was_finished
    assert every_result(Path("one")) == expected
    assert experiment(Config.from_mapping(SMALL), Path("one"), restarting()).was_finished


def test_results_of_which_nothing_says_whose_they_are_stay() -> None:
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    Path("one/config.json").unlink()
    with pytest.raises(ConfigError, match=r"^one: holds results without config\.json"):
        experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    assert Path("one/metrics.json").exists() and Path("one/history.jsonl").exists()


def test_analyses_that_are_asked_for_later_are_done_and_shown() -> None:
    experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    Path("one/report.html").write_text("")
    asked = {**SMALL, "evaluation": {"analyses": ["class_heatmap"]}}
    how, told = operation()
    experiment(Config.from_mapping(asked), Path("one"), how)
    assert told.finished == ["one"]
    assert json.loads(Path("one/analyses/index.json").read_text())["analyses"].keys() == {"class_heatmap"}


# ---- many runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what becomes of runs, wherever they are carried out: processes take their time."""
    monkeypatch.setattr(bodies, "RunPool", ThisProcess)


def compared(
    steps: Any = None, out: str = "all", raw: Mapping[str, Any] = SMALL, *, restart: bool = False
) -> tuple[Outcome, NoFollower]:
    how, told = operation(steps)
    return comparison(comparison_plan(raw), Path(out), replace(how, restart=restart), {"name": out}), told


@pytest.mark.slow
def test_runs_side_by_side_give_the_bytes_of_each_alone() -> None:
    steps = Recorded()
    _, told = compared(steps)
    runs = told.compared[0]["runs"]
    assert [run.name.rpartition("-")[0] for run in runs] == ["local-s0", "local-s1", "fedavg-s0", "fedavg-s1"]
    assert sorted(told.followed) == sorted(told.finished) == sorted(run.name for run in runs)
    assert sorted(steps.names) == sorted(
        ["prepare-data"] + ["partition-data"] * 2 + ["local-s0", "local-s1", "fedavg-s0", "fedavg-s1"] + ["compare"]
    )
    alone = Path("alone")
    os.environ[ENVIRONMENT_VARIABLE] = str(alone / "cache")  # restored with the fixture
    for method in ("local", "fedavg"):
        raw = {**SMALL, "method": {"name": method}, "seed": 1}
        experiment(Config.from_mapping(raw), alone / method, operation()[0])
        (beside,) = [run for run in runs if run.name.startswith(f"{method}-s1")]
        assert every_result(alone / method) == every_result(beside)


@pytest.mark.usefixtures("_in_this_process")
def test_what_has_finished_is_not_trained_again_and_a_new_seed_is() -> None:
    compared()
    more = {**SMALL, "compare": {**SMALL["compare"], "seeds": [0, 1, 2]}}
    _, told = compared(raw=more)
    assert sorted(name.rpartition("-")[0] for name in told.followed) == ["fedavg-s2", "local-s2"]


@pytest.mark.usefixtures("_in_this_process")
def test_a_run_that_fails_is_named_and_the_others_go_on() -> None:
    """A learning rate at which a model overflows in the first steps."""
    raw = {**SMALL, "compare": {**SMALL["compare"], "settings": {"fedavg": {"local.lr": 1e30}}}}
    steps = Recorded()
    outcome, told = compared(steps, raw=raw)
    assert outcome.failed is not None
    assert set(outcome.failed) == {"fedavg seed 0", "fedavg seed 1"}
    assert sorted(map(str, filter(None, steps.returned))) == sorted(outcome.failed.values())  # whose tasks fail with it
    assert all("round 1" in reason for reason in outcome.failed.values())
    assert {name.rpartition("-")[0] for name in told.stopped} == {"fedavg-s0", "fedavg-s1"}
    assert {name.rpartition("-")[0] for name in told.finished} == {"local-s0", "local-s1"}
    assert set(told.compared[0]["facts"]["failed"]) == set(outcome.failed)
    with pytest.raises(RunError, match=r"all 2 runs failed; the first of them, \w+ seed \d.*: round 1"):
        compared(out="bad", raw={**raw, "compare": {**raw["compare"], "methods": ["fedavg"]}})


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize(("refusals", "delays"), [(2, (0.0, 0.25)), (3, (0.0, 0.25)), (1, ())])
def test_a_run_that_the_machine_stops_is_tried_again_as_often_as_the_steps_say(
    refusals: int, delays: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two delays are three tries: two refusals are outlived, three are not. Meanwhile nobody is told that it ended."""

    class Patient(InlineSteps):
        pass

    class Heard(Watcher):
        said: ClassVar[list[str]] = []

        def say(self, text: str) -> None:
            self.said.append(text)

    train, left = running.train, list(range(refusals))

    def full(*arguments: Any, **keywords: Any) -> Any:
        if left:
            left.pop()
            raise OSError(errno.ENOSPC, "No space left on device", "state.json")
        return train(*arguments, **keywords)

    monkeypatch.setattr(running, "train", full)
    Patient.delays = delays
    how, told = operation(Patient(), Heard())
    runs, failed = carry_out_all(comparison_plan(SMALL, ["fedavg"], [0]).runs, Path("all"), how)
    reason = "state.json: No space left on device; mend that, and repeat the command to resume"
    again = [f"fedavg seed 0: {reason}; tried again in {delay:g} s" for delay in delays]
    is_outlived = refusals == len(delays)
    assert Heard.said == again + [f"fedavg seed 0 failed: {reason}"] * (not is_outlived)
    assert failed == ({} if is_outlived else {"fedavg seed 0": reason})
    assert told.followed == [runs[0].directory.name]
    assert (told.finished, list(told.stopped)) == ((told.followed, []) if is_outlived else ([], told.followed))


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize("name", quick(["history.jsonl", "config.json", "metrics.json", "seal.json"], 2))
def test_a_damaged_run_is_one_failure_beside_the_others_until_restart_is_said(name: str) -> None:
    """Of two finished runs one has a byte too many and the other is gone: this one is trained, that one named.

    Its files stay as they are, and so does what the store has of it. Where all are damaged, nothing is compared.
    """
    raw = {**SMALL, "compare": {**SMALL["compare"], "seeds": [0]}}
    runs, _ = carry_out_all(comparison_plan(raw).runs, Path("all/runs"), operation()[0])
    damaged, gone = (run.directory for run in runs)
    expected = {folder: every_result(folder) for folder in (damaged, gone)}
    with (damaged / name).open("ab") as file:
        file.write(b"x")
    shutil.rmtree(gone)
    before = every_result(damaged)
    outcome, told = compared(raw=raw)
    assert outcome.failed is not None and list(outcome.failed) == ["local seed 0"]
    cure = "delete it and start the run again" if name == "config.json" else "run it again with --restart.*"
    assert re.fullmatch(rf"{damaged / name}: .*; (no run was .*: )?{cure}", outcome.failed["local seed 0"])
    assert (told.followed, told.finished, told.stopped) == ([gone.name], [gone.name], {})
    assert every_result(gone) == expected[gone] and every_result(damaged) == before
    assert told.compared[0]["facts"]["failed"] == outcome.failed
    assert [RunFolder(folder).is_whole for folder in told.compared[0]["runs"]] == [False, True]
    with pytest.raises(RunError, match=rf"all 1 runs failed; .*{name}"):
        comparison(comparison_plan(raw, ["local"]), Path("all"), operation()[0], {})

    outcome, told = compared(raw=raw, restart=True)
    assert (outcome.failed, told.followed) == ({}, [damaged.name])
    assert every_result(damaged) == expected[damaged]
    # What is whole is not thrown away.
    assert compared(raw=raw, restart=True)[1].followed == []


class KillingWatcher(Watcher):
    """Kills a process as soon as a run says that it has ended a round, once."""

    def __init__(self) -> None:
        self.killed = False

    def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
        if not self.killed:
            self.killed = True
            child.alive()[0].kill()


def test_a_process_that_is_killed_costs_time_and_no_byte() -> None:
    raw = {**SMALL, "federation": {"rounds": 6}, "compare": {**SMALL["compare"], "methods": ["fedavg"]}}
    watcher = KillingWatcher()
    how, _ = operation(watcher=watcher)
    runs, failed = carry_out_all(comparison_plan(raw).runs, Path("killed"), how)
    assert watcher.killed and not failed
    os.environ[ENVIRONMENT_VARIABLE] = str(Path("fresh").absolute())
    for run in runs:
        experiment(run.config, Path("straight") / str(run.config.seed), operation()[0])
        assert digests(run.directory) == digests(Path("straight") / str(run.config.seed))


@pytest.mark.slow
def test_runs_end_with_whoever_asked_for_them(tmp_path: Path) -> None:
    """Ctrl-C: nothing is left running nor told as ended, and the same goes on where it was."""
    raw = {**SMALL, "federation": {"rounds": 100}, "compare": {**SMALL["compare"], "methods": ["fedavg"]}}
    begun, ended = threading.Event(), []

    class Interrupting(InlineSteps):
        def together(self, works: Any, at_once: int) -> Any:
            # With one core the second is handed out when the first has ended.
            for work in islice(works, min(2, physical_cores())):
                threading.Thread(target=work.function, daemon=True).start()
            assert begun.wait(60)
            raise KeyboardInterrupt

    class Waiting(Watcher):
        def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
            if number == 3:
                begun.set()

        def run_ended(self, label: str) -> None:
            ended.append(label)

    how, _ = operation(Interrupting(), Waiting())
    with pytest.raises(KeyboardInterrupt):
        carry_out_all(comparison_plan(raw).runs, Path("stopped"), how)
    folders = sorted(Path("stopped").iterdir())
    assert folders and any((folder / "checkpoint").exists() for folder in folders)
    assert not ended
    before = [_newest(folder) for folder in folders]
    time.sleep(0.5)
    assert [_newest(folder) for folder in folders] == before


@pytest.mark.slow
def test_a_closed_pool_starts_no_process_for_one_that_has_ended() -> None:
    """All are told to end at the same moment: what is begun in place of another would be waited for."""
    raw = {**SMALL, "federation": {"rounds": 10_000}}
    how, _ = operation()
    [planned] = comparison_plan(raw, ["fedavg"], [0]).runs
    [inputs] = bodies.inputs_of_runs([planned], how)
    run = one_run.placed(planned.config, inputs, Path("all"))
    begun, raised = threading.Event(), []

    class Waiting(Watcher):
        def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
            begun.set()

    def work() -> None:
        with pytest.raises(StoppedError) as error:
            pool.carry_out(run)
        raised.append(error)

    pool = run_pool.RunPool(1, Waiting())
    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    pool.close()
    thread.join(20)
    assert raised and not child.alive()
    with pytest.raises(StoppedError):
        pool.wait(600)


def _newest(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.rglob("*"))


def test_what_a_run_took_is_remembered_and_less_than_was_estimated() -> None:
    """A process with torch has taken more than 150 MiB before; another seed's is known by it."""
    before = memory.peak()
    outcome = experiment(Config.from_mapping(SMALL), None, operation()[0])
    other = Config.from_mapping({**SMALL, "seed": 7})
    known = bodies.Cache.here().cost(kind_of(other))
    assert known.seconds is not None and known.peak is not None
    assert 150 * 2**20 < known.peak < memory.estimate(other, RunFolder(outcome.directory).inputs, before)


def test_runs_of_a_comparison_share_data_and_partition() -> None:
    raw = {**SMALL, "compare": {**SMALL["compare"], "settings": {"local": {"partition.alpha": 5.0}}}}
    with pytest.raises(ConfigError, match=r"compare\.settings\.local: partition must be the same for all methods"):
        comparison_plan(raw, ["fedavg", "local"])


def test_nothing_of_a_run_folder_is_a_copy_of_data() -> None:
    outcome = experiment(Config.from_mapping(SMALL), Path("one"), operation()[0])
    assert not RunFiles(outcome.directory).prepared.exists()
    assert not RunFiles(outcome.directory).partition.exists()


def test_every_method_and_variant_is_run_with_every_seed_on_every_division() -> None:
    raw = {
        "partition": {"name": "iid"},
        "compare": {"methods": ["fedavg"], "seeds": [0, 1], "partition_seeds": [5, 6]},
    }
    planned = comparison_plan(with_variants(raw, ["slow=fedavg,local.lr=0.001"])).runs
    assert [(run.name, run.draw, run.config.seed, run.config.partition_seed, run.label) for run in planned] == [
        ("fedavg", 5, 0, 5, "division 5"),
        ("fedavg", 5, 1, 5, "division 5"),
        ("fedavg", 6, 0, 6, "division 6"),
        ("fedavg", 6, 1, 6, "division 6"),
        ("slow", 5, 0, 5, "slow, division 5"),
        ("slow", 5, 1, 5, "slow, division 5"),
        ("slow", 6, 0, 6, "slow, division 6"),
        ("slow", 6, 1, 6, "slow, division 6"),
    ]
    assert {run.config.local.lr for run in planned if run.row} == {0.001}
    # One that is named among the methods stands where it is named.
    named = comparison_plan(with_variants(raw, ["slow=fedavg,local.lr=0.001"]), ["slow", "local"], [0]).runs
    assert [run.name for run in named] == ["slow", "slow", "local", "local"]
    other = with_variants(raw, ["few=fedavg,partition.num_clients=3"])
    with pytest.raises(ConfigError, match=r"compare\.variants\.few: partition must be the same"):
        comparison_plan(other)


def test_one_run_and_one_round_are_told_in_the_singular() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    lines.runs(1, 0)
    lines.run("fedavg seed 0", 1, 0)
    lines.run("fedavg seed 1", 2, 1)
    assert said == ["1 run", "fedavg seed 0: 1 round", "fedavg seed 1: 2 rounds, 1 done before"]
