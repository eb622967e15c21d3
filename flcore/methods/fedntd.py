"""FedNTD (Lee, Jeong, Shin, Bae, Yun, NeurIPS 2022): FedAvg that distils the received model on the not-true classes.

Client: CE(q, y) + β·KL(softmax(z_g^∖y/τ) ‖ softmax(z^∖y/τ)), batch mean, z^∖y the logits without the true class (C − 1
entries); z_g the received model's in evaluation mode, without gradient. Server: FedAvg.

There is no factor τ², as in the authors' code; ``tau_squared`` adds it. With two classes one logit is left, the term is
zero, the run is FedAvg's and the server warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Payloads
from flcore.math.losses.alignment import not_true_distillation
from flcore.math.losses.basic import cross_entropy
from flcore.methods import types as fl
from flcore.methods.api import ModelPart, teacher_output
from flcore.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedNTD(FedAvg, name="fedntd", citation="Lee et al., NeurIPS 2022", reduces_to_fedavg={"beta": 0.0}):
    """FedAvg with distillation of the global model on the classes that are not true."""

    beta: float = param(1.0, "weight β of the distillation", low=0, search=Search(choices=(0.1, 0.3, 1.0)))
    tau: float = param(
        1.0, "temperature τ of softmaxes", above=0, search=Search(choices=(1.0, 2.0, 3.0), when=lambda m: m.beta > 0)
    )
    tau_squared: bool = param(False, "multiply the distillation by τ², which the authors' code does not")

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        if setting.num_classes == 2 and self.beta > 0:
            warnings.warn(
                "fedntd: with two classes the distillation of not-true classes is zero; this run equals fedavg",
                stacklevel=2,
            )
        return super().start_server(setting)

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        return {name: weights.values for name, (_, weights) in self.teachers(ctx).items()}

    def teachers(self, ctx: fl.ClientContext) -> Mapping[str, tuple[ModelPart, Weights]]:
        return {"teacher": ("logits", ctx.with_statistics(ctx.received[fl.MODEL]))} if self.beta > 0 else {}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        logits = model.classify(model.features(batch.images))
        terms = {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}
        if self.beta > 0:
            teacher = teacher_output(model, batch, inputs, "teacher", "logits")
            distil = partial(not_true_distillation, temperature=self.tau, tau_squared=self.tau_squared)
            terms["distillation"] = self.beta * distil(logits, teacher, batch.labels, weight=batch.weight)
        return terms
