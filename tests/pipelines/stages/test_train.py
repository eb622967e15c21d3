"""The stage *train* trains what is new, and takes nothing for a result that is another run's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, RunError
from flcore.experiment.run_folder import read_run_config, stored_config
from flcore.io.locks import run_lock
from pipelines.execution import bodies
from pipelines.execution.operation import Operation
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import InlineSteps
from pipelines.plan.comparison import comparison_plan
from pipelines.runs.cache import ENVIRONMENT_VARIABLE, Cache
from pipelines.runs.folder import RunFolder
from pipelines.stages import commands
from pipelines.stages.partition import partition
from pipelines.stages.prepare import prepare
from pipelines.stages.train import train
from tests.following import NoFollower
from tests.one_process import ThisProcess

SMALL: dict[str, Any] = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
    "compare": {"methods": ["local", "fedavg"], "seeds": [0]},
    "tracking": {"enabled": False},
}
NOT_BY_DVC = ("config.json", "timing.json", "inputs.json")


def configs(raw: Mapping[str, Any]) -> list[Config]:
    return [run.config for run in comparison_plan(raw).runs]


def trained(artifacts: Path, raw: Mapping[str, Any] = SMALL) -> list[str]:
    """Carry out the stage; returns which runs it trained."""
    follower = NoFollower()
    operation = Operation(InlineSteps(), Watcher(), follower)  # type: ignore[arg-type]
    asked: Sequence[Config] = configs(raw)
    train(asked, artifacts / "prepared", artifacts / "partitions", artifacts / "runs", operation)
    return sorted(follower.followed)


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    """Runs are trained where the stage is: a pool's processes are not what is tested here, and take their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "RunPool", ThisProcess)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the three first stages leave for one and for two rounds: ``1/``, ``2/``."""
    home = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, str(home / "cache"))
        config = configs(SMALL)[0]
        for rounds in (1, 2):
            artifacts = home / str(rounds)
            prepare(config, artifacts / "prepared")
            partition(config, [0], artifacts / "prepared", artifacts / "partitions")
            raw = {**SMALL, "federation": {"rounds": rounds}}
            assert trained(artifacts, raw) == ["fedavg-s0", "local-s0"]
    return home


