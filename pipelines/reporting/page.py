"""A page: sections of tables, figures and words, as one HTML file that needs nothing but itself.

Styles and figures are inline; there are no scripts and no links out. A page is tracked by its hash, so it is a function
of what the runs computed: no time stamps, no durations, no paths, and the same inputs give the same bytes. Figures are
drawn once: the page contains the files of ``figures/`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from pipelines.reporting import page_tables
from pipelines.reporting.comparison import Comparison, lengths_and_seeds
from pipelines.reporting.figures.sets import Drawing
from pipelines.reporting.formats import listed
from pipelines.reporting.partition_table import PartitionTable
from pipelines.reporting.tables import TIED_SIGN, Table
from pipelines.runs.layout import write_text
from pipelines.runs.record import RunRecord


@dataclass(frozen=True)
class Legend:
    """Heading and caption of a figure; ``of_several`` is added if several runs are summarised."""

    heading: str
    caption: str
    of_several: str = ""


LEGENDS: Mapping[str, Legend] = {
    "tradeoff": Legend(
        "Accuracy against traffic",
        "Final accuracy, and the bytes of the whole run in both directions, summed over clients, on a logarithmic "
        "axis.",
        "Mean over seeds, bar: ± one sample standard deviation. Up is better, left is cheaper. Dotted line: a method "
        "without traffic. Methods without a global model appear only in the second panel.",
    ),
    "bytes": Legend(
        "Accuracy over traffic, round by round",
        "Cumulative bytes in both directions, summed over clients, on a logarithmic axis.",
        "Mean over seeds; bar at the end: ± one sample standard deviation. Dotted line: a method without traffic.",
    ),
    "accuracy": Legend(
        "Accuracy over rounds",
        "after each evaluated round.",
        "Mean over seeds; band, or bar at the end: ± one sample standard deviation over seeds (none for one seed).",
    ),
    "differences": Legend(
        "Differences",
        "Right of 0 is better than the baseline. Large mark: mean; line: 95 % interval, cut off where "
        "it is much longer than the spread over seeds; dots: seeds.",
    ),
    "stream": Legend(
        "Accuracy on the stream of tasks",
        "After each evaluated round; vertical lines: the next task begins for all clients. A_loc and A_sel: clients' "
        "own models before aggregation, on all classes and on those met; dashed: minority classes alone; dotted: vote "
        "of clients' models where no global model answers.",
        "Mean over seeds.",
    ),
    "tasks": Legend(
        "Accuracy on earlier tasks over time",
        "Clients' own models before aggregation, on the classes of each task they have met, mean over clients; a panel "
        "per method, a line per task, by its number.",
        "Mean over seeds.",
    ),
    "clients": Legend(
        "Spread over clients",
        "Last evaluated round. Box: quartiles; thick bar: median; whiskers: extremes.",
        "Every dot is one client of one seed.",
    ),
    "classes": Legend(
        "Accuracy by class",
        "On the global test set in %; grey: no value. Vote: the majority of the clients' models, not one model.",
        "Mean over seeds.",
    ),
    "loss": Legend(
        "Training loss by term",
        "mean over the clients that took part; a panel per term, scales differ.",
        "Mean over seeds. Terms of a single method are on the pages of its runs.",
    ),
    "partition": Legend("Samples by client and class", "Training samples; blank: none."),
}
_NARROW_POINTS = 400
"""Width of a figure that a narrow screen shows better by scrolling than by making it small."""
_PICTURES = ("virtual_images", "inversion", "gradcam")
"""Figures of images, which keep their lightness in dark mode."""

_SKEW = (
    "Label distance: mean Jensen-Shannon distance between the label distributions of two clients (0: all alike, 1: no "
    "class in common). Classes a client lacks: mean share of all classes."
)
_SENT = "Measured bytes of the messages, summed over clients{}. Up: clients to server; down: server to clients."


@dataclass(frozen=True)
class Block:
    """A part of a section: a paragraph in small print, a list, the answer of the page, a glossary, a table, a figure.

    The template has a macro for each kind. ``title`` stands above a table where several follow each other.
    """

    kind: Literal["words", "notes", "answer", "terms", "table", "plot"]
    content: Any
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page under its heading; ``name`` is its anchor. Below a part that has parts the level is 3.

    A folded part shows its heading until it is opened.
    """

    name: str
    heading: str
    blocks: tuple[Block, ...]
    level: int = 2
    folded: bool = False


def plots(drawings: Mapping[str, Drawing], names: Sequence[str], *, several: bool) -> Iterator[Section]:
    """Yield a section for each of these figures that exists."""
    for name in names:
        if name in drawings:
            yield Section(name, LEGENDS[name].heading, tuple(plot(drawings, name, several=several)))


