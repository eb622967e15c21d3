"""The report: one file that stands alone, says what was run, and is the same for the same inputs."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flcore.errors import DataError
from pipelines.reporting.html import write_comparison_report, write_run_report
from pipelines.reporting.statistics import compare
from pipelines.runs.record import load_run


def make_run(root: Path, method: str, seed: int, final: float | None, **config: Any) -> Path:
    """A finished run of two rounds with two clients and two classes, and its configuration."""
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
    (directory / "config.json").write_text(json.dumps({"identity": full, "written": str(root)}), encoding="utf-8")
    return directory


def make_partition(root: Path, seed: int) -> Path:
    """Client 0 holds 30 of class 0, client 1 holds 10 of class 1: nothing in common."""
    directory = root / f"partition-{seed}"
    directory.mkdir(parents=True)
    manifest = {
        "clients": [{"id": "0000", "class_counts": [30, 0]}, {"id": "0001", "class_counts": [0, 10]}],
        "num_classes": 2,
        "parameters": {"name": "dirichlet", "num_clients": 2, "seed": seed, "options": {"alpha": 0.1}},
        "notes": ["a <note>"],
    }
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory


def write_both(root: Path) -> tuple[str, str]:
    """A run report and a comparison report of two methods and two seeds, as text."""
    finals = {"fedavg": (0.6, 0.7), "fedprox": (0.65, 0.77), "local": (None, None)}
    options: dict[str, dict[str, Any]] = {"fedavg": {}, "fedprox": {"mu": 0.01}, "local": {}}
    directories = [
        make_run(root, method, seed, final, **options[method])
        for method, values in finals.items()
        for seed, final in enumerate(values)
    ]
    partitions = {seed: make_partition(root, seed) for seed in (0, 1)}
    runs = [load_run(directory) for directory in directories]
    run_report = write_run_report(directories[2], partitions[0], root / "out" / "run.html")
    both = write_comparison_report(compare(runs), runs, partitions, root / "out" / "comparison.html")
    return run_report.read_text(encoding="utf-8"), both.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """Both reports and the folder they were made in."""
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
    for report in reports[:2]:
        page = _Page(report)
        assert not page.tags & {"script", "link", "iframe", "img"}
        assert len(page.ids) == len(set(page.ids))
        for reference in page.references:
            assert reference.startswith("data:image/png") or reference.removeprefix("#") in page.ids
        assert report.count("</html>") == 1


def test_tables_may_break_where_nothing_is_torn(reports: tuple[str, str, Path]) -> None:
    """Names behind an underscore, cells before a bracket and nowhere else."""
    summary = reports[1].partition('<section id="summary">')[2].partition("</section>")[0]
    assert "<th>mean_<wbr>local</th>" in summary
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", summary)
    assert any(" " in cell for cell in cells)
    assert all(re.fullmatch(r"[^ ]*( [\[(][^ ]*)?", cell) for cell in cells)


def test_reports_name_no_place_and_no_time(reports: tuple[str, str, Path]) -> None:
    """Paths, addresses and times of the configuration are left out and counted; timing.json is not read.

    Four keys: data.root, tracking.uri (a path within an address), tracking.started_at and tracking.note (a date).
    """
    for report in reports[:2]:
        assert str(reports[2]) not in report
        assert "2026" not in text_of(report) and "123.456" not in report
        assert "4 keys naming a place or a time are left out" in text_of(report)


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
    assert "1 2 2 10 / 20 / 30 1 / 1.0 / 1 1.000 50.0 %" in text
    assert "method.mu fedprox: 0.01" in text
    assert "local has no top1_global" in text
    for heading in (
        "Accuracy over rounds",
        "Accuracy against traffic",
        "Spread over clients",
        "Who holds what (seed 0)",
    ):
        assert heading in text


def test_same_inputs_give_the_same_bytes(reports: tuple[str, str, Path], tmp_path: Path) -> None:
    """Made again in another folder."""
    assert write_both(tmp_path / "elsewhere") == reports[:2]


def test_report_without_partition_configuration_and_traffic(tmp_path: Path) -> None:
    """A silent method without a global model still has a page; missing values are dashes, never 0."""
    directory = make_run(tmp_path, "local", 0, None)
    (directory / "config.json").unlink()
    text = text_of(write_run_report(directory, None, tmp_path / "run.html").read_text(encoding="utf-8"))
    assert "top1_global \u2013" in text and "Nothing was sent." in text
    assert "Who holds what" not in text and "left out" not in text


def test_damaged_configuration_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    directory = make_run(tmp_path, "local", 0, None)
    for content in ("{broken", "[]", "{}"):
        (directory / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=r"config\.json"):
            write_run_report(directory, None, tmp_path / "run.html")
