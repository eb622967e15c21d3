"""The configuration: closed, typed, read-only, and what of it names a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.config.sections import SECTIONS
from flcore.core.errors import ConfigError
from flcore.core.params import Param, declared
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.methods import METHODS
from flcore.models import MODELS

REGISTRIES = {"data": SOURCES, "partition": PARTITIONERS, "model": MODELS, "method": METHODS}


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        Config.from_mapping(raw)
    return str(error.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"federatoin": {}}, "federatoin: ... 'federation'"),
        ({"federation": {"round": 3}}, "federation.round: ... 'rounds'"),
        ({"method": {"mu": 0.1}}, "method.mu: ... fedprox"),
        ({"method": {"name": "fedprox", "weight": 1}}, "method.weight: ... fedproto"),
        ({"method": {"name": "fedprox", "muu": 1}}, "method.muu: ... 'mu'"),
        ({"partition": {"name": "iid", "alpha": 1}}, "partition.alpha: ... dirichlet"),
        ({"partition": {"name": "iid", "min_size": 1}}, "partition.min_size:"),
        ({"model": {"name": "resnet18", "feature_dim": 8}}, "model.feature_dim: ... fedgen_cnn"),
        ({"data": {"name": "mnist", "split": "letters"}}, "data.split: ... emnist"),
        ({"partition": {"alhpa": 1}}, "partition.alhpa: ... 'alpha'"),
        ({"method": {"name": "fedavgg"}}, "method.name = fedavgg:"),
        ({"data": {"name": None}}, "data.name = null:"),
        ({"model": {"name": "lenet"}}, "model.name = lenet:"),
        ({"method": "fedavg"}, "method = fedavg:"),
        ({"federation": [3]}, "federation = [3]:"),
        ({"seed": -1}, "seed = -1:"),
        ({"seed": True}, "seed = True:"),
        ({"federation": {"participation": 1.01}}, "federation.participation = 1.01:"),
        ({"federation": {"rounds": 0}}, "federation.rounds = 0:"),
        ({"federation": {"dropout": 1}}, "federation.dropout = 1:"),
        ({"local": {"lr": 0}}, "local.lr = 0:"),
        ({"local": {"lr": float("nan")}}, "local.lr = nan:"),
        ({"local": {"epochs": "2"}}, 'local.epochs = "2":'),
        ({"model": {"batchnorm": "average"}}, "model.batchnorm = average:"),
        ({"data": {"mean": 0.5}}, "data.mean = 0.5, data.std = null:"),
        ({"data": {"mean": "x", "std": 1}}, "data.mean = x:"),
        ({"data": {"mean": [0.5, float("inf")], "std": 1}}, "data.mean = inf:"),
        ({"data": {"mean": 0.5, "std": [0.5, 0, 0.5]}}, "data.std = 0:"),
        ({"data": {"name": "cifar10", "mean": [0.1, 0.2], "std": 0.5}}, "data.mean = [0.1, 0.2]:"),
        (
            {"data": {"name": "cifar10", "channels": 1, "mean": 0.5, "std": [0.1, 0.2, 0.3]}},
            "data.std = [0.1, 0.2, 0.3]:",
        ),
        ({"evaluation": {"split": "validation"}}, "evaluation.split = validation:"),
        ({"evaluation": {"analyses": ["gradcam", "tsnee"]}}, "evaluation.analyses = ['gradcam', 'tsnee']: ... 'tsne'"),
        ({"local": {"optimizer": "sgdd"}}, "local.optimizer = sgdd: ... 'sgd'"),
        ({"evaluation": {"analyses": ["tsne", "tsne"]}}, "evaluation.analyses = ['tsne', 'tsne']:"),
        ({"compare": {"methods": ["fedavgg"]}}, "compare.methods: ... 'fedavg'"),
        ({"compare": {"baseline": "best"}}, "compare.baseline:"),
        ({"compare": {"settings": {"feddane": {}}}}, "compare.settings:"),
        ({"compare": {"seeds": [1, 2, 1]}}, "compare.seeds = [1, 2, 1]:"),
        ({"evaluation": {"snapshots": [2, 30]}, "federation": {"rounds": 20}}, "evaluation.snapshots = [30]:"),
        (
            {"evaluation": {"tsne_clients": [0, 12]}, "partition": {"num_clients": 10}},
            "evaluation.tsne_clients = [12]:",
        ),
        ({"evaluation": {"tsne_classes": [3, 10]}}, "evaluation.tsne_classes = [10]:"),
        ({"evaluation": {"tsne_classes": [3, 3]}}, "evaluation: ... tsne_classes = [3, 3]"),
        ({"evaluation": {"tsne_clients": []}}, "evaluation: ... tsne_clients = []"),
        ({"evaluation": {"tsne_clients": [0, 1, 2, 3, 4]}}, "evaluation: ... tsne_clients = [0, 1, 2, 3, 4]"),
        ({"evaluation": {"tsne_clients": [-1]}}, "evaluation.tsne_clients = "),
        ({"evaluation": {"tsne_samples": 0}}, "evaluation.tsne_samples = 0:"),
        ({"compare": {"claims": {"a": "b"}}}, "compare.claims.a = b:"),
        ({"compare": {"claims": {"a": {"better": "fedavgg", "than": "local"}}}}, "compare.claims.a: ... 'fedavg'"),
        ({"compare": {"claims": {"a": {"better": "fedavg", "than": "local", "lead": 1}}}}, "compare.claims.a:"),
        (
            {"compare": {"claims": {"a": {"better": "fedavg", "than": ["local"], "by": "much"}}}},
            "compare.claims.a.by = much:",
        ),
    ],
)
def test_refused(raw: dict[str, Any], words: str) -> None:
    """The key first; of what follows, names: of the key that was meant, or of the entry that has it."""
    key, *names = words.split(" ... ")
    message = refusal(raw)
    assert message.startswith(key) and all(name in message for name in names)


@pytest.mark.parametrize("section", ["data", "method", "federation", "compare"])
def test_a_value_in_the_place_of_a_section_is_refused(section: str) -> None:
    assert refusal({section: 3}) == f"{section} = 3: expected a section with keys, not a value"


@pytest.mark.parametrize("section", ["data", "partition", "model", "method"])
def test_a_name_that_is_a_list_is_refused(section: str) -> None:
    assert refusal({section: {"name": ["fedavg"]}}).startswith(f"{section}.name = ")


def test_nothing_said_gives_the_defaults() -> None:
    assert Config.from_mapping({}) == Config()
    assert Config.from_mapping({"local": None, "method": {}}) == Config()


def test_numbers_as_yaml_writes_them() -> None:
    config = Config.from_mapping({"local": {"lr": "1e-3", "weight_decay": "1e-5"}, "partition": {"alpha": 1}})
    assert (config.local.lr, config.local.weight_decay) == (0.001, 0.00001)
    assert type(config.partitioner.alpha) is float  # type: ignore[attr-defined]


def test_the_partition_follows_the_run_unless_told() -> None:
    assert Config.from_mapping({"seed": 5}).partition_seed == 5
    assert Config.from_mapping({"seed": 5, "partition": {"seed": 0}}).partition_seed == 0


@pytest.mark.parametrize(("section", "name"), [(s, name) for s, registry in REGISTRIES.items() for name in registry])
def test_round_trip_of_every_entry(section: str, name: str) -> None:
    config = Config.from_mapping({section: {"name": name}})
    assert config.to_mapping()[section]["name"] == name
    assert Config.from_mapping(config.to_mapping()) == config
    assert Config.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize("registry", [METHODS, PARTITIONERS, MODELS, SOURCES])
def test_every_listing_is_json_and_every_default_lies_in_its_range(registry: dict[str, type]) -> None:
    for name, cls in registry.items():
        assert cls.name == name  # type: ignore[attr-defined]
        assert cls.summary  # type: ignore[attr-defined]
        for entry in map(Param.describe, declared(cls)):
            assert json.loads(json.dumps(entry, allow_nan=False))["meaning"] == entry["meaning"] != ""
    # Building from the written-out defaults checks each against its own declaration.
    section = next(section for section, entries in REGISTRIES.items() if entries is registry)
    for name in registry:
        mapping = Config.from_mapping({section: {"name": name}}).to_mapping()[section]
        Config.from_mapping({section: mapping})


FREE = {
    ("partition", "path"),
    ("data", "root"),
    ("data", "download"),
    ("engine", "workers"),
    ("engine", "name"),
    ("engine", "clients_per_task"),
    ("engine", "durable_every"),
    ("engine", "ray_address"),
    ("engine", "gpus_per_worker"),
    ("evaluation", "analyses"),
    ("evaluation", "tsne_clients"),
    ("evaluation", "tsne_classes"),
    ("evaluation", "tsne_samples"),
}
# Values that go together with another one only.
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("partition", "ratio"): {"variant": "subsampled"},
    ("method", "proto_noise"): {"proto_clip": 1.0},
    ("federation", "sampler_options"): {"sampler": "trace", "sampler_options": {"rounds": {"1": [1]}}},
    ("aggregation", "noise"): {"clip": 1.0},
    ("data", "mean"): {"mean": 0.5, "std": 0.5},
    ("data", "std"): {"mean": 0.5, "std": 0.5},
}
# ... and of another section.
NEEDS_ELSEWHERE: dict[tuple[str, str], dict[str, Any]] = {
    ("aggregation", "prototype_clip"): {"method": {"name": "fedproto"}}
}
# ... and with one method only.
NEEDS_OF: dict[tuple[str, str], dict[str, Any]] = {
    ("fedpg", "proto_clip"): {"proto_unit": "client"},
    ("fedpg", "proto_noise"): {"proto_unit": "client"},
    ("gfpl", "use_ce"): {"head": "etf"},
}
OF_A_FILE = {"pretrained", "pretrained_sha256"}
"""Keys by whose file's content a run is named: tests/flcore/models has files."""
BASE: dict[str, Any] = {"partition": {"validation": 0.1}}


