"""A run's folder at any moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flcore.core.errors import DataError
from flcore.io.files import sealed, write_json
from pipelines.runs.folder import RunFolder


CONFIG = {"seed": 3, "data": {"name": "digits"}, "partition": {"name": "iid"}}


def begun(folder: Path) -> Path:
    """A run that has begun: its header."""
    (folder / "checkpoint").mkdir(parents=True)
    write_json(folder / "config.json", sealed({"config": CONFIG, "identity": {"seed": 3}, "config_hash": "ab"}))
    return folder


def test_a_run_that_has_begun(tmp_path: Path) -> None:
    run = RunFolder(begun(tmp_path / "run"))
    assert (run.config, run.identity, run.config_hash) == (CONFIG, {"seed": 3}, "ab")
    assert ([*run.history, *run.legs], run.is_finished, run.code, run.study) == ([], False, None, None)


def test_a_round_that_may_be_repeated_is_not_there_yet(tmp_path: Path) -> None:
    """The record of round 3 was written, its state was not; of a run that was given up there may be no state."""
    folder = begun(tmp_path / "run")
    lines = "".join(json.dumps({"round": number}) + "\n" for number in (1, 2, 3))
    (folder / "checkpoint" / "history.jsonl").write_text(lines)
    (folder / "checkpoint" / "timing.jsonl").write_text(lines)
    (folder / "checkpoint" / "state.json").write_text('{"round": 2}')
    run = RunFolder(folder)
    assert [record["round"] for record in run.history] == [leg["round"] for leg in run.legs] == [1, 2]
    (folder / "checkpoint" / "state.json").unlink()
    assert len(RunFolder(folder).history) == 3


def test_a_finished_run(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    (folder / "history.jsonl").write_text('{"round": 2}\n{"round": 1}\n')
    (folder / "timing.json").write_text('{"rounds": [{"round": 1}], "seconds": {"evaluate": 1.5}}')
    (folder / "metrics.json").write_text('{"top1_global": 0.5}')
    run = RunFolder(folder)
    assert [record["round"] for record in run.history] == [1, 2]
    assert run.timing["seconds"] == {"evaluate": 1.5}
    assert run.metrics == {"top1_global": 0.5}
    (folder / "history.jsonl").unlink()
    assert not RunFolder(folder).is_finished, "metrics of a run that trains again are those of the last time"


def test_an_incomplete_last_line_is_left_out_while_a_run_trains_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    path = folder / "checkpoint" / "history.jsonl"
    path.write_bytes(b'{"round": 1}\n{"round": 2, "name": "\xc3')
    assert RunFolder(folder).history == [{"round": 1}]
    for damaged, said in ((b'{"round": 1\n{"round": 2}\n', "line 1"), (b"3\n", "not a JSON object"), (b"{}", "round")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=said):
            _ = RunFolder(folder).history
    (folder / "history.jsonl").write_bytes(b'{"round": 1}\n{"rou')
    with pytest.raises(DataError, match="line 2"):
        _ = RunFolder(folder).history


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="no run was started there"):
        _ = RunFolder(tmp_path).config
    with pytest.raises(DataError, match=r"metrics\.json: .*has not finished"):
        _ = RunFolder(tmp_path).metrics


def test_each_file_is_read_once_and_when_it_is_needed(tmp_path: Path) -> None:
    """Files that are damaged later are not read again, and a file that is not asked for is not read at all."""
    folder = begun(tmp_path / "run")
    (folder / "history.jsonl").write_text('{"round": 1}\n')
    (folder / "metrics.json").write_text('{"top1_global": 0.5}')
    (folder / "timing.json").write_text("damaged")
    run = RunFolder(folder)
    before = run.config, run.history, run.metrics
    for name in ("config.json", "history.jsonl", "metrics.json"):
        (folder / name).write_text("damaged")
    assert (run.config, run.history, run.metrics) == before
    with pytest.raises(DataError, match=r"timing\.json"):
        _ = run.timing


def test_rounds_and_results_are_of_one_moment(tmp_path: Path) -> None:
    """A run that ends after its rounds were read is unfinished until its folder is read again."""
    folder = begun(tmp_path / "run")
    (folder / "checkpoint" / "history.jsonl").write_text('{"round": 1}\n')
    run = RunFolder(folder)
    assert len(run.history) == 1
    (folder / "history.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    (folder / "metrics.json").write_text("{}")
    assert (run.is_finished, RunFolder(folder).is_finished, len(RunFolder(folder).history)) == (False, True, 2)