@pytest.fixture
def artifacts(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what was left for one round, on a machine whose cache is empty."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return Path(shutil.copytree(finished / "1", tmp_path / "artifacts"))


def rounds_of(artifacts: Path, run: str) -> tuple[int, int]:
    """As its results have them, and as it is described."""
    folder = artifacts / "runs" / run
    described = json.loads((folder / "config.json").read_text())["config"]["federation"]["rounds"]
    return len((folder / "history.jsonl").read_text().splitlines()), described


def test_what_has_finished_is_not_trained_again_and_folders_of_others_go(artifacts: Path) -> None:
    (artifacts / "runs" / "fedprox-s7" / "partition").mkdir(parents=True)
    (artifacts / "runs" / "notes.txt").write_text("")
    before = (artifacts / "runs.json").read_bytes()
    assert trained(artifacts) == []
    assert sorted(path.name for path in (artifacts / "runs").iterdir()) == ["fedavg-s0", "local-s0"]
    assert (artifacts / "runs.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "gone", "before"),
    [
        ("partition", "prepared/meta.json", "prepare"),
        ("train", "prepared/meta.json", "prepare"),
        ("train", "partitions/seed-0/manifest.json", "partition"),
        ("compare", "runs/fedavg-s0/metrics.json", "train"),
    ],
)
def test_the_stage_that_comes_first_is_named(artifacts: Path, name: str, gone: str, before: str) -> None:
    (artifacts / gone).unlink()
    with pytest.raises(DataError) as refused:
        commands.stage(name, SMALL, artifacts, restart=False)
    message = f"{artifacts / gone}: not there; carry out protofl stage {before} --out {artifacts} first"
    assert str(refused.value) == message


@pytest.mark.parametrize(("key", "value", "made"), [("validation", 0.2, "0.0"), ("num_clients", 4, "3")])
def test_a_partition_that_was_made_with_other_parameters_is_refused(
    artifacts: Path, key: str, value: float, made: str
) -> None:
    """As where the stage before was skipped, although a default has changed: config.json would say what is not so."""
    before = (artifacts / "runs.json").read_bytes()
    with pytest.raises(ConfigError, match=rf"partition\.{key} = {value}: .*seed-0 was made with {made}; carry out"):
        trained(artifacts, {**SMALL, "partition": {**SMALL["partition"], key: value}})
    assert (artifacts / "runs.json").read_bytes() == before


def test_results_that_came_by_dvc_are_known_and_described(artifacts: Path) -> None:
    """The ledger says which they are; what names the other machine has stayed there."""
    for run in ("local-s0", "fedavg-s0"):
        for name in NOT_BY_DVC:
            (artifacts / "runs" / run / name).unlink()
    assert trained(artifacts) == []
    assert rounds_of(artifacts, "fedavg-s0") == (1, 1)
    assert RunFolder(artifacts / "runs" / "fedavg-s0").inputs.prepared == artifacts / "prepared"


@pytest.mark.slow
def test_results_that_came_by_dvc_are_compared_as_those_that_were_trained_here(artifacts: Path) -> None:
    """With another baseline, DVC runs only the last stage, whose page tells how the runs were configured."""
    here = Path(shutil.copytree(artifacts, artifacts.parent / "here" / artifacts.name))
    for run in ("local-s0", "fedavg-s0"):
        for name in NOT_BY_DVC:
            (artifacts / "runs" / run / name).unlink()
    for folder in (artifacts, here):
        commands.stage("compare", {**SMALL, "compare": SMALL["compare"] | {"baseline": "local"}}, folder, restart=False)
    pages = [(folder / "comparison" / "report.html").read_bytes() for folder in (artifacts, here)]
    assert pages[0] == pages[1] and b"partition.alpha" in pages[0]
    assert rounds_of(artifacts, "fedavg-s0") == (1, 1)


def test_results_that_came_by_dvc_are_described_with_copies_of_plug_ins(artifacts: Path, plugin: Path) -> None:
    """A run names plug-ins of its own folder alone, which may be moved; it was begun without this one."""
    run = artifacts / "runs" / "fedavg-s0"
    for name in NOT_BY_DVC:
        (run / name).unlink()
    assert trained(artifacts, {**SMALL, "plugins": [str(plugin)]}) == []
    assert (run / stored_config(run).plugins[0].path).read_bytes() == plugin.read_bytes()
    assert read_run_config(run)["config"]["plugins"][0]["path"] == "plugins/mine.py"


def test_results_of_another_revision_are_not_taken_for_the_run_that_was_here(artifacts: Path, finished: Path) -> None:
    """DVC has put results of two rounds and their ledger below side files of a run of one round."""
    for run in ("local-s0", "fedavg-s0"):
        for path in (finished / "2" / "runs" / run).iterdir():
            if path.is_file() and path.name not in NOT_BY_DVC:
                shutil.copyfile(path, artifacts / "runs" / run / path.name)
    shutil.copyfile(finished / "2" / "runs.json", artifacts / "runs.json")
    other = Path(shutil.copytree(artifacts, artifacts.parent / "other"))
    assert trained(artifacts) == ["fedavg-s0", "local-s0"]
    assert rounds_of(artifacts, "fedavg-s0") == (1, 1)
    # Asked for what lies there, they are described anew, without a page about the other run.
    (other / "runs" / "fedavg-s0" / "report.html").write_text("of one round")
    assert trained(other, {**SMALL, "federation": {"rounds": 2}}) == []
    assert rounds_of(other, "fedavg-s0") == (2, 2)
    assert not (other / "runs" / "fedavg-s0" / "report.html").exists()


def test_the_cache_does_not_give_away_results_that_another_revision_replaced(artifacts: Path, finished: Path) -> None:
    run = artifacts / "runs" / "fedavg-s0"
    about = json.loads((run / "config.json").read_text())
    cache = Cache.here()
    cache.note_run(run, configs(SMALL)[1])
    assert cache.finished_run(about["config_hash"], about["code"]) == run
    shutil.copyfile(finished / "2" / "runs" / "fedavg-s0" / "metrics.json", run / "metrics.json")
    assert cache.finished_run(about["config_hash"], about["code"]) is None


def test_without_the_ledger_side_files_tell(artifacts: Path) -> None:
    """As after a stop in the middle: what had finished stays, what is of other code or half there is trained."""
    (artifacts / "runs.json").unlink()
    assert trained(artifacts) == []
    (artifacts / "runs.json").write_text("{}")
    (artifacts / "runs" / "local-s0" / "config.json").unlink()
    about = artifacts / "runs" / "fedavg-s0" / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"code": "older"}))
    assert trained(artifacts) == ["fedavg-s0", "local-s0"]


def test_what_an_older_layout_left_is_cleared_away(artifacts: Path) -> None:
    run = artifacts / "runs" / "fedavg-s0"
    shutil.rmtree(run)
    (run / "partition").mkdir(parents=True)
    (run / "config.json").write_text('{"rounds": 3}')
    (run / "history.jsonl").write_text("{}\n")
    (artifacts / "runs.json").write_text('{"fedavg-s0": "768f4b02"}')
    assert trained(artifacts) == ["fedavg-s0"]
    assert not (run / "partition").exists()


def test_a_run_that_another_process_has_just_begun_is_left_to_it(artifacts: Path) -> None:
    """It holds the lock, and nothing says yet whose the folder is: two would train into one checkpoint."""
    run = artifacts / "runs" / "fedavg-s0"
    shutil.rmtree(run)
    (artifacts / "runs.json").unlink()
    with run_lock(run):
        lock = (run / ".running").stat().st_ino
        with pytest.raises(RunError, match="fedavg-s0: another process is at work on this run"):
            trained(artifacts)
        assert (run / ".running").stat().st_ino == lock
    assert trained(artifacts) == ["fedavg-s0"]


def test_a_damaged_ledger_is_named_with_its_cure(artifacts: Path) -> None:
    (artifacts / "runs.json").write_text("{")
    with pytest.raises(DataError, match=r"runs\.json: damaged, .*; delete it, and the stage trains again"):
        trained(artifacts)
