"""Heads in closed form over given features, and the head that FedAvg trains on the same ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.core.rng import torch_stream
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.math.prototypes.client_means import pack_means, spread_of_means, unpack_means
from flcore.math.prototypes.discriminant import (
    ClassSums,
    LinearMap,
    discriminant,
    discriminant_sums,
    ridge,
)
from flcore.math.prototypes.fisher_mix import fisher_mix
from flcore.methods.closed_head import TOTALS, ClosedHead
from flcore.methods.kit.patch_sums import FILTERS
from flcore.methods.linear_probe import FEATURES, HEAD, SCALING
from flcore.methods.types import MODEL, Replies, RoundContext
from flcore.running import run

# Four images of 2x1 pixels, as features: 0, 2 | 0, 4 | 2, 0 | 4, 0; the first two are of class 0.
PIXELS, LABELS = [[0, 2], [0, 4], [2, 0], [4, 0]], [0, 0, 1, 1]


def test_the_spread_of_means_by_hand() -> None:
    """Class 0: two clients with two samples each, means 1 and 3: 2·1 + 2·1 = 4 about their mean 2, m − 1 = 1.

    Class 1 is at one client, mean 10: no spread. N = 6: the second moment is 16 + 4·6 + 200 = 240.
    """
    clients = [
        discriminant_sums(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0]), 2),
        discriminant_sums(torch.tensor([[3.0], [3.0], [10.0], [10.0]]), torch.tensor([0, 0, 1, 1]), 2),
    ]
    sent = [pack_means(sums, "float32") for sums in clients]
    assert [sorted(message) for message in sent] == [["classes", "counts", "sums"]] * 2
    arrived = [unpack_means(message, 2) for message in sent]
    assert [sums.second.item() for sums in arrived] == [2, 18 + 200]
    totals = spread_of_means(arrived[0] + arrived[1], torch.tensor([2, 1]))
    assert totals.second.item() == 240
    assert totals.counts.tolist() == [4, 2] and totals.sums.flatten().tolist() == [8, 20]


def on_pixels(lab: Any, clients: list[list[int]], **method: Any) -> Any:
    dataset = lab.toy_dataset(PIXELS, LABELS, None, None)
    partition = lab.by_hand(dataset, clients, [[0, 1]] * len(clients))
    settings = {"name": "closed_head", "wire": "float64", "shrinkage": 0.5, **method}
    return lab.experiment(dataset, partition, model={"name": "pixels"}, method=settings, federation={"rounds": 1})


def drawn(totals: ClassSums, shrinkage: float) -> LinearMap:
    return fisher_mix(totals, shrinkage, torch_stream(0, "fisher mix"))


@pytest.mark.parametrize(("head", "solve"), [("discriminant", discriminant), ("ridge", ridge), ("fisher_mix", drawn)])
def test_the_head_is_that_of_the_pixels(lab: Any, tmp_path: Path, head: str, solve: Any) -> None:
    """Two clients send what one would; nothing but the head goes down."""
    done = lab.run(on_pixels(lab, [[0, 2], [1, 3]], head=head), tmp_path / "run")
    pixels = torch.tensor(PIXELS, dtype=torch.float64)
    classes = len(done.state.server[TOTALS]["counts"])
    weight, bias = solve(discriminant_sums(pixels, torch.tensor(LABELS), classes), 0.5)
    torch.testing.assert_close(done.state.server[MODEL].params["head.weight"], weight.float())
    torch.testing.assert_close(done.state.server[MODEL].params["head.bias"], bias.float())
    assert FILTERS not in done.state.server


def test_means_alone_send_no_second_moment(lab: Any, tmp_path: Path) -> None:
    """Each client has one image of each class, so that its means are these images.

    Both classes have 2 holders: 2 degrees of freedom for 4 samples. Within: class 0 has (0, 2) and (0, 4), 1 + 1 in the
    second pixel, class 1 likewise in the first; times 4 / 2 that is (4, 4). Between: (0, 6)²/2 and (6, 0)²/2: 18 each.
    """
    done = lab.run(on_pixels(lab, [[0, 2], [1, 3]], covariance="means"), tmp_path / "run")
    totals = done.state.server[TOTALS]
    assert totals["holders"][:2].tolist() == [2, 2]
    second = torch.tensor([[22.0, 0.0], [0.0, 22.0]], dtype=torch.float64)
    weight, _ = discriminant(ClassSums(totals["counts"], totals["sums"], second), 0.5)
    torch.testing.assert_close(done.state.server[MODEL].params["head.weight"], weight.float())
    with pytest.raises(ValueError, match="covariance = means"):
        ClosedHead(covariance="means", noise_multiplier=1.0)


@pytest.mark.parametrize(("wire", "least"), [("float32", 1e-5), ("float16", 1e-3), ("int8", 1e-3)])
def test_cross_validation_stays_above_the_rounding(lab: Any, tmp_path: Path, wire: str, least: float) -> None:
    """The first pixel is 4 times the class: regression on it leaves no error as λ falls, so the least λ is taken."""
    pixels, labels = [[0, 1], [4, 2], [0, 3], [4, 1], [0, 2], [4, 3]], [0, 1] * 3
    dataset = lab.toy_dataset(pixels, labels, None, None)
    partition = lab.by_hand(dataset, [[0, 1, 2], [3, 4, 5]], [[0, 1]] * 2)
    method = {"name": "closed_head", "wire": wire, "shrinkage": None}
    experiment = lab.experiment(dataset, partition, model={"name": "pixels"}, method=method, federation={"rounds": 1})
    last = lab.run(experiment, tmp_path / "run").history[-1]
    (found,) = re.findall(r'"shrinkage": ([0-9.e-]+)', json.dumps(last))
    assert float(found) == pytest.approx(least)


@pytest.mark.slow
def test_over_a_pretrained_network_of_a_file(tmp_path: Path) -> None:
    """The file's network, stem included, gives the features: seeds change the division alone, not the head."""
    from torchvision.models import resnet18

    theirs = resnet18(weights=None).state_dict()
    save_file(theirs, tmp_path / "w.safetensors")
    model = {"name": "resnet18", "stem": "pretrained", "pretrained": str(tmp_path / "w.safetensors")}
    config = {
        "data": {"name": "digits", "limit_per_class": 4, "channels": 3, "size": 16},
        "partition": {"num_clients": 2, "alpha": 100.0, "min_size": 1},
        "model": model,
        "method": {"name": "closed_head", "wire": "float64"},
        "federation": {"rounds": 1, "participation": 1.0},
        "engine": {"workers": 0},
    }
    models = []
    for seed in (0, 1):
        run({**config, "seed": seed}, tmp_path / f"run-{seed}")
        models.append(load_file(tmp_path / f"run-{seed}" / "model.safetensors"))
    for found in models:
        stem = next(tensor for name, tensor in found.items() if name.endswith("encoder.conv1.weight"))
        assert torch.equal(stem, theirs["conv1.weight"])
    heads = [next(tensor for name, tensor in found.items() if name.endswith("head.weight")) for found in models]
    torch.testing.assert_close(*heads)
    with pytest.raises(ConfigError, match="stem = pretrained: set pretrained"):
        Config.from_mapping({"model": {"name": "resnet18", "stem": "pretrained"}})


