"""Figures that are kept with the code: of which runs, added to from several machines, refused where they contradict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.core.errors import DataError, RunError
from flcore.experiment.run_folder import RunFiles
from flcore.io.files import sealed, write_json
from pipelines.cli.app import main
from pipelines.papers import publish as publishing
from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.papers.publish import outdated, publish
from pipelines.papers.published import PublishedTable, published_tables, read_published
from pipelines.papers.results import results, write
from pipelines.papers.runs import FailedRun
from pipelines.papers.verdicts.claim_files import sentences_of
from pipelines.papers.verdicts.judge import judged
from pipelines.plan.comparison import comparison_plan
from pipelines.tuning.metrics import PER_ROUND

TABLE = "fedpa.table2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROCESSOR = "x86_64-AVX2-0123abcd"


def leave(
    out: Path,
    points: Mapping[str, float],
    *,
    seeds: tuple[int, ...] = (0,),
    divisions: tuple[int, ...] | None = None,
    commit: str | None = COMMIT,
    table: str = TABLE,
    columns: tuple[str, ...] = ("mnist_0.1",),
    **asked: Any,
) -> Path:
    """A folder of FedPA's table II as a command leaves it: per row its points, one more for each seed."""
    of = TableSelection(tuple(points), columns, seeds, divisions, **asked)
    planned = plan_table(table_named(table), of, with_data=False)
    rows = []
    place = out / planned.settings[0].name
    for run in comparison_plan(planned.settings[0].parameters).runs:
        config = decided(run.config)
        seed, hash = config.seed, config.hash("data", f"division {config.partition_seed}")
        files = RunFiles(place / "runs" / f"{run.config.method.name}-s{seed}-{hash[:8]}")
        files.directory.mkdir(parents=True, exist_ok=True)
        made = {"code_version": commit, "processor": PROCESSOR, "device": "cpu", "versions": {"torch": "2.15.0"}}
        header = {"config": config.to_mapping(), "identity": config.identity(), "config_hash": hash}
        write_json(files.config, sealed(header | {"environment": made}))
        accuracy = (points[run.name] + seed) / 100
        figure = {"top5_pooled_local": accuracy, "last10_top1_global": accuracy, "top1_global": 0.5}
        printed = {
            "data_fingerprint": "data",
            "partition_fingerprint": f"division {run.config.partition_seed}",
            **figure,
        }
        files.metrics.write_text(json.dumps({"method": run.config.method.name, **printed}))
        files.history.write_text(json.dumps({"round": 1, **dict.fromkeys(PER_ROUND), "top1_global": accuracy}) + "\n")
        rows.append({"method": run.name, "seed": seed, "division": run.draw, "config_hash": hash})
    (place / "comparison.json").write_text(json.dumps({"failed": {}, "runs": rows}))
    write(results(planned, out), out)
    return out


def decided(config: Config) -> Config:
    """As a short run stores it."""
    engine = config.engine
    stack, compile_ = engine.stack is True, "none" if engine.compile == "auto" else engine.compile
    return replace(config, engine=replace(engine, stack=stack, compile=compile_))


def test_what_is_kept_says_what_the_runs_say(tmp_path: Path) -> None:
    """Two rows, two seeds, two divisions: 90 and 91, 93 and 94; the same table from the file as from the folders."""
    out = leave(tmp_path / "table", {"fedavg": 90, "fedpa": 93}, seeds=(0, 1), divisions=(42, 43))
    assert publish(out, tmp_path).endswith("fedpa.table2.json: 8 runs, 8 of them new")
    assert publish(out, tmp_path).endswith("fedpa.table2.json: 8 runs, 0 of them new")
    kept = read_published(tmp_path / "fedpa.table2.json")
    assert outdated(kept) == []
    cell = kept.results().cells["fedpa", "mnist_0.1"]
    assert (cell.ours.n, cell.ours.mean, cell.difference.mean) == (4, pytest.approx(93.5), pytest.approx(3.0))
    assert kept.results().cells == results(kept.results().plan, out).cells
    first = kept.runs[0]
    assert (first.row, first.pair, first.data, first.partition) == ("fedavg", (42, 0), "data", "division 42")
    assert (first.commit, first.processor, first.torch, first.besides) == (COMMIT, PROCESSOR, "2.15.0", {})


