"""``dvc repro`` is exact: in other folders, with other numbers of workers, killed half-way and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}


def clone(folder: Path, **engine: object) -> Path:
    """The tracked files of this checkout as they are now, with a smaller comparison, as a repository of its own."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists() and not name.startswith("tests/") and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["data"]["limit_per_class"] = 20
    params["partition"] |= {"num_clients": 4, "min_size": 5}
    params["federation"]["rounds"] = 6
    params["compare"] |= {"methods": ["fedavg", "fedproto"], "seeds": [0]}
    params["engine"] |= engine
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    for command in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(command, cwd=folder, check=True)
    return folder


def repro(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "dvc"), "repro"],
        cwd=folder,
        env={**environment(), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def output_hashes(folder: Path) -> dict[str, str]:
    stages = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    return {out["path"]: out["md5"] for stage in stages.values() for out in stage["outs"]}


@pytest.mark.slow
def test_two_clones_one_with_a_worker_and_one_killed_have_the_same_output_hashes(tmp_path: Path) -> None:
    first, second = clone(tmp_path / "a", workers=1), clone(tmp_path / "b")
    done = repro(first)
    assert done.returncode == 0, done.stdout + done.stderr
    process = subprocess.Popen(
        [str(BIN / "dvc"), "repro"],
        cwd=second,
        env={**environment(), "PYTHONPATH": str(second)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    state = second / "artifacts" / "runs" / "fedproto-s0" / "checkpoint" / "state.json"
    deadline = time.monotonic() + 300
    while not state.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = repro(second)
    assert done.returncode == 0, done.stdout + done.stderr
    assert output_hashes(first) == output_hashes(second)
    assert len(output_hashes(first)) > 15
    status = subprocess.run([str(BIN / "dvc"), "status", "-q"], cwd=second, env=environment(), check=False)
    assert status.returncode == 0, "a second repro would have something to do"


def test_every_parameter_and_file_that_dvc_yaml_names_exists() -> None:
    """What dvc.yaml depends on must be there, or the first ``dvc repro`` of a newcomer stops half-way."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    for name, stage in stages.items():
        for path in stage["deps"]:
            assert path.startswith("artifacts") or (ROOT / path).exists(), f"{name}: {path}"
        for key in stage.get("params", []):
            value = params
            for part in key.split("."):
                assert part in value, f"{name}: {key}"
                value = value[part]
