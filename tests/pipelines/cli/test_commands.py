"""What the commands do: a run that is killed and gone on with, what each hands on, what each prints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from PIL import Image

import flcore
from flcore.config.schema import Config
from flcore.core import loaded_code
from flcore.core.errors import Cure, DataError
from flcore.methods import METHODS
from pipelines.cli.app import main
from pipelines.execution.outcome import Outcome
from pipelines.orchestration import commands as orchestration
from pipelines.orchestration import services
from pipelines.plan.comparison import comparison_plan
from pipelines.plan.params import OWN_MODELS, with_values
from pipelines.runs.standard_error import COMMANDS
from pipelines.stages import commands as stages
from pipelines.tuning.request import StudyRequest
from tests.cases import quick

TINY = (
    "data.limit_per_class=20",
    "data.size=28",
    "partition.num_clients=3",
    "partition.alpha=1.0",
    "partition.min_size=5",
    "federation.rounds=3",
    "local.epochs=1",
    "tracking.enabled=false",
)


def run(*more: str) -> list[str]:
    """`protofl run` of a small federation."""
    return ["run", "--orchestrator", "inline", *(part for value in TINY for part in ("--set", value)), *more]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def resumed(
    tmp_path_factory: pytest.TempPathFactory, plugin_text: str
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Folder and outcome of a run that is killed after its first commit and begun again, by the same command."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "mine.py").write_text(plugin_text)
    command = [sys.executable, "-m", "pipelines.cli", *run("--plugin", "mine.py", "--method", "mine", "--json")]
    killed = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(folder.glob("runs/*/checkpoint/state.json")) and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not list(folder.glob("runs/*/history.jsonl")), "the run finished before it was killed"
    return folder, subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def test_a_run_prints_its_metrics_alone_in_a_folder_of_its_own(
    resumed: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = resumed
    assert (done.returncode, done.stderr) == (0, "")
    (directory,) = (folder / "runs").iterdir()
    config = json.loads((directory / "config.json").read_text())
    assert directory.name == f"mine-s0-{config['config_hash'][:8]}"
    assert (directory / "report.html").exists()
    metrics = json.loads(done.stdout)
    assert metrics == json.loads((directory / "metrics.json").read_text())
    scores = {"top1_global", "top1_vote", "mean_local", "pooled_local", "last10_top1_global", "class_acc"}
    costs = {f"bytes_{way}{suffix}" for way in ("up", "down") for suffix in ("", "_per_round")}
    facts = {"method", "dataset", "rounds", "seed", "num_parameters", "scalars_up_per_round"}
    assert scores | costs | facts <= metrics.keys()
    # 3 clients and full participation: 3 × 26,434 scalars of 4 bytes per round and direction, BatchNorm
    # statistics of 2 × (6 + 16) floats and 2 counters of 8 bytes (192 bytes) each way, and a count of 8 bytes up.
    assert metrics["scalars_up_per_round"] == 3 * 26_434
    assert metrics["bytes_down_per_round"] == 3 * (26_434 * 4 + 192)
    assert metrics["bytes_up_per_round"] == 3 * (26_434 * 4 + 192 + 8)
    assert not (directory / "checkpoint").exists()


def test_killed_and_gone_on_with_it_has_the_bytes_of_the_library_by_itself(
    resumed: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Of FedProx, which the plug-in is by another name."""
    (directory,) = (resumed[0] / "runs").iterdir()
    values = {key: yaml.safe_load(value) for key, _, value in map(_split, TINY)}
    flcore.run(with_values({}, values | {"method.name": "fedprox"}), "alone")
    for name in ("model.safetensors", "server.safetensors", "history.jsonl", "curves.csv"):
        assert (directory / name).read_bytes() == Path("alone", name).read_bytes(), name


