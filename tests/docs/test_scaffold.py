"""The example of a method outside the package: SCAFFOLD, as docs/examples/scaffold.py writes it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flcore
from flcore.config import plugins
from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.io.messages import Weights

PLUGIN = Path(__file__).parents[2] / "docs" / "examples" / "scaffold.py"


@pytest.fixture(scope="module", autouse=True)
def _forgotten_afterwards() -> Iterator[None]:
    yield
    plugins.unload("scaffold")


def scaffold(lab: Any, folder: Path, dataset: Any = None, partition: Any = None, **changes: Any) -> Any:
    """A run of the tiny federation, or of given data."""
    spec = lab.ToySpec() if dataset is not None else None
    changes = {"plugins": [str(PLUGIN)], "method__name": "scaffold", **changes}
    return lab.run(lab.experiment(dataset, partition, spec, **changes), folder)


def params(weights: Weights) -> dict[str, torch.Tensor]:
    return dict(weights.params)


def test_two_rounds_by_hand(lab: Any, tmp_path: Path) -> None:
    """Two clients with a sample each, a linear model that starts at 0, η = 0.1, K = 1; rows of W are classes.

    Round 1, all c are 0, p = (1/2, 1/2). A: x = (2, 0), class 0: g_A = [[-1, 0], [1, 0]], bias (-1/2, 1/2). B: x =
    (0, 4), class 1: g_B = [[0, 2], [0, -2]], bias (1/2, -1/2). c_A = g_A, c_B = g_B, as (x - y)/(K η) is the gradient;
    c = [[-1/2, 1], [1/2, -1]], bias 0. The model: -η (g_A + g_B)/2 = [[0.05, -0.1], [-0.05, 0.1]], bias 0.

    Round 2, A: its logits are (0.1, -0.1), so p_0 = 1/(1 + e^-0.2) = 0.549834 and g_A = (p_0 - 1) [[2, 0], [-2, 0]] =
    [[-0.900332, 0], [0.900332, 0]], bias (-0.450166, 0.450166). With c - c_A = [[1/2, 1], [-1/2, -1]], bias (1/2, -1/2)
    it steps along [[-0.400332, 1], [0.400332, -1]], bias (0.049834, -0.049834). B: logits (-0.4, 0.4), p_0 = 1/(1 +
    e^0.8) = 0.310026, g_B = p_0 [[0, 4], [0, -4]] = [[0, 1.240102], [0, -1.240102]], bias (0.310026, -0.310026). With
    c - c_B = [[-1/2, -1], [1/2, 1]], bias (-1/2, 1/2): along [[-1/2, 0.240102], ...], bias (-0.189974, ...).
    The model: W_00 = 0.05 + 0.1 (0.400332 + 0.5)/2 = 0.0950166, W_01 = -0.1 - 0.1 (1 + 0.240102)/2 = -0.1620051,
    b_0 = -0.1 (0.049834 - 0.189974)/2 = 0.0070070. New c_A, c_B: the gradients g_A, g_B at the model of round 1.
    """
    dataset = lab.toy_dataset([[2, 0], [0, 4]], [0, 1], None, None)
    partition = lab.by_hand(dataset, [[0], [1]])
    given = {"local__lr": 0.1, "local__batch_size": 1, "partition__num_clients": 2, "federation__rounds": 2}
    run = scaffold(lab, tmp_path, dataset, partition, **given)
    weight, bias = params(run.state.server["model"]).values()
    torch.testing.assert_close(weight[0], torch.tensor([0.0950166, -0.1620051]), atol=1e-6, rtol=0)
    torch.testing.assert_close(weight[1], -weight[0])
    torch.testing.assert_close(bias, torch.tensor([0.0070070, -0.0070070]), atol=1e-6, rtol=0)
    controls = [params(run.memory(client)["control"]) for client in (0, 1)]
    ours = torch.stack([next(iter(control.values()))[0] for control in controls])
    torch.testing.assert_close(ours, torch.tensor([[-0.900332, 0.0], [0.0, 1.240102]]), atol=1e-5, rtol=0)
    total = params(run.state.server["control"])
    torch.testing.assert_close(next(iter(total.values()))[0], ours.mean(0))


def test_switched_off_it_is_fedavg_to_the_bit(lab: Any, tmp_path: Path) -> None:
    off = {"method__use_control": False, "method__weighting": "samples"}
    ours = scaffold(lab, tmp_path / "off", **off).state.server
    fedavg = lab.run(lab.experiment(), tmp_path / "fedavg").state.server
    assert ours.keys() == fedavg.keys() == {"model"}
    for name, tensor in fedavg["model"].arrays().items():
        assert torch.equal(ours["model"].arrays()[name], tensor)


def test_half_a_step_of_the_server_goes_half_the_way(lab: Any, tmp_path: Path) -> None:
    one = {"federation__rounds": 1}
    whole, half = (
        params(scaffold(lab, tmp_path / str(rate), method__server_lr=rate, **one).state.server["model"])
        for rate in (1.0, 0.5)
    )
    start = params(lab.experiment().setting.initial)
    for name, value in half.items():
        torch.testing.assert_close(value, (start[name] + whole[name]) / 2)


def test_control_variates_travel_and_are_counted(lab: Any, tmp_path: Path) -> None:
    """In each of three rounds the two clients sampled of four receive c and send a change, as large as the model."""
    run = scaffold(lab, tmp_path, federation__participation=0.5)
    last, size = run.history[-1], 4 * run.state.server["model"].num_parameters
    assert last["bytes_down"]["control"] == last["bytes_up"]["control_change"] == 3 * 2 * size
    assert last["bytes_down"]["model"] == last["bytes_up"]["model"] == 3 * 2 * size


def test_c_is_the_mean_of_what_clients_remember(lab: Any, tmp_path: Path) -> None:
    """Line 17 keeps it so whoever takes part; a client that never did has 0."""
    run = scaffold(lab, tmp_path, federation__participation=0.5)
    kept = [params(run.memory(client)["control"]) for client in run.state.memories]
    assert len(kept) >= 2
    for name, value in params(run.state.server["control"]).items():
        mean = torch.stack([control[name].double() for control in kept]).sum(0) / 4
        torch.testing.assert_close(value.double(), mean, atol=1e-6, rtol=1e-4)


def test_clients_in_a_stack_give_the_same_within_rounding(lab: Any, tmp_path: Path) -> None:
    one, stacked = (
        scaffold(lab, tmp_path / str(stack), engine__stack=stack, federation__rounds=2).state.server
        for stack in (False, True)
    )
    for slot in ("model", "control"):
        for name, value in params(one[slot]).items():
            torch.testing.assert_close(params(stacked[slot])[name], value, atol=1e-4, rtol=1e-3)


KILLED = """
import os, signal, sys
from flcore import run
from flcore.engine.rounds import Observers

