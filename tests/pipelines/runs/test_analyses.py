"""Analyses as files, figures and a part of the report; asked for in the configuration or afterwards."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flcore.analyses.base import Analysis, AnalysisResult
from flcore.analyses.registry import ANALYSES
from flcore.config.analyses import SUMMARIES
from flcore.config.schema import Config
from flcore.core.errors import DataError
from flcore.experiment.inputs import divide
from flcore.io import disk
from flcore.io.files import sealed
from flcore.running import run as run_to_end
from pipelines.cli import app as cli
from pipelines.proof.results import result_files
from pipelines.reporting import run_report
from pipelines.reporting.figures.analyses import CAPTIONS, HEADINGS, draw_analysis
from pipelines.reporting.figures.style import svg_text
from pipelines.runs import analyses
from pipelines.runs.analyses import StoredAnalysis
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import RunFiles, read_json, write_json
from tests.cases import quick

RAW = {
    "data": {"name": "digits", "limit_per_class": 12, "size": 28},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
    "local": {"epochs": 1},
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run up to its evaluation, with its data and partition inside, as `flcore.run` leaves it."""
    folder, config = tmp_path_factory.mktemp("analyses") / "run", Config.from_mapping(RAW)
    run_to_end(config, folder)
    return folder


@pytest.fixture
def run(evaluated: Path, tmp_path: Path) -> Path:
    """A copy to write into."""
    return Path(shutil.copytree(evaluated, tmp_path / "run"))


def asking(*names: str) -> Config:
    return Config.from_mapping({**RAW, "evaluation": {"analyses": list(names)}})


def report(config: Config, run: Path) -> str:
    page = run_report.report(run, config=config)
    return page.read_text(encoding="utf-8")


def test_report_computes_what_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data, figure and page of one that can be done; a line, a record and a sentence of one that cannot."""
    page = report(asking("class_heatmap", "gradcam"), run)
    assert capsys.readouterr().err == ("gradcam: left out, fedavg has no state before a calibration\n")
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert {"analyses/class_heatmap.csv", "analyses/index.json", "figures/class_heatmap.svg"} <= files
    assert not any(name.endswith(("gradcam.svg", "gradcam.csv", "gradcam.npz")) for name in files)
    index = read_json(run / "analyses" / "index.json")
    assert index["run"] == read_json(run / "config.json")["config_hash"]
    assert index["analyses"]["gradcam"]["skipped"] == "fedavg has no state before a calibration"
    assert index["analyses"]["class_heatmap"] == {"skipped": None, "notes": [], "chosen": {}}
    assert 'id="analysis-class_heatmap"' in page and HEADINGS["class_heatmap"] in page
    assert "Left out: fedavg has no state before a calibration" in page
    assert "<img" not in page and "tsne" not in page


def test_without_analyses_the_page_has_no_such_part(run: Path) -> None:
    """And the folder is there all the same, for whoever depends on it."""
    assert 'id="analyses"' not in report(asking(), run)
    assert read_json(run / "analyses" / "index.json")["analyses"] == {}


@pytest.mark.slow
def test_same_run_same_bytes(run: Path, evaluated: Path, tmp_path: Path) -> None:
    second = Path(shutil.copytree(evaluated, tmp_path / "elsewhere" / "run"))  # the page names the folder
    for folder in (run, second):
        report(asking("class_heatmap", "tsne"), folder)
    for name in ("analyses", "figures"):
        paths = sorted((run / name).iterdir())
        assert [path.name for path in paths] == [path.name for path in sorted((second / name).iterdir())]
        assert all(path.read_bytes() == (second / name / path.name).read_bytes() for path in paths)
    assert (run / "report.html").read_bytes() == (second / "report.html").read_bytes()


@pytest.mark.slow
def test_snapshots_are_analysed_as_they_were(tmp_path: Path) -> None:
    """Round 0 is the initial model, everywhere the same; round 1 is the finished run of one round."""
    two, one = tmp_path / "two", tmp_path / "one"
    asked = {"analyses": ["class_heatmap", "class_heatmap_trained"], "snapshots": [1, 0], "private": True}
    for folder, rounds in ((two, 2), (one, 1)):
        local = {"epochs": 3, "lr": 0.05}  # else a class is answered for all images after both rounds
        config = Config.from_mapping({**RAW, "local": local, "federation": {"rounds": rounds}, "evaluation": asked})
        run_to_end(config, folder)
        analyses.compute(config, folder / "prepared", folder / "partition", folder, analyses.asked(config))
    run_report.write_run_page(RunFolder(two), two / "partition")
    found = {entry.name: entry for entry in analyses.load(RunFolder(two))}
    assert list(found) == [
        *("class_heatmap_round_0", "class_heatmap_round_1", "class_heatmap"),
        *("class_heatmap_trained_round_0", "class_heatmap_trained_round_1", "class_heatmap_trained"),
    ]
    assert found["class_heatmap_trained_round_0"].skipped == "no client has trained a model yet"
    earlier = {entry.name: entry.rows for entry in analyses.load(RunFolder(one))}
    for name in ("class_heatmap", "class_heatmap_trained"):
        assert found[f"{name}_round_1"].rows == earlier[name] != found[name].rows
    page = (two / "report.html").read_text(encoding="utf-8")
    assert "Accuracy by client and class, before the first round" in page and "fedavg after round 1" in page
    digests = {name for name in result_files(two) if name.startswith("snapshots/")}
    assert {"snapshots/0000.server.safetensors", "snapshots/0001.client.0000.safetensors"} <= digests


@pytest.mark.slow
def test_an_analysis_of_another_choice_is_made_again(run: Path) -> None:
    """Classes to show are no part of a run's name: whoever asks for others finds the run, and not its picture."""

    def choosing(**evaluation: object) -> Config:
        return Config.from_mapping({**RAW, "evaluation": {"analyses": ["class_heatmap", "tsne"], **evaluation}})

    plain, two = choosing(), choosing(tsne_classes=[3, 5])
    assert analyses.left(plain, run) == ["class_heatmap", "tsne"]
    report(plain, run)
    assert analyses.left(plain, run) == [] and analyses.left(two, run) == ["tsne"]
    report(two, run)
    assert analyses.left(two, run) == [] and analyses.left(plain, run) == ["tsne"]
    index = read_json(run / "analyses" / "index.json")
    assert index["analyses"]["tsne"]["chosen"] == {"classes": [3, 5]}
    # Indices of earlier versions do not say: what was shown then is what is shown where nothing is chosen.
    del index["analyses"]["tsne"]["chosen"]
    (run / "analyses" / "index.json").write_text(json.dumps(index))
    assert analyses.left(plain, run) == []