def every_key() -> list[tuple[str, str, str]]:
    """(entry of the section's registry or "", section, key) of every value there is."""
    keys = []
    plain = Config.from_mapping({}).to_mapping()
    for section in (section for section in SECTIONS if section not in ("seed", "plugins")):
        if section not in REGISTRIES:
            keys += [("", section, key) for key in plain[section]]
            continue
        for name in REGISTRIES[section]:
            mapping = Config.from_mapping({section: {"name": name}}).to_mapping()[section]
            keys += [(name, section, key) for key in mapping if key not in {"name", *OF_A_FILE}]
    return keys


def declaration(config: Config, section: str, key: str) -> Param:
    entry = {"data": config.source, "partition": config.partitioner, "model": config.model_spec}.get(section)
    holders = [config.method] if section == "method" else [getattr(config, section), *([entry] if entry else [])]
    return next(p for holder in holders for p in declared(type(holder)) if p.name == key)


def another(declared_as: Param, value: Any) -> Any:
    """A value that is allowed and differs."""
    if declared_as.choices is not None:
        other = next(choice for choice in declared_as.choices if choice != value)
        return [other] if declared_as.type.startswith("list") else other
    kinds = {
        "bool": [not value],
        "int": [declared_as.low or 0, (declared_as.low or 0) + 1],
        "float": [share + int(declared_as.low or 0) for share in (0.25, 0.75)],
        "float or 'median'": [0.25],
        "float or list of float": [0.25],
        "str": [{"baseline": "local", "base": "fedprox", "sampler": "by_size"}.get(declared_as.name, "elsewhere")],
        "list of str": [["fedavg"]],
        "list of int": [[7]],
        "mapping": [
            {
                "variants": {"slow": {"method": "fedavg"}},
                "claims": {"ours": {"better": "fedpa", "than": "fedavg"}},
                "teacher": {"model.atoms": 7},
                "sampler_options": {"rounds": {"1": [0]}},
            }.get(declared_as.name, {"fedprox": {"method.mu": 0.5}})
        ],
    }
    return next(option for option in kinds[declared_as.type.removesuffix(" or null")] if option != value)


