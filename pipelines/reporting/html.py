"""The report: one HTML file, for one run or for a comparison, that needs nothing but itself.

Styles and figures are inline; there are no scripts and no links out. A report is tracked by its hash, so it is a
function of what the runs computed: no time stamps, no durations, no paths, and the same inputs give the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flcore.data.skew import skew
from flcore.errors import DataError
from pipelines.reporting.comparison_tables import TIED_MARK, definitions, printed_tables
from pipelines.reporting.figures.analyses import CAPTIONS, HEADINGS, draw_analysis, subject_of
from pipelines.reporting.figures.charts import PartitionTable, load_partition, svg_text
from pipelines.reporting.figures.sets import comparison_figures
from pipelines.reporting.formats import MISSING, format_bytes, format_count, format_percent
from pipelines.reporting.statistics import Comparison, compare
from pipelines.runs import analyses
from pipelines.runs.record import TASK_SCORES, RunRecord, load_run

# Heading and caption of each figure of `comparison_figures`, and what a comparison's caption adds.
_FIGURES: Mapping[str, tuple[str, str, str]] = {
    "accuracy": (
        "Accuracy over rounds",
        "After each evaluated round; round 0 is before training.",
        "Mean over seeds; the band is ± one sample standard deviation over seeds (no band for one seed).",
    ),
    "bytes": (
        "Accuracy against traffic",
        "Cumulative bytes in both directions, summed over clients, on a logarithmic axis.",
        "Mean over seeds; further left is cheaper. A method that sends nothing is a dotted line at its final accuracy.",
    ),
    "partition": ("Who holds what", "Training samples by class and client; white is none.", ""),
    "clients": (
        "Spread over clients",
        "Last evaluated round. Box: quartiles; thick bar: median; whiskers: extremes.",
        "Every dot is one client of one seed.",
    ),
    "classes": ("Accuracy by class", "Global model on the global test set in %; grey: no value.", "Mean over seeds."),
    "stream": (
        "Accuracy on the stream of tasks",
        "After each evaluated round; vertical lines: the next task begins for everybody. A_loc and A_sel: clients' own "
        "models before aggregation, on all classes and on those met; dashed: minority classes alone.",
        "Mean over seeds.",
    ),
    "tasks": (
        "Accuracy on earlier tasks over time",
        "Clients' own models before aggregation, on the classes of each task they have met, mean over clients; a panel "
        "per method, a line per task.",
        "Mean over seeds.",
    ),
    "loss": (
        "Training loss by term",
        "Mean over the clients that took part; a panel per term, scales differ.",
        "Mean over seeds.",
    ),
}
# What a page about one run does not show, it need not explain.
_COMPARISON_TERMS = ("±", "difference", "rounds to target", "bytes to target", TIED_MARK)
# A path, a home directory, a drive or an address, anywhere in a value.
_PLACE = re.compile(r"(^|[\s=:,;'\"])(~?/|~$|[A-Za-z]:[\\/]|\\\\)")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}:\d{2}")
_TIME_KEYS = ("_at", "date", "timestamp", "created", "hostname")


@dataclass(frozen=True)
class _Figure:
    """A figure of the page; without a drawing the caption says why."""

    name: str
    heading: str
    caption: str
    svg: Markup | None


@dataclass(frozen=True)
class _Section:
    """A plain table: the first column is text, numbers stand on the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def write_run_report(run_dir: Path, partition_dir: Path | None, out_file: Path) -> Path:
    """Write the report of one finished run.

    Args:
        run_dir: holds `metrics.json` and `history.jsonl`, perhaps `config.json` and `analyses/`.
        partition_dir: holds the partition's `manifest.json`; None leaves the partition out.
        out_file: replaced if it is there; its folder is made.

    Returns:
        `out_file`.

    Raises:
        DataError: a file is missing or damaged.
    """
    run = load_run(run_dir)
    partitions = {} if partition_dir is None else {run.seed: load_partition(partition_dir)}
    comparison = compare([run], baseline=run.method)
    return _render(
        out_file,
        title=f"{run.method} on {run.dataset}",
        lead=_lead(comparison, partitions),
        comparison=comparison,
        partitions=partitions,
        tiles=_tiles(run),
        tables=(),
        notes=(),
        values=_run_values(run),
        analyses=tuple(_analyses(run)),
    )


def write_comparison_report(
    comparison: Comparison, runs: Sequence[RunRecord], partitions: Mapping[int, Path], out_file: Path
) -> Path:
    """Write the report of a comparison.

    Args:
        comparison: what `compare(runs, ...)` returned.
        runs: the same runs, in the order in which figures shall show their methods.
        partitions: partition directory by seed; the heatmap shows that of the lowest seed. May be empty.
        out_file: replaced if it is there; its folder is made.

    Returns:
        `out_file`.

    Raises:
        DataError: a file is missing or damaged.
    """
    tables = {seed: load_partition(directory) for seed, directory in sorted(partitions.items())}
    count = len(comparison.methods)
    return _render(
        out_file,
        title=f"{count} method{'' if count == 1 else 's'} on {comparison.dataset}",
        lead=_lead(comparison, tables),
        comparison=comparison,
        partitions=tables,
        tiles=(),
        tables=printed_tables(comparison),
        notes=comparison.notes,
        values=None,
        analyses=(),
        runs=runs,
    )


