"""The command, run for real in temporary folders: what it writes, what it prints, how it refuses.

Flows run in processes of their own, as a user starts them. Stages and refusals call the same ``main`` here: importing
torch, seconds each time, is all that a new process would add.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flcore.plugins import unload
from flcore.version import VERSION
from pipelines.cli import app as cli

TINY = (
    "data.limit_per_class=20",
    "data.size=28",
    "partition.num_clients=3",
    "partition.alpha=1.0",
    "partition.min_size=5",
    "federation.rounds=3",
    "local.epochs=1",
)

DETERMINISTIC = (
    "model.safetensors",
    "server.safetensors",
    "history.jsonl",
    "metrics.json",
    "curves.csv",
    "report.html",
)


def protofl(folder: Path, *arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False, **kwargs)  # type: ignore[call-overload]


def call(folder: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, in this process."""
    before, hook = Path.cwd(), sys.excepthook
    os.chdir(folder)
    try:
        code = cli.main(arguments)
    finally:
        os.chdir(before)
        sys.excepthook = hook
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def settings(*more: str) -> list[str]:
    return [part for assignment in (*TINY, *more) for part in ("--set", assignment)]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One whole run as a flow, with everything switched on."""
    folder = tmp_path_factory.mktemp("cli")
    return folder, protofl(folder, "run", *settings(), "--out", "run", "--json")


def test_run_prints_metrics_alone_and_writes_the_contract(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = finished
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert metrics == json.loads((folder / "run" / "metrics.json").read_text())
    scores = {"top1_global", "mean_local", "pooled_local", "last10_top1_global", "class_acc"}
    costs = {f"bytes_{way}{suffix}" for way in ("up", "down") for suffix in ("", "_per_round")}
    facts = {"method", "dataset", "rounds", "seed", "num_parameters", "scalars_up_per_round"}
    assert scores | costs | facts <= metrics.keys()
    # FedAvg with 3 clients and full participation: 3 × 26,434 scalars of 4 bytes per round and direction, BatchNorm
    # statistics of 2 × (6 + 16) floats and 2 counters of 8 bytes (192 bytes) each way, and a count of 8 bytes up.
    assert metrics["scalars_up_per_round"] == 3 * 26_434
    assert metrics["bytes_down_per_round"] == 3 * (26_434 * 4 + 192)
    assert metrics["bytes_up_per_round"] == 3 * (26_434 * 4 + 192 + 8)
    for name in (*DETERMINISTIC, "config.json", "timing.json"):
        assert (folder / "run" / name).exists(), name
    assert not (folder / "run" / "checkpoint").exists()
    assert (folder / "mlruns" / "mlflow.db").exists()


def test_stages_inline_give_the_same_bytes_as_the_flow(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    for stage in ("prepare", "partition", "train", "evaluate", "report"):
        code, _, error = call(folder, "stage", stage, *settings(), "--out", "staged", capsys=capsys)
        assert code == 0, error
    for name in DETERMINISTIC:
        assert digest(folder / "run" / name) == digest(folder / "staged" / name), name
    for artefact in ("prepared/train.safetensors", "prepared/meta.json", "partition/manifest.json"):
        assert digest(folder / "run" / artefact) == digest(folder / "staged" / artefact), artefact


def test_a_finished_run_is_not_repeated_and_another_is_refused(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = finished
    before = (folder / "run" / "history.jsonl").stat().st_mtime_ns
    again = protofl(folder, "run", *settings(), "--out", "run")
    assert again.returncode == 0
    assert "finished already" in again.stdout
    assert (folder / "run" / "history.jsonl").stat().st_mtime_ns == before
    other = protofl(folder, "run", *settings("local.lr=0.5"), "--out", "run")
    assert other.returncode == 2
    assert "holds a run with another configuration" in other.stderr


def test_the_same_configuration_on_other_files_is_another_run(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """``data.root`` is not part of a run's identity, its images are: a finished run must not answer for other files."""
    folder, _ = finished
    other = protofl(folder, "run", *settings("data.root=elsewhere"), "--out", "run")
    assert other.returncode == 2
    assert "holds a run with another configuration" in other.stderr


