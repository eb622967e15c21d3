"""A table's runs, in a process of their own that is killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError
from pipelines.execution import bodies
from pipelines.execution.operation import Operation
from pipelines.execution.progress import Watcher
from pipelines.orchestration.commands import operation
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.papers.run_table import run_table
from pipelines.papers.shard import shard
from tests.one_process import ThisProcess

from .conftest import TINY, tiny

SCRIPT = """
import json, sys
from pathlib import Path
from pipelines.orchestration.commands import operation
from pipelines.papers.run_table import run_table
from pipelines.papers.catalogue import table_of
from pipelines.papers.plan import TableSelection, plan_table

if __name__ == "__main__":
    table = table_of(json.loads(sys.argv[1]))
    planned = plan_table(table, TableSelection(seeds=(0, 1), rounds_scale=0.2, assignments=("tracking.enabled=false",)))
    with operation(planned.settings[0].parameters, wait=False) as (how, _):
        run_table(planned, Path(sys.argv[2]), how)
"""
WRITTEN = ("table.md", "table.csv", "table.json")


def started(home: Path) -> subprocess.Popen[bytes]:
    """The table's runs in a folder and with a cache of their own."""
    home.mkdir(exist_ok=True)
    script = home / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = os.environ | {"PROTOFL_CACHE": str(home / "cache")}
    command = [sys.executable, str(script), json.dumps(TINY), str(home / "table")]
    return subprocess.Popen(command, env=environment, cwd=home, start_new_session=True)


