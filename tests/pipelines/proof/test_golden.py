"""Golden hashes: three methods against those kept with the code, all of them where there is time; a change is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flcore.core.cpu_class import processor_class
from flcore.core.errors import ConfigError
from flcore.io.files import read_json, write_json
from flcore.methods.registry import METHODS
from pipelines.cli.app import main
from pipelines.proof import golden


def recorded_here() -> bool:
    return (golden.FOLDER / f"{processor_class()}.json").is_file()


def check(names: list[str] | None) -> None:
    """To the byte where this class of processor is recorded, and else with the word that it is not."""
    outcome = golden.check(names)
    first = outcome.lines[0]
    assert list(outcome.different) == [], "\n".join(outcome.lines)
    if "NOT CHECKED BY BYTES" in first:
        assert not recorded_here()
        pytest.skip(first)


def test_three_methods_give_what_is_recorded() -> None:
    """A model that is averaged; prototypes with retraining; statistics with a dictionary."""
    check(["fedavg", "gfpl", "protolda"])


@pytest.mark.slow
def test_every_method_gives_what_is_recorded() -> None:
    check(None)


def test_every_method_is_recorded_with_some_class() -> None:
    recorded = {path.name: read_json(path, "")["methods"] for path in golden.FOLDER.glob("*.json")}
    assert set().union(*recorded.values()) == set(METHODS)
    for methods in recorded.values():
        # No two give the same: none of them is another one by mistake.
        assert len({tuple(entry["files"].values()) for entry in methods.values()}) == len(methods)


def test_what_changes_is_named_and_recorded_where_it_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ProtoLDA, which takes the least time, as if its model had been other; then its record anew."""
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    with pytest.raises(
        ConfigError, match="nothing is recorded yet; record it anew with protofl reproduce --golden --rec"
    ):
        golden.check(["protolda"], tmp_path)
    path = tmp_path / f"{processor_class()}.json"
    said = golden.record(["protolda"], tmp_path)
    assert said == f"{path}: 1 methods recorded, of which 1 are new or other than before"
    whole = read_json(path, "")
    files = whole["methods"]["protolda"]["files"]
    assert {"metrics.json", "history.jsonl", "model.safetensors", "server.safetensors"} <= files.keys()
    other = {**whole["methods"]["protolda"], "files": {**files, "model.safetensors": "0" * 64}}
    write_json(path, {"versions": {**whole["versions"], "torch": "1.0"}, "methods": {"protolda": other}})
    monkeypatch.setattr(golden.check, "__defaults__", (None, tmp_path))
    assert main(["reproduce", "--golden", "--methods", "protolda"]) == 4
    captured = capsys.readouterr()
    here = processor_class()
    assert captured.out.splitlines() == [
        f"golden: 0 of 1 methods have the recorded bytes (class {here})",
        "protolda: other bytes in model.safetensors",
        f"note: other packages than recorded: torch {whole['versions']['torch']} instead of 1.0",
    ]
    assert captured.err.startswith("protofl: golden: 1 of 1 methods are not as recorded: protolda\n")
    # As the record of another class its bytes do not count, and its figures agree.
    path.rename(tmp_path / "vax-FLOAT.json")
    outcome = golden.check(["protolda"], tmp_path)
    assert outcome.different == []
    assert outcome.lines == [
        f"golden: NOT CHECKED BY BYTES: nobody has recorded the class {here}; "
        "figures are set against those of vax-FLOAT, and 1 of 1 methods agree",
        "protofl reproduce --golden --record keeps what comes out here, from then on to the byte",
    ]
    # Nor do other bytes that were recorded for the instructions alone: who knows of which processor. The same ones do.
    undigested = tmp_path / f"{here.rpartition('-')[0]}.json"
    (tmp_path / "vax-FLOAT.json").rename(undigested)
    assert "figures are set against those of " + undigested.stem in golden.check(["protolda"], tmp_path).lines[0]
    write_json(undigested, {**whole, "methods": {"protolda": {**other, "files": files}}})
    told = f"golden: 1 of 1 methods have the recorded bytes (class {undigested.stem})"
    assert golden.check(["protolda"], tmp_path).lines == [told]


def test_a_new_method_is_set_against_the_class_that_has_it(tmp_path: Path) -> None:
    """Recorded here is another one; ProtoLDA on a VAX: its figures count, its bytes do not."""
    here = processor_class()
    golden.record(["local", "protolda"], tmp_path)
    whole = read_json(tmp_path / f"{here}.json", "")
    entry = whole["methods"].pop("protolda")
    write_json(tmp_path / f"{here}.json", whole)
    elsewhere = {"files": {}, "figures": entry["figures"]}
    write_json(tmp_path / "vax-FLOAT.json", {**whole, "methods": {"protolda": elsewhere}})
    outcome = golden.check(["local", "protolda"], tmp_path)
    assert outcome.different == []
    assert outcome.lines == [
        f"golden: 2 of 2 methods have the recorded bytes, 1 of them the figures of another class (class {here})",
        "protolda: figures are set against those of vax-FLOAT",
    ]
    elsewhere["figures"] = {**entry["figures"], "bytes_up": 1 + entry["figures"]["bytes_up"]}
    write_json(tmp_path / "vax-FLOAT.json", {**whole, "methods": {"protolda": elsewhere}})
    assert golden.check(["local", "protolda"], tmp_path).different == ["protolda"]


def test_a_method_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--golden", "--methods", "fedavgg"]) == 2
    assert capsys.readouterr().err.startswith("protofl: --methods: fedavgg: unknown method; did you mean 'fedavg'?")


@pytest.mark.slow
def test_other_instructions_are_another_class_with_other_bytes_and_the_same_figures(tmp_path: Path) -> None:
    """PyTorch told to do without vector instructions: really other last bits, in a process of its own."""
    command = [sys.executable, "-m", "pipelines.cli", "reproduce", "--golden", "--methods", "fedavg,fedcspc,gfpl"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "NOT CHECKED BY BYTES: nobody has recorded the class" in done.stdout
    assert "3 of 3 methods agree" in done.stdout