def test_a_run_is_named_by_what_can_change_its_result() -> None:
    wrong = [(name, section, key) for name, section, key in every_key() if not names_a_run(name, section, key)]
    assert wrong == []


def names_a_run(name: str, section: str, key: str) -> bool:
    """Whether another value names another run, or the same where the key changes no result."""
    raw = json.loads(json.dumps(BASE | NEEDS_ELSEWHERE.get((section, key), {})))
    if name:
        raw.setdefault(section, {})["name"] = name
    if section == "partition":  # images with any number of classes, for which any number of clients may do
        raw["data"] = {"name": "imagefolder"}
    raw.setdefault(section, {}).update(NEEDS.get((section, key), {}) | NEEDS_OF.get((name, key), {}))
    before = Config.from_mapping(raw)
    if len(declaration(before, section, key).choices or (0, 0)) == 1:
        return True
    value = another(declaration(before, section, key), before.to_mapping()[section][key])
    raw[section][key] = value
    after = Config.from_mapping(raw)
    same = section in ("tracking", "compare", "tune") or (section, key) in FREE
    hashes_equal = after.hash("d", "p") == before.hash("d", "p")
    return after != before and hashes_equal == same == (after.identity() == before.identity())


@pytest.mark.parametrize(
    ("section", "name"), [("method", "fedprox"), ("model", "resnet18"), ("partition", "iid"), ("data", "mnist")]
)
def test_another_entry_is_another_run(section: str, name: str) -> None:
    assert Config.from_mapping({section: {"name": name}}).hash("d", "p") != Config().hash("d", "p")


