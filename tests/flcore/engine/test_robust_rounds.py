"""Whole runs with robust rules, noise, poisoned clients and server optimisers: refusals, what holds, equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record, serialise
from flcore.methods import METHODS
from flcore.methods.types import RoundContext
from tests.cases import quick

SLOW = pytest.mark.slow
PLAIN = {"model": {"name": "fedcspc_cnn"}}  # without BatchNorm
NOISY = {"aggregation": {"clip": 0.5, "noise": 1.0}, **PLAIN}
POISONED = {"federation": {"rounds": 2, "participation": 0.75, "poisoned": 1, "attack_scale": 3.0}}
CASES: dict[str, dict[str, Any]] = {
    "median": {**POISONED, "aggregation": {"rule": "median", "clip": "median"}},
    "noise": {**POISONED, **NOISY},
    "prototypes": {
        **POISONED, "method": {"name": "fedproto"}, "aggregation": {"rule": "trimmed_mean", "prototype_clip": "median"}
    },
    "both": {
        **POISONED, "method": {"name": "fedproc"}, "aggregation": {"rule": "median", "prototype_clip": 1.0, "clip": 0.5}
    },
    "labels": {"federation": {"rounds": 2, "poisoned": 2, "attack": "random_labels"}},
}  # fmt: skip

SOME = [case if case == "both" else pytest.param(case, marks=SLOW) for case in CASES]


# ---- what is refused -----------------------------------------------------------------------------------------------


def refusal(**raw: Any) -> str:
    with pytest.raises(ConfigError) as error:
        Config.from_mapping(raw)
    return str(error.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"aggregation": {"rule": "medain"}}, "aggregation.rule = medain: did you mean 'median'? expected one of mean"),
        ({"aggregation": {"trim": 0.5}}, "aggregation.trim = 0.5: must be > 0 and < 0.5"),
        ({"aggregation": {"clip": 0}}, "aggregation.clip = 0: must be > 0 or 'median'"),
        ({"aggregation": {"clip": "mean"}}, "aggregation.clip = mean: expected a number > 0 or 'median'"),
        ({"aggregation": {"noise": 1}}, "aggregation: noise needs clip, a number"),
        ({"aggregation": {"noise": 1, "clip": "median"}}, "aggregation: noise needs clip, a number"),
        ({"aggregation": {"noise": 1, "clip": 1, "rule": "median"}}, "aggregation: noise is measured against a sum"),
        (
            {"aggregation": {"rule": "median"}, "method": {"name": "gfpl"}},
            "aggregation.rule = median: no server step of gfpl does so; leave rule out, or take another method",
        ),
        (
            {"aggregation": {"rule": "median"}, "method": {"name": "central"}},
            "aggregation.rule = median: no server step of central does so",
        ),
        (
            {"aggregation": {"clip": 1}, "method": {"name": "fedproto"}},
            "aggregation.clip = 1.0: fedproto aggregates prototypes alone; leave clip out, or take another method",
        ),
        (
            {"aggregation": {"prototype_clip": 1}},
            "aggregation.prototype_clip = 1.0: fedavg aggregates weights alone; leave prototype_clip out",
        ),
        (
            {"aggregation": {"clip": 1, "noise": 1}, "method": {"name": "fedpa"}},
            "aggregation.noise = 1: the server of fedpa also uses messages that the noise would not",
        ),
        (
            {"aggregation": {"clip": 1, "noise": 1}, "federation": {"deadline": 9.0}},
            "aggregation.noise = 1: the privacy account needs a cohort drawn by chance",
        ),
        (
            {"federation": {"poisoned": 1}, "method": {"name": "gfpl"}},
            "federation.attack = sign_flip: clients of gfpl send neither weights nor class prototypes",
        ),
        (
            {"federation": {"poisoned": 1}, "method": {"name": "central"}},
            "federation.attack = sign_flip: clients of central send neither weights nor class prototypes",
        ),
        (
            {"federation": {"poisoned": 1, "poisoned_clients": [1]}},
            "federation: poisoned is a number of clients and poisoned_clients are ids",
        ),
        ({"federation": {"poisoned_clients": [1, 1]}}, "federation: poisoned_clients = [1, 1]: an id appears twice"),
    ],
)
def test_refused(raw: dict[str, Any], words: str) -> None:
    assert refusal(**raw).startswith(words)


def test_noise_on_statistics_is_refused_before_training(lab: Any) -> None:
    config = lab.config(aggregation={"clip": 1, "noise": 1})
    with pytest.raises(ConfigError, match=r"^aggregation.noise = 1: this model has BatchNorm statistics"):
        Experiment.open(config, lab.prepared, lab.partition_folder)
    for fine in ({"batchnorm": "local"}, {"batchnorm": "frozen"}, {"name": "fedcspc_cnn"}):
        config = lab.config(aggregation={"clip": 1, "noise": 1}, model=fine)
        Experiment.open(config, lab.prepared, lab.partition_folder)


def test_a_client_that_there_is_not_is_refused_before_training(lab: Any) -> None:
    config = lab.config(federation={"poisoned_clients": [4]})
    with pytest.raises(ConfigError, match=r"no client 4, ids go from 0 to 3$"):
        Experiment.open(config, lab.prepared, lab.partition_folder)


def test_what_the_methods_fold() -> None:
    """As docs/how-to/robust.md says: weights, prototypes, both, nothing; and where noise covers all there is."""
    folds = {name: " ".join(sorted(cls().aggregates)) for name, cls in METHODS.items()}
    both = {"fedpa", "fedpg", "fedproc", "fedmlp"}
    nothing = {"local", "gfpl", "fesem", "feddc", "fedavg_q", "protolda", "protolda_blocks", "protolda_distilled"}
    nothing |= {"closed_head", "linear_probe"}
    assert {name for name, kinds in folds.items() if kinds == "prototypes weights"} == both
    assert {name for name, kinds in folds.items() if kinds == "prototypes"} == {"fedproto"}
    assert {name for name, kinds in folds.items() if not kinds} == nothing
    sent = {name for name, cls in METHODS.items() if cls().poisonable_payloads}
    assert sent == folds.keys() - nothing | {"feddc", "fesem"}
    alone = {name for name, cls in METHODS.items() if cls().releases_weights_alone}
    assert alone == {
        *("central", "fedavg", "fedprox", "fedper", "fedrep", "fedntd", "moon"),
        *("feddecorr", "fedasam", "fednova", "feddyn", "ditto"),
    }


# ---- what holds ----------------------------------------------------------------------------------------------------


def test_at_its_defaults_a_run_keeps_its_name() -> None:
    """The hash of the default configuration before these keys existed; and any value that differs gives another."""
    default = Config.from_mapping({"engine": {"stack": False, "compile": "none"}})
    assert default.hash("d", "p") == "c850bb0a2aa1ba3871129aacc5981f5f6013429cef4de605e53cc1208f5d8b22"
    assert "aggregation" not in Config().identity() and "attack" not in Config().identity()["federation"]
    assert Config.from_mapping({"aggregation": {"clip": 2}}).identity()["aggregation"] == {"clip": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME)
def test_the_same_bytes_in_a_pool(lab: Any, case: str, tmp_path: Path) -> None:
    changes = CASES[case]
    whole = lab.run(lab.experiment(**changes), tmp_path / "whole")
    assert lab.run_in_pool(tmp_path / "pool", **changes, engine__workers=1).bytes == whole.bytes
    assert whole.bytes != lab.run(lab.experiment(**without(changes)), tmp_path / "plain").bytes


def without(changes: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in changes.items() if key != "aggregation"}
    return {**kept, "federation": {key: value for key, value in kept["federation"].items() if "pois" not in key}}


@pytest.mark.parametrize("case", SOME)
def test_stopped_before_the_server_folds_and_resumed(lab: Any, stops: Any, case: str, tmp_path: Path) -> None:
    """In round 2, when the replies are there: the same bytes as undisturbed."""

    class Stopping(InlineOrchestrator):
        def call(self, name: str, *rest: Any) -> Any:
            if name in ("aggregate", "aggregate-prototypes", "fuse-prototypes"):
                folds.append(name)
            if len(folds) == 2:
                raise stops.Crash
            return super().call(name, *rest)

    folds: list[str] = []
    experiment = lab.experiment(**CASES[case])
    whole = lab.run(experiment, tmp_path / "whole").bytes
    with pytest.raises(stops.Crash):
        lab.run(experiment, tmp_path / "stopped", orchestrator=Stopping())
    assert lab.run(experiment, tmp_path / "stopped").bytes == whole


@SLOW
@pytest.mark.parametrize("case", ["median", "prototypes"])
def test_stopped_anywhere(lab: Any, stops: Any, case: str, tmp_path: Path) -> None:
    stops.everywhere(lab, lab.experiment(**CASES[case]), tmp_path, after=False)


@pytest.mark.parametrize("case", SOME)
def test_stacked_it_is_the_same_to_rounding(lab: Any, distance: Any, case: str, tmp_path: Path) -> None:
    serial = lab.run(lab.experiment(**CASES[case], local__steps=2), tmp_path / "serial")
    stacked = lab.run(lab.experiment(**CASES[case], local__steps=2, engine__stack=True), tmp_path / "stacked")
    assert distance(serial.state.server, stacked.state.server) < 1e-4


def test_a_median_holds_where_the_mean_is_thrown_far_away(lab: Any, tmp_path: Path) -> None:
    """One of four sends 1,000 times its update: the mean moves far; the others about as far as honest ones."""
    changes = {"federation": {"rounds": 1, "poisoned": 1, "attack": "scale", "attack_scale": 1000.0}, **PLAIN}
    start = lab.experiment(**PLAIN).setting.initial.params

    def moved(name: str, **more: Any) -> float:
        after = lab.run(lab.experiment(**changes, **more), tmp_path / name).state.server["model"].params
        return float(sum((after[key] - tensor).double().square().sum() for key, tensor in start.items()) ** 0.5)

    honest = lab.run(lab.experiment(**PLAIN, federation__rounds=1), tmp_path / "honest").state.server["model"].params
    far = float(sum((honest[key] - tensor).double().square().sum() for key, tensor in start.items()) ** 0.5)
    assert moved("mean") > 20 * far
    assert moved("median", aggregation={"rule": "median"}) < 4 * far
    assert moved("clip", aggregation={"clip": "median"}) < 4 * far


FOLDING = [name for name, cls in METHODS.items() if cls().aggregates and cls().data_scope == "client"]


@pytest.mark.parametrize("method", FOLDING)
def test_every_method_that_folds_does_so_with_poisoned_clients(lab: Any, method: str, tmp_path: Path) -> None:
    """What the server ends with is finite, and another with another rule."""
    federation = {"rounds": 2, "poisoned": 1, "attack_scale": 2.0}
    found = []
    for rule in ("mean", "median"):
        how = {"aggregation": {"rule": rule}, "federation": federation, "model": lab.model_of(method)}
        run = lab.run(lab.experiment(method__name=method, **how), tmp_path / rule)
        tensors = [tensor for payload in run.state.server.values() for tensor in payload.arrays().values()]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point())
        found.append(serialise(run.state.server))
    assert found[0] != found[1]


UNFOLDED: list[dict[str, Any]] = [
    {"name": "feddc"},
    {"name": "fesem", "centres": 2},
    {"name": "fedensemble", "variant": "permutation", "models": 2},
]


@pytest.mark.parametrize("method", quick(UNFOLDED, 1), ids=lambda method: method["name"])
def test_clients_may_be_poisoned_where_no_rule_folds_what_they_send(
    lab: Any, method: dict[str, Any], tmp_path: Path
) -> None:
    """The server ends with other values; and what left client 1 is its start minus twice what training did."""
    found = []
    for attack in ({}, {"poisoned_clients": [1], "attack_scale": 2.0}):
        experiment = lab.experiment(method=method, federation={"rounds": 1, **attack}, model={"name": "fedcspc_cnn"})
        assert not experiment.method.aggregates
        found.append((lab.train(experiment, 1)[0], lab.run(experiment, tmp_path / str(len(found))).state.server))
    ctx = RoundContext(experiment.setting, 1, experiment.method.round_exchanges(1, experiment.setting)[0].name)
    begun = Record(experiment.method.start_server(experiment.setting))
    start = experiment.method.broadcast(begun, 1, ctx)["model"].params
    honest, changed = (reply.message["model"].params for reply, _ in found)
    for name, tensor in honest.items():
        assert torch.equal(changed[name], start[name] - 2 * (tensor - start[name]))
    assert serialise(found[0][1]) != serialise(found[1][1])


def test_who_is_absent_sends_nothing_and_the_divisor_stays(lab: Any, tmp_path: Path) -> None:
    """Nearly without noise: n of 4 answers, each bounded by C = 0.01, move the model by at most n/4 · C."""
    federation = {"rounds": 1, "dropout": 0.63}
    run = lab.run(
        lab.experiment(**PLAIN, aggregation={"clip": 0.01, "noise": 1e-9}, federation=federation), tmp_path / "run"
    )
    start = lab.experiment(**PLAIN).setting.initial.params
    after = run.state.server["model"].params
    squares = [(after[name] - tensor).double().square().sum() for name, tensor in start.items()]
    answered = len(run.history[0]["participants"])
    assert answered == 2
    assert 0 < float(torch.stack(squares).sum().sqrt()) <= answered / 4 * 0.01 * (1 + 1e-3)


def test_facts_are_in_the_rounds_record(lab: Any, tmp_path: Path) -> None:
    run = lab.run(lab.experiment(**CASES["median"]), tmp_path / "run")
    assert {"update_norm", "clip_norm", "clipped"} <= run.history[0]["server"].keys()
    assert run.history[0]["server"]["clip_norm"] == run.history[0]["server"]["update_norm"]
    plain = lab.run(lab.experiment(), tmp_path / "plain")
    assert "server" not in plain.history[0]
    assert serialise(plain.state.server) != serialise(run.state.server)


# ---- an optimiser on the server ------------------------------------------------------------------------------------


def test_the_fold_comes_first(lab: Any, tmp_path: Path) -> None:
    """Clipped, then their median, then the step: half of the way that the median goes by itself."""
    fold = {"rule": "median", "clip": 0.5}
    start = lab.experiment().setting.initial.params
    ways = []
    for name, more in (("fold", {}), ("half", {"optimizer": "momentum", "server_lr": 0.5})):
        run = lab.run(lab.experiment(aggregation={**fold, **more}, federation__rounds=1), tmp_path / name)
        ways.append({key: value - start[key] for key, value in run.state.server["model"].params.items()})
    for key, way in ways[0].items():
        assert torch.allclose(ways[1][key], way / 2, rtol=1e-4, atol=1e-7)


OF_WEIGHTS = [name for name, cls in METHODS.items() if "weights" in cls().aggregates]


@pytest.mark.parametrize("name", quick(OF_WEIGHTS, ("fedavg", "fednova")))
def test_every_stage_that_folds_weights_takes_the_step(lab: Any, name: str, tmp_path: Path) -> None:
    """At a tiny rate the model hardly leaves the place where it began."""
    if METHODS[name].data_scope == "union":
        return
    how = {"method__name": name, "model": lab.model_of(name), "federation__rounds": 1}
    step = {"optimizer": "momentum", "server_lr": 1e-9}
    experiment = lab.experiment(**how, aggregation=step)
    start = experiment.method.start_server(experiment.setting)["model"].params
    after = lab.run(experiment, tmp_path / "run").state.server["model"].params
    assert all(torch.allclose(after[key], value, atol=1e-6) for key, value in start.items() if key in after)


def test_a_run_that_does_not_say_it_keeps_its_name() -> None:
    assert "aggregation" not in Config.from_mapping({"aggregation": {"optimizer": "none"}}).identity()
    assert Config.from_mapping({"aggregation": {"optimizer": "adam"}}).identity()["aggregation"] == {
        "optimizer": "adam"
    }


@pytest.mark.parametrize("name", METHODS)
def test_refused_where_no_stage_folds_weights(name: str) -> None:
    raw = {"method": {"name": name}, "aggregation": {"optimizer": "adam"}}
    method = METHODS[name]()
    if "weights" in method.aggregates and method.data_scope == "client":
        Config.from_mapping(raw)
    else:
        with pytest.raises(ConfigError, match=r"^aggregation\.optimizer = adam: .*; leave optimizer out"):
            Config.from_mapping(raw)
