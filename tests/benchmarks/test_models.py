"""The benchmark of models, small: the bare loop trains the same networks."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.command import run
from benchmarks.measuring import Bench
from benchmarks.model_loop import plain_model, simulate
from benchmarks.models import PAPERS, ModelCases, Options
from benchmarks.work import digest
from flcore.models import MODELS, build_model
from flcore.models.base import dropout
from pipelines.cli import app as cli

QUICK = [name for name in PAPERS if not name.startswith("resnet")]  # which take seconds to import


class Dropped(nn.Module):
    """Dropout with given numbers, at the rate of PyTorch's layer that it stands for."""

    def __init__(self, numbers: Tensor, rate: float) -> None:
        super().__init__()
        self.numbers, self.rate = numbers, rate

    def forward(self, values: Tensor) -> Tensor:
        return dropout(values, self.numbers, self.rate)


def test_every_model_has_a_paper() -> None:
    # Without steps, and the network of McMahan et al., with which ProtoLDA is compared: in none of the five papers.
    trained = [name for name in MODELS if name not in ("patch_dictionary", "pixels", "fedavg_cnn")]
    assert list(PAPERS) == list(Options().named) == trained
    assert Options(models=("pfl_cnn", "fedgen_cnn")).named == ("pfl_cnn", "fedgen_cnn")
    assert all(paper.source for paper in PAPERS.values())


@pytest.mark.parametrize("name", QUICK)
def test_the_bare_loop_trains_the_same_network(name: str) -> None:
    """The same answers without dropout, and with the same numbers dropped: places and rates are the same too."""
    shape = PAPERS[name].shape
    model, plain = build_model(MODELS[name](), shape, 10), plain_model(name, shape)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, *shape, generator=generator)
    torch.testing.assert_close(plain.eval()(images), model.eval()(images)[1])
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in model.parameters())
    layers = {key: layer for key, layer in plain.named_children() if isinstance(layer, nn.Dropout | nn.Dropout2d)}
    numbers = {site: torch.rand(4, *values, generator=generator) for site, values in model.dropout_shapes.items()}
    for (site, given), (key, layer) in zip(numbers.items(), layers.items(), strict=True):
        assert isinstance(layer, nn.Dropout2d) == (site == "channels")  # whole maps
        setattr(plain, key, Dropped(given, layer.p))
    torch.testing.assert_close(plain.train()(images), model.train()(images, numbers)[1])


def test_the_bare_loop_takes_all_rounds() -> None:
    """A time for each round, and weights that each round has moved."""
    digests = set()
    for rounds in (1, 2):
        work = replace(PAPERS["fedproto_cnn"], steps=2, clients=2).work("fedproto_cnn", rounds)
        seconds, weights = simulate(work, "[1, 28, 28]")
        assert len(seconds) == rounds
        assert min(seconds) > 0
        digests.add(digest(weights))
    assert len(digests) == 2


def test_an_unknown_model_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert cli.main(["bench", "models", "--models", "fedgen_cnn,what"]) == 2
    said = capsys.readouterr().err
    assert "bench models: --models what: expected some of fedgen_cnn, fedproto_cnn," in said
    assert "compiled, first" not in said


@pytest.mark.slow
def test_a_first_run_that_fails_is_told_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any failure of the process will do; without data it comes sooner than from a compiler."""
    monkeypatch.setitem(PAPERS, "fedgen_cnn", replace(PAPERS["fedgen_cnn"], steps=1, clients=2))
    cases = ModelCases("fedgen_cnn", 2, Bench("models", tmp_path))
    shutil.rmtree(cases.federation.prepared)
    assert cases.first() == {}
    assert cases.failed is not None
    assert "fedgen_cnn, compiled, first: failed with exit code 1" in cases.failed


@pytest.mark.slow
def test_compiled_cases_find_what_the_first_run_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have 12 steps; the first one has one round, half of them."""
    monkeypatch.setitem(PAPERS, "fedgen_cnn", replace(PAPERS["fedgen_cnn"], steps=3, clients=2))
    result = run("models", models=("fedgen_cnn",), rounds=2, repetitions=1, workers=(0, 1))
    assert json.loads(json.dumps(result)) == result
    cases = {case["case"].removeprefix("fedgen_cnn, "): case for case in result["cases"]}
    ours = [f"{engine}, {workers} workers" for engine in ("serial", "compiled") for workers in (0, 1)]
    assert list(cases) == ["bare", *ours, "compiled, first"]
    seconds = {case: found["seconds"]["median"] for case, found in cases.items()}
    assert cases["compiled, first"]["steps_per_second"] == pytest.approx(6 / seconds["compiled, first"])
    assert result["ratios"] == {
        f"rounds per second, fedgen_cnn, {case}/bare": pytest.approx(seconds["bare"] / seconds[case]) for case in ours
    }
    assert result["settings"]["models"]["fedgen_cnn"]["batch_size"] == 32
