"""The code in memory is the code that a run is recorded under, whatever happens to the files meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flcore
from flcore.config.schema import Config
from flcore.core.errors import RunError
from flcore.running import train

LIBRARY = Path(flcore.__file__).parent

WHILE_FILES_ARE_EDITED = """
import json
from pathlib import Path
import flcore
from flcore.config.schema import Config
from flcore.engine.pool.child import WorkerProcess
from flcore.core.errors import RunError
from flcore.experiment.provenance import code_fingerprint
import after

ROOT = Path(flcore.__file__).parent
RAW = {
    "data": {"size": 16, "limit_per_class": 20}, "partition": {"num_clients": 2, "min_size": 5},
    "method": {"name": "fedavg"}, "federation": {"rounds": 1}, "model": {"name": "fedgen_cnn", "feature_dim": 8},
}
said = {}

def edited(name, old, new):
    path = ROOT / name
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new, 1))
    return lambda: path.write_text(before)

def run(folder, **changes):
    try:
        flcore.run({**RAW, **changes}, folder)
        return json.loads(Path(folder, "config.json").read_text())["code"]
    except RunError as error:
        return str(error)

said["first"], said["fingerprint"] = run("first"), code_fingerprint(Config.from_mapping(RAW))
put_back = edited("methods/fedavg.py", "from __future__", "# a remark\\nfrom __future__")
said["after an edit"], said["wrote"] = run("second", seed=1), Path("second/metrics.json").exists()
said["finished before"] = run("first")
child = WorkerProcess(after.refused, "flcore.methods.fedavg")
said["in a new worker"] = child.pipe.recv()
put_back()
said["put back"] = run("second", seed=1)
edited("methods/fedprox.py", "FedAvg with a proximal term that", "EDITED FedAvg with a proximal term that")
from flcore.methods.fedprox import FedProx
said["imported later"] = FedProx.summary
said["of another method"] = run("third", seed=2)
print(json.dumps(said))
"""
IN_A_WORKER = """
from flcore.core.errors import RunError
from flcore.core.loaded_code import refuse_edited
def refused(pipe, module):
    try:
        refuse_edited([module])
        pipe.send("")
    except RunError as error:
        pipe.send(str(error))
"""


@pytest.mark.slow
def test_a_run_does_not_begin_where_a_file_of_its_code_was_edited(tmp_path: Path) -> None:
    """One process, whose package is edited while it lives: a method in use, then one that nothing has imported yet."""
    shutil.copytree(LIBRARY, tmp_path / "flcore")  # with what is compiled, whose times of files stay
    (tmp_path / "script.py").write_text(WHILE_FILES_ARE_EDITED)
    (tmp_path / "after.py").write_text(IN_A_WORKER)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["first"] == said["fingerprint"] == said["finished before"]
    assert "flcore/methods/fedavg.py was edited" in said["after an edit"] and not said["wrote"]
    assert "flcore/methods/fedavg.py" in said["in a new worker"]
    assert said["put back"] == said["first"]
    assert "EDITED" not in said["imported later"]
    assert said["of another method"] == said["first"]  # fedprox is no part of a run of fedavg


def test_a_run_does_not_begin_where_its_plug_in_was_edited(lab: Any, plugin: Path, tmp_path: Path) -> None:
    raw = lab.mapping(plugins=[str(plugin)], method={"name": "mine"}, federation__rounds=1)
    config = Config.from_mapping(raw)
    plugin.write_text(plugin.read_text() + "# a remark\n")
    with pytest.raises(RunError, match=r"mine\.py was edited"):
        train(config, lab.prepared, lab.partition_folder, tmp_path / "run")
    with pytest.raises(RunError, match=r"mine\.py was edited"):  # as a worker, or a trial, makes it again
        Config.from_mapping(config.to_mapping())
    assert not (tmp_path / "run" / "history.jsonl").exists()
    train(Config.from_mapping(raw), lab.prepared, lab.partition_folder, tmp_path / "run")
