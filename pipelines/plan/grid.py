"""The plan of a sweep: all combinations of some keys' values, or a list of points, and baselines, with every seed.

``compare.settings`` of a method apply as in a comparison, so both reuse each other's finished runs. A baseline is run
with all varied keys outside ``method``: with ``--vary method.mu=...`` once, with ``--vary partition.alpha=...`` once
per value, so that every point has a baseline on the same federation.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from flcore.config.schema import Config
from flcore.config.sections import SECTIONS, own_keys
from flcore.core.errors import ConfigError
from flcore.core.params import declared
from flcore.core.text import shorten, unknown_key
from flcore.methods import METHODS
from pipelines.plan import yaml_text
from pipelines.plan.params import for_entry, with_values, without_tracking
from pipelines.plan.spec import ExperimentPlan, RunSpec

_WITHOUT_EFFECT = ("compare", "tune", "tracking")
_MOST_RUNS = 100_000


@dataclass(frozen=True)
class Point:
    """A row of a sweep: a method with values of the varied keys; a baseline has only those that affect it."""

    method: str
    values: Mapping[str, Any]
    is_baseline: bool = False
    is_configured: bool = False

    @property
    def label(self) -> str:
        """Return the values in words: ``method.mu = 0.1, local.epochs = 2``; empty without values."""
        return ", ".join(f"{key} = {show(value)}" for key, value in self.values.items() if key != "method.name")

    @property
    def name(self) -> str:
        """Return method and values in words."""
        return f"{self.method}, {self.label}" if self.label else self.method


@dataclass(frozen=True)
class SweepPlan(ExperimentPlan):
    """A validated sweep: runs by point and seed.

    Attributes:
        configured: the configuration's own values of the varied keys, without keys of another method.
        points: in the order of the grid, the last key fastest, then baselines.
    """

    keys: tuple[str, ...] = ()
    configured: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    points: tuple[Point, ...] = ()
    kind: ClassVar[Literal["comparison", "sweep"]] = "sweep"


def sweep_plan(
    raw: Mapping[str, Any],
    vary: Sequence[str],
    seeds: Sequence[int] | None = None,
    baselines: Sequence[str] = (),
    listed: Sequence[Mapping[str, Any]] = (),
) -> SweepPlan:
    """Return the validated runs of a sweep.

    Args:
        raw: parameters from a file, overridden; they name the swept method.
        vary: ``KEY=VALUE,VALUE,...`` for each key, values as in YAML.
        listed: points instead of ``vary``: dotted keys with values; missing keys have their configured values.

    Raises:
        ConfigError: a key cannot be varied, a value cannot be run, or two points are the same run.
    """
    base = Config.from_mapping(for_entry(raw, None, None))
    seeds = tuple(base.compare.seeds if seeds is None else seeds)
    _check_seeds(seeds)
    if listed:
        combinations = [dict(point) for point in _listed(listed, vary)]
    else:
        varied = _varied(vary)
        _check_number(varied, seeds)
        combinations = list(_combinations(varied))
    _check_baselines(baselines)
    keys = tuple(dict.fromkeys(key for point in combinations for key in point))
    configured = _values_of(base, keys)
    points: list[Point] = []
    runs: list[RunSpec] = []
    for values in combinations:
        method = str(values.get("method.name", base.method.name))
        configs = [_config(raw, method, seed, values) for seed in seeds]
        resolved = _values_of(configs[0], keys)
        points.append(Point(method, resolved, is_configured=resolved == configured))
        runs += [RunSpec(config, points[-1].label) for config in configs]
    _refuse_same_runs(points, runs, len(seeds))
    shared = [key for key in keys if not key.startswith("method.")]
    for name in baselines:
        for values in _distinct([{key: point.values[key] for key in shared} for point in points]):
            points.append(Point(name, values, is_baseline=True))
            configs = [_config(raw, name, seed, values) for seed in seeds]
            runs += [RunSpec(config, points[-1].label) for config in configs]
    _refuse_other_data(runs, keys)
    return SweepPlan(without_tracking(raw), base, tuple(runs), keys, configured, seeds, tuple(points))


def show(value: Any) -> str:
    """Return a value as in a parameter file."""
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return keys without their section, if they are unambiguous without it."""
    names = {key: key.partition(".")[2] for key in keys}
    alone = {name for name in names.values() if name != "name" and list(names.values()).count(name) == 1}
    return {key: name if name in alone else key for key, name in names.items()}


def describe_federation(base: Config, varied: Sequence[str]) -> str:
    """Return what is not varied of dataset, partition and clients: ``digits, iid partition, 10 clients``."""
    parts = [base.source.display_name]
    if "partition.name" not in varied:
        parts.append(f"{base.partitioner.name} partition{_own_parameters(base, varied)}")
    if "partition.num_clients" not in varied:
        parts.append(f"{base.partition.num_clients} client{'' if base.partition.num_clients == 1 else 's'}")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------------------ parts


def _combinations(varied: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(varied, combination, strict=True)) for combination in itertools.product(*varied.values()))