@pytest.mark.parametrize(
    ("typed", "left", "said"),
    [
        ("compare --methods fedavg --seeds 0 --out all", "all/comparison.json", "report: all/report.html"),
        ("tune --method fedprox --trials 1 --out study", "study/best.yaml", "protofl run --params study/best.yaml"),
    ],
    ids=["compare", "tune"],
)
def test_as_it_is_typed(typed: str, left: str, said: str, empty_folder: Path) -> None:
    command = [sys.executable, "-m", "pipelines.cli", *typed.split(), *run()[1:]]
    done = subprocess.run(command, cwd=empty_folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert (empty_folder / left).exists()


def _split(assignment: str) -> tuple[str, str, str]:
    return assignment.partition("=")


def test_data_that_are_not_there_or_damaged_are_refused_with_their_place(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*values: str, code: int) -> str:
        both = {key: value for key, _, value in map(_split, (*TINY, *values))}
        words = [part for key, value in both.items() for part in ("--set", f"{key}={value}")]
        assert main(["stage", "prepare", *words]) == code
        error = capsys.readouterr().err
        assert len(error.splitlines()) <= 2
        return error

    assert "partition.num_clients = 0" in refused("partition.num_clients=0", code=2)
    assert list(empty_folder.iterdir()) == []
    error = refused("data.name=mnist", "data.root=nowhere", code=3)
    assert "nowhere" in error and "data.root" in error
    (empty_folder / "images.zip").write_bytes(b"PK\x03\x04 not a zip")
    assert "images.zip" in refused("data.name=imagefolder", "data.root=images.zip", code=3)
    monkeypatch.setenv("DVC_STAGE", "prepare")  # DVC looks into no linked folder
    (empty_folder / "images").mkdir()
    (empty_folder / "images" / "train").symlink_to(empty_folder)
    assert "images/train" in refused("data.name=imagefolder", "data.root=images", code=3)
    monkeypatch.delenv("DVC_STAGE")
    (empty_folder / "artifacts").write_text("a file")
    assert "choose another --out" in refused(code=2)


# ------------------------------------------------------------------------------------------------- what is handed on


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the commands hand on, instead of its being done: tests/pipelines/orchestration has that."""
    calls: list[tuple[Any, ...]] = []

    def note(name: str, answer: Any = None) -> Any:
        return lambda *given, **named: calls.append((name, *given, named)) or answer

    @contextmanager
    def operation(raw: dict[str, Any], **how: bool) -> Iterator[tuple[None, Config]]:
        calls.append(("operation", raw, how))
        yield None, Config()

    done = Outcome(Path("done"))
    monkeypatch.setattr(orchestration, "operation", operation)
    monkeypatch.setattr(orchestration, "say_run", note("said"))
    monkeypatch.setattr(orchestration, "say_table", note("said"))
    monkeypatch.setattr("pipelines.orchestration.as_flow.uses_prefect", note("prefect", False))
    for place, name in (
        ("pipelines.execution.bodies.experiment", "run"),
        ("pipelines.tuning.comparing.compare_methods", "compare"),
        ("pipelines.execution.bodies.comparison", "sweep"),
        ("pipelines.tuning.search.study", "tune"),
    ):
        monkeypatch.setattr(place, note(name, done))
    monkeypatch.setattr(stages, "stage", note("stage"))
    monkeypatch.setattr("pipelines.tracking.backfill.log_folder", note("track", False))
    best = SimpleNamespace(name="fedavg-s0", words="mean_local 0.9", run_id="0123", model=None)
    monkeypatch.setattr("pipelines.tracking.best.best", note("best", best))
    for name, answer in {"up": None, "status": True, "down": None}.items():
        monkeypatch.setattr(services, name, note(name, answer))
    return calls


def handed_on(asked: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """The arguments of the calls of one command, by name."""
    calls = {name: given for name, *given in asked}
    asked.clear()
    return calls


def test_a_method_brings_the_model_that_it_needs(
    asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's model is for every method; one line says who has another. Said by --set it is meant: refused."""
    Path("params.yaml").write_text("model: {name: fedgen_cnn, feature_dim: 16, batchnorm: frozen}\n")
    assert main(["run", "--method", "protolda", "--set", "model.atoms=7"]) == 0
    assert handed_on(asked)["operation"][0]["model"] == {"name": "patch_dictionary", "batchnorm": "frozen", "atoms": 7}
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and all(
        word in told.err for word in ("protolda", "patch_dictionary", "fedgen_cnn")
    )
    sweep = ["sweep", "--set", "method.name=protolda", "--vary", "method.ridge=1,2"]
    for named in (["run", "--method", "protolda"], ["compare", "--methods", "fedavg,protolda"], sweep):
        assert main([*named, "--set", "model.name=pfl_cnn"]) == 2
        message = capsys.readouterr().err
        assert all(word in message for word in ("model.name=pfl_cnn", "protolda", "patch_dictionary")), message

    variant = ["--variant", "small=protolda_blocks,method.steps=1"]
    assert main(["compare", "--methods", "fedavg,protolda", *variant]) == 0
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and "fedavg" not in told.err and "protolda, small" in told.err
    raw = handed_on(asked)["operation"][0]
    models = {run.name: run.config.model_spec.name for run in comparison_plan(raw, ["fedavg", "protolda"], [0]).runs}
    assert models == {"fedavg": "fedgen_cnn", "protolda": "patch_dictionary", "small": "patch_dictionary"}
    for named in (["run", "--method", "fedavg"], ["compare", "--methods", "fedavg"]):
        assert main(named) == 0 and not capsys.readouterr().err
    settings = "compare: {settings: {protolda: {model.name: patch_dictionary}}}\n"
    Path("params.yaml").write_text(f"model: {{name: fedgen_cnn}}\n{settings}")
    assert main(["run", "--method", "protolda"]) == 0 and not capsys.readouterr().err


def test_methods_that_bring_a_model_are_those_that_work_with_one_alone() -> None:
    needs = {name: getattr(METHODS[name], "required_config", None) for name in METHODS}
    models = {name: own["model.name"] for name, own in needs.items() if isinstance(own, dict) and "model.name" in own}
    assert models == {name: (model,) for name, model in OWN_MODELS.items()}


def test_test_images_that_are_training_images_are_counted(empty_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two of the three test images; the same pixels in files of another name, and of another class."""
    pixels = {"train/a/1": 10, "train/a/2": 20, "train/b/1": 30, "test/a/9": 20, "test/a/3": 40, "test/b/9": 10}
    for name, value in pixels.items():
        path = empty_folder / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), value).save(path)
    named = ["data.name=imagefolder", "data.root=images", "tracking.enabled=false"]
    command = ["stage", "prepare", "--out", "staged", *(part for value in named for part in ("--set", value))]
    assert main(command) == 0
    assert [
        record.getMessage().split()[1] for record in caplog.records if record.name == "flcore.experiment.inputs"
    ] == ["2"]
    caplog.clear()
    Image.new("L", (4, 4), 50).save(empty_folder / "images/test/a/9.png")
    Image.new("L", (4, 4), 60).save(empty_folder / "images/test/b/9.png")
    assert main(command) == 0
    assert not [record for record in caplog.records if record.name == "flcore.experiment.inputs"]


@pytest.mark.parametrize("cure", list(Cure))
def test_advice_of_the_library_is_printed_in_terms_of_commands(
    cure: Cure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DataError(f"there: damaged; {cure}")

    monkeypatch.setattr(orchestration, "operation", refuse)
    assert main(["run"]) == 3
    assert capsys.readouterr().err == f"protofl: there: damaged; {COMMANDS[cure]}\n"
    assert "restart=True" not in COMMANDS[cure] and ("restart=True" not in cure or "--restart" in COMMANDS[cure])


def test_parameters_are_handed_on_as_they_are_given(
    asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one run those of its method; of several all of them, whose settings are applied to each of them."""
    Path("params.yaml").write_text("local: {lr: 0.2}\ncompare: {settings: {moon: {local.epochs: 9}}}\n")
    compare = {"settings": {"moon": {"local.epochs": 9}}}
    raw = {"local": {"lr": 0.2, "momentum": 0.5}, "compare": compare}
    more = ["--set", "local.momentum=0.5"]
    moon = {**raw, "local": {**raw["local"], "epochs": 9}, "method": {"name": "moon"}}  # type: ignore[dict-item]
    assert main(["run", "--method", "moon", "--seed", "4", "--json", *more]) == 0
    calls = handed_on(asked)
    assert calls["operation"] == [
        {**moon, "seed": 4},
        {"quiet": True, "restart": False, "wait": True},
    ]
    assert (calls["prefect"][0], calls["run"][1], calls["said"][-1]) == (None, None, {"as_json": True})
    words = ["--no-prefect", "--restart", "--no-wait"]
    assert main(["run", "--out", "x", *more, *words]) == 0
    calls = handed_on(asked)
    assert calls["operation"] == [raw, {"quiet": False, "restart": True, "wait": False}]
    assert (calls["prefect"][0], calls["run"][1]) == (False, Path("x"))
    assert main(["compare", "--methods", "moon,local", "--seeds", "1,2", *more]) == 0
    calls = handed_on(asked)
    assert calls["operation"] == [raw, {"restart": False, "wait": True}]
    plan, *where = calls["compare"]
    assert where == [Path("runs/comparison"), None, {"tuned": 0}]
    epochs = {(run.name, run.config.seed): run.config.local.epochs for run in plan.runs}
    assert epochs == {("moon", 1): 9, ("moon", 2): 9, ("local", 1): 1, ("local", 2): 1}
    grid = ["--vary", "local.lr=0.1,0.2", "--vary", "local.batch_size=8", "--baselines", "local"]
    assert main(["sweep", *grid, "--seeds", "1", "--metric", "top1_global", *more]) == 0
    calls = handed_on(asked)
    facts = {"vary": ["local.lr=0.1,0.2", "local.batch_size=8"], "seeds": [1], "baselines": ["local"], "name": "sweep"}
    facts |= {"metric": "top1_global", "points": []}
    assert calls["sweep"][1:] == [Path("runs/sweep"), None, facts, {}]
    assert main(["tune", "--method", "moon", "--trials", "3", "--storage", "sqlite:///x", *more]) == 0
    calls = handed_on(asked)
    assert calls["operation"] == [moon, {"wait": True}]
    assert calls["tune"][1:3] == [StudyRequest(3, storage="sqlite:///x"), Path("runs/tune-moon")]
    limited = ["--objective", "accuracy,bytes", "--metric", "mean_local", "--max-bytes", "5kB", "--at-once", "2"]
    assert main(["tune", "--method", "moon", *limited, *more]) == 0
    calls = handed_on(asked)
    assert calls["operation"][0] == {**moon, "tune": {"parallel": 2}}
    assert calls["tune"][1] == StudyRequest(20, "accuracy,bytes", "mean_local", max_bytes=5000)
    assert main(["stage", "train", "--restart", *more]) == 0
    assert asked.pop() == ("stage", "train", raw, Path("artifacts"), {"restart": True})
    assert main(["stage", "compare", "--out", "y", *more]) == 0
    assert asked.pop() == ("stage", "compare", raw, Path("y"), {"restart": False})


def test_the_store_of_runs_is_the_commands_the_files_or_the_environments(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which `run` and `up` take it; and a store that could not take them is a failure."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    Path("params.yaml").write_text("tracking: {uri: http://file}\n")
    assert main(["track", "a", "b", "--uri", "http://command"]) == 4
    assert main(["track", "a"]) == 4
    Path("params.yaml").write_text("tracking: {uri: null}\n")
    assert main(["track", "a"]) == 4
    stores = [call[2] for call in asked]
    assert asked[0] == ("track", Path("a"), "http://command", {"register": False})
    assert stores == ["http://command", "http://file", "http://environment"]
    Path("params.yaml").write_text("tracking: {uri: http://file, register: true}\n")
    assert main(["track", "a"]) == 4
    assert asked[-1][-1] == {"register": True}


@pytest.mark.parametrize("words", [["list", "datasets"], ["list", "methods"], ["show", "dataset", "digits"]])
def test_a_plug_in_that_is_named_has_to_be_there(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--plugin", "/nope.py"]) == 2
    assert "/nope.py" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["a"], ["best", "--metric", "mean_local"]])
@pytest.mark.parametrize("address", ["foo://me:hidden@bar", "localhost:5000"])
def test_an_address_that_can_be_no_store_is_bad_usage(
    asked: list[tuple[Any, ...]], arguments: list[str], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["track", *arguments, "--uri", address]) == 2
    said = capsys.readouterr().err
    assert f"{address.replace('me:hidden', '***')} is the address of no store" in said and "http, https, file" in said
    assert asked == []


def test_the_best_run_is_asked_for_by_a_metric(
    asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://store")
    words = ["--metric", "mean_local", "--experiment", "digits/iid", "--where", "tags.seed = '0'", "--promote"]
    assert main(["track", "best", *words]) == 0
    among = {"experiment": "digits/iid", "where": "tags.seed = '0'", "promote": True}
    assert asked.pop() == ("best", "http://store", "mean_local", among)
    assert capsys.readouterr().out == "fedavg-s0: mean_local 0.9\nrun: 0123\n"
    for arguments, said in (
        (["best"], "track best: --metric is missing"),
        (["best", "--promote"], "track best: --metric is missing"),
        (["runs/a", "--metric", "mean_local"], "track: no option --metric"),
        (["best", "runs/a", "--metric", "mean_local"], "track best: unexpected runs/a"),
    ):
        assert main(["track", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert asked == []
    assert main(["track", "./best"]) == 4  # a folder of that name
    assert asked.pop()[:2] == ("track", Path("best"))


def test_servers_are_started_but_for_those_that_are_not_wanted(asked: list[tuple[Any, ...]]) -> None:
    for words in (["up", "--no-mlflow", "--no-worker"], ["status"], ["status", "--json"], ["down"]):
        assert main(words) == 0
    wanted = {"prefect": True, "mlflow": False, "dashboard": True, "worker": False, "flows_per_gpu": 1}
    assert asked == [("up", wanted), ("status", {"as_json": False}), ("status", {"as_json": True}), ("down", {})]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run --method fedavg --set method.name=fedprox --set method.mu=0.3", ("--method", "method.name")),
        ("run --method fedavg --set method={name:\u00a0fedprox}", ("--method", "--set method")),
        ("tune --method fedavg --set method.name=fedprox", ("--method", "method.name")),
        ("run --seed 3 --set seed=5", ("--seed", "--set seed")),
        ("compare --methods fedavg --set compare.methods=[fedprox]", ("--methods", "compare.methods")),
        ("compare --seeds 0,1 --set compare.seeds=[2]", ("--seeds", "compare.seeds")),
        ("sweep --vary local.lr=1,2 --seeds 0,1 --set compare={seeds:\u00a0[2]}", ("--seeds", "--set compare")),
        ("compare --partition-seeds 1 --set compare.partition_seeds=[2]", ("--partition-seeds", "partition_seeds")),
        ("compare --partition-seeds 1,2 --set partition.seed=3", ("--partition-seeds", "partition.seed")),
        ("compare --claims claims.yaml --set compare.claims={}", ("--claims", "compare.claims")),
        ("compare --variant a=fedavg --variant a=fedprox", ("--variant a",)),
        ("compare --variant a=fedavg --set compare.variants.a={method:\u00a0fedprox}", ("--variant a", "variants.a")),
        ("run --plugin mine.py --set plugins=[other.py]", ("--plugin", "--set plugins")),
        ("run --set local.lr=1 --set local.lr=2", ("--set local.lr",)),
        ("reproduce x.zip --set data.root=a --set data.root=b", ("--set data.root",)),
        ("paper show fedpa.table2 --set data.root=a --set data.root=b", ("--set data.root",)),
        ("compare --set seed=5", ("--set seed", "seeds")),
        ("stage train --set seed=5", ("--set seed", "seeds")),
        ("sweep --vary local.lr=1,2 --set seed=5", ("--set seed", "seeds")),
        ("paper show fedpa.table2 --set seed=5", ("--set seed", "seeds")),
        ("paper show fedpa.table2 --partition-seeds 1 --set partition.seed=5", ("--set partition.seed",)),
        ("run --set compare.seeds=[3]", ("--set compare.seeds",)),
        ("sweep --vary local.lr=1,2 --set local.lr=3", ("--vary local.lr", "--set local.lr")),
    ],
)
def test_options_of_which_one_would_be_lost_are_refused_by_name(
    words: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    (empty_folder / "claims.yaml").write_text("ours: {better: fedprox, than: fedavg}\n")
    (empty_folder / "x.zip").touch()
    assert main([word.replace("\u00a0", " ") for word in words.split(" ")]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in named), said
    assert "fault" not in said
    assert not (empty_folder / "runs").exists()


@pytest.mark.parametrize("assignment", ["federation.raunds=3", "federaton.rounds=3"])
def test_a_mistyped_section_or_key_of_it_is_refused_before_anything_starts(
    assignment: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--set", assignment]) == 2
    assert "unknown key; did you mean" in capsys.readouterr().err
    assert not any(empty_folder.iterdir())


def test_options_that_say_the_same_are_taken(asked: list[tuple[Any, ...]]) -> None:
    same = ["--method", "fedprox", "--set", "method.name=fedprox", "--set", "method.mu=0.3", "--seed", "3"]
    assert main(["run", *same, "--set", "seed=3"]) == 0
    assert (asked[0][1]["method"], asked[0][1]["seed"]) == ({"name": "fedprox", "mu": 0.3}, 3)
    several = ["--methods", "fedavg,fedprox", "--set", "compare.methods=[fedavg, fedprox]", "--seeds", "0,1"]
    assert main(["compare", *several, "--set", "compare.seeds=[0, 1]"]) == 0


def test_a_server_that_does_not_answer_is_seen_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "status", lambda as_json: False)
    assert main(["status"]) == main(["status", "--json"]) == 4


@pytest.mark.parametrize(
    ("claim", "said"),
    quick(
        [
            ("{better: fedprox, than: fedavg, metric: nosuch}", "compare.claims.ours: metric nosuch"),
            (
                "{better: fedavg, than: [fedprox, moon]}",
                "compare.claims.ours.moon: moon is not compared; one of fedavg, ",
            ),
            ("{better: fedavg (tuned), than: fedprox}", "compare.claims.ours: fedavg (tuned) is not compared"),
            ("{better: local, than: fedavg, metric: top1_global}", "metric top1_global: local has no global model"),
        ],
        1,
    ),
)
def test_a_claim_that_no_run_could_decide_is_refused_before_any_begins(
    claim: str, said: str, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    (empty_folder / "claims.yaml").write_text(f"ours: {claim}\n")
    words = ["--methods", "fedavg,fedprox,local", "--seeds", "0", "--claims", "claims.yaml"]
    assert main(["compare", *run()[1:], *words]) == 2
    assert said in capsys.readouterr().err
    assert not (empty_folder / "runs").exists()


def test_an_unknown_analysis_is_refused_in_words(
    resumed: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told as a list that Python would print."""
    (directory,) = (resumed[0] / "runs").iterdir()
    assert main(["analyse", str(directory), "--analyses", "tsn"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("protofl: --analyses tsn: unknown analysis; did you mean 'tsne'? allowed here: ")
    assert "(" not in said


def test_a_stage_fails_where_parameters_or_code_were_edited_while_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DVC would record those that are there when it ends as what its results were made from."""
    monkeypatch.chdir(tmp_path)
    params = Path("params.yaml")
    params.write_text("seed: 1\n")
    monkeypatch.setattr(stages, "stage", lambda *arguments, **keywords: None)
    assert main(["stage", "train"]) == 0
    with monkeypatch.context() as patch:
        patch.setitem(cast(dict[str, bytes], loaded_code.PACKAGE_SOURCES), "methods/fedpg.py", b"as the process began")
        assert main(["stage", "train"]) == 4
    assert "flcore/methods/fedpg.py was edited" in capsys.readouterr().err
    monkeypatch.setattr(stages, "stage", lambda *arguments, **keywords: params.write_text("seed: 2\n"))
    assert main(["stage", "train"]) == 4
    assert "params.yaml" in capsys.readouterr().err
    assert main(["stage", "train"]) == 0  # it is as it was when this command began
