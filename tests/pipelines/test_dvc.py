"""``dvc repro`` is exact and trains only what is new: elsewhere, killed half-way, pulled, after a change."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from flcore.config.schema import Config
from flcore.config.stored import REMOVED
from flcore.core.loaded_code import PACKAGE_SOURCES
from flcore.data.dataset import Dataset
from pipelines.cli import make_run
from pipelines.stages.code import write_digests
from pipelines.stages.parameters import unseen_plugin

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


# ---- without DVC -------------------------------------------------------------------------------------------------


def test_every_parameter_and_file_that_dvc_yaml_names_exists() -> None:
    """What dvc.yaml depends on must be in git, or the first ``dvc repro`` of a newcomer stops half-way."""
    declared = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    for name, stage in declared["stages"].items():
        for path in stage["deps"]:
            if path == "${data.root}":
                path = params["data"]["root"]
            assert path.startswith("artifacts") or (ROOT / path).exists(), f"{name}: {path}"
        for key in stage.get("params", ()):
            value = params
            for part in key.split("."):
                assert part in value, f"{name}: {key}"
                value = value[part]
    for plot in declared["plots"]:
        for settings in plot.values():
            assert (ROOT / ".dvc" / "plots" / f"{settings['template']}.json").exists()


def test_every_stage_depends_on_what_its_code_imports(tmp_path: Path) -> None:
    """A default may stand anywhere in flcore: a stage that is skipped after it has changed claims what is not so."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert {"flcore", "pipelines/stages", "pipelines/runs", "pipelines/reporting", "plugins"} == set(
        stages.pop("code")["deps"]
    )
    write_digests(tmp_path)
    library = {f"flcore/{path}" for path in PACKAGE_SOURCES}
    for name, stage in stages.items():
        assert f"artifacts/code/{name}.txt" in stage["deps"], name
        modules = {line.split()[1] for line in (tmp_path / f"{name}.txt").read_text().splitlines()}
        own = {"pipelines/reporting/comparison_report.py"} if name == "compare" else {f"pipelines/stages/{name}.py"}
        assert library | own | {"pipelines/runs/cache.py"} <= modules, name


def test_stages_depend_on_plug_ins_without_their_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the comparison, which reads results; elsewhere than in `plugins` DVC would not see a change."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugins").mkdir()

    def digests(source: str) -> dict[str, str]:
        (tmp_path / "plugins" / "mine.py").write_text(source)
        write_digests(tmp_path)
        return {path.name: path.read_text() for path in tmp_path.glob("*.txt")}

    before = digests("a = 1\n")
    assert digests("a = 1  # one\n") == before
    after = digests("a = 2\n")
    assert {name for name in after if after[name] != before[name]} == {"prepare.txt", "partition.txt", "train.txt"}
    assert unseen_plugin(tmp_path, [tmp_path / "plugins" / "mine.py"]) is None
    assert "other.py is not in plugins/" in str(unseen_plugin(tmp_path, [tmp_path / "other.py"]))


