"""The pages: one file that stands alone, says what was run, and is the same for the same inputs."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError, DataError
from flcore.io.files import sealed, write_json
from pipelines.reporting.comparison_report import collect, write_report
from pipelines.reporting.run_report import report, write_run_page
from pipelines.runs.folder import RunFolder

PROJECT = Path(__file__).resolve().parents[3]


def make_run(root: Path, method: str, seed: int, final: float | None, **config: Any) -> Path:
    """A finished run of two rounds with two clients and two classes, its configuration, and where its data lie."""
    directory = root / f"{method}-{seed}"
    directory.mkdir(parents=True)
    sends = 0 if final is None else 1500
    rounds = [
        {
            "round": number,
            "top1_global": None if final is None else final * number / 2,
            "mean_local": 0.4 * number,
            "local_accuracy": [0.3 * number, 0.5 * number],
            "train_loss": {"cross_entropy": 1 / number},
            "bytes_up": {"weights": sends * number} if sends else {},
            "bytes_down": {"weights": sends * number, "prototypes": 500 * number} if sends else {},
        }
        for number in (1, 2)
    ]
    metrics = {
        "method": method,
        "dataset": "digits",
        "partition": "dirichlet",
        "rounds": 2,
        "seed": seed,
        "top1_global": final,
        "mean_local": 0.8,
        "client_std": 0.2,
        "class_acc": [None, None] if final is None else [final, None],
        "bytes_up": 2 * sends,
        "bytes_down": 2 * sends + 1000 if sends else 0,
        "bytes_up_by_kind": {"weights": 3000} if sends else {},
        "bytes_down_by_kind": {"weights": 3000, "prototypes": 1000} if sends else {},
        "data_fingerprint": "data",
        "partition_fingerprint": f"partition-{seed}",
    }
    full = {
        "seed": seed,
        "data": {"name": "digits", "root": str(root)},
        "local": {"lr": 0.05, "milestones": [1, 2]},
        "tracking": {"uri": f"sqlite:///{root}/store.db", "started_at": 12, "note": "at 2026-11-21T10:00:00"},
        "method": {"name": method, **config},
    }
    (directory / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    (directory / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds), encoding="utf-8")
    (directory / "timing.json").write_text('{"seconds": {"train": 123.456}}', encoding="utf-8")
    described = {"identity": full, "config": {**full, "partition": {}}, "config_hash": "0", "written": str(root)}
    write_json(directory / "config.json", sealed(described))
    places = {"prepared": "../prepared", "partition": f"../partition-{seed}"}
    (directory / "inputs.json").write_text(json.dumps(places), encoding="utf-8")
    return directory


def make_data(root: Path) -> None:
    (root / "prepared").mkdir(parents=True)
    (root / "prepared" / "meta.json").write_text('{"fingerprint": "data"}', encoding="utf-8")


def make_partition(root: Path, seed: int) -> Path:
    """Client 0 holds 30 of class 0, client 1 holds 10 of class 1: nothing in common."""
    directory = root / f"partition-{seed}"
    directory.mkdir(parents=True)
    manifest = {
        "clients": [{"id": "0000", "class_counts": [30, 0]}, {"id": "0001", "class_counts": [0, 10]}],
        "num_classes": 2,
        "parameters": {"name": "dirichlet", "num_clients": 2, "seed": seed, "options": {"alpha": 0.1}},
        "notes": ["a <note>"],
        "fingerprint": f"partition-{seed}",
    }
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory


FINALS: dict[str, tuple[float | None, ...]] = {"fedavg": (0.6, 0.7), "fedprox": (0.65, 0.77), "local": (None, None)}


def make_all(root: Path) -> list[Path]:
    """Three methods with two seeds, and what they were made from."""
    make_data(root)
    for seed in (0, 1):
        make_partition(root, seed)
    options: dict[str, dict[str, Any]] = {"fedavg": {}, "fedprox": {"mu": 0.01}, "local": {}}
    return [
        make_run(root, method, seed, final, **options[method])
        for method, values in FINALS.items()
        for seed, final in enumerate(values)
    ]


def folders(directories: Sequence[Path]) -> list[RunFolder]:
    return [RunFolder(directory) for directory in directories]


def write_both(root: Path) -> tuple[str, str]:
    """The page of a run and that of a comparison, as text."""
    directories = make_all(root)
    write_report(
        collect({}, folders(directories), {"gfpl seed 0": "round 1: <diverged>"}), root / "out", with_times=False
    )
    both = root / "out" / "report.html"
    return report(directories[2]).read_text(encoding="utf-8"), both.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """Both pages and the folder they were made in."""
    root = tmp_path_factory.mktemp("reports")
    return *write_both(root), root


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id" and value is not None:
                self.ids.append(value)
            if name in ("href", "xlink:href", "src") and value is not None:
                self.references.append(value)


def text_of(page: str) -> str:
    """The words of a page without figures, styles and tags, with single spaces."""
    page = re.sub(r"<(svg|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_reports_stand_alone(reports: tuple[str, str, Path]) -> None:
    """No scripts, nothing from elsewhere, every id once, every inner reference answered."""
    for text in reports[:2]:
        page = _Page(text)
        assert not page.tags & {"script", "link", "iframe", "img"}
        assert len(page.ids) == len(set(page.ids))
        for reference in page.references:
            assert reference.startswith("data:image/png") or reference.removeprefix("#") in page.ids
        assert text.count("</html>") == 1


def test_tables_may_break_where_nothing_is_torn(reports: tuple[str, str, Path]) -> None:
    """Cells before and after what stands in brackets, and nowhere else."""
    summary = reports[1].partition('<section id="differences">')[2].partition("</section>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", summary)
    assert any(" [" in cell for cell in cells)
    assert all(re.fullmatch(r"[^ ]*( [\[(][^ ]*)?( p[^ ]*)?", cell) for cell in cells)


def test_the_answer_comes_first_then_contents_then_figures(reports: tuple[str, str, Path]) -> None:
    """Verdict, accuracies, links to every part, and the differences before all other figures."""
    page = reports[1]
    body = page.partition("<body>")[2]
    order = ['class="answer"', "<table>", 'aria-label="Contents"', 'id="differences"', "<svg id="]
    places = [body.index(part) for part in order]
    assert places == sorted(places)
    linked = re.findall(r'<a href="#([a-z_]+)">', page)
    assert {"summary", "differences", "accuracy", "communication", "provenance"} <= set(linked) <= set(_Page(page).ids)
    pictures = re.findall(r'<svg id="plot-([a-z]+)', page)
    assert list(dict.fromkeys(pictures)) == [
        *("differences", "tradeoff", "accuracy", "bytes", "clients", "classes", "loss", "partition")
    ]


def test_a_page_of_this_machine_says_when_by_which_code_and_how_it_was_made(tmp_path: Path) -> None:
    """The day is that of the run that ended last, not of the clock; 0 ms is 1 January 1970, a day later the 2nd."""
    runs = make_all(tmp_path)
    for run, ended in zip(runs, (0, 86_400_000, 5, 0, 0, 0), strict=True):
        (run / "timing.json").write_text(json.dumps({"seconds": {"train": 1.0}, "ended_ms": ended}), encoding="utf-8")
    header = json.loads((runs[0] / "config.json").read_text(encoding="utf-8"))
    known = {key: value for key, value in header.items() if key in ("identity", "config", "config_hash")}
    write_json(runs[0] / "config.json", sealed({**known, "environment": {"code_version": "c0ffee" * 6}}))
    write_report(collect({}, folders(runs)), tmp_path / "out", command="protofl compare --methods fedavg,local")
    head = text_of((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))[:1500]
    assert "runs ended: 1970-01-02" in head and "protofl commit: c0ffeec0ffee " in head
    assert "command: protofl compare --methods fedavg,local" in head


def test_figures_are_inverted_on_dark_ground_and_pictures_are_not(reports: tuple[str, str, Path]) -> None:
    dark = reports[1].partition("@media screen and (prefers-color-scheme: dark) {")[2].partition("</style>")[0]
    assert re.search(r"\.plot svg, \.pictures svg image, \.key \{ filter: invert", dark)
    assert 'class="plots pictures"' not in reports[1]


def test_reports_name_no_place_and_no_time(reports: tuple[str, str, Path]) -> None:
    """Paths, addresses and times of the configuration are left out and counted; timing.json is not read.

    Four keys: data.root, tracking.uri (a path within an address), tracking.started_at and tracking.note (a date).
    """
    for text in reports[:2]:
        assert str(reports[2]) not in text
        assert "2026" not in text_of(text) and "123.456" not in text
        assert "4 keys naming a place or a time are left out" in text_of(text)


def test_run_report_says_what_was_run(reports: tuple[str, str, Path]) -> None:
    """The lead sentence, the tiles, the traffic and the configuration.

    Down per round: 3000 B / 2 = 1.50 kB of weights, 75 % of 4000 B.
    """
    text = text_of(reports[0])
    assert "fedprox on digits, divided among 2 clients by dirichlet (alpha = 0.1); 2 rounds, seed 0." in text
    assert "65.00 %" in text and "80.00 %" in text
    assert "fedprox down weights 1.50 kB 3.00 kB 75.0 %" in text
    assert "method.mu 0.01" in text and "local.milestones [1, 2]" in text
    assert "a &lt;note&gt;" in text
    assert "interval" not in text


def test_comparison_report_shows_differences_and_skew(reports: tuple[str, str, Path]) -> None:
    """Differences 5 and 7 points: mean 6, std √2, half-width 12.706205 * √2 / √2 = 12.71.

    Two clients with one class each: label distance 1, each lacks 50 % of the classes; sizes 10 and 30, median 20.
    """
    text = text_of(reports[1])
    assert "fedavg, fedprox, local on digits" in text and "seeds 0, 1." in text
    assert "fedprox 2 71.00 ± 8.49" in text
    assert "+6.00 [\u22126.71, +18.71]" in text
    assert "No difference to fedavg shown: fedprox" in text
    assert "gfpl seed 0: round 1: &lt;diverged&gt;" in text
    assert "1 2 2 10 / 20 / 30 1 / 1.0 / 1 1.000 50.0 %" in text
    assert "method.mu fedprox: 0.01" in text
    for heading in (
        "Accuracy over rounds",
        "Accuracy against traffic",
        "Spread over clients",
        "Samples by client and class (seed 0)",
    ):
        assert heading in text


def test_same_inputs_give_the_same_bytes(reports: tuple[str, str, Path], tmp_path: Path) -> None:
    """Pages, tables and figures, made again in another folder; none names its folder."""
    assert write_both(tmp_path / "elsewhere") == reports[:2]
    first, second = ({path.relative_to(out): path.read_bytes() for path in out.rglob("*.*")}
                     for out in (reports[2] / "out", tmp_path / "elsewhere" / "out"))  # fmt: skip
    assert first == second and len(first) > 20
    assert not any(str(reports[2]).encode() in content for content in first.values())


def test_report_without_partition_configuration_and_traffic(tmp_path: Path) -> None:
    """A silent method without a global model still has a page; missing values are dashes, never 0."""
    directory = make_run(tmp_path, "local", 0, None)
    (directory / "config.json").unlink()
    text = text_of(write_run_page(RunFolder(directory), None).read_text(encoding="utf-8"))
    assert "global model top1_global \u2013" in text and "Nothing was sent." in text
    assert "Samples by client and class" not in text and "left out" not in text


def test_damaged_configuration_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    directory = make_run(tmp_path, "local", 0, None)
    for content in ("{broken", "[]", "{}"):
        (directory / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=r"config\.json"):
            write_run_page(RunFolder(directory), None)


def test_a_run_whose_partition_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own page is refused with the folder's name; a comparison says so and goes on without it."""
    directories = make_all(tmp_path)
    (tmp_path / "partition-1" / "manifest.json").unlink()
    with pytest.raises(DataError, match="partition-1"):
        report(directories[1])
    write_report(collect({}, folders(directories)), tmp_path / "out")
    assert "who holds what with seed 1" in caplog.text
    assert "Samples by client and class" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_failed_runs_are_left_out_and_missing_ones_refused(tmp_path: Path) -> None:
    """fedprox failed with seed 1: its mean is that of seed 0. A folder without result that nobody named is a fault."""
    directories = make_all(tmp_path)
    (directories[3] / "metrics.json").unlink()
    with pytest.raises(DataError, match="fedprox-1"):
        collect({}, folders(directories))
    found = collect({}, folders(directories), {"fedprox seed 1": "round 2: diverged"})
    seeds = {row.method: row.seeds for row in found.methods}
    assert seeds == {"fedavg": (0, 1), "fedprox": (0,), "local": (0, 1)}
    assert found.failed == {"fedprox seed 1": "round 2: diverged"}