def _render(
    out_file: Path,
    *,
    comparison: Comparison,
    partitions: Mapping[int, PartitionTable],
    runs: Sequence[RunRecord] | None = None,
    **page: Any,
) -> Path:
    runs = comparison.runs if runs is None else runs
    first = next(iter(partitions.values()), None)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    html = environment.get_template("report.html.j2").render(
        figures={figure.name: figure for figure in _figures(runs, first)},
        heatmap_seed=next(iter(partitions), None),
        skew=_skew_table(partitions),
        partition_notes=_partition_notes(partitions),
        traffic=_traffic_table(comparison),
        configuration=_configuration(runs),
        provenance=_provenance(runs),
        definitions={
            term: meaning
            for term, meaning in definitions(comparison).items()
            if page["tables"] or term not in _COMPARISON_TERMS
        },
        tied_mark=TIED_MARK,
        **page,
    )
    out_file.parent.mkdir(parents=True, exist_ok=True)
    out_file.write_text(html, encoding="utf-8", newline="")
    return out_file


def _figures(runs: Sequence[RunRecord], partition: PartitionTable | None) -> Iterator[_Figure]:
    for name, (figure, _) in comparison_figures(runs, partition).items():
        heading, caption, addition = _FIGURES[name]
        if len(runs) > 1 and addition:
            caption = f"{caption} {addition}"
        # The SVG is our own drawing, so it goes in as it is; all other text is escaped by the template.
        yield _Figure(name, heading, caption, Markup(svg_text(figure, prefix=f"plot-{name}")))


def _analyses(run: RunRecord) -> Iterator[_Figure]:
    for analysis in analyses.load(run.directory):
        if analysis.skipped is not None:
            yield _Figure(analysis.name, HEADINGS[analysis.name], f"Left out: {analysis.skipped}.", None)
            continue
        drawing = svg_text(draw_analysis(analysis, subject_of(run)), prefix=f"plot-{analysis.name}")
        caption = " ".join((CAPTIONS[analysis.name], *analysis.notes))
        yield _Figure(analysis.name, HEADINGS[analysis.name], caption, Markup(drawing))


def _lead(comparison: Comparison, partitions: Mapping[int, PartitionTable]) -> str:
    methods = [row.method for row in comparison.methods]
    partition = next(iter(partitions.values()), None)
    rounds = sorted({run.rounds for run in comparison.runs})
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    split = "" if comparison.partition is None else f", divided by {comparison.partition}"
    if partition is not None:
        parameters = ", ".join(f"{key} = {value}" for key, value in _partition_parameters(partition.manifest))
        name = comparison.partition or partition.manifest.get("parameters", {}).get("name", "an unnamed partitioner")
        split = f", divided among {len(partition.client_ids)} clients by {name}"
        split += f" ({parameters})" if parameters else ""
    return (
        f"{', '.join(methods)} on {comparison.dataset}{split}; {', '.join(map(str, rounds))} "
        f"round{'' if rounds == [1] else 's'}, seed{'' if len(comparison.seeds) == 1 else 's'} {seeds}."
    )


