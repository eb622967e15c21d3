"""Carrying archives out: the same bytes, what is said where they are not, and what is refused before anything runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from flcore.config.schema import Config
from flcore.experiment.inputs import divide
from flcore.experiment.run_folder import stored_config
from flcore.io.files import read_json
from pipelines.cli.app import main
from pipelines.proof.archive import archive
from pipelines.proof.contents import read_archive, without_places
from pipelines.proof.results import beyond_tolerance, difference
from pipelines.runs.cache import Cache
from tests.cases import quick

Change = Callable[[dict[str, bytes]], object]
Forge = Callable[[Change], Path]


@pytest.fixture(autouse=True)
def _plainly(plainly: None) -> None:
    pass


def carried_out(*words: object, code: int, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """``protofl reproduce --check``: what it prints, in lines, and its error."""
    assert main(["reproduce", *map(str, words), "--check"]) == code
    said = capsys.readouterr()
    return said.out.splitlines(), said.err


def the_run(contents: dict[str, bytes]) -> str:
    (config,) = (name for name in contents if name.endswith("/config.json"))
    return config.removesuffix("/config.json")


def of_json(file: str, **values: Any) -> Change:
    def change(contents: dict[str, bytes]) -> None:
        name = f"{the_run(contents)}/{file}"
        contents[name] = json.dumps({**json.loads(contents[name]), **values}).encode()

    return change


def test_the_same_bytes_come_out_and_are_computed(
    archived: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight files: metrics, history, curves, model, server, and the memories of three clients.

    The run is known to the cache as finished on this machine; it is carried out all the same.
    """
    Cache.here().note_run(finished, stored_config(finished))
    lines, error = carried_out(archived, code=0, capsys=capsys)
    assert lines == [f"{archived}: 8 files of results are the same to the byte"]
    assert error == ""
    (again,) = Path("runs/reproduced/first/runs").iterdir()
    times = [read_json(folder / "timing.json", "")["began_ms"] for folder in (finished, again)]
    assert times[0] != times[1]
    # Typed again, nothing is left to do.
    assert carried_out(archived, code=0, capsys=capsys)[0] == lines
    assert read_json(again / "timing.json", "")["began_ms"] == times[1]


