"""Three lines of Python: a configuration to a finished folder, with the packages that flcore needs alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import flcore
from flcore import run, running
from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, RunError
from flcore.data.partition import Partition
from flcore.engine.rounds import Observers
from flcore.experiment.inputs import divide, prepare_data
from flcore.experiment.run_folder import RunFiles, stored_config
from flcore.io.locks import run_lock
from flcore.methods.fedavg import FedAvg
from tests.cases import quick

ROOT = Path(flcore.__file__).parents[1]
RAW: dict[str, Any] = {
    "data": {"size": 16, "limit_per_class": 20},
    "partition": {"num_clients": 3, "min_size": 5},
    "method": {"name": "fedproto"},
    "federation": {"rounds": 2},
    "local": {"lr": 0.05},
}
RESULTS = ["model.safetensors", "server.safetensors", "history.jsonl", "metrics.json", "curves.csv"]


def results(folder: Path) -> dict[str, bytes]:
    """What must be the same to the byte."""
    names = [*RESULTS, *(f"clients/{path.name}" for path in sorted((folder / "clients").iterdir()))]
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(RAW, folder)
    return folder


def test_it_returns_the_metrics_and_leaves_a_whole_folder(finished: Path) -> None:
    metrics = run(RAW, finished)
    assert (metrics["method"], metrics["rounds"], metrics["num_clients"]) == ("fedproto", 2, 3)
    assert metrics == json.loads((finished / "metrics.json").read_text())
    files = {path.name for path in finished.iterdir()}
    folders = {"clients", "prepared", "partition"}
    assert files == {*RESULTS, *folders, "config.json", "seal.json", "timing.json", "prepared.request.json"}
    # A short run: the rule answers neither stacks, nor compiled steps, nor workers.
    by_rule = {"engine": {"stack": False, "compile": "none", "workers": 0}}
    assert stored_config(finished) == Config.from_mapping({**RAW, **by_rule})
    assert {"python", "versions", "code_hash"} <= json.loads((finished / "config.json").read_text())[
        "environment"
    ].keys()


def test_files_of_a_run_whose_loss_overflows_are_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits ±3e38 are finite and their difference is not: the loss of a wrong answer is infinite.

    The record says so; the files have no ``Infinity``, which readers other than Python's refuse; and files of earlier
    versions, which have it, are read still.
    """

    def overflowing(self: FedAvg, model: Any, images: torch.Tensor, *_: Any) -> torch.Tensor:
        logits = torch.full((len(images), 10), -3e38)
        logits[:, 0] = 3e38
        return logits

    heard = []
    monkeypatch.setattr(FedAvg, "predict", overflowing)
    raw = {**RAW, "method": {"name": "fedavg"}}
    metrics = run(raw, tmp_path / "run", observers=Observers(lambda _, record: heard.append(record)))

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    found = {}
    for path in (tmp_path / "run").rglob("*.json*"):
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        found[path.name] = [json.loads(line, parse_constant=refuse) for line in lines]
    assert found["metrics.json"] == [metrics] and found["history.jsonl"] == heard
    for record in (metrics, *heard):
        assert record["loss_global"] is None and record["not_finite"] == {"loss_global": "inf"}
        assert 0 < record["top1_global"] < 1
    assert "inf" not in (tmp_path / "run" / "curves.csv").read_text()


@pytest.mark.slow
def test_with_the_packages_of_the_library_alone_it_gives_the_bytes_of_the_command(
    finished: Path, tmp_path: Path
) -> None:
    """The command's stages and `run`, each in a process of its own, the latter without anything that operates runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"torch", "torchvision", "numpy", "scikit-learn", "scipy", "safetensors", "pydantic"}
    needed |= {"pillow", "threadpoolctl"}
    extra = [entry for entries in project["optional-dependencies"].values() for entry in entries]
    names = {entry.split(">")[0].split("=")[0].split("[")[0] for entry in [*project["dependencies"], *extra]} - needed
    banned = sorted({"pyyaml": "yaml", "dp-accounting": "dp_accounting"}.get(name, name) for name in names)
    assert {"prefect", "mlflow", "optuna", "yaml", "matplotlib", "ray"} <= set(banned)
    code = f"""