def on_round(number, record):
    if number == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

run(sys.argv[1], sys.argv[2], observers=Observers(on_round=on_round))
"""


@pytest.mark.slow
def test_killed_after_a_round_and_called_again_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    raw = {
        "plugins": [str(PLUGIN)],
        "method": {"name": "scaffold"},
        "data": {"size": 16, "limit_per_class": 20},
        "partition": {"num_clients": 4, "min_size": 5},
        "federation": {"rounds": 4, "participation": 0.5},
        "local": {"lr": 0.05},
    }
    flcore.run(raw, tmp_path / "whole")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config.json"), str(tmp_path / "killed")]
    done = subprocess.run([*command, "2"], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed" / "history.jsonl").exists()
    again = subprocess.run([*command, "0"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    names = ["model.safetensors", "server.safetensors", "history.jsonl", "metrics.json", "curves.csv"]
    names += [f"clients/{path.name}" for path in (tmp_path / "whole" / "clients").iterdir()]
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"momentum": 0.5}, "local.momentum = 0.5: scaffold works with 0.0 alone"),
        ({"optimizer": "adam"}, "local.optimizer = adam: scaffold works with sgd alone"),
        ({"clip": 1.0}, "local.clip = 1.0: scaffold works with null alone"),
    ],
)
def test_what_would_make_its_control_variates_wrong_is_refused(local: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"plugins": [str(PLUGIN)], "method": {"name": "scaffold"}, "local": local})
    assert str(caught.value) == message