def test_a_result_that_is_another_is_named_with_its_figure(
    archived: Path, forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean accuracy that is 0.25 too high, all hashes of the archive mended."""
    true = read_json_of(archived, "metrics.json")["mean_local"]
    path = forged(of_json("metrics.json", mean_local=true + 0.25))
    lines, error = carried_out(path, code=4, capsys=capsys)
    run_folder = the_run(dict.fromkeys(read_archive(path).file.namelist(), b""))
    assert lines == [
        f"{path}: 7 files of results are the same to the byte",
        f"{run_folder}/metrics.json: mean_local is {true} instead of {true + 0.25}",
    ]
    assert error == f"protofl: {path}: 1 results are not what it says; they are named above\n"


def read_json_of(path: Path, ending: str) -> dict[str, Any]:
    found = read_archive(path)
    (name,) = (name for name in found.file.namelist() if name.endswith(f"/{ending}"))
    return found.json(name)


@pytest.mark.parametrize(
    ("further", "code", "known"),
    quick([(0.015, 0, "processor"), (0.05, 4, "processor"), (0.015, 0, "cpu_capability")], 1),
)
def test_another_class_of_processor_is_said_and_figures_are_compared(
    further: float, code: int, known: str, archived: Path, forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if of a processor with other kernels: within 0.02, or beyond. An old archive knows the instructions alone."""
    true = read_json_of(archived, "metrics.json")["mean_local"]
    environment = read_json_of(archived, "config.json")["environment"]

    def change(contents: dict[str, bytes]) -> None:
        of_json("metrics.json", mean_local=true + further)(contents)
        kept = environment if known == "processor" else {k: v for k, v in environment.items() if k != "processor"}
        of_json("config.json", environment={**kept, known: "OTHER"})(contents)

    path = forged(change)
    lines, _ = carried_out(path, code=code, capsys=capsys)
    here = environment[known]
    assert lines[0] == f"{path}: ANOTHER CLASS OF PROCESSOR: {here}, cpu here, OTHER, cpu in the archive"
    assert lines[1] == f"{path}: 7 files of results are the same to the byte"
    assert lines[2].endswith("may be 0.02 apart: all are so" if code == 0 else "may be 0.02 apart: 1 are not so")
    assert lines[3:] == [] if code == 0 else f"instead of {true + further:.4f}, more than 0.02 apart" in lines[3]


@pytest.mark.slow
def test_a_run_that_was_begun_on_another_class_is_compared_as_one_of_another(
    archived: Path, forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on here: neither class gives its last bits by itself."""
    true = read_json_of(archived, "metrics.json")["mean_local"]
    environment = read_json_of(archived, "config.json")["environment"]
    began = {**environment, "processor": "OTHER"}

    def change(contents: dict[str, bytes]) -> None:
        of_json("metrics.json", mean_local=true + 0.015)(contents)
        of_json("config.json", earlier_environments=[began])(contents)

    path = forged(change)
    lines, _ = carried_out(path, code=0, capsys=capsys)
    here = f"{environment['processor']}, cpu"
    assert lines[0] == f"{path}: ANOTHER CLASS OF PROCESSOR: {here} here, OTHER, cpu and then {here} in the archive"


@pytest.mark.slow
def test_other_code_and_packages_are_told_beside_what_differs(
    archived: Path, forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = read_json_of(archived, "config.json")["environment"]
    versions = {**environment["versions"], "torch": "1.0"}

    def change(contents: dict[str, bytes]) -> None:
        of_json("config.json", code="0" * 64, environment={**environment, "versions": versions})(contents)
        proof = json.loads(contents["proof.json"])
        (said,) = proof["runs"].values()
        said["modules"]["flcore.engine.rounds"] = "0" * 64
        contents["proof.json"] = json.dumps(proof).encode()

    lines, _ = carried_out(forged(change), code=0, capsys=capsys)
    assert lines[1:] == [
        "note: the code here is another than the archive's: flcore.engine.rounds",
        f"note: packages here are others than the archive's: torch {environment['versions']['torch']} instead of 1.0",
    ]


def test_an_archive_whose_training_was_decided_by_measuring_is_refused(
    archived: Path, forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier versions stored ``auto``, and measured what it stood for."""
    config = read_json_of(archived, "config.json")["config"]
    change = of_json("config.json", config={**config, "engine": {**config["engine"], "compile": "auto"}})
    _, error = carried_out(forged(change), code=3, capsys=capsys)
    assert "engine.compile is auto" in error and error.count("\n") == 1


def test_an_exchanged_partition_is_found_by_dividing_again(
    archived: Path, finished: Path, forged: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another seed's, in itself whole, in the place of this one's."""
    other = replace(stored_config(finished), seed=5)
    divided = divide(other, finished / "prepared", tmp_path / "other")

    def change(contents: dict[str, bytes]) -> None:
        for name in [name for name in contents if name.startswith("partitions/")]:
            del contents[name]
        for name in ("manifest.json", "indices.safetensors"):
            contents[f"partitions/{divided.fingerprint[:16]}/{name}"] = (tmp_path / "other" / name).read_bytes()
        proof = json.loads(contents["proof.json"])
        (said,) = proof["runs"].values()
        said["partition"] = divided.fingerprint
        contents["proof.json"] = json.dumps(proof).encode()

    lines, _ = carried_out(forged(change), code=4, capsys=capsys)
    assert lines[1] == f"partitions/{divided.fingerprint[:16]}: dividing the data as configured gives other indices"
    assert any("/metrics.json: bytes_" in line or "/metrics.json: best_" in line for line in lines)


# ---- refused before anything runs ------------------------------------------------------------------------------------


def test_other_data_are_refused(forged: Forge, capsys: pytest.CaptureFixture[str]) -> None:
    def change(contents: dict[str, bytes]) -> None:
        proof = json.loads(contents["proof.json"])
        (said,) = proof["runs"].values()
        said["data"] = "0" * 64
        contents["proof.json"] = json.dumps(proof).encode()

    _, error = carried_out(forged(change), code=3, capsys=capsys)
    assert "the data digits here are not the archive's (fingerprint " in error and ", not 00000000): " in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--set", "local.lr=0.1"],
            "--set local.lr=0.1: makes another run of it than the archive's; only what does not",
        ),
        (["--set", "engine.workers=x"], "engine.workers = x: "),
        (["--golden"], "--golden: goes without --check"),
        (["--methods", "fedavg"], "--methods: goes with --golden"),
        (
            ["--out", "taken"],
            "taken: holds something else than what this archive gives; name another folder with --out",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(
    words: list[str], said: str, archived: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    _, error = carried_out(archived, *words, code=2, capsys=capsys)
    assert error.startswith(f"protofl: {said}") and error.count("\n") == 1
    assert Path("taken/notes.txt").read_text() == "mine"


KILLED = """
import os, signal, sys
from pathlib import Path
from flcore.io.files import replace_file

replace_file(Path(sys.argv[1]), lambda file: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.slow
def test_killed_while_it_begins_it_begins_again(archived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a ``proof.json`` is all that there is; what somebody else has put there is no leftover, and stays."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(Path("again/proof.json").absolute())], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = Path("again").iterdir()
    assert left.name.startswith(".proof.json.") and left.name.endswith(".tmp")
    Path("again/.notes.1.1.tmp").write_text("mine")
    _, error = carried_out(archived, "--out", "again", code=2, capsys=capsys)
    assert error.startswith("protofl: again: holds something else than what this archive gives")
    Path("again/.notes.1.1.tmp").unlink()
    carried_out(archived, "--out", "again", code=0, capsys=capsys)
    assert Path("again/proof.json").read_bytes() == read_archive(archived).read("proof.json")


def test_without_an_archive_there_is_nothing_to_carry_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 2
    assert capsys.readouterr().err == "protofl: reproduce: name an archive, or give --golden\n"


def test_code_in_an_archive_runs_only_where_that_is_allowed(
    unload_plugins: Callable[[], None], plugin_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(f"from pathlib import Path\nPath('it-ran').touch()\n{plugin_text}")
    raw = {"data": {"limit_per_class": 20}, "partition": {"num_clients": 3, "min_size": 5}, "federation": {"rounds": 1}}
    run({**raw, "plugins": ["mine.py"], "method": {"name": "mine"}}, "run")
    archive(Path("run"), Path("x.zip"), licence="CC-BY-4.0")
    unload_plugins()
    Path("it-ran").unlink()
    _, error = carried_out("x.zip", code=2, capsys=capsys)
    allow = "read it, then allow it to run with --trust-plugins"
    assert error == f"protofl: x.zip: brings code of its own (plugins/mine.py); {allow}\n"
    assert not Path("it-ran").exists()
    lines, _ = carried_out("x.zip", "--trust-plugins", code=0, capsys=capsys)
    assert lines[0] == "x.zip: 5 files of results are the same to the byte"
    assert Path("it-ran").exists()


def test_no_place_that_an_archive_names_is_gone_to(finished: Path) -> None:
    """Folders, downloads, clusters and stores are said on this machine, or not at all."""
    stored = read_json(finished / "config.json", "")["config"]
    hostile = {
        **stored,
        "data": {**stored["data"], "root": "/etc", "download": True},
        "partition": {**stored["partition"], "path": "/etc/passwd"},
        "engine": {**stored["engine"], "name": "ray", "workers": 9, "ray_address": "ray://elsewhere:1"},
        "tracking": {"uri": "http://elsewhere"},
    }
    harmless = {**stored, "data": {**stored["data"], "root": None}, "engine": {**stored["engine"], "workers": None}}
    assert Config.from_mapping(without_places(hostile)) == Config.from_mapping(harmless)


# ---- in words --------------------------------------------------------------------------------------------------------


def test_differences_in_words() -> None:
    before = {"a": 1, "b": [1, 2], "c": {"d": 0.5}, "e": 1, "gone": 0}
    after = {"a": 1, "b": [1, 3], "c": {"d": 0.25}, "new": 0, "e": True}
    told = difference("metrics.json", json.dumps(before).encode(), json.dumps(after).encode())
    assert told == "b[1] is 3 instead of 2; c.d is 0.25 instead of 0.5; e is true instead of 1; and 2 more"
    lines = [b'{"round": 1, "x": 1}', b'{"round": 2, "x": 1}']
    other = [lines[0], b'{"round": 2, "x": 5}']
    assert difference("history.jsonl", b"\n".join(lines), b"\n".join(other)) == "round 2.x is 5 instead of 1"
    assert difference("history.jsonl", b"\n".join(lines), lines[0]) == "round 2 is missing"
    assert difference("curves.csv", b"a\nb\n", b"a\nc\n") == "line 2 is c instead of b"
    assert difference("metrics.json", b"{}", b"{} ") == "other bytes with the same values"


def test_arrays_differ_by_name_and_by_how_much() -> None:
    """1.5 and 1.25 differ by a quarter."""
    import torch
    from safetensors.torch import save

    one = {"a": torch.tensor([1.0, 1.5]), "b": torch.zeros(2), "c": torch.zeros(1)}
    other = {"a": torch.tensor([1.0, 1.25]), "b": torch.zeros(3), "c": torch.zeros(1)}
    told = difference("model.safetensors", save(one), save(other))
    assert told == "a differs by 0.25 at most; b has another shape or type"


def test_what_tolerance_means() -> None:
    """Accuracies by 0.02, what is counted not at all, what is measured on few images is left aside."""
    before = {"method": "x", "bytes_up": 10, "top1_global": 0.5, "mean_local": None, "class_acc": [0.0, 1.0]}
    assert beyond_tolerance(before, {**before, "top1_global": 0.5195, "class_acc": [1.0, 0.0]}) == []
    assert beyond_tolerance(before, {**before, "top1_global": 0.5215}) == [
        "top1_global is 0.5215 instead of 0.5000, more than 0.02 apart"
    ]
    assert beyond_tolerance(before, {**before, "bytes_up": 11}) == ["bytes_up is 11 instead of 10"]
    assert beyond_tolerance(before, {**before, "mean_local": 0.1}) == ["mean_local is 0.1 instead of null"]
    tasks = {"tasks": {"a_sel": 0.25, "last_epochs": {"a_glo": 0.5}}}
    changed = {"tasks": {"a_sel": 0.25, "last_epochs": {"a_glo": 0.75}}}
    assert beyond_tolerance(tasks, changed) == ["a_glo is 0.7500 instead of 0.5000, more than 0.02 apart"]


def test_a_configuration_that_cannot_be_is_the_archives_fault(
    forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(contents: dict[str, bytes]) -> None:
        name = f"{the_run(contents)}/config.json"
        header = json.loads(contents[name])
        header["config"]["local"]["lr"] = -1
        contents[name] = json.dumps(header).encode()

    _, error = carried_out(forged(change), code=3, capsys=capsys)
    assert "/config.json: local.lr = -1: must be > 0" in error


# ---- comparisons -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comparison_comes_out_with_all_its_runs_and_tables(tmp_path: Path) -> None:
    """By real commands: two methods, two seeds; four runs and seven files of the comparison; then one is exchanged."""
    values = ("data.limit_per_class=20", "partition.num_clients=3", "partition.min_size=5", "federation.rounds=2")
    words = [part for value in (*values, "tracking.enabled=false") for part in ("--set", value)]

    def protofl(*more: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "pipelines.cli", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout

    (tmp_path / "claims.yaml").write_text("ours: {better: fedavg, than: [local], by: 1}\n")
    compare = ["compare", "--methods", "fedavg,local", "--seeds", "0,1", "--orchestrator", "inline"]
    compare += ["--claims", "claims.yaml"]
    protofl(*compare, *words)
    protofl("archive", "runs/comparison", "--out", "all.zip")
    found = read_archive(tmp_path / "all.zip")
    assert [run.header.config["method"]["name"] for run in found.runs] == ["fedavg", "fedavg", "local", "local"]
    assert found.comparison is not None and len(found.comparison.results) == 7
    assert found.comparison.claims["ours.local"].metric == "mean_local"
    expected = sum(len(run.proof.results) for run in found.runs) + 7
    said = protofl("reproduce", "all.zip", "--check").splitlines()
    assert said[-1] == f"all.zip: {expected} files of results are the same to the byte"
    table = (tmp_path / "runs/reproduced/all/comparison.md").read_bytes()
    assert table == (tmp_path / "runs/comparison/comparison.md").read_bytes()
    (tmp_path / "runs/reproduced/all/comparison.csv").write_text("another\n")
    assert protofl("reproduce", "all.zip", "--check").splitlines()[-1] == said[-1]  # the tables are made anew