def test_several_machines_fill_one_file(tmp_path: Path) -> None:
    """Seeds 0 and 2 of one, 1 of another, in the file's order whichever came first."""
    files = []
    for number, seeds in enumerate([((0, 2), (1,)), ((1,), (0, 2))]):
        into = tmp_path / str(number)
        for each in seeds:
            publish(leave(tmp_path / f"{number}-{each[0]}", {"fedavg": 90}, seeds=each), into)
        files.append((into / "fedpa.table2.json").read_bytes())
    assert files[0] == files[1]
    assert [run.seed for run in read_published(tmp_path / "0" / "fedpa.table2.json").runs] == [0, 1, 2]


def test_rounds_to_a_target_wait_for_the_run_that_defines_it(tmp_path: Path) -> None:
    """FedAvg ends at 90 on one machine; FedPG, at 80 on another, has no target of 85.5 before a folder has both."""
    columns = ("fashion_2class", "fashion_2class_rounds")
    given = {"fedavg": 90.0, "fedpg": 80.0}
    parts = [{row: given[row]} for row in given] + [given]
    folders = [
        leave(tmp_path / str(number), points, table="fedpg.standin", columns=columns)
        for number, points in enumerate(parts)
    ]
    said = [publish(folder, tmp_path) for folder in folders[:2]]
    file = tmp_path / "fedpg.standin.json"
    assert said[0].endswith("1 of them new")
    assert f"FedAvg of the same seed and division is not in {folders[1]}" in said[1]
    assert [columns[1] in run.figures for run in read_published(file).runs] == [True, False]
    assert publish(folders[2], tmp_path).endswith("2 runs, 1 of them new")
    # Both have one round: FedAvg reaches 85.5 in it, and FedPG counts as one round more.
    assert [run.figures["fashion_2class_rounds"] for run in read_published(file).runs] == [1, 2]
    # What is known stays known, whichever folder is kept again.
    assert publish(folders[1], tmp_path, again=True).endswith("2 runs, 0 of them new")


def test_a_division_is_kept_once_however_it_was_asked_for(tmp_path: Path) -> None:
    """The table divides by seed 42: the same runs asked for by --partition-seeds 42 are no more runs.

    By --set partition.seed=43 they are those of division 43: two seeds on two divisions, four runs.
    """
    publish(leave(tmp_path / "fixed", {"fedavg": 90}, seeds=(0, 1)), tmp_path)
    assert publish(leave(tmp_path / "asked", {"fedavg": 90}, seeds=(0, 1), divisions=(42,)), tmp_path).endswith(
        "0 of them new"
    )
    publish(leave(tmp_path / "set", {"fedavg": 90}, seeds=(0, 1), assignments=("partition.seed=43",)), tmp_path)
    kept = read_published(tmp_path / "fedpa.table2.json")
    assert [(run.pair, run.besides) for run in kept.runs] == [((d, s), {}) for d in (42, 43) for s in (0, 1)]
    assert (outdated(kept), kept.results().cells["fedavg", "mnist_0.1"].ours.n) == ([], 4)


def test_figures_of_a_column_that_came_in_place_of_another_are_kept(tmp_path: Path) -> None:
    """Where the file has one that the table has no longer, and lacks what the run says of the new one."""
    out, file = leave(tmp_path / "table", {"fedavg": 90}), tmp_path / "fedpa.table2.json"
    publish(out, tmp_path)
    before = file.read_bytes()
    file.write_bytes(before.replace(b'"mnist_0.1": 90', b'"gone": 1'))
    assert file.read_bytes() != before
    assert publish(out, tmp_path).endswith("1 run, 1 of them new")
    assert file.read_bytes() == before


def test_a_reduced_budget_has_a_file_of_its_own(tmp_path: Path) -> None:
    publish(leave(tmp_path / "whole", {"fedavg": 90}), tmp_path / "kept")
    publish(leave(tmp_path / "tenth", {"fedavg": 60}, rounds_scale=0.1), tmp_path / "kept")
    found = published_tables(tmp_path / "kept")
    assert [(one.path(Path()).stem, one.rounds_scale) for one in found] == [
        ("fedpa.table2-x0.1", 0.1),
        ("fedpa.table2", 1.0),
    ]
    assert all(outdated(one) == [] for one in found)