def test_killed_while_training_and_resumed_gives_the_same_bytes(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL after the first commit, whenever that is; ``--resume`` takes the configuration from the folder."""
    folder, _ = finished
    for name in ("prepare", "partition"):
        assert call(folder, "stage", name, *settings(), "--out", "killed", capsys=capsys)[0] == 0
    command = [sys.executable, "-m", "pipelines.cli", "stage", "train", *settings(), "--out", "killed"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = folder / "killed" / "checkpoint" / "state.json"
    deadline = time.monotonic() + 120
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "killed" / "history.jsonl").exists(), "the run finished before it was killed"
    resumed = protofl(folder, "run", "--resume", "--out", "killed", "--json")
    assert resumed.returncode == 0, resumed.stderr
    for name in DETERMINISTIC:
        assert digest(folder / "run" / name) == digest(folder / "killed" / name), name


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--set", "methd.name=fedavg"], 2, "did you mean 'method'"),
        (["--set", "method.mu=0.1"], 2, "method.mu: fedavg has no such parameter; it belongs to fedprox"),
        (["--set", "method.name=fedprox", "--set", "method.mu=-1"], 2, "method.mu = -1.0: must be >= 0"),
        (["--set", "local.epochs=two"], 2, "local.epochs = two: expected >= 1"),
        (["--set", "partition.num_clients=0"], 2, "partition.num_clients = 0: must be >= 1"),
        (["--set", "local.lr"], 2, "expected KEY=VALUE"),
        (["--params", "nowhere.yaml"], 2, "nowhere.yaml: cannot be read"),
    ],
)
def test_bad_configuration_stops_before_anything_is_written(
    tmp_path: Path, arguments: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    returned, _, error = call(tmp_path, "stage", "prepare", *arguments, capsys=capsys)
    assert returned == code
    assert named in error
    assert len(error.strip().splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


def test_run_with_a_bad_value_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The exit code reaches the shell, nothing is printed but the line, and no server is left behind or waited for."""
    done = protofl(tmp_path, "run", "--set", "partition.num_clients=0")
    assert done.returncode == 2
    assert done.stderr == "protofl: partition.num_clients = 0: must be >= 1\n"
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_missing_and_damaged_data_are_refused_with_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mnist = ("--set", "data.name=mnist", "--set", "data.root=nowhere")
    code, _, error = call(tmp_path, "stage", "prepare", *mnist, capsys=capsys)
    assert code == 3
    assert "nowhere" in error
    assert "data.root" in error
    (tmp_path / "images.zip").write_bytes(b"PK\x03\x04 not a zip")
    folder = ("--set", "data.name=imagefolder", "--set", "data.root=images.zip")
    code, _, error = call(tmp_path, "stage", "prepare", *folder, capsys=capsys)
    assert code == 3
    assert "images.zip" in error


def test_more_clients_than_samples_and_a_truncated_artefact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crowd = settings("partition.num_clients=500")
    assert call(tmp_path, "stage", "prepare", *crowd, capsys=capsys)[0] == 0
    code, _, error = call(tmp_path, "stage", "partition", *crowd, capsys=capsys)
    assert code == 3
    assert "at most" in error
    train = tmp_path / "artifacts" / "prepared" / "train.safetensors"
    train.write_bytes(train.read_bytes()[:1000])
    code, _, error = call(tmp_path, "stage", "partition", *settings(), capsys=capsys)
    assert code == 3
    assert "train.safetensors" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    code, _, error = call(tmp_path, "stage", "prepare", *settings(), "--out", "locked/x", capsys=capsys)
    assert code == 2
    assert "cannot write there" in error


def test_out_below_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be made, also for the superuser: its parent is a file."""
    (tmp_path / "file").write_text("")
    code, _, error = call(tmp_path, "stage", "prepare", *settings(), "--out", "file/x", capsys=capsys)
    assert code == 2
    assert "file/x" in error
    assert "choose another --out" in error


def test_resume_takes_no_other_configuration(tmp_path: Path) -> None:
    done = protofl(tmp_path, "run", "--resume", "--set", "seed=1", "--out", "run")
    assert done.returncode == 2
    assert "without --params, --set or --plugin" in done.stderr


def test_only_restart_throws_an_unusable_checkpoint_away(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    data = ("--prepared", "run/prepared", "--partition", "run/partition")
    train = ("stage", "train", *settings(), *data, "--out", "damaged")
    checkpoint = folder / "damaged" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{")
    code, _, error = call(folder, *train, capsys=capsys)
    assert code == 3
    assert "--restart throws it away" in error
    assert (checkpoint / "state.json").read_text() == "{"
    assert call(folder, *train, "--restart", capsys=capsys)[0] == 0
    assert digest(folder / "damaged" / "model.safetensors") == digest(folder / "run" / "model.safetensors")
    code, _, error = call(folder, "stage", "evaluate", *settings(), "--restart", capsys=capsys)
    assert (code, error) == (2, "protofl: --restart: there is nothing to restart in the stage evaluate\n")


# ------------------------------------------------------------------------------------------------------------ usage


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("compare", "--method", "local"), "protofl: unrecognized arguments: --method local; see protofl --help\n"),
        (("compare", "--seed", "0"), "protofl: unrecognized arguments: --seed 0; see protofl --help\n"),
        (("run", "--param", "x.yaml"), "protofl: unrecognized arguments: --param x.yaml; see protofl --help\n"),
        (
            ("compare", "--seeds", "a"),
            "protofl compare: argument --seeds: 'a': expected whole numbers separated by commas, such as 0,1,2; "
            "see protofl compare --help\n",
        ),
    ],
)
def test_options_go_by_their_whole_names_and_errors_are_a_line(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(*arguments, capsys=capsys) == error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"protofl {VERSION}\n")


# --------------------------------------------------------------------------------------------------------- plug-ins

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from flcore.methods.fedprox import FedProx

@dataclass(frozen=True)
class Mine(FedProx):
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "FedProx by another name"
    citation: ClassVar[str] = "nobody"
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    yield path
    unload("mine")


def test_a_plug_in_is_listed_shown_and_trained(
    plugin: Path,
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = finished
    own = ("--plugin", str(plugin))
    assert "\nmine  " in call(folder, "list", "methods", *own, capsys=capsys)[1]
    shown = json.loads(call(folder, "show", "method", "mine", "--json", *own, capsys=capsys)[1])
    assert (shown["file"], shown["stages"]) == (str(plugin), ["aggregate"])
    data = ("--prepared", "run/prepared", "--partition", "run/partition", "--out", "mine")
    chosen = settings("method.name=mine", "method.mu=0")
    for stage in ("train", "evaluate"):
        assert call(folder, "stage", stage, *chosen, *data, *own, capsys=capsys)[0] == 0
    assert digest(folder / "mine" / "model.safetensors") == digest(folder / "run" / "model.safetensors")
    # Afterwards its folder is enough.
    plugin.unlink()
    unload("mine")
    data = ("--prepared", "run/prepared", "--partition", "run/partition")
    assert call(folder, "analyse", "mine", "--analyses", "class_heatmap", *data, capsys=capsys)[0] == 0


def test_plug_ins_of_the_parameter_file_stand_relative_to_it(
    plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text("plugins: [mine.py]\nmethod: {name: mine, mu: 3}\n")
    (tmp_path / "elsewhere").mkdir()
    params = ("--params", str(tmp_path / "params.yaml"))
    code, _, error = call(tmp_path / "elsewhere", "stage", "prepare", *params, *settings(), capsys=capsys)
    assert code == 0, error
    assert "mine  " in call(tmp_path, "list", "methods", capsys=capsys)[1]


@pytest.mark.parametrize("command", [("run",), ("doctor",), ("show", "method", "fedavg"), ("tune", "--method", "x")])
def test_a_plug_in_that_cannot_be_used_stops_every_command(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("x = (\n")
    code, out, error = call(tmp_path, *command, "--plugin", "broken.py", capsys=capsys)
    assert (code, out) == (2, "")
    assert error == f"protofl: plug-in {tmp_path}/broken.py:1: '(' was never closed\n"


def test_an_unknown_method_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = call(tmp_path, "show", "method", "fedprx", capsys=capsys)
    assert code == 2
    assert error.startswith("protofl: fedprx: unknown method; did you mean 'fedprox'?")


@pytest.mark.parametrize("kind", ["methods", "datasets", "partitioners", "models", "engines"])
def test_list_names_every_entry_in_both_forms(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(call(tmp_path, "list", kind, "--json", capsys=capsys)[1])
    assert all({"name", "summary", "parameters"} <= entry.keys() for entry in entries)
    text = call(tmp_path, "list", kind, capsys=capsys)[1]
    assert all(entry["name"] in text for entry in entries)


@pytest.mark.slow
def test_compare_finds_finished_runs_again(tmp_path: Path) -> None:
    call = ["compare", "--methods", "local,fedavg", "--seeds", "0,1", *settings(), "--out", "c"]
    first = protofl(tmp_path, *call)
    assert first.returncode == 0, first.stderr
    runs = sorted((tmp_path / "c" / "runs").iterdir())
    assert len(runs) == 4
    stamps = {run: (run / "history.jsonl").stat().st_mtime_ns for run in runs}
    again = protofl(tmp_path, *call)
    assert again.returncode == 0, again.stderr
    assert {run: (run / "history.jsonl").stat().st_mtime_ns for run in runs} == stamps
    table = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert [row["method"] for row in table["methods"]] == ["local", "fedavg"]
    for name in ("comparison.csv", "comparison.md", "runs.csv", "report.html"):
        assert (tmp_path / "c" / name).exists()
