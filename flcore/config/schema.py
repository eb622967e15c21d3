"""The configuration of one run: frozen, closed and typed.

A configuration is a mapping of sections. Sections with a ``name`` (data, partition, model, method) hold their own keys
and those of the named registry entry. :meth:`Config.from_mapping` checks everything before any data are read; its
errors name the key, the value and what is allowed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from flcore.aggregation.settings import Aggregation
from flcore.config.plugins import Plugin, used, with_classes
from flcore.config.sections import (
    DEFAULT_NAMES,
    PLAIN,
    SECTIONS,
    SHARED,
    CompareConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    FederationConfig,
    LocalConfig,
    ModelConfig,
    PartitionConfig,
    TrackingConfig,
)
from flcore.config.stored import with_removed
from flcore.config.tuning import TuneConfig
from flcore.core.errors import ConfigError
from flcore.core.params import LARGEST, build, declared
from flcore.core.text import nearest, shorten, to_yaml, unknown_key
from flcore.data.images import of_channels
from flcore.data.partitioners import PARTITIONERS
from flcore.data.partitioners.base import Partitioner
from flcore.data.sources import SOURCES
from flcore.data.sources.base import Source
from flcore.methods import METHODS, Method
from flcore.methods.kit.on_top import WrapperMethod
from flcore.models import MODELS, ModelSpec
from flcore.sampling import make_sampler
from flcore.sampling.base import Sampler

REGISTRIES: Mapping[str, Mapping[str, type]] = {
    "data": SOURCES,
    "partition": PARTITIONERS,
    "model": MODELS,
    "method": METHODS,
}

# Keys that cannot change a result: paths (the content of data and partitions is in the hash of a run), workers,
# tracking, comparisons and analyses.
_NOT_IDENTITY = {
    "data": {"root", "download"},
    "partition": {"path"},
    "evaluation": {"analyses", "tsne_clients", "tsne_classes", "tsne_samples"},
    "engine": {"name", "workers", "clients_per_task", "ray_address", "gpus_per_worker", "durable_every"},
    "tracking": None,
    "compare": None,
    "tune": None,
}

_CLAIM = ("better", "than", "metric", "by", "says")
# Keys added later: not part of the identity at their defaults, so that names of earlier runs stay the same.
_UNSAID_AT_DEFAULT: Mapping[str, frozenset[str]] = {
    "aggregation": frozenset(key.name for key in declared(Aggregation)),
    "federation": frozenset({"sampler", "sampler_options", "poisoned", "poisoned_clients", "attack", "attack_scale"}),
    "data": frozenset({"mean", "std"}),
    "method": frozenset({"absent_clients", "absent_classes", "images", "covariance"}),
    "local": frozenset({"batches"}),
    "evaluation": frozenset({"snapshots"}),
    "engine": frozenset({"numerics"}),
}


@dataclass(frozen=True)
class Config:
    """All values of one run; ``source``, ``partitioner``, ``model_spec``, ``method`` are registry entries."""

    seed: int = 0
    plugins: tuple[Plugin, ...] = ()
    data: DataConfig = field(default_factory=DataConfig)
    source: Source = field(default_factory=lambda: SOURCES[DEFAULT_NAMES["data"]]())
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    partitioner: Partitioner = field(default_factory=lambda: PARTITIONERS[DEFAULT_NAMES["partition"]]())
    model: ModelConfig = field(default_factory=ModelConfig)
    model_spec: ModelSpec = field(default_factory=lambda: MODELS[DEFAULT_NAMES["model"]]())
    method: Method = field(default_factory=lambda: METHODS[DEFAULT_NAMES["method"]]())
    federation: FederationConfig = field(default_factory=FederationConfig)
    aggregation: Aggregation = field(default_factory=Aggregation)
    local: LocalConfig = field(default_factory=LocalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Config:
        """Parse a nested mapping, as read from ``params.yaml``, and load its plug-ins.

        Raises:
            ConfigError: an unknown key, a key of another registry entry, a wrong type, a value out of range,
                contradictory values, or an unusable plug-in.
        """
        for key in raw:
            if key not in SECTIONS:
                raise ConfigError(unknown_key(shorten(key), key, SECTIONS))
        raw, plugins = with_classes(raw)
        sections = {name: _section(raw, name) for name in SECTIONS if name not in ("seed", "plugins")}
        parsed: dict[str, Any] = {"seed": _seed(raw.get("seed", 0)), "plugins": plugins}
        parsed["method"] = _named_section("method", sections["method"])[1]
        # A method that works with one model alone brings it where none is named.
        (only, *others) = parsed["method"].required_config.get("model.name", (None,))
        if only is not None and not others:
            sections["model"] = {"name": only, **sections["model"]}
        for name, entry in (("data", "source"), ("partition", "partitioner"), ("model", "model_spec")):
            parsed[name], parsed[entry] = _named_section(name, sections[name])
        parsed |= {name: build(section, sections[name], name) for name, section in PLAIN.items()}
        config = cls(**parsed)
        if (loaded := config.sampler.loaded()) is not config.sampler:
            config = replace(config, federation=replace(config.federation, sampler_options=asdict(loaded)))
        config._check_together()
        return config

    def _check_together(self) -> None:
        used(self.plugins, self.entries)
        self._check_needs()
        reason = self.partitioner.refusal(self.partition.num_clients, self.source.num_classes)
        if reason is not None:
            raise ConfigError(reason)
        if (self.data.mean is None) != (self.data.std is None):
            mean, std = (to_yaml(value) for value in (self.data.mean, self.data.std))
            raise ConfigError(f"data.mean = {mean}, data.std = {std}: set both, or neither")
        # Channels of image files are unknown before `flcore.data.dataset.prepare_dataset`.
        channels = self.data.channels or self.source.channels
        if self.data.normalisation is not None and channels is not None:
            of_channels(self.data.normalisation, channels, self.source.name)
        if self.local.batches == "endless" and self.local.steps is None:
            raise ConfigError("local.batches = endless: set local.steps, the mini-batches of a round, for example 20")
        self._check_aggregation()
        if self.evaluation.split == "validation" and self.partition.validation == 0:
            raise ConfigError("evaluation.split = validation: needs partition.validation above 0, for example 0.2")
        if len(set(self.evaluation.analyses)) < len(self.evaluation.analyses):
            raise ConfigError(f"evaluation.analyses = {list(self.evaluation.analyses)}: a name appears twice")
        beyond = [number for number in self.evaluation.snapshots if number > self.federation.rounds]
        if beyond:
            raise ConfigError(f"evaluation.snapshots = {beyond}: the run has {self.federation.rounds} rounds")
        self.evaluation.check_shown(self.partition.num_clients, self.source.num_classes)
        if getattr(self.partitioner, "tasks", 1) > 1 and self.federation.task_schedule != "none":
            self.check_tasks()
        self._check_comparison()

    def check_tasks(self) -> None:
        """Refuse a partition with tasks if the method does not support them; imported ones show that when read.

        Raises:
            ConfigError: the method does not support tasks.
        """
        if self.method.task_stream_error is not None:
            schedule = self.federation.task_schedule
            raise ConfigError(
                f"federation.task_schedule = {schedule}: {self.method.name} {self.method.task_stream_error}"
            )

    def _check_comparison(self) -> None:
        compare = self.compare
        for variant, row in compare.variants.items():
            if not isinstance(row, Mapping) or row.get("method") not in METHODS:
                raise ConfigError(
                    f"compare.variants.{variant}: expected a method and dotted keys, such as "
                    "{method: fedavg, local.lr: 0.001}"
                )
            if variant in METHODS and variant != row["method"]:
                raise ConfigError(f"compare.variants.{variant}: is the name of another method; choose another")
        rows = {*METHODS, *compare.variants}
        for key, name in (*(("methods", name) for name in compare.methods), ("baseline", compare.baseline)):
            if name not in rows:
                raise ConfigError(f"compare.{key}: {unknown_key(name, name, rows).replace('key', 'method', 1)}")
        for name in compare.settings:
            if name not in METHODS:
                raise ConfigError(f"compare.settings: {unknown_key(name, name, METHODS).replace('key', 'method', 1)}")
        for name, claim in compare.claims.items():
            _check_claim(f"compare.claims.{name}", claim, rows)
        for key, noun in (("seeds", "seed"), ("methods", "method"), ("partition_seeds", "seed")):
            given = getattr(compare, key) or ()
            if len(set(given)) < len(given):
                raise ConfigError(f"compare.{key} = {list(given)}: a {noun} appears twice")

    def _check_needs(self) -> None:
        mapping = self.to_mapping()
        for key, allowed in self.method.required_config.items():
            section, _, name = key.partition(".")
            if name not in mapping.get(section, {}):
                raise ConfigError(f"method.name = {self.method.name}: it needs {key}, and there is no such key")
            if mapping[section][name] not in allowed:
                value, wanted = to_yaml(mapping[section][name]), " or ".join(map(to_yaml, allowed))
                raise ConfigError(f"{key} = {value}: {self.method.name} works with {wanted} alone")

    def _check_aggregation(self) -> None:
        """Refuse settings that the method would ignore."""
        if self.aggregation == Aggregation() and not self.federation.simulates_poison:
            return
        how, name = self.aggregation, self.method.name
        folded = self.method.aggregates if self.method.data_scope == "client" else frozenset[str]()
        kinds_of = " and ".join(sorted(folded))
        reason = f"{name} aggregates {kinds_of} alone" if folded else f"no server step of {name} does so"
        asked: tuple[tuple[str, Any, set[str]], ...] = (
            ("rule", how.rule, {"weights", "prototypes"}),
            ("clip", how.clip, {"weights"}),
            ("prototype_clip", how.prototype_clip, {"prototypes"}),
            ("noise", how.noise, {"weights"}),
            ("optimizer", how.optimizer, {"weights"}),
        )
        for key, value, kinds in asked:
            if value not in ("mean", "none", None, 0) and folded.isdisjoint(kinds):
                cure = f"leave {key} out, or take another method"
                raise ConfigError(f"aggregation.{key} = {to_yaml(value)}: {reason}; {cure}")
        if how.noise > 0 and not self.method.releases_weights_alone:
            raise ConfigError(
                f"aggregation.noise = {how.noise:g}: the server of {name} also uses messages that the noise would not "
                "cover; take a method that only averages weights"
            )
        by_chance = self.federation.sampler == "uniform" and self.federation.oversampling == 1
        if how.noise > 0 and (not by_chance or self.federation.deadline is not None):
            raise ConfigError(
                f"aggregation.noise = {how.noise:g}: the privacy account needs a cohort drawn by chance; set "
                "federation.sampler=uniform, federation.oversampling=1 and federation.deadline=null"
            )
        sent = self.method.data_scope == "client" and self.method.poisonable_payloads
        if self.federation.simulates_poison and self.federation.attack != "random_labels" and not sent:
            raise ConfigError(
                f"federation.attack = {self.federation.attack}: clients of {name} send neither weights nor class "
                "prototypes that it could change; use federation.attack=random_labels"
            )

    @cached_property
    def sampler(self) -> Sampler:
        """Sampler of the clients of a round."""
        return make_sampler(self.federation.sampler, self.federation.sampler_options)

    @property
    def entries(self) -> tuple[object, ...]:
        return (*self.methods, self.source, self.partitioner, self.model_spec, self.sampler)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The method and, for a wrapper, its base methods."""
        found = [self.method]
        while isinstance(found[-1], WrapperMethod):
            found.append(found[-1].base_method)
        return tuple(found)

    @property
    def partition_seed(self) -> int:
        """Seed of the division: ``partition.seed``, else the run's seed."""
        return self.seed if self.partition.seed is None else self.partition.seed

    def to_mapping(self) -> dict[str, Any]:
        """Return all values, defaults included, as JSON values that :meth:`from_mapping` reads back."""
        mapping: dict[str, Any] = {"seed": self.seed}
        for name, entry in (("data", self.source), ("partition", self.partitioner), ("model", self.model_spec)):
            mapping[name] = {"name": entry.name, **_values(getattr(self, name)), **_values(entry)}
        mapping["method"] = {"name": self.method.name, **_values(self.method)}
        if self.plugins:
            mapping["plugins"] = [plugin.to_mapping() for plugin in self.plugins]
        return mapping | {name: _values(getattr(self, name)) for name in PLAIN}

    def identity(self) -> dict[str, Any]:
        """Return the values that can change a result: data by fingerprint, files and used plug-ins by content."""
        mapping = self.to_mapping()
        mapping.pop("plugins", None)
        if needed := used(self.plugins, self.entries):
            mapping["plugins"] = {plugin.name: plugin.sha256 for plugin in needed}
        for section, dropped in _NOT_IDENTITY.items():
            if dropped is None:
                del mapping[section]
            else:
                mapping[section] = {key: value for key, value in mapping[section].items() if key not in dropped}
        mapping["federation"] = {**mapping["federation"], "sampler_options": self.sampler.identity()}
        if (start := getattr(self.model_spec, "pretrained_file", None)) is not None:
            own = {key: value for key, value in mapping["model"].items() if key != "pretrained_sha256"}
            mapping["model"] = {**own, "pretrained": start.digest()}
        for key in _values(self.source).keys() - self.source.options().keys():
            del mapping["data"][key]
        for section, since in _UNSAID_AT_DEFAULT.items():
            plain = _values((PLAIN[section] if section in PLAIN else type(getattr(self, section)))())
            mapping[section] = {k: v for k, v in mapping[section].items() if k not in since or v != plain[k]}
            if not mapping[section]:
                del mapping[section]
        return with_removed(mapping)

    def hash(self, data_fingerprint: str, partition_fingerprint: str) -> str:
        """Return the SHA-256 that names a run: of its identity, data and partition."""
        named = {"config": self.identity(), "data": data_fingerprint, "partition": partition_fingerprint}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _check_claim(place: str, claim: Any, rows: Collection[str]) -> None:
    """Refuse an invalid claim; ``rows`` are the names of methods and variants."""
    if not isinstance(claim, Mapping) or not {"better", "than"} <= {*claim}:
        raise ConfigError(f"{place} = {shorten(claim)}: expected {{better: METHOD, than: METHOD or a list of them}}")
    for key in claim:
        if key not in _CLAIM:
            raise ConfigError(f"{place}: {unknown_key(str(key), str(key), _CLAIM)}")
    rivals = claim["than"] if isinstance(claim["than"], list | tuple) else [claim["than"]]
    for row in (claim["better"], *rivals):
        if not isinstance(row, str) or row.removesuffix(" (tuned)") not in rows:
            raise ConfigError(f"{place}: {unknown_key(str(row), str(row), rows).replace('key', 'method', 1)}")
    lead, texts = claim.get("by", 0.0), [claim[key] for key in ("metric", "says") if key in claim]
    if isinstance(lead, bool) or not isinstance(lead, int | float) or not math.isfinite(lead):
        raise ConfigError(f"{place}.by = {shorten(lead)}: expected a number")
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{place}: metric and says are texts")


