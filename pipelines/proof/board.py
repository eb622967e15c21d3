"""``protofl board``: archives on one page, each row with the command that repeats it to the byte.

Only archives are read, and checked whole (:mod:`pipelines.proof.contents`). Rows are compared only within one setting:
the same data, and the same configuration except for seeds, method, and a model that only this method works with.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.experiment.run_folder import refuse_inside_a_run
from pipelines.plan.params import OWN_MODELS
from pipelines.proof.contents import ArchivedRun, read_archive
from pipelines.proof.results import digest_of
from pipelines.reporting.comparison import PAIRED_METRICS, compare, lengths_and_seeds
from pipelines.reporting.figures.points import draw_tradeoff
from pipelines.reporting.figures.sets import drawing
from pipelines.reporting.figures.style import LineStyle, house_style, method_styles
from pipelines.reporting.formats import format_bytes, format_percent, listed, plural
from pipelines.reporting.frame import tradeoff
from pipelines.reporting.page import Block, Section, plot, write_page
from pipelines.reporting.statistics import Summary, marks, paired_difference
from pipelines.reporting.tables import MARKS_MEAN, Column, Table, meanings
from pipelines.runs import kinds
from pipelines.runs.compared import flatten
from pipelines.runs.metrics import heading, meaning
from pipelines.runs.record import RunRecord, record_from

_DIGITS = 12  # digits of a hash that a reader compares with another one on the page
_INTERVAL = (
    " In brackets: two-sided 95 % Student-t interval of the mean over seeds; where seeds are run on several divisions "
    "of the data, over divisions, each with the mean over its seeds. A single one has no interval."
)
_SENT = "measured bytes that all clients together send and receive in the whole run, mean over runs."
_NOT_REPEATED = (
    "Every archive is whole: each file in it has the SHA-256 that the archive gives. This page repeated no run, and an "
    "archive does not record whether anybody did. Its command does, and exits with 0 if all results have the same "
    "bytes. First compare the SHA-256 of your file with this one. For data that no package includes, add --set "
    "data.root=DIR."
)


@dataclass(frozen=True)
class _Run:
    """A run of an archive, with its values by dotted key.

    Attributes:
        record: its results; its method is the name of its row. archive: the file.
        setting: values that all compared runs share. method: values that tell rows apart.
        counted: keys that count when runs are compared (:mod:`pipelines.runs.compared`).
    """

    record: RunRecord
    archive: Path
    setting: Mapping[str, str]
    method: Mapping[str, str]
    counted: Sequence[str]


def board(places: Sequence[Path], out: Path) -> Path:
    """Write ``board.html``, and return it.

    Args:
        places: archives, and folders of archives. out: folder of the page.

    Raises:
        DataError: there is no archive, or one is damaged or from another program, or two have other results of a run.
        ProtoflError: runs of a setting have other partitions.
    """
    page = out / "board.html"
    refuse_inside_a_run(page)
    digests = {path: digest_of(path) for place in places for path in _archives(place)}
    commands = {path: f"protofl reproduce {shlex.quote(path.name)} --check\n# SHA-256 " for path in digests}
    failed: list[str] = []
    runs = list(_runs(digests, failed))
    settings = _settings(runs)
    styles = method_styles(list(dict.fromkeys(run.record.method for setting in settings for run in setting)))
    short = {path: commands[path] + digest[:_DIGITS] for path, digest in digests.items()}
    tables = [_table(setting, short) for setting in settings]
    sections = [
        Section(f"setting-{number}", name, tuple(_blocks(setting, table, f"tradeoff-{number}", styles)))
        for number, (name, setting, table) in enumerate(zip(_names(settings), settings, tables, strict=True), 1)
    ]
    columns = (
        Column("repeat it with", [commands[path] + digests[path] for path in digests], is_text=True),
        Column("runs", [sum(run.archive == path for run in runs) for path in digests]),
    )
    archives = [Block("table", Table("Archives", columns)), Block("words", _NOT_REPEATED)]
    archives += [Block("notes", failed)] if failed else []
    terms = Block("terms", {**meanings(tables), "bold": MARKS_MEAN})
    sections.append(Section("archives", "Archives", tuple(archives)))
    sections.append(Section("reading", "How to read it", (terms,), folded=True))
    title = f"{plural(len(styles), 'method')} in {plural(len(settings), 'setting')}"
    lead = f"{plural(len(runs), 'run')} from {plural(len(digests), 'archive')}. Only rows of one setting are compared."
    colours = {method: style.colour for method, style in styles.items()}
    return write_page(page, {"kicker": "board", "title": title}, lead, sections, colours=colours)


def _archives(place: Path) -> list[Path]:
    paths = [place] if place.is_file() else sorted(place.glob("*.zip"))
    if not paths:
        raise DataError(f"{place}: no archive (*.zip) there; protofl archive makes one of a finished run or comparison")
    return paths


def _runs(paths: Iterable[Path], failed: list[str]) -> Iterator[_Run]:
    """Yield the runs of archives; a run of several archives once, from the first; add failed ones to a list."""
    known: dict[tuple[str, str], tuple[Path, str]] = {}
    for path in paths:
        archive = read_archive(path)
        failures = archive.comparison.failed if archive.comparison else {}
        failed += [f"{path.name}: {label} failed: {reason}" for label, reason in failures.items()]
        with archive.file:
            for run in archive.runs:
                name = f"{run.folder}/metrics.json"
                found = path, run.proof.results["metrics.json"]
                first, digest = known.setdefault((run.header.config_hash, run.header.code), found)
                if digest != found[1]:
                    raise DataError(
                        f"{path}: {name} is not that of the same run in {first}; leave one archive out: protofl "
                        "reproduce --check says which repeats on this machine"
                    )
                if first == path:
                    yield _run(path, run, _record(f"{path}: {name}", archive.json(name)))


def _record(place: str, metrics: Mapping[str, Any]) -> RunRecord:
    kinds.check(metrics, kinds.METRICS, place)
    try:
        return record_from(metrics, place)
    except (KeyError, OverflowError) as error:  # an archive is not trusted
        raise DataError(f"{place}: no results of a run ({error}); get the archive again") from error


def _run(path: Path, run: ArchivedRun, record: RunRecord) -> _Run:
    values = flatten(run.header.identity)
    if not {"method.name", "model.name", "partition.seed"} <= values.keys():
        raise DataError(f"{path}: {run.folder}/config.json: no identity of a run; get the archive again")
    brings_model = OWN_MODELS.get(values["method.name"]) == values["model.name"]
    own = ("method.", "plugins.", "engine.stack", "engine.compile", *(["model."] if brings_model else []))
    method = {key: value for key, value in values.items() if key.startswith(own)}
    setting = {key: value for key, value in values.items() if key not in (*method, "seed", "partition.seed")}
    counted = run.header.environment.get("compared_by")
    draw = values["partition.seed"]
    return _Run(
        replace(record, draw=int(draw) if draw.isdecimal() else None),
        path,
        {**setting, "data.fingerprint": run.proof.data[:_DIGITS]},
        {**method, "code": run.header.code[:_DIGITS]},
        [str(key) for key in counted] if isinstance(counted, list) else [],
    )


def _settings(runs: Sequence[_Run]) -> list[list[_Run]]:
    """Return runs by setting; a run that brings its model is in each setting that is equal except for the model."""
    settings: list[tuple[Mapping[str, str], list[_Run]]] = []
    for run in sorted(runs, key=lambda run: "model.name" in run.method):
        accepting = [setting for setting in settings if _accepts(setting[0], run)]
        if not accepting:
            accepting = [(run.setting, [])]
            settings += accepting
        for _, members in accepting:
            members.append(run)
    return [_labelled(members, runs) for _, members in settings]


def _accepts(shared: Mapping[str, str], run: _Run) -> bool:
    brings_model = "model.name" in run.method
    return {k: v for k, v in shared.items() if not (brings_model and k.startswith("model."))} == run.setting


def _labelled(runs: Sequence[_Run], on_page: Sequence[_Run]) -> list[_Run]:
    """Return runs with rows named by method and, if the page has several of it, the values in which they differ."""
    divided = any(run.record.draw is not None for run in runs)
    labelled = []
    for run in runs:
        name = run.method["method.name"]
        apart = _differing([other.method for other in on_page if other.method["method.name"] == name])
        values = [f"{key.removeprefix('method.')} = {run.method[key]}" for key in apart if key in run.method]
        draw = run.record.seed if divided and run.record.draw is None else run.record.draw  # null follows the seed
        method = name + f" ({listed(values)})" * bool(values)
        labelled.append(replace(run, record=replace(run.record, method=method, draw=draw)))
    return sorted(labelled, key=lambda run: run.record.method)


def _differing(mappings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values are not the same everywhere."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return [key for key in keys if len({mapping.get(key) for mapping in mappings}) > 1]


def _main_values(setting: Sequence[_Run]) -> dict[str, str]:
    counted = {"data.fingerprint", *(key for run in setting for key in run.counted)}
    return {key: value for run in setting for key, value in run.setting.items() if key in counted}


def _names(settings: Sequence[Sequence[_Run]]) -> list[str]:
    """Return headings: data, partition, and what else tells settings apart."""
    main = [_main_values(setting) for setting in settings]
    apart = [key for key in _differing(main) if key not in ("data.name", "partition.name")]
    names = []
    for number, values in enumerate(main, 1):
        details = listed(f"{key.rpartition('.')[2]} = {values[key]}" for key in apart if key in values)
        name = listed(values[key] for key in ("data.name", "partition.name") if key in values)
        names.append(f"{number}. " * (len(main) > 1) + name + f" ({details})" * bool(details))
    return names


def _table(setting: Sequence[_Run], commands: Mapping[Path, str]) -> Table:
    """Return a row per method, with the commands that repeat its runs."""
    rows = compare([run.record for run in setting], baseline=setting[0].record.method).methods
    scores = {
        key: [row.scores[key] for row in rows] for key in PAIRED_METRICS if any(row.scores[key].n for row in rows)
    }
    sent = [
        None if up is None or down is None else up + down
        for up, down in ((row.communication["bytes_up"].mean, row.communication["bytes_down"].mean) for row in rows)
    ]
    repeat = [dict.fromkeys(commands[run.archive] for run in setting if run.record.method == row.method)
              for row in rows]  # fmt: skip
    accuracies = (
        Column(heading(key), [*map(_accuracy, of)], False, meaning(key) + _INTERVAL, marks(of), key)
        for key, of in scores.items()
    )
    columns = (
        Column("method", [row.method for row in rows], is_text=True),
        Column("up + down", [*map(format_bytes, sent)], meaning=_SENT),
        *accuracies,
        Column("runs", [row.num_runs for row in rows]),
        Column("repeat it with", ["\n".join(commands) for commands in repeat], is_text=True),
    )
    return Table("Bytes, and accuracy in % [95 % interval]", columns)


def _accuracy(summary: Summary) -> str:
    """Return mean and interval, and the number of runs with a value if others have none."""
    over = paired_difference(summary.by_seed, dict.fromkeys(summary.by_seed, 0.0))
    interval = "" if over.low is None else f" [{format_percent(over.low)}, {format_percent(over.high)}]"
    return format_percent(over.mean) + interval + f" (n = {over.n})" * (0 < over.n < len(summary.by_seed))


def _blocks(setting: Sequence[_Run], table: Table, name: str, styles: Mapping[str, LineStyle]) -> Iterator[Block]:
    """Yield what runs of a setting have in common, their table, and accuracy against bytes."""
    records = [run.record for run in setting]
    shared = [f"{key} = {value}" for key, value in _main_values(setting).items() if value != "null"]
    models = {run.record.method: run.method["model.name"] for run in setting if "model.name" in run.method}
    own = (f" {method} brings its model, {model}." for method, model in models.items())
    yield Block("words", f"{lengths_and_seeds(records)}. In common: {listed(shared)}.{''.join(own)}")
    yield Block("table", table, table.title)
    costs = tradeoff(records, PAIRED_METRICS)
    if (costs["bytes"] > 0).any():
        with house_style():
            yield from plot({"tradeoff": drawing(name, draw_tradeoff(costs, styles))}, "tradeoff", several=True)
