"""What a run says of the process that made it."""

from __future__ import annotations

import pytest

from flcore.config import Config
from pipelines.runs.provenance import environment, source


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/env/bin/protofl", "compare", "--set", "tracking.uri=http://u:secret@h"], "protofl compare"),
        (["/env/bin/protofl", "stage", "train", "--out", "x"], "protofl stage train"),
        (["/project/pipelines/cli/__main__.py", "run"], "protofl run"),
        (["somewhere/my_script.py", "run"], "my_script.py"),
        (["-c"], "-c"),
        ([""], "python"),
    ],
)
def test_a_command_is_named_without_its_options(command: list[str], name: str) -> None:
    assert source(command, {}) == {"name": name, "type": "LOCAL"}


def test_a_run_that_a_worker_began_is_a_job() -> None:
    command = ["/env/lib/prefect/engine.py", "0d1e"]
    assert source(command, {"PREFECT__FLOW_RUN_ID": "0d1e"}) == {"name": "prefect deployment", "type": "JOB"}


def test_the_lock_is_found() -> None:
    found = environment(Config())
    assert len(found["lock_hash"]) == 64
    assert found["source"]["type"] == "LOCAL"
