"""A run's folder at any moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flcore.core.errors import DataError
from pipelines.runs.folder import read_folder, read_lines


def begun(folder: Path) -> Path:
    """A run that has begun: its header, with a section that is told to nobody."""
    (folder / "checkpoint").mkdir(parents=True)
    config = {"seed": 3, "tracking": {"uri": "http://user:secret@host"}}
    header = {"config": config, "identity": {"seed": 3}, "config_hash": "ab"}
    (folder / "config.json").write_text(json.dumps(header))
    return folder


def test_a_run_that_has_begun(tmp_path: Path) -> None:
    run = read_folder(begun(tmp_path / "run"))
    assert run.config == {"seed": 3}
    assert ([*run.history, *run.legs], run.metrics, run.code, run.study) == ([], None, None, None)


def test_a_round_that_may_be_repeated_is_not_there_yet(tmp_path: Path) -> None:
    """The record of round 3 was written, its state was not; of a run that was given up there may be no state."""
    folder = begun(tmp_path / "run")
    lines = "".join(json.dumps({"round": number}) + "\n" for number in (1, 2, 3))
    (folder / "checkpoint" / "history.jsonl").write_text(lines)
    (folder / "checkpoint" / "timing.jsonl").write_text(lines)
    (folder / "checkpoint" / "state.json").write_text('{"round": 2}')
    run = read_folder(folder)
    assert [record["round"] for record in run.history] == [leg["round"] for leg in run.legs] == [1, 2]
    (folder / "checkpoint" / "state.json").unlink()
    assert len(read_folder(folder).history) == 3


def test_a_finished_run(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    (folder / "history.jsonl").write_text('{"round": 2}\n{"round": 1}\n')
    (folder / "timing.json").write_text('{"rounds": [{"round": 1}], "seconds": {"evaluate": 1.5}}')
    (folder / "metrics.json").write_text('{"top1_global": 0.5}')
    run = read_folder(folder)
    assert [record["round"] for record in run.history] == [1, 2]
    assert run.timing["seconds"] == {"evaluate": 1.5}
    assert run.metrics == {"top1_global": 0.5}
    (folder / "history.jsonl").unlink()
    assert read_folder(folder).metrics is None, "metrics of a run that trains again are those of the last time"


def test_an_incomplete_last_line_is_left_out_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"round": 1}\n{"round": 2, "name": "\xc3')
    assert [record["round"] for record in read_lines(path)] == [1]
    path.write_bytes(b'{"round": 1\n{"round": 2}\n')
    with pytest.raises(DataError, match="line 1"):
        read_lines(path)
    path.write_bytes(b"3\n")
    with pytest.raises(DataError, match="not a JSON object"):
        read_lines(path)


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="not a run"):
        read_folder(tmp_path)
