"""The recorder's process dies, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flcore import run
from flcore.core.errors import RunError
from pipelines.execution.recorder import Recorder

TINY = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
}
PATIENCE_SECONDS = 120


def kill(recorder: Recorder) -> None:
    """Its process, which has ended when this returns."""
    process = recorder._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_what_cannot_be_said_keeps_no_answer_from_whoever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process says a line, for which nobody has an ear, and then answers the first question."""

    def refuse(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.chdir(tmp_path)
    with Recorder(False, refuse) as recorder:
        answer = recorder.finish(Path("run"))
        said = """print('{"say": "a store is away"}'); print('{"number": 0, "answer": "done"}')"""
        with subprocess.Popen([sys.executable, "-c", said], stdout=subprocess.PIPE, text=True) as speaking:
            recorder._closing = True
            recorder._listen(speaking)
        recorder._closing = False
        assert answer.result(0) == "done"


def test_a_recorder_that_dies_in_the_middle_of_a_line_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens ends with it, and it is started again, or told of, as after any other death."""
    monkeypatch.chdir(tmp_path)
    ended: list[int] = []
    with Recorder(False, print) as recorder:
        half = "import os; print('{\"number\": 0, \"ans', end='', flush=True); os.kill(os.getpid(), 9)"
        with subprocess.Popen([sys.executable, "-c", half], stdout=subprocess.PIPE, text=True) as dying:
            monkeypatch.setattr(recorder, "_ended", ended.append)
            recorder._listen(dying)
    assert ended[0] == -signal.SIGKILL


@pytest.mark.slow
def test_a_recorder_that_dies_with_nothing_to_do_is_there_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while data are prepared; its second death is told, also to those who ask afterwards."""
    monkeypatch.chdir(tmp_path)
    run(TINY, "run")
    with Recorder(False, print) as recorder:
        kill(recorder)
        recorder.configure({"enabled": False})
        found = recorder.finish(Path("run")).result(PATIENCE_SECONDS)
        assert Path(found["report"]).exists()
        kill(recorder)
        with pytest.raises(RunError, match=r"the recorder ended \(signal 9\): results are on disk, the same command"):
            recorder.finish(Path("run")).result(PATIENCE_SECONDS)


def test_a_file_of_the_working_folder_is_not_taken_for_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a run is made, whatever lies beside it, and nothing of it is carried out."""
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    text = f"open({str(marker)!r}, 'a').write(__name__); raise RuntimeError(__name__)"
    for name in ("json.py", "queue.py", "random.py", "pipelines.py", "flcore.py"):
        (tmp_path / name).write_text(text)
    run(TINY, "run")
    with Recorder(False, print) as recorder:
        recorder.configure({"enabled": False})
        found = recorder.finish(tmp_path / "run").result(PATIENCE_SECONDS)
    assert Path(found["report"]).exists() and not marker.exists()
