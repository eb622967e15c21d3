"""SCAFFOLD: rounds by hand, and what its controls add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flcore.io.messages import Weights


def scaffold(lab: Any, folder: Path, dataset: Any = None, partition: Any = None, **changes: Any) -> Any:
    """A run of the tiny federation, or of given data."""
    spec = lab.ToySpec() if dataset is not None else None
    changes = {"method__name": "scaffold", **changes}
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
    controls = [params(run.client_state(client)["control"]) for client in (0, 1)]
    ours = torch.stack([next(iter(control.values()))[0] for control in controls])
    torch.testing.assert_close(ours, torch.tensor([[-0.900332, 0.0], [0.0, 1.240102]]), atol=1e-5, rtol=0)
    total = params(run.state.server["control"])
    torch.testing.assert_close(next(iter(total.values()))[0], ours.mean(0))


def test_half_a_step_of_the_server_goes_half_the_way(lab: Any, tmp_path: Path) -> None:
    one = {"federation__rounds": 1}
    whole, half = (
        params(scaffold(lab, tmp_path / str(rate), method__server_lr=rate, **one).state.server["model"])
        for rate in (1.0, 0.5)
    )
    start = params(lab.experiment().setting.initial)
    for name, value in half.items():
        torch.testing.assert_close(value, (start[name] + whole[name]) / 2)


def test_c_is_the_mean_of_what_clients_remember(lab: Any, tmp_path: Path) -> None:
    """Line 17 keeps it so whoever takes part; a client that never did has 0."""
    run = scaffold(lab, tmp_path, federation__participation=0.5)
    kept = [params(run.client_state(client)["control"]) for client in run.state.client_states]
    assert len(kept) >= 2
    for name, value in params(run.state.server["control"]).items():
        mean = torch.stack([control[name].double() for control in kept]).sum(0) / 4
        torch.testing.assert_close(value.double(), mean, atol=1e-6, rtol=1e-4)