def test_a_finished_run_is_analysed_later(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other; what is there stays, and the configuration of the run is not changed."""
    before = (run / "config.json").read_bytes()
    assert cli.main(["analyse", str(run), "--analyses", "class_heatmap"]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert cli.main(["analyse", str(run), "--analyses", "confusion,gradcam"]) == 0
    assert [entry.name for entry in analyses.load(RunFolder(run))] == ["class_heatmap", "confusion", "gradcam"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.index("analysis-class_heatmap") < page.index("analysis-confusion") < page.index("analysis-gradcam")
    assert (run / "config.json").read_bytes() == before
    moved = run.rename(run.with_name("moved"))
    for name in ("prepared", "partition"):
        (moved / name).rename(moved.parent / name)
    command = ["analyse", str(moved), "--analyses", "class_heatmap"]
    assert cli.main(command) == 3  # the data are not where `protofl run` puts them
    places = ["--prepared", str(moved.parent / "prepared"), "--partition", str(moved.parent / "partition")]
    assert cli.main([*command, *places]) == 0


def test_refusals_name_what_is_allowed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name before data are read; no name; no run; a run that has not finished."""
    shutil.rmtree(run / "prepared")
    assert cli.main(["analyse", str(run), "--analyses", "tsnee"]) == 2
    assert "did you mean 'tsne'" in capsys.readouterr().err
    assert cli.main(["analyse", str(run)]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in SUMMARIES)
    assert cli.main(["analyse", str(tmp_path / "nothing"), "--analyses", "tsne"]) == 3


def test_another_partition_is_refused(run: Path) -> None:
    other = Config.from_mapping({**RAW, "seed": 5})
    divide(other, run / "prepared", run / "other")
    with pytest.raises(DataError, match="another partition"):
        analyses.compute(asking(), run / "prepared", run / "other", run, ["class_heatmap"])


def test_analyses_of_an_earlier_run_are_not_shown(run: Path) -> None:
    report(asking("class_heatmap"), run)
    write_json(run / "config.json", sealed({**RunFolder(run).header, "config_hash": "another"}))
    assert analyses.load(RunFolder(run)) == []


@pytest.fixture(scope="module")
def other_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run gives with another step of local training, as an edit of the code could make it."""
    folder = tmp_path_factory.mktemp("analyses") / "other"
    run_to_end(Config.from_mapping({**RAW, "local": {"epochs": 1, "lr": 0.5}}), folder)
    return folder


@pytest.mark.parametrize("changed", quick(["server.safetensors", "history.jsonl"], 1))
def test_analyses_of_a_run_that_was_trained_again_are_made_again(changed: str, run: Path, other_code: Path) -> None:
    """``--restart`` leaves the name of the run and other results: of these nothing has been analysed.

    While it is trained there is no history: what lies there belongs to nothing.
    """
    asked = asking("class_heatmap")
    report(asked, run)
    assert analyses.left(asked, run) == []
    (run / "history.jsonl").rename(run / "kept")
    assert analyses.load(RunFolder(run)) == []
    (run / "kept").rename(run / "history.jsonl")
    assert [entry.name for entry in analyses.load(RunFolder(run))] == ["class_heatmap"]
    shutil.copy(other_code / changed, run / changed)
    assert (analyses.left(asked, run), analyses.load(RunFolder(run))) == (["class_heatmap"], [])
    # One that is asked for later does not bring the others back.
    analyses.compute(asking("gradcam"), run / "prepared", run / "partition", run, ["gradcam"])
    assert [entry.name for entry in analyses.load(RunFolder(run))] == ["gradcam"]
    assert analyses.left(asked, run) == ["class_heatmap"]


class Killed(BaseException):
    """As sudden as a kill."""


def test_stopped_while_it_is_done_again_an_analysis_is_whole_or_not_done(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before any operation on the disk: the index, the old array, the old table, then the new ones.

    The index, without it; two files removed; two files that appear; the index, with it: six.
    """
    places, asked = (run / "prepared", run / "partition", run), asking("class_heatmap", "tsne")
    analyses.compute(asked, *places, ["class_heatmap"])
    found = before = AnalysisResult({"points": np.zeros(2)}, ({"model": "0"},))
    monkeypatch.setitem(ANALYSES, "tsne", Analysis(lambda left: found))
    stopped = 0
    while True:
        found = before
        analyses.compute(asked, *places, ["tsne"])
        found, seen = AnalysisResult({"points": np.ones(2)}, ({"model": "1"},)), itertools.count()
        with monkeypatch.context() as patched:
            for name in ("rename", "remove"):
                patched.setattr(disk, name, _killed_at(stopped, seen, getattr(disk, name)))
            try:
                analyses.compute(asked, *places, ["tsne"])
            except Killed:
                stopped += 1
            else:
                break
        done = {entry.name: (entry.arrays["points"].tolist(), entry.rows) for entry in analyses.load(RunFolder(run))[1:]}
        assert done == ({} if stopped > 1 else {"tsne": ([0, 0], ({"model": "0"},))})
        assert analyses.left(asked, run) == ["tsne"] * (stopped > 1)
        assert analyses.load(RunFolder(run))[0].name == "class_heatmap"
    assert stopped == 6
    assert analyses.load(RunFolder(run))[1].rows == ({"model": "1"},)


def _killed_at(number: int, seen: Iterator[int], operation: Callable[..., None]) -> Callable[..., None]:
    def killed(path: Path, *arguments: Path, **keywords: bool) -> None:
        if next(seen) >= number:
            raise Killed
        operation(path, *arguments, **keywords)

    return killed


def test_an_analysis_without_its_data_is_not_done(run: Path) -> None:
    """An earlier version may have been stopped there. What could not be done has no data, and is done."""
    analyses.compute(asking(), run / "prepared", run / "partition", run, ["class_heatmap", "gradcam"])
    assert analyses.left(asking("class_heatmap", "gradcam"), run) == []
    (run / "analyses" / "class_heatmap.csv").unlink()
    assert analyses.left(asking("class_heatmap", "gradcam"), run) == ["class_heatmap"]
    assert [entry.name for entry in analyses.load(RunFolder(run))] == ["gradcam"]


def test_what_is_stored_is_read_back(run: Path) -> None:
    """Arrays as they were, numbers of tables to twelve digits, nothing for None; an earlier table does not survive."""
    files = RunFiles(run)
    arrays = {"points": np.arange(6.0).reshape(3, 2), "names": np.array(["zero", "0"])}
    rows = ({"model": "0", "accuracy": 1 / 3, "total": 3}, {"model": "1", "accuracy": None, "total": 0})
    analyses._store(files, "tsne", AnalysisResult(arrays, rows))
    assert (files.analyses / "tsne.csv").read_text() == "model,accuracy,total\n0,0.333333333333,3\n1,,0\n"
    found = analyses._read_arrays(files.analyses / "tsne.npz")
    assert set(found) == {"points", "names"} and found["names"].tolist() == ["zero", "0"]
    assert np.array_equal(found["points"], arrays["points"])
    analyses._store(files, "tsne", AnalysisResult(arrays))
    assert analyses._read_rows(files.analyses / "tsne.csv") == ()
    (files.analyses / "tsne.npz").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"tsne\.npz: damaged"):
        analyses._read_arrays(files.analyses / "tsne.npz")


