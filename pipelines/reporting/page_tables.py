"""What a page says beside scores: who holds what, what was sent, how runs were configured, what they were made from.

A page is tracked by its hash, so it is a function of what the runs computed: values that name a place or a time are
left out, and counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flcore.data.summary import skew
from flcore.experiment.run_folder import RunFiles, read_run_config
from flcore.io.files import read_json
from pipelines.reporting.comparison import Comparison
from pipelines.reporting.formats import MISSING, format_bytes, format_percent, format_value
from pipelines.reporting.partition_table import PartitionTable
from pipelines.reporting.tables import Column, Table
from pipelines.runs import kinds as file_kinds
from pipelines.runs.metrics import heading, unit
from pipelines.runs.record import TASK_SCORES, RunRecord, load_identity, score

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
    """A fraction with its sign: 71.33 %; None gives a dash."""
    return MISSING if value is None else f"{format_percent(value)} %"


def page_facts(runs: Sequence[RunRecord], command: str | None) -> tuple[tuple[str, str], ...]:
    """Return the day on which the last run ended, the commits of their code, and the command, as far as known."""
    ended, commits = [], []
    for run in runs:
        files = RunFiles(run.directory)
        timing = read_json(files.timing, file_kinds.CURE) if files.timing.is_file() else {}
        ended += [timing["ended_ms"]] if timing.get("ended_ms") else []
        header = read_run_config(run.directory) if files.config.is_file() else {}
        commits.append((header.get("environment") or {}).get("code_version"))
    day = datetime.fromtimestamp(max(ended) / 1000, UTC).date().isoformat() if ended else None
    commit = ", ".join(dict.fromkeys(commit[:12] for commit in commits if commit))
    known = (("runs ended", day), ("commit", commit), ("command", command))
    return tuple((name, value) for name, value in known if value)


def run_tiles(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """What one looks at first: heading, value and meaning; what the run does not have is left out."""
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
    """All figures of one run, each with its name in ``metrics.json``."""

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
    """Rows of the privacy account, ε first; none where nothing is differentially private."""
    if not run.privacy:
        return ()
    told = run.privacy
    epsilon = math.inf if told["epsilon"] is None else told["epsilon"]  # JSON has no number for it
    rows = (
        ("privacy spent, ε", "epsilon", f"{epsilon:.2f} at δ = {told['delta']:g}"),
        ("what it hides", "unit", f"one {told['unit']}, over {told['releases']} rounds"),
        ("noise multiplier", "noise_multiplier", told.get("noise_multiplier")),
        ("clipping norm", "clip", told.get("clip")),
        ("sampling of clients", "sampling", told.get("sampling")),
        ("what it covers", "covers", told["covers"]),
        ("what it assumes", "assumes", told.get("assumes")),
    )
    return tuple((name, f"privacy.{key}", str(value)) for name, key, value in rows if value is not None)


def _poisoned(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """Rows of a simulated attack; none where there is none."""
    if not run.poisoned:
        return ()
    told = run.poisoned
    attack = told["attack"] if told["attack_scale"] is None else f"{told['attack']} × {told['attack_scale']:g}"
    who = ", ".join(map(str, told["clients"]))
    return (
        ("simulated attack", "poisoned.attack", attack),
        ("poisoned clients", "poisoned.clients", who),
        ("the other clients' mean", "poisoned.honest_mean_local", percent(told["honest_mean_local"])),
    )


def traffic_by_kind(comparison: Comparison) -> Table | None:
    """Bytes by method, direction and kind; None where nothing was sent."""
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
    """Sizes and label skew by seed, from the class counts of the manifests."""
    rows = []
    for seed, partition in partitions.items():
        sizes = sorted(int(size) for size in partition.counts.sum(axis=1))
        measured = skew(partition.counts)
        held = (partition.counts > 0).sum(axis=1)
        middle = (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
        rows.append(
            (
                seed,
                len(sizes),
                partition.counts.shape[1],
                f"{sizes[0]} / {middle:g} / {sizes[-1]}",
                f"{int(held.min())} / {held.mean():.1f} / {int(held.max())}",
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


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], words: int = 0) -> Table:
    """A table by rows; the first columns are words."""
    columns = zip(headings, zip(*rows, strict=True), strict=True)
    return Table(title, tuple(Column(name, cells, place < words) for place, (name, cells) in enumerate(columns)))


def partition_words(manifest: Mapping[str, Any], counted: Collection[str] | None = None) -> str:
    """What the partitioner was told, without what the sentence around it says anyway: `alpha = 0.1, min_size = 5`.

    Where a manifest tells the partitioner's own `options` from the rest, only they say how labels were divided.

    Args:
        manifest: of a partition.
        counted: the dotted keys that matter; None: all.
    """
    parameters = manifest.get("parameters") or {}
    told = _flatten(parameters.get("options", parameters))
    unsaid = ((key, value) for key, value in told if key not in ("name", "num_clients", "seed") and value != MISSING)
    return ", ".join(f"{key} = {value}" for key, value in unsaid if counted is None or f"partition.{key}" in counted)


def configuration(runs: Sequence[RunRecord]) -> tuple[list[Table], int]:
    """How runs were configured: keys whose values differ, keys with one value, and how many keys are left out.

    Seed and method are left out, they stand everywhere else. So are values that name a place or a time.
    """
    by_run = [(run, dict(_flatten(config))) for run in runs if (config := load_identity(run.directory)) is not None]
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
    """What each run was made from, in the first letters of its hashes."""
    hashes = ("config_hash", "data_fingerprint", "partition_fingerprint")
    rows = [
        (
            run.method,
            run.seed,
            run.directory.name,
            *(found and found[:12] for key in hashes for found in [getattr(run, key)]),
        )
        for run in runs
    ]
    return _table("Fingerprints", ("method", "seed", "folder", "configuration", "data", "partition"), rows, 1)


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
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _is_shown(key: str, value: str) -> bool:
    last = key.rsplit(".", 1)[-1]
    return not (_PLACE.search(value) or _TIME.search(value) or last.endswith(_TIME_KEYS))
