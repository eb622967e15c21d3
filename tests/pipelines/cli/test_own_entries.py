"""One file with a method, a data source, a partitioner, a model and a sampler of a user's own, in whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flcore
from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.engine.rounds import Observers
from pipelines.cli.app import main
from pipelines.plan.comparison import comparison_plan

ALL_KINDS = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import nn

from flcore.core.params import param
from flcore.core.rng import numpy_stream
from flcore.data.partitioners.base import Assignment, Partitioner
from flcore.data.sources.base import RawDataset, RawSplit, Source
from flcore.methods.fedprox import FedProx
from flcore.models import Backbone, ModelSpec
from flcore.sampling.base import Sampler


@dataclass(frozen=True)
class Method(FedProx):
    name: ClassVar[str] = "own_method"
    summary: ClassVar[str] = "FedProx by another name"
    citation: ClassVar[str] = "nobody"


@dataclass(frozen=True)
class Stripes(Source):
    """Class c is a bright column c, with noise."""

    name: ClassVar[str] = "stripes"
    summary: ClassVar[str] = "three classes of noisy stripes"
    num_classes: ClassVar[int | None] = 3
    channels: ClassVar[int | None] = 1
    noise: int = param(40, "largest noise of a pixel", low=1, high=100)

    def load(self, root, download):
        def split(seed, count):
            rng = np.random.default_rng(seed)
            labels = np.arange(count, dtype=np.int64) % 3
            images = rng.integers(0, self.noise, (count, 8, 8)).astype(np.uint8)
            images[np.arange(count), :, labels] = 200
            return RawSplit(images, labels)

        names = ("left", "middle", "right")
        return RawDataset(split(0, 48), split(1, 24), names, (0.5,), (0.5,), "none", "made up")


@dataclass(frozen=True)
class Dealt(Partitioner):
    name: ClassVar[str] = "dealt"
    summary: ClassVar[str] = "sample i to client i modulo K"

    def split(self, labels, num_clients, rng, groups=None):
        return Assignment([np.arange(k, len(labels), num_clients) for k in range(num_clients)])


@dataclass(frozen=True)
class OneLayer(ModelSpec):
    name: ClassVar[str] = "one_layer"
    summary: ClassVar[str] = "one linear layer before the head"
    width: int = param(4, "features", low=1)

    def build(self, shape, num_classes):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], self.width), nn.ReLU())
        return Backbone(encoder, nn.Identity(), nn.Linear(self.width, num_classes))


@dataclass(frozen=True)
class Pair(Sampler):
    name: ClassVar[str] = "pair"
    summary: ClassVar[str] = "a client and the next one"
    step: int = param(1, "to the next one", low=1)

    def sample(self, count, sizes, round_number, seed):
        first = int(numpy_stream(seed, "pair", round_number).integers(len(sizes)))
        return [(first + self.step * place) % len(sizes) for place in range(count)]
'''
NAMES = {"methods": "own_method", "datasets": "stripes", "partitioners": "dealt", "models": "one_layer",
         "samplers": "pair"}  # fmt: skip
RAW: dict[str, Any] = {
    "data": {"name": "stripes", "noise": 50},
    "partition": {"name": "dealt", "num_clients": 4},
    "model": {"name": "one_layer", "width": 5},
    "method": {"name": "own_method", "mu": 0.1},
    "federation": {"rounds": 2, "participation": 0.5, "sampler": "pair", "sampler_options": {"step": 1}},
    "tracking": {"enabled": False},
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file, under ``own.py`` and as the module ``own_lab.everything``, and parameters."""
    (tmp_path / "own.py").write_text(ALL_KINDS)
    package = tmp_path / "there" / "own_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("WIDTH = 4\n")
    source = ALL_KINDS.replace("param(4,", "param(WIDTH,")
    source = source.replace("import numpy as np", "from .words import WIDTH\nimport numpy as np", 1)
    (package / "everything.py").write_text(source)
    (tmp_path / "params.yaml").write_text(json.dumps({**RAW, "plugins": ["own.py"]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "there")
    return tmp_path


def run(out: str, *more: str) -> bytes:
    """Train, with a cache in which no such run has finished."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOFL_CACHE", f"{out}-cache")
        assert main(("run", "--out", out, *more)) == 0
    return Path(out, "metrics.json").read_bytes()


@pytest.mark.slow
def test_the_command_runs_it_alone_and_in_two_workers(own: Path) -> None:
    alone = run("runs/alone")
    assert run("runs/pool", "--set", "engine.workers=2") == alone
    kept = own / "runs" / "alone" / "plugins" / "own.py"
    assert kept.read_text() == ALL_KINDS
    identity = json.loads((own / "runs" / "alone" / "config.json").read_text())["identity"]
    assert set(identity["plugins"]) == {"own"}
    assert main(("run", "--out", "runs/alone")) == 0  # finished: found again


def test_killed_and_resumed_the_same_bytes(own: Path) -> None:
    raw = {**RAW, "plugins": [str(own / "own.py")]}
    flcore.run(raw, own / "whole")

    def stop(number: int, record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flcore.run(raw, own / "killed", observers=Observers(on_round=stop))
    flcore.run(raw, own / "killed")
    for name in ("metrics.json", "model.safetensors"):
        assert (own / "killed" / name).read_bytes() == (own / "whole" / name).read_bytes()


def test_an_edited_file_is_another_run(own: Path) -> None:
    raw = {**RAW, "plugins": [str(own / "own.py")]}
    before = Config.from_mapping(raw).hash("d", "p")
    (own / "own.py").write_text(ALL_KINDS + "# edited\n")
    assert Config.from_mapping(raw).hash("d", "p") != before


@pytest.mark.parametrize(
    ("section", "values"),
    [(name, RAW[name]) for name in ("data", "partition", "model", "method", "federation")],
    ids=["source", "partitioner", "model", "method", "sampler"],
)
def test_each_kind_names_a_run_by_the_content_of_its_file(own: Path, section: str, values: dict[str, Any]) -> None:
    config = Config.from_mapping({section: values, "plugins": [str(own / "own.py")]})
    assert set(config.identity()["plugins"]) == {"own"}
    with pytest.raises(ConfigError, match="needed and not named"):
        Config.from_mapping({section: values})


def test_importable_classes_are_named_and_kept_with_the_run(own: Path, unload_plugins: Callable[[], None]) -> None:
    """The module and what it imports of its package; run folders and workers need the package no more."""
    place = "own_lab.everything"
    raw = {
        "data": {"name": f"{place}:Stripes", "noise": 50},
        "partition": {"name": f"{place}:Dealt", "num_clients": 4},
        "model": {"name": f"{place}:OneLayer", "width": 5},
        "method": {"name": f"{place}:Method", "mu": 0.1},
        "federation": {**RAW["federation"], "sampler": f"{place}:Pair"},
    }
    flcore.run({**RAW, "plugins": [str(own / "own.py")]}, own / "file")
    unload_plugins()  # whose entries have the same names
    config = Config.from_mapping(raw)
    assert set(config.identity()["plugins"]) == {"own_lab", "own_lab.everything", "own_lab.words"}
    flcore.run(raw, own / "modules")
    model = (own / "modules" / "model.safetensors").read_bytes()
    assert (own / "file" / "model.safetensors").read_bytes() == model
    stored = Config.from_mapping(json.loads(json.dumps(config.to_mapping())))
    assert stored == config
    (own / "there").rename(own / "gone")
    pooled = {**json.loads((own / "modules" / "config.json").read_text())["config"], "engine": {"workers": 1}}
    pooled["plugins"] = [{**entry, "path": str(own / "modules" / entry["path"])} for entry in pooled["plugins"]]
    flcore.run(pooled, own / "pool")
    assert (own / "pool" / "model.safetensors").read_bytes() == model


def test_the_base_of_a_wrapper_method_may_be_an_importable_class(own: Path) -> None:
    config = Config.from_mapping({"method": {"name": "ccvr", "base": "own_lab.everything:Method"}})
    assert [method.name for method in config.methods] == ["ccvr", "own_method"]
    assert set(config.identity()["plugins"]) == {"own_lab", "own_lab.everything", "own_lab.words"}


def test_rows_of_a_comparison_may_be_importable_classes(own: Path) -> None:
    """Two methods and a variant, with one seed: three runs, two of which have the class and its code."""
    mine = "own_lab.everything:Method"
    variant = {"method": mine, "method.mu": 0.2}
    compare = {"methods": ["fedavg", mine], "baseline": mine, "seeds": [0], "variants": {"more": variant}}
    config = Config.from_mapping({"compare": compare})
    assert (config.compare.methods, config.compare.baseline) == (("fedavg", "own_method"), "own_method")
    runs = [run.config for run in comparison_plan({"compare": compare}).runs]
    assert [run.method.name for run in runs] == ["fedavg", "own_method", "own_method"]
    assert ["plugins" in run.identity() for run in runs] == [False, True, True]
    assert [run.to_mapping()["method"].get("mu") for run in runs[1:]] == [0.01, 0.2]
    assert comparison_plan({"compare": compare}, [mine]).runs[0].config == runs[1]


def test_a_class_that_is_not_there(own: Path) -> None:
    for name, words in (
        ("no_lab.x:Mine", "no Python module no_lab.x"),
        ("own_lab.everything:Pair", "no method called"),
    ):
        with pytest.raises(ConfigError, match=rf"^method\.name = {name}: .*{words}"):
            Config.from_mapping({"method": {"name": name}})


def test_listed_and_shown(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name in NAMES.items():
        assert main(("list", kind, "--plugin", str(own / "own.py"))) == 0
        assert name in capsys.readouterr().out
        assert main(("show", kind.removesuffix("s"), name, "--plugin", str(own / "own.py"))) == 0
        assert name in capsys.readouterr().out