def test_what_was_set_beside_the_table_is_said(tmp_path: Path) -> None:
    """``--set engine.compile=default`` changes last bits and is kept; of a changed or shortened table runs are not."""
    out = leave(tmp_path / "table", {"fedavg": 90, "fedpa": 93}, assignments=("engine.compile=default",))
    publish(out, tmp_path)
    kept = read_published(tmp_path / "fedpa.table2.json")
    assert {json.dumps(run.besides) for run in kept.runs} == {'{"engine.compile": "default"}'}
    assert outdated(kept) == []
    changed = replace(kept.table, common={**kept.table.common, "local.lr": 0.5})
    assert outdated(replace(kept, table=changed)) == list(kept.runs)
    gone = replace(kept.table, rows=tuple(row for row in kept.table.rows if row.key != "fedpa"))
    assert [run.row for run in outdated(replace(kept, table=gone))] == ["fedpa"]


def with_settings(kept: PublishedTable, change: Callable[[dict[str, Any]], object]) -> PublishedTable:
    """The same runs with settings that were changed."""
    runs = []
    for run in kept.runs:
        settings = json.loads(json.dumps(run.settings))
        change(settings)
        runs.append(replace(run, settings=settings))
    return replace(kept, runs=tuple(runs))


def test_kept_runs_of_another_setting_than_the_tables_are_replaced(tmp_path: Path) -> None:
    """The table's rate was another one when it was kept: whoever ran it anew keeps that."""
    file = tmp_path / "fedpa.table2.json"
    publish(leave(tmp_path / "before", {"fedavg": 80}), tmp_path)
    file.write_text(with_settings(read_published(file), lambda settings: settings["local"].update(lr=0.5)).text())
    assert publish(leave(tmp_path / "now", {"fedavg": 90}), tmp_path).endswith("1 run, 1 of them new")
    assert read_published(file).runs[0].figures["mnist_0.1"] == 90.0


def test_kept_runs_outlive_keys_that_came_later(tmp_path: Path) -> None:
    """Without ``local.clip`` they have its default, which no table changes; a key that is gone is another setting."""
    publish(leave(tmp_path / "table", {"fedavg": 90, "fedpa": 93}), tmp_path)
    file = tmp_path / "fedpa.table2.json"
    whole = read_published(file)
    older = with_settings(whole, lambda settings: settings["local"].pop("clip"))
    file.write_text(older.text())
    assert (read_published(file), outdated(older)) == (older, [])
    assert publish(tmp_path / "table", tmp_path).endswith("2 runs, 0 of them new")
    gone = with_settings(whole, lambda settings: settings["local"].update(forgotten=1))
    assert outdated(gone) == list(gone.runs)


def test_settings_stand_once_for_all_seeds_and_divisions(tmp_path: Path) -> None:
    """Two rows, four runs each, two settings, without the seeds that stand beside them."""
    publish(leave(tmp_path / "table", {"fedavg": 90, "fedpa": 93}, seeds=(0, 1), divisions=(42, 43)), tmp_path)
    stored = json.loads((tmp_path / "fedpa.table2.json").read_text())
    assert (len(stored["runs"]), len(stored["settings"])) == (8, 2)
    for settings in stored["settings"].values():
        assert ("seed" in settings, "seed" in settings["partition"], settings["partition"]["alpha"]) == (
            False,
            False,
            0.1,
        )


@pytest.mark.parametrize("assignment", ["local.steps=5", "local.lr=0.5", "data.name=fashionmnist"])
def test_runs_of_another_setting_than_the_tables_are_not_kept(tmp_path: Path, assignment: str) -> None:
    """Not in place of a run of the table's own, nor where there is none, nor with --again."""
    publish(leave(tmp_path / "before", {"fedavg": 90}), tmp_path / "kept")
    held = (tmp_path / "kept" / "fedpa.table2.json").read_bytes()
    other = leave(tmp_path / "now", {"fedavg": 60}, assignments=(assignment,))
    for into, again in ((tmp_path / "kept", False), (tmp_path / "kept", True), (tmp_path / "empty", False)):
        with pytest.raises(
            RunError, match=rf"fedavg on mnist_0.1, 0 on division 42: was made with {assignment}, which"
        ):
            publish(other, into, again=again)
    assert (tmp_path / "kept" / "fedpa.table2.json").read_bytes() == held
    assert not (tmp_path / "empty").exists()


