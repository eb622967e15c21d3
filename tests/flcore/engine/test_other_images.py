"""Images other than the batch's in a loss (virtual data): behind the batch in one pass, or in a pass of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flcore.io.messages import Weights
from flcore.math.losses.basic import cross_entropy
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import Batch, ClientContext, LocalModel, LossInputs
from tests.cases import quick


@dataclass(frozen=True)
class Second(FedAvg):
    """FedAvg that also learns from ``width`` fixed images per step."""

    name: ClassVar[str] = "fedavg"
    width: int = 16
    joint: bool = False

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        generator = torch.Generator().manual_seed(1)
        return {"images": torch.randn(100, 1, 16, 16, generator=generator), "labels": torch.arange(100) % 6}

    def random_inputs(self, ctx: ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        return {"rows": torch.randint(100, (steps, self.width), generator=generator)}

    def loss(self, model: LocalModel, batch: Batch, context: LossInputs) -> dict[str, Tensor]:
        rows = batch.random_inputs["rows"]
        others, labels = context["images"][rows], context["labels"][rows]
        if self.joint:
            both = model.classify(model.features(torch.cat([batch.images, others])))
            logits, more = both.tensor_split([len(batch.labels)])
        else:
            beside = model.for_extra_inputs()
            logits = model.classify(model.features(batch.images))
            more = beside.classify(beside.features(others))
        return {
            "cross_entropy": cross_entropy(logits, batch.labels, batch.weight),
            "virtual": cross_entropy(more, labels),
        }


def distance(one: Weights, other: Weights) -> float:
    pairs = [(value.float(), other.values[name].float()) for name, value in one.values.items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


# A width of 16 is that of a whole batch (a mask of the wrong images would fit), 24 is more and 7 less.
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("width", quick([16, 24, 7], 1))
@pytest.mark.parametrize("model", quick(["fedgen_cnn", "fedproto_cnn", "fedcspc_cnn"], 1))
def test_stacked_and_serial_clients_learn_the_same_from_them(lab: Any, model: str, width: int, joint: bool) -> None:
    trained = []
    for stack in (False, True):
        experiment = lab.experiment(algorithm=Second(width, joint), model={"name": model}, engine__stack=stack)
        contexts = lab.train_stack(experiment, range(4))
        trained.append([contexts[client][0].message["model"] for client in range(4)])
    assert max(distance(one, other) for one, other in zip(*trained, strict=True)) < 1e-4