def test_seed_data_and_partition_name_a_run() -> None:
    names = {Config().hash("d", "p"), Config(seed=1).hash("d", "p"), Config().hash("e", "p"), Config().hash("d", "q")}
    assert len(names) == 4


def test_a_normalisation_of_each_channel_names_a_run_and_one_of_all_is_named_as_before() -> None:
    """Numbers stand in a run's name as numbers, lists as lists; null, which came first, does not stand there at all."""
    imagenet: dict[str, Any] = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    halves = {"mean": 0.5, "std": 0.5}
    names = []
    for own in (imagenet, halves, {"mean": [0.5, 0.5, 0.5], "std": 0.5}, {}):
        config = Config.from_mapping({"data": {"name": "cifar10", **own}})
        assert Config.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
        assert {key: value for key, value in config.identity()["data"].items() if key in halves} == own
        names.append(config.hash("d", "p"))
    assert len(set(names)) == 4
    assert Config.from_mapping({"data": {"mean": ["5e-1"], "std": [1]}}).data.normalisation == ((0.5,), (1.0,))
    # Whose channels only the files know is asked when they are read.
    assert Config.from_mapping({"data": {"name": "imagefolder", **imagenet}}).source.channels is None


def test_one_is_one_however_it_is_written() -> None:
    """1, 1.0, "1" and "1e0" are the same learning rate, the same run; a default said aloud changes nothing."""
    hashes = {Config.from_mapping({"local": {"lr": lr}}).hash("d", "p") for lr in (1, 1.0, "1", "1e0")}
    assert len(hashes) == 1
    assert Config.from_mapping(Config().to_mapping()).hash("d", "p") == Config().hash("d", "p")


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        # 3K divisible by 10: multiples of 10; 12m divisible by 10: multiples of 5.
        (
            {"name": "classes_per_client", "classes": 3, "num_clients": 12},
            ["partition.num_clients=10 or 20", "partition.classes=5"],
        ),
        ({"name": "classes_per_client", "classes": 11}, ["partition.classes = 11", "10 classes"]),
        ({"name": "dominant", "num_clients": 12}, ["partition.num_clients = 12", "use 10 clients"]),
        ({"name": "ways_shots", "ways": 12, "ways_spread": 1}, ["partition.ways = 12", "[11, 9]"]),
        ({"name": "ways_shots", "kind": "fedproto_mnist", "shots_spread": 1}, ["partition.shots_spread = 1"]),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_a_division_that_cannot_be_is_refused_before_data_are_read(partition: dict[str, Any], said: list[str]) -> None:
    """Digits are known to have ten classes."""
    with pytest.raises(ConfigError) as refused:
        Config.from_mapping({"data": {"name": "digits"}, "partition": partition})
    assert all(text in str(refused.value) for text in said), refused.value


def test_a_division_of_images_whose_classes_only_their_files_tell_is_not_refused_yet() -> None:
    partition = {"name": "classes_per_client", "classes": 3, "num_clients": 12}
    config = Config.from_mapping({"data": {"name": "imagefolder", "root": "images"}, "partition": partition})
    assert config.partition.num_clients == 12