@pytest.mark.slow
def test_a_killed_table_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Killed when the first setting is compared, and started again: as if nothing had happened."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = started(killed)
    try:
        deadline = time.monotonic() + 600
        while not (killed / "table" / "even" / "comparison.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (killed / "table" / "skewed" / "comparison.json").exists()
    assert started(killed).wait(timeout=600) == 0
    assert started(whole).wait(timeout=600) == 0
    for name in WRITTEN:
        assert (killed / "table" / name).read_bytes() == (whole / "table" / name).read_bytes(), name
    cells = json.loads((whole / "table" / "table.json").read_text(encoding="utf-8"))["cells"]
    measured = {(cell["row"], cell["column"]) for cell in cells if cell["n"] == 2}
    assert measured == {
        ("fedavg", "even"),
        ("fedavg", "sent"),
        ("fedavg", "skewed"),
        ("near", "even"),
        ("near", "skewed"),
    }


@pytest.fixture(scope="module")
def how(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operation]:
    """One follower and one cache for all tables here: a run that several of them have is trained once, and here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "RunPool", ThisProcess)
        patch.setenv("PROTOFL_CACHE", str(tmp_path_factory.mktemp("cache")))
        with operation({"tracking": {"enabled": False}}, wait=False) as (how, _):
            yield how


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Folder of a table."""
    return tmp_path / "table"


@pytest.fixture
def carried_out(how: Operation, out: Path) -> Callable[..., list[str]]:
    return partial(_carried_out, how, out)


def _carried_out(
    how: Operation,
    out: Path,
    *rows: str,
    seeds: tuple[int, ...] = (0,),
    part: tuple[int, int] = (1, 1),
    meanwhile: Callable[[], object] | None = None,
    **asked: Any,
) -> list[str]:
    """Rows of the first setting at a tenth of its rounds; returns what was said on the way.

    ``meanwhile`` is called when it is settled which runs are compared, and none of them has begun.
    """
    said: list[str] = []
    assignments = ("tracking.enabled=false", *asked.pop("assignments", ()))
    planned = plan_table(
        tiny(), TableSelection(rows, ["even"], seeds, assignments=assignments, **{"rounds_scale": 0.1, **asked})
    )
    watcher, once = Watcher(), iter([meanwhile] if meanwhile is not None else [])
    watcher.say = said.append  # type: ignore[method-assign]
    watcher.runs = lambda *_: next(once, bool)()  # type: ignore[method-assign]
    run_table(shard(planned, part), out, replace(how, watcher=watcher))
    return said


def measured(out: Path) -> dict[tuple[str, str], int]:
    """How many runs are behind each cell that has any."""
    cells = json.loads((out / "table.json").read_text(encoding="utf-8"))["cells"]
    return {(cell["row"], cell["column"]): cell["n"] for cell in cells if cell["n"]}


@pytest.mark.slow
def test_what_an_earlier_command_finished_stays_beside_what_a_later_one_does(
    carried_out: Callable[..., list[str]], out: Path
) -> None:
    """FedProx alone with two seeds, then FedAvg with one, then with a third: nothing is lost, or trained again."""
    said = carried_out("near", "other", seeds=(0, 1))
    assert "not run here: Unheard-of (even): Unheard-of is not built" in said
    assert measured(out) == {("near", "even"): 2}
    written = {path: path.stat().st_mtime_ns for path in (out / "even" / "runs").glob("*/metrics.json")}
    carried_out("fedavg")
    assert measured(out) == {("fedavg", "even"): 1, ("near", "even"): 2, ("fedavg", "sent"): 1}
    carried_out("fedavg", seeds=(2,))
    assert measured(out) == {("fedavg", "even"): 2, ("near", "even"): 2, ("fedavg", "sent"): 2}
    assert {path: path.stat().st_mtime_ns for path in written} == written
    document = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert document["seeds"] == [0, 1, 2]
    difference = next(one for one in document["cells"] if (one["row"], one["column"]) == ("near", "even"))
    assert difference["difference"] is not None and difference["difference_low"] is None  # one seed in common, 0


@pytest.mark.slow
def test_two_parts_in_one_folder_at_once_are_the_whole(carried_out: Callable[..., list[str]], out: Path) -> None:
    """Of two rows and two seeds each part has a seed of both; the table of the one that ends last has all four.

    The first part has settled what it compares when the second one comes, and is carried out to its end. Nothing else
    here has these seeds: what is found again is there before anything is compared.
    """
    rows, seeds = ("fedavg", "near"), (8, 9)

    def second() -> None:
        said = carried_out(*rows, seeds=seeds, part=(2, 2))
        assert said[0].startswith("fedpa.tiny: 2 runs in 1 setting (2 others left out)")
        assert measured(out) == {("fedavg", "even"): 1, ("fedavg", "sent"): 1, ("near", "even"): 1}
        assert "- 2 runs left out: kept with the code, or another" in (out / "table.md").read_text(encoding="utf-8")

    carried_out(*rows, seeds=seeds, part=(1, 2), meanwhile=second)
    assert measured(out) == {("fedavg", "even"): 2, ("fedavg", "sent"): 2, ("near", "even"): 2}
    assert "left out" not in (out / "table.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_divisions_of_an_earlier_command_stay_and_what_has_none_is_told_to_be_left_out(
    carried_out: Callable[..., list[str]], out: Path
) -> None:
    """A run without a division of its own cannot stand beside runs that have one."""
    carried_out("fedavg")
    said = carried_out("fedavg", partition_seeds=(5,))
    assert [line for line in said if "earlier command" in line] == [
        "even: 1 run of an earlier command without --partition-seeds cannot be put together with these; its options "
        "bring them back to the table"
    ]
    carried_out("fedavg", partition_seeds=(6,))
    assert measured(out)["fedavg", "even"] == 2
    assert json.loads((out / "table.json").read_text(encoding="utf-8"))["partition_seeds"] == [5, 6]


@pytest.mark.slow
def test_what_is_set_beside_the_table_is_told_of_the_setting_that_has_it(
    carried_out: Callable[..., list[str]], out: Path
) -> None:
    """In every output, and of that column alone; where runs lie and how many work at once is not."""
    carried_out("fedavg", assignments=("local.lr=0.02", "engine.workers=0", "data.download=false"))
    document = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert document["assignments"] == {"even": ["local.lr=0.02"]}
    marked = {(one["column"], one["assignments"], one["rounds_scale"]) for one in document["cells"]}
    assert marked == {("even", "local.lr=0.02", 0.1), ("sent", "local.lr=0.02", 0.1), ("skewed", None, 0.1)}
    said = "REDUCED BUDGET: 0.1 of the rounds) (CHANGED SETTING: local.lr=0.02)"
    text = (out / "table.md").read_text(encoding="utf-8")
    assert said in text and "- even, kilobytes: local.lr=0.02" in text and "even, ours (changed setting)" in text
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"{said}</h1>" in page and f"{said}</title>" in page
    carried_out("fedavg")  # as the table has it: the mark is gone
    assert "CHANGED SETTING" not in (out / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds_scale": 0.1}, r"holds the table at 0\.1 of its rounds, not 0\.2; choose another --out"),
        ({"id": "fedpa.table2"}, r"holds fedpa\.table2, not fedpa\.tiny; choose another --out"),
    ],
)
def test_figures_of_two_budgets_or_tables_are_not_put_into_one_folder(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    said = {"id": "fedpa.tiny", "seeds": [0], "partition_seeds": None, "rounds_scale": 0.2, **changes}
    (tmp_path / "table.json").write_text(json.dumps(said))
    planned, how = plan_table(tiny(), TableSelection(rounds_scale=0.2), with_data=False), Operation(*[Watcher()] * 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        run_table(planned, tmp_path, how)


def test_a_folder_with_other_files_is_not_written_in(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "thesis.tex").write_text("mine")
    planned, how = plan_table(tiny(), TableSelection(), with_data=False), Operation(*[Watcher()] * 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"holds thesis\.tex, which a paper's table would not; choose another --out"):
        run_table(planned, tmp_path, how)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "thesis.tex"]