def test_baseline_and_target_are_those_of_the_parameters(tmp_path: Path) -> None:
    """And are checked: a key that nobody knows is named."""
    directories = make_all(tmp_path)
    found = collect({"compare": {"baseline": "fedprox", "target_fraction": 0.5}}, folders(directories))
    assert (found.baseline, found.target_fraction) == ("fedprox", 0.5)
    assert found.methods[0].differences["top1_global"].mean == pytest.approx(-0.06)
    with pytest.raises(ConfigError, match=r"compare\.base"):
        collect({"compare": {"base": "fedprox"}}, folders(directories))


def test_curves_of_all_runs_are_one_table(reports: tuple[str, str, Path]) -> None:
    """For `dvc plots`: a row per method, seed and round."""
    rows = list(csv.DictReader((reports[2] / "out" / "curves.csv").open(encoding="utf-8")))
    assert len(rows) == 3 * 2 * 2
    last = {"method": "fedprox", "seed": "1", "round": "2", "top1_global": "0.77", "top1_vote": "", "bytes": "7000"}
    assert {**last, "mean_local": "0.8", "pooled_local": ""} in rows
    template = json.loads((PROJECT / ".dvc" / "plots" / "methods.json").read_text(encoding="utf-8"))
    numbers = set(template["data"]["format"]["parse"])
    assert numbers == set(rows[0]) - {"method", "seed"} and template["encoding"]["color"]["field"] == "method"


