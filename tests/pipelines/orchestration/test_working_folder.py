"""Which flows work in the folder of their deployment without importing from it."""

import os
from pathlib import Path

import pytest
import yaml

from pipelines.orchestration import deployments, working_folder


def test_flows_of_protofl_alone_get_the_step_and_heartbeats_and_a_step_of_ones_own_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = [{"prefect.deployments.steps.set_working_directory": {"directory": "/srv"}}]
    declared = [
        {
            "name": "ours",
            "entrypoint": "pipelines.orchestration.flows.compare",
            "tags": ["scheduled"],
            "work_pool": {"name": "p", "job_variables": {"env": {"OMP_NUM_THREADS": "1"}}},
        },
        {"name": "moved", "entrypoint": "pipelines.orchestration.flows.compare", "pull": own},
        {"name": "mine", "entrypoint": "mine.py:flow"},
    ]
    rest = [["heartbeat-30s"], None]
    file = Path("prefect.yaml")
    for content, expected in (
        ({"deployments": declared}, [working_folder.steps(), own, None]),
        ({"deployments": declared, "pull": own}, [None, own, None]),
    ):
        file.write_text(yaml.safe_dump(content))
        written = yaml.safe_load(deployments._completed(file, Path("logs"), ()).read_text())
        assert [each.get("pull") for each in written["deployments"]] == expected
        assert written.get("pull") == content.get("pull")
        assert [each.get("tags") for each in written["deployments"]] == [["scheduled", "heartbeat-30s"], *rest]
        sent = {"env": {"OMP_NUM_THREADS": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}
        assert written["deployments"][0]["work_pool"] == {"name": "p", "job_variables": sent}
    assert str(tmp_path) in str(working_folder.steps())


def test_a_flow_moves_to_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    before = dict(os.environ)
    working_folder.set_working_folder(str(tmp_path))
    working_folder.enter()
    assert Path.cwd() == tmp_path and dict(os.environ) == before
    monkeypatch.chdir("/")
    working_folder.enter()
    assert Path.cwd() == Path("/")
    working_folder.set_working_folder(str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        working_folder.enter()