def _partition_parameters(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the partitioner was told, without what the sentence around it says anyway.

    Where a manifest tells the partitioner's own `options` from the rest, only they say how labels were divided.
    """
    parameters = manifest.get("parameters") or {}
    told = _flatten(parameters.get("options", parameters))
    return [(key, value) for key, value in told if key not in ("name", "num_clients", "seed") and value != MISSING]


def _tiles(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    traffic = None if run.bytes_up is None or run.bytes_down is None else run.bytes_up + run.bytes_down
    candidates = (
        ("top1_global", _percent(run.top1_global), "global model, global test set"),
        ("mean_local", _percent(run.mean_local), "mean over clients"),
        ("client_std", _percent(run.client_std), "spread over clients"),
        ("traffic", format_bytes(traffic), "up + down, all clients, whole run"),
    )
    return tuple(tile for tile in candidates if tile[1] != MISSING)


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{format_percent(value)} %"


def _run_values(run: RunRecord) -> _Section:
    best_round = "" if run.best_round is None else f" (round {run.best_round}; chosen on test data, no headline figure)"
    best = _percent(run.best_top1_global)
    rows = (
        ("top1_global", _percent(run.top1_global)),
        ("mean_local", _percent(run.mean_local)),
        ("pooled_local", _percent(run.pooled_local)),
        ("client_std", _percent(run.client_std)),
        ("mean_local_own_classes", _percent(run.mean_local_own_classes)),
        ("last10_top1_global", _percent(run.last10_top1_global)),
        ("best_top1_global", best if best == MISSING else best + best_round),
        *((name, _percent(run.tasks[key])) for key, name in TASK_SCORES.items() if run.tasks.get(key) is not None),
        ("bytes up / round", format_bytes(run.bytes_up_per_round)),
        ("bytes down / round", format_bytes(run.bytes_down_per_round)),
        ("scalars up / round", format_count(run.scalars_up_per_round)),
        ("parameters", format_count(run.num_parameters)),
    )
    return _Section(("value", run.method), rows)


def _traffic_table(comparison: Comparison) -> _Section:
    rows = []
    for row in comparison.methods:
        for direction, kinds in (("up", row.bytes_up_by_kind), ("down", row.bytes_down_by_kind)):
            total = sum(kinds.values())
            for kind, count in kinds.items():
                share = MISSING if not total else f"{100 * count / total:.1f} %"
                per_round = count / row.rounds[0] if len(row.rounds) == 1 and row.rounds[0] else None
                rows.append((row.method, direction, kind, format_bytes(per_round), format_bytes(count), share))
    return _Section(("method", "direction", "kind", "per round", "whole run", "share of direction"), tuple(rows))


def _skew_table(partitions: Mapping[int, PartitionTable]) -> _Section | None:
    """Sizes and label skew by seed, from the class counts of the manifests."""
    if not partitions:
        return None
    rows = []
    for seed, partition in partitions.items():
        sizes = sorted(int(size) for size in partition.counts.sum(axis=1))
        measured = skew(partition.counts)
        held = (partition.counts > 0).sum(axis=1)
        middle = (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
        rows.append(
            (
                str(seed),
                str(len(sizes)),
                str(partition.counts.shape[1]),
                f"{sizes[0]} / {middle:g} / {sizes[-1]}",
                f"{int(held.min())} / {held.mean():.1f} / {int(held.max())}",
                f"{measured.js_distance:.3f}",
                f"{100 * measured.missing_class_share:.1f} %",
            )
        )
    header = (
        "seed",
        "clients",
        "classes",
        "samples per client (min / median / max)",
        "classes per client (min / mean / max)",
        "label distance",
        "classes a client lacks",
    )
    return _Section(header, tuple(rows))


def _partition_notes(partitions: Mapping[int, PartitionTable]) -> list[str]:
    return [
        f"Seed {seed}: {note}"
        for seed, partition in partitions.items()
        for note in partition.manifest.get("notes") or ()
    ]


def _configuration(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Configuration keys that all runs share, and those in which methods differ.

    Seed and method are left out, they stand everywhere else. So are values that name a place or a time; these are
    counted.
    """
    by_run = [(run, dict(_flatten(config))) for run in runs if (config := _read_config(run.directory)) is not None]
    if not by_run:
        return None
    keys = sorted({key for _, config in by_run for key in config} - {"seed", "method.name"})
    shown = [key for key in keys if all(_is_shown(key, config.get(key, "")) for _, config in by_run)]
    common, differing = [], []
    for key in shown:
        values: dict[str, list[str]] = {}
        for run, config in by_run:
            value = config.get(key)
            if value is not None and value not in values.setdefault(run.method, []):
                values[run.method].append(value)
        distinct = {tuple(method_values) for method_values in values.values()}
        if len(distinct) == 1 and len(next(iter(distinct))) == 1 and all(key in config for _, config in by_run):
            common.append((key, next(iter(distinct))[0]))
        else:
            pairs = [(method, " or ".join(method_values)) for method, method_values in values.items() if method_values]
            differing.append((key, pairs))
    return {"common": common, "differing": differing, "hidden": len(keys) - len(shown)}


def _read_config(directory: Path) -> Mapping[str, Any] | None:
    path = directory / "config.json"
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: damaged JSON; run this method again.") from error
    config = document.get("identity") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        raise DataError(f"{path}: no object 'identity'; run this method again.")
    return config


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key in sorted(values):
        value = values[key]
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _as_text(value)


def _as_text(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _is_shown(key: str, value: str) -> bool:
    last = key.rsplit(".", 1)[-1]
    return not (_PLACE.search(value) or _TIME.search(value) or last.endswith(_TIME_KEYS))


def _provenance(runs: Sequence[RunRecord]) -> _Section:
    rows = tuple(
        (
            run.method,
            str(run.seed),
            _short(run.config_hash),
            _short(run.data_fingerprint),
            _short(run.partition_fingerprint),
        )
        for run in runs
    )
    return _Section(("method", "seed", "configuration", "data", "partition"), rows)


def _short(fingerprint: str | None) -> str:
    return MISSING if fingerprint is None else fingerprint[:12]