def test_a_value_that_a_preset_gained_since_is_not_taken_from_it(tmp_path: Path) -> None:
    """The authors' values of FedCSPC had no ``few`` when this run was made, so it is none of the table's row."""
    out = leave(tmp_path / "table", {"fedcspc_authors": 50}, table="fedcspc.standin", columns=("beta_0.1",))
    (path,) = out.glob("*/runs/*/config.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["config"]["method"].pop("few") == 5
    write_json(path, sealed({key: document[key] for key in ("config", "identity", "config_hash", "environment")}))
    with pytest.raises(RunError, match=r"method\.few"):
        publish(out, tmp_path / "kept")


def test_another_engine_is_kept_only_when_asked_for(tmp_path: Path) -> None:
    publish(leave(tmp_path / "before", {"fedavg": 90}, assignments=("engine.compile=default",)), tmp_path)
    other = leave(tmp_path / "now", {"fedavg": 90})
    with pytest.raises(RunError, match=r"was kept with engine.compile=default, and was found now with the table's own"):
        publish(other, tmp_path)
    publish(other, tmp_path, again=True)
    assert read_published(tmp_path / "fedpa.table2.json").runs[0].besides == {}


def test_images_in_another_form_are_the_tables(tmp_path: Path) -> None:
    images = ("data.name=imagefolder", f"data.root={tmp_path}")
    publish(leave(tmp_path / "table", {"fedavg": 90}, assignments=images), tmp_path)
    kept = read_published(tmp_path / "fedpa.table2.json")
    assert kept.runs[0].besides == {"data.name": "imagefolder", "data.image_size": "null"}
    assert outdated(kept) == []
    smaller = leave(tmp_path / "smaller", {"fedavg": 90}, assignments=(*images, "data.image_size=16"))
    with pytest.raises(RunError, match=r"data.image_size=16, which is not the table's setting"):
        publish(smaller, tmp_path)


@pytest.mark.parametrize(
    ("now", "division", "changed", "said"),
    [
        ("fedpa", 42, ("division 42", "another"), "its clients do not hold what those of fed"),
        ("fedavg", 43, ('"data"', '"other data"'), "is of other images"),
    ],
)
def test_runs_on_other_data_than_those_that_are_kept_are_refused(
    tmp_path: Path, now: str, division: int, changed: tuple[str, str], said: str
) -> None:
    """Of one seed, clients that hold other images; or other images on another division, where nothing else tells."""
    publish(leave(tmp_path / "one", {"fedavg": 90}, divisions=(42,)), tmp_path)
    other = leave(tmp_path / "other", {now: 93}, divisions=(division,))
    for metrics in other.glob("**/metrics.json"):
        metrics.write_text(metrics.read_text().replace(*changed))
    with pytest.raises(RunError, match=rf"{now} on mnist_0.1, 0 on division {division}: {said}"):
        publish(other, tmp_path)


def test_failed_runs_are_kept_with_their_reason_until_one_ends(tmp_path: Path) -> None:
    """Of FedPA's three seeds one ended, one diverged, one was interrupted, which says nothing: 1 of 2 diverged."""
    out = leave(tmp_path / "table", {"fedavg": 90, "fedpa": 93}, seeds=(2,))
    file = out / "mnist_0.1" / "comparison.json"
    failed = {"fedpa seed 0": "round 3: training diverged (nan)", "fedpa seed 1": "interrupted"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"failed": failed}))
    assert publish(out, tmp_path).endswith("2 runs, 2 of them new; 1 other failed")
    kept = read_published(tmp_path / "fedpa.table2.json")
    assert kept.failed == (FailedRun("mnist_0.1", "fedpa", 42, 0, "round 3: training diverged (nan)"),)
    cells = kept.results().cells
    assert [cells[row, "mnist_0.1"].lost for row in ("fedavg", "fedpa")] == ["", "1 of 2 diverged"]
    assert cells["fedpa", "mnist_1"].lost == ""
    assert publish(out, tmp_path).endswith("0 of them new; 1 other failed")
    assert publish(leave(tmp_path / "later", {"fedpa": 93}), tmp_path).endswith("3 runs, 1 of them new")
    assert read_published(tmp_path / "fedpa.table2.json").failed == ()


