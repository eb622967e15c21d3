"""Baselines.md section 23, 1: with what it adds switched off a method is FedAvg, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flcore.methods import METHODS
from flcore.methods.types import MODEL
from tests.cases import quick

VHL = {"name": "vhl", "per_class": 5, "virtual_batch": 8}
OFF: dict[str, dict[str, Any]] = {
    **{name: {"name": name, **off} for name, cls in METHODS.items() if (off := vars(cls).get("reduces_to_fedavg"))},
    "vhl": VHL | {"lambda_v": 0, "lambda_a": 0},
    "vhl, never": VHL | {"lambda_v": 0, "align_epochs": 0},  # another way to have no contrastive part
    "fedpa, weights": {"name": "fedpa", "lambda_ge0": 0, "lambda_po0": 0},
}
for _uniform in ("feddc", "feddyn", "scaffold"):  # only where clients have equally many samples
    del OFF[_uniform]
MODELS = {
    "fedgen_cnn": {"name": "fedgen_cnn", "feature_dim": 8},  # batch normalisation
    "fedproto_cnn": {"name": "fedproto_cnn"},  # dropout
}

Runs = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def of(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of a method, with half of the clients per round; FedAvg's is made once for each setting."""
    averaged: dict[str, SimpleNamespace] = {}

    def run(method: dict[str, Any], model: str, **changes: Any) -> SimpleNamespace:
        changes = {"federation": {"rounds": 2, "participation": 0.5}, "local__momentum": 0.5} | changes
        place = f"{method}, {model}, {changes}"
        if method["name"] != "fedavg" or place not in averaged:
            experiment = lab.experiment(method=method, model=MODELS[model], **changes)
            found = lab.run(experiment, tmp_path_factory.mktemp(method["name"]))
            if method["name"] != "fedavg":
                return found
            averaged[place] = found
        return averaged[place]

    return run


@pytest.mark.parametrize("model", quick(MODELS, 1))
@pytest.mark.parametrize("name", OFF)
def test_switched_off_it_is_fedavg(lab: Any, of: Runs, name: str, model: str) -> None:
    """The server's state, and the history with its losses and traffic."""
    found, expected = of(OFF[name], model), of({"name": "fedavg"}, model)
    assert lab.same(found.state.server, expected.state.server)
    assert found.history == expected.history


@pytest.mark.parametrize("name", ["fedprox", "moon", "fedntd", "feddecorr", "fedasam", "fedfa", "vhl"])
def test_switched_on_it_is_not(lab: Any, of: Runs, name: str) -> None:
    """Section 22: of those that send the model alone it is P up and down, whatever their terms weigh."""
    method = VHL | {"label_style": "patch"} if name == "vhl" else {"name": name}
    found, expected = of(method, "fedgen_cnn"), of({"name": "fedavg"}, "fedgen_cnn")
    assert not lab.same(found.state.server[MODEL], expected.state.server[MODEL])
    for on, off in zip(found.history, expected.history, strict=True):
        assert on["participants"] == off["participants"]
        if name not in ("fedfa", "vhl"):  # anchors; virtual images
            assert all(on[kind] == off[kind] for kind in ("bytes_up", "bytes_down", "scalars_up"))


@pytest.mark.parametrize("name", ["moon", "fedproc", "fedhkd", "fedgen", "fedpa"])
def test_its_first_round_is_fedavg(lab: Any, of: Runs, name: str) -> None:
    """Of those whose terms need what a round leaves behind; what trains at its end draws nothing of the clients'."""
    changes = {"federation": {"rounds": 1, "participation": 0.5}, "local__lr": 0.01}
    found, expected = (of({"name": each}, "fedgen_cnn", **changes) for each in (name, "fedavg"))
    assert lab.same(found.state.server[MODEL], expected.state.server[MODEL])
    assert found.history[0]["train_loss"] == expected.history[0]["train_loss"]
    sent = {kind: num_bytes for kind, num_bytes in found.history[0]["bytes_down"].items() if num_bytes}
    assert sent == expected.history[0]["bytes_down"]