import json, sys
class Banned:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {[*banned, "pipelines"]!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Banned())
from flcore import run
print(json.dumps(run(json.loads(sys.argv[1]), "alone"), sort_keys=True))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False, "env": environment}
    alone = subprocess.run([sys.executable, "-c", code, json.dumps(RAW)], **options)  # type: ignore[call-overload]
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout) == json.loads((tmp_path / "alone" / "metrics.json").read_text())
    (tmp_path / "params.yaml").write_text(json.dumps(RAW))
    one_run = ["--set", "compare.methods=[fedproto]", "--set", "compare.seeds=[0]"]
    words = [["prepare"], ["partition"], ["train", *one_run]]
    steps = "; ".join(f"assert main(['stage', *{stage}, '--out', 'staged']) == 0" for stage in words)
    staged = subprocess.run([sys.executable, "-c", f"from pipelines.cli.app import main; {steps}"], **options)  # type: ignore[call-overload]
    assert staged.returncode == 0, staged.stderr
    assert results(tmp_path / "alone") == results(tmp_path / "staged/runs/fedproto-s0") == results(finished)
    for own, shared in (("prepared", "prepared"), ("partition", "partitions/seed-0")):
        for path in (tmp_path / "alone" / own).iterdir():
            assert path.read_bytes() == (tmp_path / "staged" / shared / path.name).read_bytes()


@pytest.mark.slow
def test_a_script_asks_for_workers_as_it_is(finished: Path, tmp_path: Path) -> None:
    """Without a guard around the call, and with a name beside it that workers must not import."""
    script = tmp_path / "script.py"
    script.write_text("import json, sys\nfrom flcore import run\nprint('once')\nrun(json.loads(sys.argv[1]), 'run')\n")
    words = [sys.executable, str(script), json.dumps({**RAW, "engine": {**RAW.get("engine", {}), "workers": 2}})]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("once\n", 0), done.stderr
    assert results(tmp_path / "run") == results(finished)


def test_a_configuration_may_be_a_file_or_another_runs(finished: Path, tmp_path: Path) -> None:
    again = run(finished / "config.json", tmp_path / "again")
    assert results(tmp_path / "again") == results(finished)
    (tmp_path / "own.json").write_text(json.dumps(RAW))
    assert run(str(tmp_path / "own.json"), finished) == run(Config.from_mapping(RAW), finished) == again


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "given.json: cannot be read (No such file or directory)"),
        (
            "seed: 1",
            "given.json: not valid JSON (Expecting value: line 1 column 1 (char 0)); give a mapping",
        ),
        ("[1]", "given.json: expected an object with sections such as 'data' and 'method'"),
        ('{"seeds": 1}', "seeds: unknown key; did you mean 'seed'?"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "given.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "given.json", tmp_path / "run")
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)
    assert not (tmp_path / "run").exists()


def test_every_file_of_a_finished_run_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own prepared data and partition too: once it has finished, they would not be made again."""
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    run(RAW, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".running"]
    assert [path.name for path in files if path.stat().st_ino not in synced] == []


def test_data_and_partition_may_be_given(finished: Path, tmp_path: Path) -> None:
    config = Config.from_mapping(RAW)
    prepare_data(config, tmp_path / "data")
    divide(config, tmp_path / "data", tmp_path / "division")
    run(RAW, tmp_path / "run", prepared=tmp_path / "data", partition=tmp_path / "division")
    assert results(tmp_path / "run") == results(finished)
    assert not (tmp_path / "run" / "prepared").exists()
    assert not (tmp_path / "run" / "partition").exists()
    with pytest.raises(DataError, match="nowhere"):
        run(RAW, tmp_path / "other", prepared=tmp_path / "nowhere")


def test_a_finished_folder_of_another_partition_or_other_data_is_refused(finished: Path, tmp_path: Path) -> None:
    """What was handed in to no avail must not look as if it had been used; the run's own is told by its fingerprint."""
    own = {"prepared": finished / "prepared", "partition": finished / "partition"}
    assert run(RAW, finished, **own) == run(RAW, finished)
    other = Config.from_mapping({**RAW, "data": {"size": 16, "limit_per_class": 21}})
    prepare_data(other, tmp_path / "data")
    divide(Config.from_mapping({**RAW, "seed": 1}), finished / "prepared", tmp_path / "division")
    for wrong in ({"partition": tmp_path / "division"}, {"prepared": tmp_path / "data"}):
        with pytest.raises(ConfigError, match=r"holds a run on other data; choose another folder, or delete that one"):
            run(RAW, finished, **{**own, **wrong})