def test_a_folder_without_a_table_is_told_what_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "keep", str(tmp_path / "nope")]) == 3
    said = capsys.readouterr().err
    assert (
        said
        == f"protofl: {tmp_path}/nope: no table there (table.json); protofl paper run makes one, below runs/papers\n"
    )


def test_other_figures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(leave(tmp_path / "before", {"fedavg": 90}), tmp_path)
    other = leave(tmp_path / "now", {"fedavg": 90.5}, commit="f" * 40)
    file = tmp_path / "fedpa.table2.json"
    held = file.read_bytes()
    assert main(["paper", "keep", str(other), "--into", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert (
        f"fedavg on mnist_0.1, 0 on division 42: 90.0 was kept (commit 0123456789ab, {PROCESSOR}), 90.5 was found now"
        in said
    )
    assert f"now (ffffffffffff, {PROCESSOR})" in said
    assert file.read_bytes() == held
    assert main(["paper", "keep", str(other), "--into", str(tmp_path), "--again"]) == 0
    assert read_published(file).runs[0].figures["mnist_0.1"] == 90.5


@pytest.mark.parametrize("commit", [None, f"{COMMIT}-dirty"])
def test_code_that_is_in_no_commit_is_refused(tmp_path: Path, commit: str | None) -> None:
    with pytest.raises(RunError, match=r"fedavg-s0-.*: was made by code that is in no commit"):
        publish(leave(tmp_path / "table", {"fedavg": 90}, commit=commit), tmp_path)
    assert not (tmp_path / "fedpa.table2.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "damaged"),
        ('{"id": "fedpa.table2"}', "not a file of kept runs; name another folder, or delete it"),
        (
            '{"id": "fedpa.table2", "rounds_scale": 1, "settings": {}, "runs": [{"row": "fedavg"}]}',
            "run 1: expected besides, commit",
        ),
        (
            '{"id": "fedpa.table2", "rounds_scale": 1, "settings": {"0123": {"seed": 1}}, "runs": []}',
            "settings 0123: not those that were kept; delete the file",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "fedpa.table2.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"{path}: .*{said}"):
        read_published(path)


def test_what_was_run_here_stands_above_what_is_kept(tmp_path: Path) -> None:
    """FedPA is one point ahead in what is kept and seven in the folder, over three seeds each."""
    pair = {"table": TABLE, "column": "mnist_0.1", "better": "fedpa", "than": "fedavg"}
    sentence = sentences_of([{"id": "fedpa.some", "says": "", "where": "", "pairs": [pair]}])
    publish(leave(tmp_path / "table", {"fedavg": 95, "fedpa": 96}, seeds=(0, 1, 2)), tmp_path)
    home = leave(tmp_path / "home" / TABLE, {"fedavg": 90, "fedpa": 97}, seeds=(0, 1, 2)).parent
    places = [(None, None), (None, tmp_path), (home, None), (home, tmp_path)]
    found = [judged(sentence, *place)[0] for place in places]
    assert [one.verdict for one in found] == ["not run", "holds", "holds", "holds"]
    assert [one.pairs[0].difference.mean for one in found] == [None, 1.0, 7.0, 7.0]
    assert found[1].pairs[0].verdict == "holds on one division"


@pytest.mark.slow
def test_what_this_project_keeps_is_what_its_tables_ask_for() -> None:
    """Whoever changes a table, or what a default means, measures again or takes the figures away."""
    for kept in published_tables():
        assert outdated(kept) == [], kept.path(Path())
        assert kept.runs == tuple(sorted(kept.runs, key=lambda run: run.key)), kept.path(Path())


def test_a_run_that_is_older_than_a_key_has_its_default() -> None:
    """Nobody measures again for a choice that came later; what is known no more stays as it was said."""
    config = Config.from_mapping(
        {"data": {"name": "digits"}, "method": {"name": "fedprox"}, "federation": {"rounds": 7}}
    )
    settings = {key: value for key, value in config.identity().items() if key != "seed"}
    settings["partition"] = {key: value for key, value in settings["partition"].items() if key != "seed"}
    values = config.to_mapping()
    del values["local"]["clip"]
    assert publishing._current_settings(values, {}) == settings
    values["local"]["forgotten"] = 1
    assert publishing._current_settings(values, {"seed": 3, "partition": {"seed": 4, "said": 1}}) == {
        "partition": {"said": 1}
    }
