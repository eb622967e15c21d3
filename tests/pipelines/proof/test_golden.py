"""Golden hashes: three methods against those kept with the code, all of them where there is time; a change is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flcore.core.cpu_class import is_portable, processor_class
from flcore.core.errors import ConfigError
from flcore.io.files import read_json, write_json
from flcore.methods.registry import METHODS
from pipelines.cli.app import main
from pipelines.proof import golden


def check(names: list[str] | None) -> None:
    """To the byte on every processor with AVX2."""
    outcome = golden.check(names)
    assert list(outcome.different) == [], "\n".join(outcome.lines)
    if not is_portable():
        assert "NOT CHECKED BY BYTES" in outcome.lines[0]
        pytest.skip(outcome.lines[0])


def test_three_methods_give_what_is_recorded() -> None:
    """A model that is averaged; prototypes with retraining; statistics with a dictionary."""
    check(["fedavg", "gfpl", "protolda"])


@pytest.mark.slow
def test_every_method_gives_what_is_recorded() -> None:
    check(None)


def test_every_method_is_recorded_and_none_is_another_one_by_mistake() -> None:
    methods = read_json(golden.FILE, "")["methods"]
    assert methods.keys() == set(METHODS)
    assert len({tuple(entry["files"].values()) for entry in methods.values()}) == len(methods)


def test_what_changes_is_named_and_recorded_where_it_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ProtoLDA, which takes the least time, as if its model had been other; then its record anew."""
    path, here = tmp_path / "hashes.json", processor_class()
    monkeypatch.setattr(golden, "FILE", path)
    monkeypatch.setattr(golden, "is_portable", lambda: False)
    with pytest.raises(ConfigError, match="--record"):
        golden.record(["protolda"])
    monkeypatch.setattr(golden, "is_portable", lambda: True)
    assert golden.record(["protolda"]) == f"{path}: 1 methods recorded, of which 1 are new or other than before"
    whole = read_json(path, "")
    entry = whole["methods"]["protolda"]
    assert {"metrics.json", "history.jsonl", "model.safetensors", "server.safetensors"} <= entry["files"].keys()
    other = {**entry, "files": {**entry["files"], "model.safetensors": "0" * 64}}
    changed = {**whole, "versions": {**whole["versions"], "torch": "1.0"}, "methods": {"protolda": other}}
    write_json(path, changed)
    assert main(["reproduce", "--golden", "--methods", "protolda"]) == 4
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"golden: 0 of 1 methods have the recorded bytes (class {here})",
        "protolda: other bytes in model.safetensors",
        f"note: other packages than recorded: torch {whole['versions']['torch']} instead of 1.0",
    ]
    assert captured.err.startswith("protofl: golden: 1 of 1 methods are not as recorded: protolda\n")
    # Where the record is of another class its bytes do not count, and its figures do.
    write_json(path, {**changed, "processor": "vax-FLOAT"})
    outcome = golden.check(["protolda"])
    assert outcome.different == [] and "NOT CHECKED BY BYTES" in outcome.lines[0] and "1 of 1" in outcome.lines[0]
    other["figures"] = {**entry["figures"], "bytes_up": 1 + entry["figures"]["bytes_up"]}
    write_json(path, {**changed, "processor": "vax-FLOAT"})
    assert golden.check(["protolda"]).different == ["protolda"]


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
    assert "NOT CHECKED BY BYTES" in done.stdout and "3 of 3 methods have its figures" in done.stdout