def test_a_probe_standardises_by_all_clients_features(lab: Any) -> None:
    """First pixel: 0, 0, 2, 4: mean 1.5, variance 5 − 2.25 = 2.75. The averaged head reads (f − mean) / scale."""
    dataset = lab.toy_dataset(PIXELS, LABELS, None, None)
    partition = lab.by_hand(dataset, [[0, 2], [1, 3]], [[0, 1]] * 2)
    method = {"name": "linear_probe"}
    experiment = lab.experiment(dataset, partition, model={"name": "pixels"}, method=method, federation={"rounds": 1})
    server = Record(experiment.method.start_server(experiment.setting))
    first = {client: lab.train(experiment, client, server=server) for client in (0, 1)}
    ctx = RoundContext(experiment.setting, 1, "feature-sums")
    server, _ = experiment.method.scale(
        server, Replies({client: reply.message for client, (reply, _) in first.items()}), ctx
    )
    scale = 2.75**0.5
    assert server[SCALING]["mean"].tolist() == [1.5, 1.5]
    assert server[SCALING]["scale"].tolist() == pytest.approx([scale, scale])
    _, state = lab.train(experiment, 0, exchange=1, server=server, client_state=first[0][1])
    torch.testing.assert_close(state[FEATURES]["features"][0], torch.tensor([-1.5 / scale, 0.5 / scale]))

    head = Weights({"head.weight": torch.tensor([[scale, 0.0], [0.0, scale]]), "head.bias": torch.tensor([1.0, 2.0])})
    sent = lab.train(experiment, 0, exchange=2, server=server, client_state=state)[0].message
    assert list(sent) == [HEAD, "num_samples"]
    replies = Replies({0: {**sent, HEAD: head}})
    after, _ = experiment.method.aggregate(server, replies, ctx)
    assert after[MODEL].params["head.weight"].flatten().tolist() == pytest.approx([1, 0, 0, 1])
    assert after[MODEL].params["head.bias"].tolist() == pytest.approx([1 - 1.5, 2 - 1.5])


def test_a_probe_has_protoldas_features(lab: Any, tmp_path: Path) -> None:
    """The same dictionary, of all clients, although half of them train in a round; only heads travel later."""
    runs = {}
    for name in ("protolda", "linear_probe"):
        asked = {"rounds": 2, "participation": 1.0 if name == "protolda" else 0.5}
        experiment = lab.experiment(
            model=lab.model_of("protolda"), method={"name": name}, federation=asked, local={"lr": 0.3, "epochs": 5}
        )
        runs[name] = lab.run(experiment, tmp_path / name)
    one, other = (done.state.server[FILTERS].params for done in runs.values())
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert runs["linear_probe"].history[-1]["top1_global"] > 0.5
