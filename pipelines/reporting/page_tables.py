"""What a page says beside scores: who holds what, what was sent, how runs were configured, what they were made from.

A page is tracked by its hash, so it is a function of what the runs computed: values that name a place or a time are
left out, and counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from flcore.data.summary import skew
from flcore.experiment.run_folder import RunFiles, read_run_config
from flcore.io.files import read_json
from pipelines.reporting.comparison import Comparison
from pipelines.reporting.comparison_tables import HEADINGS
from pipelines.reporting.figures.partition import PartitionTable
from pipelines.reporting.formats import MISSING, format_bytes, format_count, format_percent
from pipelines.reporting.tables import BYTES, VALUE, WORDS, Column, Table
from pipelines.runs import kinds as file_kinds
from pipelines.runs.record import TASK_SCORES, RunRecord, load_identity

# A path, a home directory, a drive or an address, anywhere in a value.
_PLACE = re.compile(r"(^|[\s=:,;'\"])(~?/|~$|[A-Za-z]:[\\/]|\\\\)")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}:\d{2}")
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
        (HEADINGS["top1_global"], percent(run.top1_global), "accuracy on the global test set"),
        (HEADINGS["top1_vote"], percent(run.top1_vote), "majority, on the global test set"),
        (HEADINGS["mean_local"], percent(run.mean_local), "accuracy on own test data"),
        (HEADINGS["client_std"], percent(run.client_std), "spread of that accuracy"),
        ("traffic", format_bytes(traffic), "up + down, all clients, whole run"),
        *((row[0], row[2], "of what is told under all values") for row in _privacy(run)[:1]),
    )
    return tuple(tile for tile in candidates if tile[1] != MISSING)


def run_values(run: RunRecord) -> Table:
    """All figures of one run, each with its name in ``metrics.json``."""
    best_round = "" if run.best_round is None else f" (round {run.best_round}; chosen on test data, no headline figure)"
    best = percent(run.best_top1_global)
    own = "mean_local_own_classes"
    scores = ("top1_global", "top1_vote", "mean_local", "pooled_local", "client_std", own, "last10_top1_global")
    rows = (
        *((HEADINGS[key], key, percent(getattr(run, key))) for key in scores),
        ("global model, best round", "best_top1_global", best if best == MISSING else best + best_round),
        *((name, key, percent(run.tasks[key])) for key, name in TASK_SCORES.items() if run.tasks.get(key) is not None),
        ("up / round", "bytes_up_per_round", format_bytes(run.bytes_up_per_round)),
        ("down / round", "bytes_down_per_round", format_bytes(run.bytes_down_per_round)),
        ("scalars up / round", "scalars_up_per_round", format_count(run.scalars_up_per_round)),
        ("parameters", "num_parameters", format_count(run.num_parameters)),
        *_privacy(run),
        *_poisoned(run),
    )
    what, names, values = zip(*rows, strict=True)
    columns = (Column("value", "value", what, WORDS), Column("name", "name", names, WORDS))
    return Table("All values", (*columns, Column("of", run.method, values)))


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
                rows.append((row.method, direction, kind, per_round, count, share))
    if not rows:
        return None
    method, directions, kinds_sent, per_rounds, counts, shares = zip(*rows, strict=True)
    return Table(
        "By direction and kind",
        (
            Column("method", "method", method, WORDS),
            Column("direction", "direction", directions, WORDS),
            Column("kind", "kind", kinds_sent, WORDS),
            Column("per_round", "per round", per_rounds, BYTES),
            Column("total", "whole run", counts, BYTES),
            Column("share", "share of direction", shares),
        ),
    )


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
    columns = zip(headings, zip(*rows, strict=True), strict=True)
    return Table("Label skew by seed", tuple(Column(heading, heading, values) for heading, values in columns))


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


@dataclass(frozen=True)
class Configuration:
    """Keys and values that all runs share, keys whose values differ (by method), and how many keys are left out."""

    common: tuple[tuple[str, str], ...]
    differing: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    hidden: int


def configuration(runs: Sequence[RunRecord]) -> Configuration | None:
    """How runs were configured; None where no run says.

    Seed and method are left out, they stand everywhere else. So are values that name a place or a time.
    """
    by_run = [(run, dict(_flatten(config))) for run in runs if (config := load_identity(run.directory)) is not None]
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
            differing.append((key, tuple((method, " or ".join(each)) for method, each in values.items() if each)))
    return Configuration(tuple(common), tuple(differing), len(keys) - len(shown))


def fingerprints(runs: Sequence[RunRecord]) -> Table:
    """What each run was made from, in the first letters of its hashes."""

    def column(heading: str, key: str) -> Column:
        hashes = [getattr(run, key) for run in runs]
        return Column(key, heading, [None if found is None else found[:12] for found in hashes], VALUE)

    return Table(
        "Fingerprints",
        (
            Column("method", "method", [run.method for run in runs], WORDS),
            Column("seed", "seed", [run.seed for run in runs]),
            Column("folder", "folder", [run.directory.name for run in runs], WORDS),
            column("configuration", "config_hash"),
            column("data", "data_fingerprint"),
            column("partition", "partition_fingerprint"),
        ),
    )


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