def test_pages_are_made_without_torch(tmp_path: Path) -> None:
    """It takes longer to import than a page to make."""
    directories = [str(path) for path in make_all(tmp_path)]
    program = (
        "import sys; from pathlib import Path\n"
        "from pipelines.reporting.comparison_report import collect, write_report\n"
        "from pipelines.reporting.run_report import report\n"
        "from pipelines.runs.folder import RunFolder\n"
        f"runs = [RunFolder(Path(run)) for run in {directories!r}]\n"
        f"write_report(collect({{}}, runs), Path({str(tmp_path / 'out')!r})); report(runs[0].directory)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=PROJECT, check=False, timeout=120).returncode == 0


@pytest.mark.slow
def test_a_page_tells_times_unless_it_must_be_the_same_everywhere(tmp_path: Path) -> None:
    directories = make_all(tmp_path)
    write_report(collect({}, folders(directories)), tmp_path / "told")
    told = text_of((tmp_path / "told" / "report.html").read_text(encoding="utf-8"))
    assert "Time, mean ± std over n seeds" in told and "123 ± 0" in told  # two seeds of 123.456 seconds
    assert (tmp_path / "told" / "times.csv").exists()

    write_report(collect({}, folders(directories)), tmp_path / "told", with_times=False)
    assert "Time, mean" not in (tmp_path / "told" / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "told" / "times.csv").exists()  # what is left of another time would pass for this one's
