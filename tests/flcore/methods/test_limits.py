"""With what it adds switched off a method is FedAvg, or local training, to the bit (baselines.md section 23, 1, 2)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flcore.methods import METHODS
from flcore.methods.types import MODEL
from tests.cases import SMALL, quick

VHL = {"name": "vhl", **SMALL["vhl"]}
OFF: dict[str, dict[str, Any]] = {
    **{name: {"name": name, **off} for name, cls in METHODS.items() if (off := vars(cls).get("reduces_to_fedavg"))},
    "vhl": VHL | {"lambda_v": 0, "lambda_a": 0},
    "vhl, never": VHL | {"lambda_v": 0, "align_epochs": 0},  # another way to have no contrastive part
    "fedpa, weights": {"name": "fedpa", "lambda_ge0": 0, "lambda_po0": 0},
}
UNIFORM = ("feddc", "feddyn", "scaffold")  # only where clients have equally many samples
for _uniform in UNIFORM:
    del OFF[_uniform]
ONE_CENTRE = {"name": "fesem", "centres": 1}
FEDPG = {"name": "fedpg", **SMALL["fedpg"]}
NO_MOMENTUM = {"local__momentum": 0.0}
MODELS = {
    "fedgen_cnn": {"name": "fedgen_cnn", "feature_dim": 8},  # batch normalisation
    "fedproto_cnn": {"name": "fedproto_cnn"},  # dropout
}

Runs = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def of(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of a method, with half of the clients per round; a reference's is made once for each setting.

    ``equal``: clients of one size, which have uniform weights in FedAvg too.
    """
    references: dict[str, SimpleNamespace] = {}
    alike = lab.by_hand(lab.dataset, [range(start, 240, 4) for start in range(4)], [range(60)] * 4)

    def run(
        method: dict[str, Any], model: str = "fedgen_cnn", *, equal: bool = False, **changes: Any
    ) -> SimpleNamespace:
        changes = {"federation": {"rounds": 2, "participation": 0.5}, "local__momentum": 0.5} | changes
        place = f"{method}, {model}, {equal}, {changes}"
        if place not in references:
            partition = alike if equal else None
            experiment = lab.experiment(partition=partition, method=method, model=MODELS[model], **changes)
            found = lab.run(experiment, tmp_path_factory.mktemp(method["name"]))
            if method["name"] not in ("fedavg", "local"):
                return found
            references[place] = found
        return references[place]

    return run


@pytest.mark.parametrize("model", quick(MODELS, 1))
@pytest.mark.parametrize("name", OFF)
def test_switched_off_it_is_fedavg(lab: Any, of: Runs, name: str, model: str) -> None:
    """The server's state, and the history with its losses and traffic."""
    found, expected = of(OFF[name], model), of({"name": "fedavg"}, model)
    assert lab.same(found.state.server, expected.state.server)
    assert found.history == expected.history


@pytest.mark.parametrize(
    "name", ["fedprox", "moon", "fedntd", "feddecorr", "fedasam", "fedfa", "vhl", "fedpg", "feddc", "scaffold"]
)
def test_switched_on_it_is_not(lab: Any, of: Runs, name: str) -> None:
    """Section 22: of those that send the model alone it is P up and down, whatever their terms weigh."""
    method = {"vhl": VHL | {"label_style": "patch"}, "fedpg": FEDPG}.get(name, {"name": name})
    changes = {"equal": True, **NO_MOMENTUM} if name in UNIFORM else {}
    found, expected = of(method, **changes), of({"name": "fedavg"}, **changes)
    assert not lab.same(found.state.server[MODEL], expected.state.server[MODEL])
    for on, off in zip(found.history, expected.history, strict=True):
        assert on["participants"] == off["participants"]
        if name not in ("fedfa", "vhl", "fedpg", *UNIFORM):  # anchors; virtual images; drifts and controls
            assert all(on[kind] == off[kind] for kind in ("bytes_up", "bytes_down", "scalars_up"))