@pytest.mark.parametrize("inside", ["checkpoint/b", "prepared", "figures/deep/er"])
def test_a_folder_that_a_run_may_remove_is_no_place_for_another(finished: Path, inside: str) -> None:
    with pytest.raises(ConfigError, match="may remove"):
        run({**RAW, "seed": 1}, finished / inside)
    assert not (finished / inside).exists() or inside == "prepared"
    running.refuse_inside_a_run(finished / "notes" / "checkpoint")


def test_another_configuration_in_the_folder_is_refused(finished: Path) -> None:
    before = results(finished)
    with pytest.raises(ConfigError, match=r"with another configuration or other files \(seed is 0 there\);"):
        run({**RAW, "seed": 1}, finished)
    assert results(finished) == before


def test_a_folder_at_work_is_refused(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"), pytest.raises(RunError, match="another process is at work"):
        run(RAW, tmp_path / "run")


def test_a_run_has_its_folder_to_itself_from_its_first_file_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes meanwhile is refused: the same run, started a second time, would remove the data of the first."""
    folder, came = tmp_path / "run", list[str]()

    def come_meanwhile(name: str) -> None:
        step = getattr(running, name)

        def stepping(*arguments: Any, **keywords: Any) -> Any:
            with pytest.raises(RunError, match="another process is at work"), run_lock(folder):
                pass
            came.append(name)
            return step(*arguments, **keywords)

        monkeypatch.setattr(running, name, stepping)

    steps = ["prepare_data", "divide", "train", "evaluate"]
    for name in steps:
        come_meanwhile(name)
    assert run(RAW, folder)["rounds"] == 2
    assert came == steps
    assert not (folder / ".running").exists()


def test_observers_are_told_and_threads_are_left_as_they_were(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(RAW, tmp_path, observers=Observers(on_round=lambda n, record: seen.append((n, torch.get_num_threads()))))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [(1, 1), (2, 1)]


def test_on_threads_of_one_process_runs_wait_for_each_other(tmp_path: Path, finished: Path) -> None:
    """Else each would initialise its model with numbers that the other draws. Who comes third finds what is there."""
    seen: list[str] = []
    begin = threading.Barrier(3)

    def carry_out(name: str) -> None:
        begin.wait()
        run(RAW, tmp_path / name, observers=Observers(on_round=lambda n, record: seen.append(name)))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(carry_out, ["a", "b", "a"]))
    assert seen in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    assert results(tmp_path / "a") == results(tmp_path / "b") == results(finished)


def test_a_checkpoint_that_cannot_be_used_is_kept_until_restart_is_said(tmp_path: Path, finished: Path) -> None:
    class StopError(Exception):
        pass

    def stop(number: int, record: object) -> None:
        raise StopError

    with pytest.raises(StopError):
        run(RAW, tmp_path, observers=Observers(on_round=stop))
    for path in RunFiles(tmp_path).checkpoint.glob("*.json"):  # the newest state and the last safe one
        path.write_bytes(b"{")
    with pytest.raises((DataError, RunError), match="pass restart=True"):
        run(RAW, tmp_path)
    assert RunFiles(tmp_path).checkpoint.exists()
    run(RAW, tmp_path, restart=True)
    assert results(tmp_path) == results(finished)


def test_results_of_other_code_are_refused_until_restart_is_said(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    began = (tmp_path / "run" / "timing.json").read_text()
    monkeypatch.setattr(running, "code_fingerprint", lambda config: "edited since")
    with pytest.raises(RunError, match=r"^\S+: was finished by a different version of the code; .*restart=True"):
        run(RAW, tmp_path / "run")
    run(RAW, tmp_path / "run", restart=True)
    assert results(tmp_path / "run") == results(finished)
    assert (tmp_path / "run" / "timing.json").read_text() != began  # trained again


def test_a_division_that_is_there_is_left_alone(tmp_path: Path, finished: Path) -> None:
    """The same run started twice: the second must not take the first one's partition away for a moment."""
    shutil.copytree(finished / "partition", tmp_path / "partition")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "partition").iterdir()}
    made = divide(Config.from_mapping(RAW), finished / "prepared", tmp_path / "partition")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "partition").iterdir()} == before
    other = divide(Config.from_mapping({**RAW, "seed": 1}), finished / "prepared", tmp_path / "partition")
    assert other.fingerprint != made.fingerprint == Partition.load(finished / "partition").fingerprint
    assert Partition.load(tmp_path / "partition").fingerprint == other.fingerprint