def test_training_depends_on_every_parameter_that_can_change_a_result() -> None:
    """Of those in params.yaml; what is left out changes no byte: who carries a run out, and who is told."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    known = {key for stage in ("prepare", "partition", "train") for key in stages[stage]["params"]}
    keys = {f"{section}.{key}" for section, value in params.items() if isinstance(value, dict) for key in value}
    left_out = {key for key in keys if key not in known and key.partition(".")[0] not in known}
    assert left_out == {
        "compare.baseline", "compare.target_fraction", "engine.name", "engine.workers", "tracking.enabled",
        "tune.parallel", "tune.pruner", "tune.sampler", "tune.startup",
    }  # fmt: skip


def test_every_key_of_a_run_s_identity_is_a_dependency_of_training() -> None:
    """Whether or not it stands in params.yaml: one that no stage has would leave old results under a new name.

    Data and partition are named by content, of files that the stages before make; these have both sections whole.
    """
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert "data" in stages["prepare"]["params"] and "partition" in stages["partition"]["params"]
    assert {"artifacts/prepared", "artifacts/partitions"} <= set(stages["train"]["deps"])
    said = {"aggregation"}  # of this, and of some keys elsewhere, an identity says only what is not at its default
    for section, values in Config().identity().items():
        if section not in ("data", "partition"):
            said |= {f"{section}.{key}" for key in values} if isinstance(values, dict) else {section}
    said -= {f"{section}.{key}" for section, removed in REMOVED.items() for key in removed}
    assert {"seed", "local.lr", "engine.stack"} < said
    params = set(stages["train"]["params"])
    assert {key for key in said if not {key, key.partition(".")[0]} & params} == set()


def test_make_run_says_what_dvc_would_trip_over_or_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it goes on"))
    (tmp_path / ".git").mkdir()
    (tmp_path / "dvc.yaml").write_text("stages: {prepare: {cmd: x, deps: ['${data.root}']}}\n")

    def said(text: str, code: int) -> str:
        (tmp_path / "params.yaml").write_text(text)
        assert make_run.main() == code
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    assert "data.root" in said("data: {name: digits, root: ~/images}", 2)
    assert "mine.py" in said("{plugins: [mine.py], data: {root: images}}", 2)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "train").symlink_to(tmp_path)
    assert "images/train" in said("data: {name: imagefolder, root: images}", 3)


# ---- with it -----------------------------------------------------------------------------------------------------


def call(folder: Path, *command: str, check: bool = True) -> str:
    """What a command prints on standard output; its errors are shown where it fails."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    environment |= {"DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1"}
    environment |= {
        f"GIT_{role}_{key}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout


def commit(folder: Path) -> None:
    call(folder, "git", "add", "-A")
    call(folder, "git", "commit", "-q", "--allow-empty", "-m", "state")


def clone(folder: Path, **engine: object) -> Path:
    """The files of this checkout as they are now, with a smaller comparison, as a repository of its own."""
    listed = call(ROOT, "git", "ls-files", "-co", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists() and not name.startswith(("tests/", "docs/")) and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)

    def small(params: dict[str, Any]) -> None:
        params["data"]["limit_per_class"] = 20
        params["partition"] |= {"num_clients": 4, "min_size": 5}
        params["federation"]["rounds"] = 6
        params["engine"] |= engine
        params["compare"] |= {"methods": ["fedavg", "fedpa", "fedproto"], "seeds": [0]}
        params["compare"]["settings"] = {"fedpa": {"method.lambda_po0": 0.5}}

    change(folder, small)
    call(folder, "git", "init", "-q")
    commit(folder)
    return folder


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    params = yaml.safe_load((folder / "params.yaml").read_text())
    edit(params)
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def add_seed(params: dict[str, Any]) -> None:
    params["compare"]["seeds"].append(1)


def change_fedpa(params: dict[str, Any]) -> None:
    params["compare"]["settings"]["fedpa"]["method.lambda_po0"] = 0.4


def edit_of(name: str, line: str = "\nADDED = 1\n") -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "flcore" / "methods" / f"{name}.py"
        path.write_text(path.read_text() + line)

    return edit


def trained(folder: Path, *command: str) -> set[str]:
    """Carry a command out; returns the runs whose results were written meanwhile."""

    def times() -> dict[str, int]:
        return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("artifacts/runs/*/history.jsonl")}

    before = times()
    call(folder, *command)
    return {run for run, written in times().items() if before.get(run) != written}


def output_hashes(folder: Path) -> dict[str, str]:
    stages = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    return {out["path"]: out["md5"] for stage in stages.values() for out in stage["outs"]}


def is_up_to_date(folder: Path) -> bool:
    return call(folder, "dvc", "status").strip() == "Data and pipelines are up to date."


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose comparison has been made and committed; tests work on copies."""
    folder = clone(tmp_path_factory.mktemp("dvc") / "finished", workers=1)
    call(folder, "dvc", "repro")
    assert is_up_to_date(folder)
    commit(folder)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The same in another folder."""
    return Path(shutil.copytree(finished, tmp_path / "copy", symlinks=True))