# Where its weights are those of FedAvg: method, changes, their name at the server, equal figures, one that differs.
TRAFFIC = ("bytes_up", "bytes_down", "scalars_up", "participants")
IMAGES = ("train_loss", "bytes_down", "class_accuracy")
ENSEMBLE = {"name": "fedensemble", "variant": "permutation", "models": 1}
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, tuple[str, ...], str]] = {
    "ditto": ({"name": "ditto"}, {}, "model", ("top1_global", *TRAFFIC), "mean_local"),
    "fedensemble": ({"name": "fedensemble"}, {}, "model", ("train_loss", *TRAFFIC), "loss_global"),
    "one model": (ENSEMBLE, {}, "member_0000", ("train_loss", "bytes_down", "top1_global"), ""),
    "one centre": (ONE_CENTRE, {"equal": True}, "centre_0000", (), "bytes_eval_down"),  # centres travel to be scored
    "one centre, weighted": (ONE_CENTRE | {"weighted": True}, {}, "centre_0000", (), "bytes_eval_down"),
    "feddc": ({"name": "feddc", "use_drift": False, "use_correction": False}, {"equal": True}, "model", (), ""),
    # The generator is trained all the same; with a gate that never opens, and after its last round, images stay home.
    "fedpg": (FEDPG | {"w_v": 0, "lambda_c": 0}, {}, "model", IMAGES, ""),
    "fedpg, switched off": (FEDPG | {"use_ct": False, "use_fa": False}, {}, "model", IMAGES, ""),
    "fedpg, gate": (FEDPG | {"gate": 1.0, "gen_steps": 0}, {}, "model", IMAGES, ""),
    "fedpg, stop": (FEDPG | {"stop_round": 1}, {}, "model", IMAGES, ""),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_its_weights_are_those_of_fedavg(lab: Any, of: Runs, name: str) -> None:
    """Equal in all figures where none is named, but for the one that differs."""
    method, changes, place, figures, differs = WEIGHTS[name]
    found, expected = of(method, **changes), of({"name": "fedavg"}, **changes)
    assert lab.same(found.state.server[place], expected.state.server[MODEL])
    assert {"targets", "virtual"} & set(found.state.server) == (
        {"targets", "virtual"} if method["name"] == "fedpg" and "stop_round" not in method else set()
    )
    for ours, theirs in zip(found.history, expected.history, strict=True):
        for figure in figures or theirs.keys() - {differs}:
            assert ours[figure] == theirs[figure], figure
        assert not differs or ours[differs] != theirs[differs]


@pytest.mark.parametrize("name", ["moon", "fedproc", "fedhkd", "fedgen", "fedpa", "fedpg", "scaffold"])
def test_its_first_round_is_fedavg(lab: Any, of: Runs, name: str) -> None:
    """Of those whose terms need what a round leaves behind; what trains at its end draws nothing of the clients'."""
    changes: dict[str, Any] = {"federation": {"rounds": 1, "participation": 0.5}, "local__lr": 0.01}
    changes |= {"equal": True, **NO_MOMENTUM} if name == "scaffold" else {}
    method = {"name": name, **SMALL.get(name, {})}
    found, expected = of(method, **changes), of({"name": "fedavg"}, **changes)
    assert lab.same(found.state.server[MODEL], expected.state.server[MODEL])
    losses = {term: loss for term, loss in found.history[0]["train_loss"].items() if loss or term != "control"}
    assert losses == expected.history[0]["train_loss"]
    sent = {kind: num_bytes for kind, num_bytes in found.history[0]["bytes_down"].items() if num_bytes}
    assert {kind: size for kind, size in sent.items() if kind != "control"} == expected.history[0]["bytes_down"]


GFPL = {"name": "gfpl", "use_pfg": False}
LOCAL: dict[str, tuple[dict[str, Any], int]] = {
    "fedproto": ({"name": "fedproto", "weight": 0}, 2),
    "fedproto, its first round": ({"name": "fedproto"}, 1),
    "gfpl": (GFPL | {"use_dcs": False}, 3),
    "gfpl, no weight": (GFPL | {"weight": 0, "first_exchange": 0}, 3),
}


@pytest.mark.parametrize("model", quick(MODELS, 1))
@pytest.mark.parametrize("name", LOCAL)
def test_switched_off_it_is_local_training(lab: Any, of: Runs, name: str, model: str) -> None:
    """Names of the weights included; GFPL then sends nothing (gfpl.md, fact 11)."""
    method, rounds = LOCAL[name]
    found, expected = (of(each, model, federation={"rounds": rounds}) for each in (method, {"name": "local"}))
    for client in range(4):
        assert lab.same(found.client_state(client)["model"], expected.client_state(client)["model"])
    assert [r["local_accuracy"] for r in found.history] == [r["local_accuracy"] for r in expected.history]
    assert method["name"] == "fedproto" or (found.state.up, found.state.down) == ({}, {})


ALONE: list[dict[str, Any]] = [
    *({"name": "fedavg"}, {"name": "fedper"}, {"name": "fedper", "head_from": "fully_connected"}),
    *({"name": "fedprox", "mu": 0}, {"name": "central"}),
]


@pytest.mark.parametrize("method", quick(ALONE, 2), ids=lambda method: "-".join(map(str, method.values())))
def test_one_client_with_everything_is_local_training(lab: Any, method: dict[str, Any], tmp_path: Any) -> None:
    """FedProx differs from the second step on unless it is off."""
    everything = lab.by_hand(lab.dataset, [range(240)], [range(60)])
    changes = {"partition": everything, "local__epochs": 2, "local__momentum": 0.9, "federation__rounds": 2}
    local = lab.run(lab.experiment(method__name="local", **changes), tmp_path / "local")
    experiment = lab.experiment(method=method, **changes)
    run, asked = lab.run(experiment, tmp_path / "other"), experiment.method
    own = lab.client_model(asked, run.state.server, 0, run.client_state(0), experiment.setting)
    model = asked.global_model(run.state.server) if asked.has_global_model else own
    assert lab.same(model, local.client_state(0)["model"])
    assert [r["mean_local"] for r in run.history] == [r["mean_local"] for r in local.history]