@pytest.mark.parametrize("removed", quick(range(5), [2]))
def test_killed_while_results_are_forgotten_it_still_goes_on(
    removed: int, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has gone by then, the same call trains or evaluates to the same bytes."""
    shutil.copytree(finished, tmp_path / "run")
    calls = iter(range(100))

    def remove(path: Path, **options: Any) -> None:
        if next(calls) == removed:
            raise KeyboardInterrupt
        path.unlink(**options)

    with monkeypatch.context() as patch:
        patch.setattr(running, "code_fingerprint", lambda config: "edited since")
        patch.setattr("flcore.experiment.run_folder.disk.remove", remove)
        with pytest.raises(KeyboardInterrupt):
            run(RAW, tmp_path / "run", restart=True)
    run(RAW, tmp_path / "run", restart=True)
    assert results(tmp_path / "run") == results(finished)


@pytest.mark.parametrize("name", quick(["history.jsonl", "metrics.json", "seal.json"], 1))
def test_damaged_results_are_refused_until_restart_is_said(name: str, tmp_path: Path, finished: Path) -> None:
    """A byte too many."""
    shutil.copytree(finished, tmp_path / "run")
    with (tmp_path / "run" / name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=rf"^\S+{name}: .*; run it again with restart=True"):
        run(RAW, tmp_path / "run")
    run(RAW, tmp_path / "run", restart=True)
    assert results(tmp_path / "run") == results(finished)


def test_a_plug_in_is_kept_in_the_folder_which_may_be_moved(
    plugin: Path, plugin_text: str, unload_plugins: Callable[[], None], tmp_path: Path
) -> None:
    """Afterwards neither the file, nor the place of the folder, nor this process's memory of it are needed."""
    run({**RAW, "plugins": [str(plugin)], "method": {"name": "mine"}}, tmp_path / "run")
    assert (tmp_path / "run" / "plugins" / "mine.py").read_text() == plugin_text
    plugin.unlink()
    unload_plugins()
    (tmp_path / "run").rename(tmp_path / "moved")
    config = stored_config(tmp_path / "moved")
    assert (config.method.name, config.plugins[0].path) == ("mine", tmp_path / "moved" / "plugins" / "mine.py")
    assert run(tmp_path / "moved" / "config.json", tmp_path / "moved")["method"] == "mine"


def test_the_file_may_be_edited_while_its_run_goes_on(plugin: Path, plugin_text: str, tmp_path: Path) -> None:
    """Workers started later still load what the run began with; the next start sees that it is another method."""
    raw = {**RAW, "plugins": [str(plugin)], "method": {"name": "mine"}}
    edit = Observers(on_round=lambda number, record: plugin.write_text(plugin_text + "# edited\n") and None)
    run(raw, tmp_path / "run", observers=edit)
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        run(raw, tmp_path / "run")