@pytest.mark.slow
def test_without_a_worker_and_killed_half_way_it_has_the_same_output_hashes(finished: Path, tmp_path: Path) -> None:
    folder = clone(tmp_path / "killed")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    process = subprocess.Popen(
        [str(BIN / "dvc"), "repro"],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    states = [
        folder / "artifacts" / "runs" / f"{name}-s0" / "checkpoint" / "state.json" for name in ("fedpa", "fedproto")
    ]
    deadline = time.monotonic() + 300
    while not any(state.exists() for state in states) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    call(folder, "dvc", "repro")
    assert output_hashes(folder) == output_hashes(finished)
    assert {"artifacts/prepared", "artifacts/partitions", "artifacts/runs", "artifacts/runs.json"} < set(
        output_hashes(finished)
    )
    assert is_up_to_date(folder)


@pytest.mark.slow
def test_a_copy_in_another_folder_has_nothing_to_do_and_gives_the_same_hashes_by_force(
    copy: Path, finished: Path
) -> None:
    assert is_up_to_date(copy)
    assert trained(copy, "dvc", "repro") == set()
    shutil.rmtree(copy / "artifacts")
    shutil.rmtree(copy / ".protofl")
    call(copy, "dvc", "repro", "--force")
    assert output_hashes(copy) == output_hashes(finished)


@pytest.mark.slow
def test_after_a_change_only_what_is_new_is_trained(copy: Path) -> None:
    for edit, expected in (
        (lambda folder: change(folder, add_seed), {"fedavg-s1", "fedpa-s1", "fedproto-s1"}),
        (lambda folder: change(folder, change_fedpa), {"fedpa-s0", "fedpa-s1"}),
        (edit_of("gfpl"), set()),  # nobody's code here
    ):
        edit(copy)
        assert trained(copy, "dvc", "repro") == expected
        assert is_up_to_date(copy)
    # A line of code may be anything: the runs that use the file are made again, to the same bytes; a comment is not.
    before = output_hashes(copy)
    edit_of("fedproto", "\n# a comment\n")(copy)
    assert (trained(copy, "dvc", "repro"), output_hashes(copy)) == (set(), before)
    edit_of("fedproto")(copy)
    assert trained(copy, "dvc", "repro") == {"fedproto-s0", "fedproto-s1"}
    after = output_hashes(copy)
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {"artifacts/runs.json", *(path for path in after if path.startswith("artifacts/code/"))}


def swap(one: Path, two: Path) -> None:
    one.rename(one.with_name("between"))
    two.rename(one)
    one.with_name("between").rename(two)


@pytest.mark.slow
def test_changed_images_are_prepared_again_and_unchanged_ones_are_not(tmp_path: Path) -> None:
    """Of equal size and time: added, swapped, removed."""
    folder = clone(tmp_path / "images")
    own = folder / "images"
    for part in ("train", "test"):
        for shade, kind in enumerate(("a", "b")):
            (own / part / kind).mkdir(parents=True)
            for number in range(3):
                Image.new("L", (8, 8), 100 * shade + number).save(own / part / kind / f"{number}.bmp")
                os.utime(own / part / kind / f"{number}.bmp", ns=(0, 0))
    change(folder, lambda params: params["data"].update(name="imagefolder"))

    def shades() -> list[int]:
        call(folder, "dvc", "repro", "prepare")
        assert call(folder, "dvc", "status", "prepare").strip() == "Data and pipelines are up to date."
        return [int(image[0, 0, 0]) for image in Dataset.load(folder / "artifacts" / "prepared").train.images]

    assert shades() == [0, 1, 2, 100, 101, 102]
    swap(own / "train/a/0.bmp", own / "train/b/2.bmp")
    assert shades() == [102, 1, 2, 100, 101, 0]
    shutil.copy(own / "train/a/1.bmp", own / "train/a/9.bmp")
    assert shades() == [102, 1, 2, 1, 100, 101, 0]
    (own / "train/a/0.bmp").unlink()
    assert shades() == [1, 2, 1, 100, 101, 0]
    before = (folder / "dvc.lock").read_bytes()
    assert "didn't change, skipping" in call(folder, "dvc", "repro", "prepare")
    assert (folder / "dvc.lock").read_bytes() == before
    (own / "train" / "a").rename(folder / "elsewhere")
    (own / "train" / "a").symlink_to(folder / "elsewhere")
    assert "train/a: a linked folder" in call(folder, "sh", "-c", "dvc repro prepare 2>&1", check=False)


@pytest.mark.slow
def test_an_experiment_with_another_value_and_what_differs(copy: Path) -> None:
    call(copy, "dvc", "exp", "run", "-q", "-S", "federation.rounds=3", "-n", "shorter")
    changed = json.loads(call(copy, "dvc", "params", "diff", "--json"))
    assert changed == {"params.yaml": {"federation.rounds": {"old": 6, "new": 3, "diff": -3}}}
    metrics = json.loads(call(copy, "dvc", "metrics", "diff", "HEAD", "shorter", "--json"))
    (values,) = metrics.values()
    assert values["fedavg.bytes_up"]["new"] * 2 == values["fedavg.bytes_up"]["old"]
    assert "fedproto.top1_vote" in values
    page = call(copy, "dvc", "plots", "diff", "HEAD", "shorter").strip().removeprefix("file://")
    curves = Path(page).read_text()
    assert '"rev": "shorter"' in curves and '"rev": "HEAD"' in curves and "mean accuracy over clients" in curves


@pytest.mark.slow
def test_small_metrics_and_the_papers_partitions_are_in_git(copy: Path, tmp_path: Path) -> None:
    """A clone without cache and remote has the metrics of its revision, and every partition as an artifact."""
    call(tmp_path, "git", "clone", "-q", str(copy), "clone")
    (values,) = json.loads(call(tmp_path / "clone", "dvc", "metrics", "show", "--json"))[""]["data"].values()
    assert values["data"]["fedavg"]["bytes_up"] > 0
    name = "partitions:gfpl-mnist-ways-3"
    call(tmp_path / "clone", "gto", "register", name, "--version", "v1.0.0")
    call(tmp_path, "dvc", "artifacts", "get", str(tmp_path / "clone"), name, "--rev", "v1.0.0", "--out", "mine")
    stored = ROOT / "partitions" / "gfpl-mnist-ways-3"
    assert (tmp_path / "mine/seed-0/manifest.json").read_bytes() == (stored / "seed-0/manifest.json").read_bytes()
    assert not re.search(r"^\?\? dvc_plots", call(copy, "git", "status", "--short"), re.MULTILINE)
    # Back: DVC brings results without what names a machine. An edit elsewhere makes the stage look at them.
    call(copy, "git", "checkout", "-q", ".")
    call(copy, "dvc", "checkout", "-q")
    assert is_up_to_date(copy)
    edit_of("gfpl")(copy)
    assert trained(copy, "dvc", "repro") == set()
    described = json.loads((copy / "artifacts" / "runs" / "fedavg-s0" / "config.json").read_text())
    assert described["config"]["federation"]["rounds"] == 6


@pytest.mark.slow
def test_pulled_results_are_shown_and_added_to(copy: Path, tmp_path: Path) -> None:
    call(copy, "dvc", "remote", "add", "-q", "-d", "team", str(tmp_path / "remote"))
    commit(copy)
    call(copy, "dvc", "push", "-q")
    fresh = tmp_path / "fresh"
    call(tmp_path, "git", "clone", "-q", str(copy), str(fresh))
    call(fresh, "dvc", "pull", "-q")
    assert not (fresh / "artifacts" / "runs" / "fedavg-s0" / "config.json").exists()
    assert is_up_to_date(fresh)
    shown = call(fresh, sys.executable, "-m", "pipelines.cli.make_run")
    assert "Stage 'train' didn't change, skipping" in shown
    assert "3 methods on digits, partition dirichlet, 6 rounds, seed 0." in shown
    assert re.search(r"│ fedproto +│ 1 │", shown)
    change(fresh, lambda params: params["compare"].update(baseline="fedproto"))
    assert trained(fresh, "dvc", "repro") == set()
    compared = json.loads((fresh / "artifacts" / "comparison" / "comparison.json").read_text())
    assert compared["baseline"] == "fedproto"
    change(fresh, add_seed)
    assert trained(fresh, "dvc", "repro") == {"fedavg-s1", "fedpa-s1", "fedproto-s1"}
    assert is_up_to_date(fresh)
