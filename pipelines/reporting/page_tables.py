"""Tables of a page without scores: partitions, traffic, configuration and fingerprints.

A page is tracked by its hash, so values that name a place or a time are left out, and counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from flcore.core.errors import DataError
from flcore.data.summary import skew
from pipelines.reporting.comparison import Comparison
from pipelines.reporting.formats import MISSING, format_bytes, format_percent, format_value
from pipelines.reporting.partition_table import PartitionTable
from pipelines.reporting.tables import Column, Table
from pipelines.runs.compared import flatten
from pipelines.runs.metrics import heading, unit
from pipelines.runs.record import TASK_SCORES, RunRecord, score

# A path, a home directory, a drive or an address, anywhere in a value.
_PLACE = re.compile(r"(^|[\s=:,;'\"])(~?/|~$|[A-Za-z]:[\\/]|\\\\)")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}:\d{2}")
_SHOWN = (
    *("top1_global", "top1_vote", "mean_local", "pooled_local", "client_std", "mean_local_own_classes"),
    *("last10_top1_global", "best_top1_global"),
)
_COSTS = ("bytes_up_per_round", "bytes_down_per_round", "scalars_up_per_round", "num_parameters")
_TIME_KEYS = ("_at", "date", "timestamp", "created", "hostname")


def percent(value: float | None) -> str:
    """Return a fraction in percent, such as 71.33 %; None gives a dash."""
    return MISSING if value is None else f"{format_percent(value)} %"


def page_facts(runs: Sequence[RunRecord], command: str | None) -> tuple[tuple[str, str], ...]:
    """Return the day on which the last run ended, the commits of their code, and the command, as far as known."""
    ended = list[int]()
    for run in runs:
        with suppress(DataError):  # the table of times has warned
            ended += filter(None, [run.folder.timing.get("ended_ms")])
    commits = [run.folder.environment.get("code_version") for run in runs if run.folder.is_described]
    day = datetime.fromtimestamp(max(ended) / 1000, UTC).date().isoformat() if ended else None
    commit = ", ".join(dict.fromkeys(commit[:12] for commit in commits if commit))
    known = (("runs ended", day), ("protofl commit", commit), ("command", command))
    return tuple((name, value) for name, value in known if value)


def run_tiles(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """Return the main figures of a run: heading, value and meaning; missing ones are left out."""
    traffic = None if run.bytes_up is None or run.bytes_down is None else run.bytes_up + run.bytes_down
    candidates = (
        (heading("top1_global"), percent(run.top1_global), "accuracy on the global test set"),
        (heading("top1_vote"), percent(run.top1_vote), "majority, on the global test set"),
        (heading("mean_local"), percent(run.mean_local), "accuracy on own test data"),
        (heading("client_std"), percent(run.client_std), "spread of that accuracy"),
        ("traffic", format_bytes(traffic), "up + down, all clients, whole run"),
        *((row[0], row[2], "of what is told under all values") for row in _privacy(run)[:1]),
    )
    return tuple(tile for tile in candidates if tile[1] != MISSING)


def run_values(run: RunRecord) -> Table:
    """Return all figures of one run, each with its name in ``metrics.json``."""

    def row(key: str) -> tuple[str, str, str]:
        text = format_value(score(run, key), unit(key))
        text += " %" if unit(key) == "share" and text != MISSING else ""
        if key == "best_top1_global" and run.best_round is not None and text != MISSING:
            text += f" (round {run.best_round}; chosen on test data, no headline figure)"
        return heading(key), key, text

    known = [key for key in TASK_SCORES if run.tasks.get(key) is not None]
    rows = [*map(row, (*_SHOWN, *known, *_COSTS)), *_privacy(run), *_poisoned(run)]
    what, names, values = zip(*rows, strict=True)
    columns = (Column("value", what, is_text=True), Column("name", names, is_text=True))
    return Table("All values", (*columns, Column(run.method, values)))


def _privacy(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """Return rows of the privacy account, ε first; none without differential privacy."""
    if not run.privacy:
        return ()
    account = run.privacy
    epsilon = math.inf if account["epsilon"] is None else account["epsilon"]  # JSON has no number for it
    rows = (
        ("privacy spent, ε", "epsilon", f"{epsilon:.2f} at δ = {account['delta']:g}"),
        ("what it hides", "unit", f"one {account['unit']}, over {account['releases']} rounds"),
        ("noise multiplier", "noise_multiplier", account.get("noise_multiplier")),
        ("clipping norm", "clip", account.get("clip")),
        ("sampling of clients", "sampling", account.get("sampling")),
        ("what it covers", "covers", account["covers"]),
        ("what it assumes", "assumes", account.get("assumes")),
    )
    return tuple((name, f"privacy.{key}", str(value)) for name, key, value in rows if value is not None)


def _poisoned(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """Return rows of a simulated attack, if there is one."""
    if not run.poisoned:
        return ()
    poisoned = run.poisoned
    attack = (
        poisoned["attack"]
        if poisoned["attack_scale"] is None
        else f"{poisoned['attack']} × {poisoned['attack_scale']:g}"
    )
    who = ", ".join(map(str, poisoned["clients"]))
    return (
        ("simulated attack", "poisoned.attack", attack),
        ("poisoned clients", "poisoned.clients", who),
        ("the other clients' mean", "poisoned.honest_mean_local", percent(poisoned["honest_mean_local"])),
    )


def traffic_by_kind(comparison: Comparison) -> Table | None:
    """Return bytes by method, direction and kind; None if nothing was sent."""
    rows = []
    for row in comparison.methods:
        for direction, kinds in (("up", row.bytes_up_by_kind), ("down", row.bytes_down_by_kind)):
            total = sum(kinds.values())
            for kind, count in kinds.items():
                share = MISSING if not total else f"{100 * count / total:.1f} %"
                per_round = count / row.rounds[0] if len(row.rounds) == 1 and row.rounds[0] else None
                rows.append((row.method, direction, kind, format_bytes(per_round), format_bytes(count), share))
    if not rows:
        return None
    headings = ("method", "direction", "kind", "per round", "whole run", "share of direction")
    return _table("By direction and kind", headings, rows, 3)


def skew_table(partitions: Mapping[int, PartitionTable]) -> Table:
    """Return sizes and label skew by seed, from the class counts of the manifests."""
    rows = []
    for seed, partition in partitions.items():
        sizes = sorted(int(size) for size in partition.counts.sum(axis=1))
        measured = skew(partition.counts)
        classes_held = (partition.counts > 0).sum(axis=1)
        middle = (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
        rows.append(
            (
                seed,
                len(sizes),
                partition.counts.shape[1],
                f"{sizes[0]} / {middle:g} / {sizes[-1]}",
                f"{int(classes_held.min())} / {classes_held.mean():.1f} / {int(classes_held.max())}",
                f"{measured.js_distance:.3f}",
                f"{100 * measured.missing_class_share:.1f} %",
            )
        )
    headings = (
        "seed",
        "clients",
        "classes",
        "samples per client (min / median / max)",
        "classes per client (min / mean / max)",
        "label distance",
        "classes a client lacks",
    )
    return _table("Label skew by seed", headings, rows)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], num_words: int = 0) -> Table:
    """Return a table from its rows; the first columns are words."""
    columns = zip(headings, zip(*rows, strict=True), strict=True)
    return Table(title, tuple(Column(name, cells, index < num_words) for index, (name, cells) in enumerate(columns)))


def partition_words(manifest: Mapping[str, Any], compared_by: Collection[str] | None = None) -> str:
    """Return a partitioner's parameters that its name does not imply: `alpha = 0.1, min_size = 5`.

    Where a manifest tells the partitioner's own `options` from the rest, only they say how labels were divided.

    Args:
        manifest: of a partition.
        compared_by: the dotted keys that matter; None: all.
    """
    parameters = manifest.get("parameters") or {}
    return ", ".join(
        f"{key} = {text}"
        for key, text in _texts(parameters.get("options", parameters)).items()
        if key not in ("name", "num_clients", "seed") and text != MISSING
        if compared_by is None or f"partition.{key}" in compared_by
    )


def configuration(runs: Sequence[RunRecord]) -> tuple[list[Table], int]:
    """Return the configuration of runs: tables of differing and of common keys, and the number of keys left out.

    Seed and method are left out, they stand everywhere else. So are values that name a place or a time.
    """
    by_run = [(run, _texts(run.folder.identity)) for run in runs if run.folder.is_described]
    keys = sorted({key for _, config in by_run for key in config} - {"seed", "method.name"})
    shown = [key for key in keys if all(_is_shown(key, config.get(key, "")) for _, config in by_run)]
    common, differing = [], []
    for key in shown:
        values: dict[str, list[str]] = {}
        for run, config in by_run:
            if key in config and config[key] not in values.setdefault(run.method, []):
                values[run.method].append(config[key])
        texts = {method: " or ".join(each) for method, each in values.items()}
        if len(set(texts.values())) == 1 and all(key in config for _, config in by_run):
            common.append((key, next(iter(texts.values()))))
        else:
            differing.append((key, "; ".join(f"{method}: {text}" for method, text in texts.items())))
    parts = {"Differs between methods": differing, "The same in every run": common}
    tables = [_table(title, ("key", "value"), rows, 2) for title, rows in parts.items() if rows]
    return tables, len(keys) - len(shown)


def fingerprints(runs: Sequence[RunRecord]) -> Table:
    """Return the first digits of each run's hashes."""
    hashes = ("config_hash", "data_fingerprint", "partition_fingerprint")
    rows = [
        (
            run.method,
            run.seed,
            run.folder.directory.name,
            *(value and value[:12] for key in hashes for value in [getattr(run, key)]),
        )
        for run in runs
    ]
    return _table("Fingerprints", ("method", "seed", "folder", "configuration", "data", "partition"), rows, 1)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested values as text, by dotted key in alphabetical order; null is a dash."""
    return {key: MISSING if text == "null" else text for key, text in sorted(flatten(values).items())}


def _is_shown(key: str, value: str) -> bool:
    last = key.rsplit(".", 1)[-1]
    return not (_PLACE.search(value) or _TIME.search(value) or last.endswith(_TIME_KEYS))
