"""FedDecorr: a step by hand, and what it is for (baselines.md 12)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flcore.math.losses.basic import correlation_penalty

CSPC = {"name": "fedcspc_cnn", "projection_dim": 16}


def test_one_step_by_hand(lab: Any) -> None:
    """z = E·x at E = I for the four samples of fact a: r² = 0.9, variances 20/3 and 18/3; the penalty 9/4·r² = 2.025.

    With z_1 = x_1 + e·x_2 dr/de = (σ_2/σ_1)·(1 - r²) at e = 0, so the penalty rises with E_01 by 9/4·2r·0.1·√0.9 =
    0.405 and with E_10 by 9/4·2r·0.1/√0.9 = 0.45; scaling a dimension changes nothing. The cross-entropy gives E
    nothing through a head of zeros. Learning rate 0.1, β = 2.
    """
    dataset = lab.toy_dataset([[1, 2], [3, 5], [5, 5], [7, 8]], [0, 1, 0, 1], None, None)
    experiment = lab.experiment(
        dataset,
        lab.by_hand(dataset, [[0, 1, 2, 3]], [[0, 1]]),
        lab.ToySpec(encoder=True),
        method={"name": "feddecorr", "beta": 2.0},
        local={"lr": 0.1, "batch_size": 100},
    )
    reply, _ = lab.train(experiment)
    assert reply.losses["decorrelation"] == pytest.approx(2 * 2.025, abs=1e-5)
    encoder = reply.message["model"].params["encoder.1.weight"]
    assert encoder.flatten().tolist() == pytest.approx([1, -0.2 * 0.405, -0.2 * 0.45, 1], abs=1e-5)


@pytest.mark.slow
def test_features_are_less_correlated_with_it(lab: Any) -> None:
    """A client of two classes, trained with and without, in the mean over three seeds: what FedDecorr is for.

    At the laboratory's rate of 0.1 the term makes training swing and one seed's outcome is that of the machine's
    rounding; at 0.03, for twenty passes, it is not.
    """
    labels = lab.dataset.train.labels
    own = torch.nonzero(labels < 2).flatten().tolist()
    partition = lab.by_hand(lab.dataset, [own], [range(60)])
    images = lab.dataset.train.images[own].float() / 255

    def correlation(beta: float, seed: int) -> float:
        method = {"name": "feddecorr", "beta": beta}
        experiment = lab.experiment(
            partition=partition, model=CSPC, method=method, seed=seed, local__lr=0.03, local__epochs=20
        )
        weights = lab.train(experiment)[0].message["model"]
        return float(correlation_penalty(experiment.setting.network.features(images, weights.values), scaling="paper"))

    assert sum(correlation(0.2, seed) for seed in range(3)) < 0.75 * sum(correlation(0.0, seed) for seed in range(3))
