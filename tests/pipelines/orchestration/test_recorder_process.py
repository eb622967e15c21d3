"""The recorder's own end of the pipe: what it answers."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from flcore.core.errors import DataError, ProtoflError
from pipelines.execution.recorder import _error_of
from pipelines.orchestration.recorder_process import _Desk

TINY: dict[str, Any] = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
}


@pytest.mark.slow
def test_a_store_that_is_away_is_not_named_as_the_place_of_a_run(tmp_path: Path) -> None:
    """The page is made, and one line says that nothing was logged; so it is for a request that cannot be met."""
    run(TINY, tmp_path / "run")
    answers: list[Mapping[str, Any]] = []
    desk = _Desk(answers.append)
    # An address of its own: that a store is away is said once in a process, and other tests have stores there.
    away = {"enabled": True, "uri": "http://127.0.0.1:9/recorder", "log_model": True, "register": False}
    desk._do({"do": "configure", "tracking": away})
    desk._do({"do": "finish", "run": str(tmp_path / "run"), "number": 4})
    (said,) = [answer["say"] for answer in answers if "say" in answer]
    assert "127.0.0.1:9/recorder" in said
    page = str(tmp_path / "run" / "report.html")
    assert [answer for answer in answers if "say" not in answer] == [
        {"number": 4, "answer": {"report": page, "store": None}}
    ]
    assert Path(page).exists()
    desk._do({"do": "finish", "run": str(tmp_path / "nowhere"), "number": 5})
    assert answers[-1]["number"] == 5 and answers[-1]["error"]["kind"] == "DataError"
    # What the system refuses comes through as what it is: a folder stands where the page belongs.
    Path(page).unlink()
    Path(page).mkdir()
    desk._do({"do": "finish", "run": str(tmp_path / "run"), "number": 6})
    error = _error_of(json.loads(json.dumps(answers[-1]["error"])))
    assert isinstance(error, OSError) and error.errno == errno.EISDIR


def test_a_run_that_cannot_be_marked_keeps_no_other_from_it(tmp_path: Path) -> None:
    """Of two runs that were stopped the first one's store is away."""
    marked: list[bool] = []

    class Tracker:
        def __init__(self, error: ProtoflError | None) -> None:
            self.error = error

        def mark_stopped(self, *, failed: bool) -> None:
            if self.error is not None:
                raise self.error
            marked.append(failed)

    answers: list[Mapping[str, Any]] = []
    desk = _Desk(answers.append)
    for name, error in (("away", DataError("away: damaged")), ("here", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        desk._trackers[str(tmp_path / name)] = Tracker(error)
    desk._mark_stopped(failed=True)
    assert (marked, answers) == ([True], [{"say": "away: damaged"}])


def test_a_comparison_calls_methods_by_their_names_where_nobody_says_otherwise(tmp_path: Path) -> None:
    """As the stage *compare* asks, and as a tuned comparison does: the same run in a row of another name."""
    run(TINY, tmp_path / "run")
    answers: list[Mapping[str, Any]] = []
    desk = _Desk(answers.append)
    desk._do({"do": "configure", "tracking": {"enabled": False}})
    for rows, named in (((), "fedavg"), (("fedavg (tuned)",), "fedavg (tuned)")):
        facts = {"name": "c", "width": 100, "terminal": False} | ({"rows": rows} if rows else {})
        asked = {"do": "comparison", "config": {}, "runs": [str(tmp_path / "run")], "directory": str(tmp_path / "c")}
        desk._do({**asked, "facts": facts, "number": 1})
        assert f"| {named} |" in answers[-1]["answer"]["markdown"]