def _listed(points: Sequence[Mapping[str, Any]], vary: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    if vary:
        raise ConfigError("--rows: names whole points; leave out --vary")
    for number, point in enumerate(points, 1):
        if not isinstance(point, Mapping) or not point:
            raise ConfigError(f"--rows: point {number}: expected dotted keys with values, such as {{method.mu: 0.1}}")
        for key in point:
            _check_key(str(key), "--rows")
        yield point


def _varied(assignments: Sequence[str]) -> dict[str, list[Any]]:
    varied: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        try:
            values = yaml_text.parse(f"[{text}]")
        except ValueError:
            values = None
        if not equals or not isinstance(values, list) or not values:
            raise ConfigError(
                f"--vary {shorten(assignment)}: expected KEY=VALUE,VALUE,..., such as --vary local.lr=0.01,0.1"
            )
        _check_key(key)
        if key in varied:
            raise ConfigError(f"--vary {shorten(key)}: appears twice; give all its values at once")
        varied[key] = values
    if not varied:
        raise ConfigError("--vary: name at least one key with its values, such as --vary local.lr=0.01,0.1")
    return varied


def _check_key(key: str, option: str = "--vary") -> None:
    section, *rest = key.split(".")
    if section not in SECTIONS:
        raise ConfigError(f"{option} {shorten(key)}: {unknown_key(section, section, SECTIONS)}")
    if section == "seed":
        raise ConfigError(f"{option} seed: every point is run with every seed; name them with --seeds")
    if len(rest) != 1 or not rest[0]:
        raise ConfigError(f"{option} {shorten(key)}: expected a section and one key of it, such as local.lr")
    if section in _WITHOUT_EFFECT:
        raise ConfigError(f"{option} {key}: changes no result; vary a key of another section")
    if section == "data" and rest != ["augmentation"]:
        raise ConfigError(f"{option} {key}: a sweep is on one set of images; start one for each, with --set and --out")


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds:
        raise ConfigError("--seeds: name at least one seed, such as --seeds 0,1")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {','.join(map(str, seeds))}: a seed appears twice; name each once")


def _check_number(varied: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> None:
    """Refuse too many runs before they are planned: a few short lists multiply to very many."""
    runs = math.prod(map(len, varied.values())) * len(seeds)
    if runs > _MOST_RUNS:
        raise ConfigError(f"--vary: {shorten(runs)} runs; vary fewer keys or values, {_MOST_RUNS} runs are the most")


def _check_baselines(names: Sequence[str]) -> None:
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"--baselines: {unknown_key(name, name, METHODS).replace('key', 'method', 1)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--baselines {','.join(names)}: a method appears twice; name each once")


def _config(raw: Mapping[str, Any], method: str, seed: int, values: Mapping[str, Any]) -> Config:
    try:
        entry = for_entry(raw, method, seed) if method in METHODS else raw
        return Config.from_mapping(with_values(entry, values))
    except ConfigError as error:
        # A rule about several keys does not name the point that breaks it.
        named = any(str(error).startswith(key) for key in values)
        place = shorten(", ".join(f"{key} = {show(value)}" for key, value in values.items()))
        if named or not values:
            raise
        raise ConfigError(f"{error} (with {place})") from error


def _values_of(config: Config, keys: Sequence[str]) -> dict[str, Any]:
    mapping = config.to_mapping()
    paths = {key: key.split(".") for key in keys}
    return {key: mapping[section][name] for key, (section, name) in paths.items() if name in mapping[section]}


def _distinct(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for position, item in enumerate(items):
        if item not in items[:position]:
            yield item


def _refuse_same_runs(points: Sequence[Point], runs: Sequence[RunSpec], seeds: int) -> None:
    seen: dict[str, Point] = {}
    for point, run in zip(points, runs[::seeds], strict=True):
        # The path of an imported partition is not part of a run's identity, but its content is.
        described = json.dumps([run.config.identity(), run.config.to_mapping()["partition"]], sort_keys=True)
        other = seen.setdefault(described, point)
        if other is not point:
            raise ConfigError(
                f"--vary: '{other.name}' and '{point.name}' are the same run; name each value once, and a key that can "
                "change a result"
            )


def _refuse_other_data(runs: Sequence[RunSpec], keys: Sequence[str]) -> None:
    """Refuse runs that differ in their images, or in parameters of partitions that are not varied."""
    varied = {key.removeprefix("partition.") for key in keys if key.startswith("partition.")}

    def told(config: Config) -> dict[str, Any]:
        mapping = config.to_mapping()
        data = {key: value for key, value in mapping["data"].items() if key != "augmentation"}
        common = own_keys("partition") if "name" in varied else mapping["partition"].keys()
        return {"data": data, "partition": {key: mapping["partition"][key] for key in common - varied}}

    first = told(runs[0].config)
    for run in runs:
        for section, values in told(run.config).items():
            if values != first[section]:
                raise ConfigError(f"compare.settings.{run.config.method.name}: {section} must be the same for all runs")


def _own_parameters(base: Config, varied: Sequence[str]) -> str:
    """Return a partitioner's first parameter, its main one, and those with other values than their defaults."""
    own = declared(type(base.partitioner))
    stated = {p.name: getattr(base.partitioner, p.name) for p in own}
    told = [p.name for place, p in enumerate(own) if place == 0 or stated[p.name] != p.default]
    texts = [f"{name} {show(stated[name])}" for name in told if f"partition.{name}" not in varied]
    return f" ({', '.join(texts)})" if texts else ""