def plot(drawings: Mapping[str, Drawing], name: str, *, several: bool) -> Iterator[Block]:
    """Yield a figure with its caption, if it exists."""
    if name in drawings:
        legend = LEGENDS[name]
        caption = f"{legend.caption} {legend.of_several}".strip() if several else legend.caption
        yield panels(legend.heading, caption[:1].upper() + caption[1:], drawings[name])


def panels(heading: str, caption: str, *drawings: Drawing) -> Block:
    """Return figures under one caption; the SVGs are our own drawings, so they are not escaped."""
    svgs = tuple(Markup(svg) for drawing in drawings for svg in drawing.svgs)
    content = {
        "heading": heading,
        "panels": svgs,
        "caption": caption,
        "has_pictures": any(kind in drawing.name for drawing in drawings for kind in _PICTURES),
        "is_wide": any(float(svg.partition('width="')[2].partition("pt")[0]) > _NARROW_POINTS for svg in svgs),
    }
    return Block("plot", content)


def who_holds_what(drawings: Mapping[str, Drawing], partitions: Mapping[int, PartitionTable]) -> Iterator[Section]:
    """Yield the partitions by seed: a figure of the first, and the skew of all."""
    if not partitions:
        return
    heading = LEGENDS["partition"].heading + (f" (seed {next(iter(partitions))})" if len(partitions) > 1 else "")
    notes = tuple(
        f"Seed {seed}: {note}"
        for seed, partition in partitions.items()
        for note in partition.manifest.get("notes") or ()
    )
    skew = page_tables.skew_table(partitions)
    blocks = (*plot(drawings, "partition", several=False), Block("table", skew, skew.title), Block("words", _SKEW))
    yield Section("partition", heading, (*blocks, *([Block("notes", notes)] if notes else [])))


def communication(comparison: Comparison, traffic: Table | None = None) -> Iterator[Section]:
    """Yield the traffic by direction and kind, after the traffic of all methods if it is given."""
    kinds = page_tables.traffic_by_kind(comparison)
    if kinds is None:
        yield Section("communication", "Communication", (Block("words", "Nothing was sent."),))
        return
    sent = Block("words", _SENT.format(", mean over seeds" if traffic else ""))
    yield Section("communication", "Communication", (Block("table", traffic or kinds), sent))
    if traffic:
        yield Section("kinds", "Communication by direction and kind", (Block("table", kinds), sent), folded=True)


def ending(meanings: Mapping[str, str], runs: Sequence[RunRecord]) -> Iterator[Section]:
    """Yield the meanings of terms, the configuration of runs, and their fingerprints."""
    yield Section("reading", "How to read it", (Block("terms", meanings),), folded=True)
    settings, hidden = page_tables.configuration(runs)
    blocks = [Block("table", table, table.title if len(settings) > 1 else "") for table in settings]
    if hidden:
        keys = f"{hidden} key{'' if hidden == 1 else 's'} naming a place or a time {'is' if hidden == 1 else 'are'}"
        blocks.append(Block("words", f"{keys} left out: the report is the same on every machine."))
    if blocks:
        yield Section("configuration", "Configuration", tuple(blocks), folded=True)
    yield Section("provenance", "Fingerprints", (Block("table", page_tables.fingerprints(runs)),), folded=True)


def lead(comparison: Comparison, partitions: Mapping[int, PartitionTable]) -> str:
    """Return a sentence on the runs."""
    methods = listed(row.method for row in comparison.methods)
    partition = next(iter(partitions.values()), None)
    split = "" if comparison.partition is None else f", divided by {comparison.partition}"
    if partition is not None:
        folder = comparison.runs[0].folder
        counted = folder.environment.get("compared_by") if folder.is_described else None
        parameters = page_tables.partition_words(partition.manifest, counted)
        name = comparison.partition or partition.manifest.get("parameters", {}).get("name", "an unnamed partitioner")
        split = f", divided among {len(partition.client_ids)} clients by {name}"
        split += f" ({parameters})" if parameters else ""
    return f"{methods} on {comparison.dataset}{split}; {lengths_and_seeds(comparison.runs)}."


def write_page(
    path: Path, page: Mapping[str, Any], lead: str, sections: Sequence[Section], *, colours: Mapping[str, str]
) -> Path:
    """Write a page.

    Args:
        path: of the file; its folder is made if it is not there.
        page: ``kicker``, ``title`` and perhaps ``tiles`` and ``facts``.
        lead: the first sentence.
        sections: in their order.
        colours: by method, where tables shall show them.
    """
    text = _template().render(
        {"tiles": (), "facts": (), **page}, lead=lead, sections=sections, keys=colours, tied_sign=TIED_SIGN
    )
    write_text(path, text)
    return path


@cache
def _template() -> Template:
    """Return the template, compiled once, which takes longer than writing a page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2")