def stored(name: str, classes: int) -> StoredAnalysis:
    """Made-up data of the form that `flcore` leaves, for `classes` classes."""
    rng = np.random.default_rng(0)
    names = np.array([f"c{i}" for i in range(classes)])
    labels = np.repeat(np.arange(classes), 3)
    count = len(labels)
    common = {"class_names": names, "labels": labels}
    calibration = {
        "embedding": rng.normal(size=(2, count, 2)),
        "predictions": np.stack([labels, labels[::-1]]),
        "accuracies": np.array([1.0, 0.5]),
        "counts": np.ones((2, classes), dtype=int),
        "models": np.array(["first", "second"]),
    }
    prototypes = {
        "embedding": rng.normal(size=(12, 2)),
        "labels": np.repeat([0, 1], 6),
        "clusters": np.tile([0, 0, 1, 2, 2, -1], 2),
        "client": np.array(3),
    }
    generated = {
        "embedding": rng.normal(size=(2 * count, 2)),
        "labels": np.tile(labels, 2),
        "generated": np.repeat([False, True], count),
    }
    images = rng.integers(0, 255, (2, 3, 1, 8, 8), dtype=np.uint8)
    sheet = {
        "truths": images,
        "rebuilt": images,
        "guesses": images[:, 0],
        "labels": np.array([0, 1]),
        "sizes": np.array(["1", "2", "all"]),
    }
    cases = {
        "images": images[:, 0],
        "before": rng.random((2, 8, 8)),
        "after": rng.random((2, 8, 8)),
        "labels": np.array([0, 1]),
        "predicted_before": np.array([0, 1]),
        "predicted_after": np.array([0, 0]),
        "cases": np.array(["kept right", "broken"]),
    }
    arrays = {
        "confusion": {"counts": np.diag([0, *range(1, classes)])},
        "tsne": calibration,
        "tsne_trained": calibration,
        "tsne_projections": calibration,
        "tsne_calibration": calibration,
        "tsne_calibration_trained": {
            **calibration,
            "embedding": rng.normal(size=(2, 2, count, 2)),
            "accuracies": np.array([[1.0, 0.5], [0.5, 0.25]]),
            "global_accuracies": np.array([0.5, 1.0]),
            "states": np.array(["before", "after"]),
        },
        "tsne_prototypes": prototypes,
        "tsne_generated": generated,
        "virtual_images": {"sheet": rng.integers(0, 255, (9 * classes - 1, 35, 3), dtype=np.uint8)},
        "inversion": sheet,
        "inversion_search": sheet,
        "gradcam": cases,
    }.get(name, {})
    heat = [
        {"model": model, "test": test, "class": c, "accuracy": accuracy}
        for model, test, accuracy in (("0", "own", ""), ("1", "own", "0.5"), ("global", "all", "0.25"))
        for c in names
    ]
    distances = [
        {"features": which, "space": space, "intra": "1", "inter": "2", "centroid_inter": "", "nearest_distance": near,
         "nearest_cosine": near}
        for which, near in (("generated", "0.5"), ("real", ""))
        for space in ("feature", "tsne")
    ]  # fmt: skip
    attacked = [
        {"attack": attack, "m": m, "against": against, "mse": "0.1", "ssim": "0.5", "accuracy": "1"}
        for attack in ("decoder", "class mean image")
        for against in ("closest", "class mean")
        for m in ("1", "2", "all")
    ]
    counted = [{"case": case, "count": "1", "share": "0.25"} for case in ("kept right", "mended", "broken", "x")]
    rows = dict.fromkeys(("class_heatmap", "class_heatmap_trained", "averaged_bodies"), heat)
    rows |= {"generator_distances": distances, "gradcam": counted}
    if name.startswith("inversion"):
        rows[name] = attacked
    return StoredAnalysis(name, None, {**common, **arrays}, tuple(rows.get(name, ())), ())


@pytest.mark.parametrize("classes", quick([2, 40], 1))
@pytest.mark.parametrize("name", quick(SUMMARIES, 3))
def test_every_analysis_has_a_figure_with_its_subject(name: str, classes: int) -> None:
    """For few classes and for more than there are colours."""
    figure = draw_analysis(stored(name, classes), "digits, seed 0")
    assert figure.get_suptitle() == "digits, seed 0"
    assert svg_text(figure).startswith("<svg ")
    assert HEADINGS[name] and CAPTIONS[name]