def _seed(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ConfigError(f"seed = {shorten(value)}: expected a whole number >= 0 and <= {LARGEST}")
    return value


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} = {to_yaml(section)}: expected a section with keys, not a value")
    return section


def _named_section(name: str, values: Mapping[str, Any]) -> tuple[Any, Any]:
    registry, common = REGISTRIES[name], SHARED[name]
    chosen = values.get("name", DEFAULT_NAMES[name])
    if not isinstance(chosen, str) or chosen not in registry:
        near = nearest(chosen, registry)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{name}.name = {to_yaml(chosen)}: must be one of {', '.join(registry)}{hint}")
    shared = {p.name for p in declared(common)} if common else set()
    rest = {key: value for key, value in values.items() if key != "name" and key not in shared}
    own = {p.name for p in declared(registry[chosen])}
    for key in rest:
        if key in own:
            continue
        owners = [other for other, cls in registry.items() if key in {p.name for p in declared(cls)}]
        if owners:
            raise ConfigError(f"{name}.{key}: {chosen} has no such parameter; it belongs to {', '.join(owners)}")
        raise ConfigError(unknown_key(f"{name}.{shorten(key)}", key, shared | own | {"name"}))
    section = build(common, {k: v for k, v in values.items() if k in shared}, name) if common else None
    return section, build(registry[chosen], rest, name)


def _values(section: Any) -> dict[str, Any]:
    values = {p.name: getattr(section, p.name) for p in declared(type(section))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
