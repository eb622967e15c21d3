"""FedGen (Zhu, Hong, Zhou, ICML 2021): a small generator of features, trained on the clients' heads, teaches clients.

Generator G: (noise ε [z], label y) → feature [d]. h is the model's head, f its encoder, r the round counted from 0.

Server, Adam, ``gen_steps`` steps on batches of ``gen_batch`` (Eq. 4 and the authors' code), y uniform over the classes
that a sampled client drew in this round:

    L = α · mean_i Σ_k ω_{k,y_i} · CE(h_k(G(ε_i, y_i)), y_i) + η · exp(−mean_ij δ_G(i, j) · δ_ε(i, j)),
    ω_{k,c} = (n_{k,c} + 1) / Σ_j (n_{j,c} + 1), n_{k,c}: how often client k drew a sample of class c in this round.

Client from the second round on (Eq. 5):

    CE(x, y) + γ_r · (B_gen/B) · CE(h(G(ε, ŷ)), ŷ) + β_r · KL(softmax h(G(ε, y)) ‖ softmax h(f(x))),

γ_r = max(1e-4, γ·0.98^r), β_r likewise; ŷ uniform over all classes that a client has reported so far; the KL term's
target is a constant. A weight of 0 switches its term off; the floor does not raise it.

Deviations from the authors' code: noise is normal as in the paper (the code: uniform) and weights belong to samples
(the code multiplies [B] by [B, 1]); ``preset: authors`` restores both. The student term, of weight 0 in the released
configuration, is left out. Clients report the classes they drew; the server does not know all data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.core.schedules import exponential
from flcore.io.messages import TensorDict
from flcore.io.records import Payloads, Record
from flcore.math.generators.features import diversity_loss, fidelity_loss, frozen_head_logits, teacher_divergence
from flcore.math.generators.networks import constant_output, draw_noise
from flcore.math.losses.basic import cross_entropy
from flcore.methods import types as fl
from flcore.methods.kit import feature_generator as gen
from flcore.methods.kit.server_training import Terms


@dataclass(frozen=True)
class FedGen(
    gen.FeatureGeneratorMethod,
    name="fedgen",
    citation="Zhu et al., ICML 2021",
    reduces_to_fedavg={"gamma": 0.0, "beta": 0.0},
):
    """A server-trained generator of features teaches the clients' heads and models."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {"noise": "uniform", "div_metric": "code", "fidelity": "authors_broadcast"}

    gamma: float = param(
        10.0, "γ, initial weight of the loss on generated features", low=0, search=Search(0.1, 50, log=True)
    )
    beta: float = param(
        10.0, "β, initial weight of the divergence (EMNIST: 1)", low=0, search=Search(0.1, 50, log=True)
    )
    decay: float = param(
        0.98, "factor of both weights per round", above=0, high=1, search=Search(0.95, 1.0, when=lambda m: m.generates)
    )
    alpha: float = param(1.0, "α, weight of the heads' loss in the generator's loss", above=0)
    eta: float = param(
        1.0, "η, weight of diversity in the generator's loss", low=0, search=Search(0, 5, when=lambda m: m.generates)
    )

    @property
    def generates(self) -> bool:
        return self.gamma > 0 or self.beta > 0

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        if gen.FEATURE_GENERATOR not in ctx.received:
            return {}
        gamma, beta = (
            exponential(weight, self.decay, gen.FLOOR)(ctx.rounds_done) for weight in (self.gamma, self.beta)
        )
        generator = ctx.received[gen.FEATURE_GENERATOR]
        weights = {"gamma": gamma * self.generated_share(ctx), "beta": beta}
        return {
            **{name: weight for name, weight in weights.items() if weight > 0},
            "architecture": self.architecture(ctx.setting),
            "generator": {"params": generator.params, "buffers": generator.buffers},
        }

    def random_inputs(self, ctx: fl.ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        if gen.FEATURE_GENERATOR not in ctx.received:
            return {}
        drawn = self.generated(ctx, steps, generator) if self.gamma > 0 else {}
        if self.beta > 0:
            size = ctx.setting.batch_size
            noise = draw_noise(steps * size, self.noise_dim, generator, self.noise)
            drawn["noise"] = noise.reshape(steps, size, self.noise_dim)
        return drawn

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        logits = model.classify(model.features(batch.images))
        terms = {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}
        if "gamma" in inputs:
            terms["generated"] = inputs["gamma"] * gen.generated_cross_entropy(model, batch)
        if "beta" in inputs:
            noise = batch.random_inputs["noise"][: batch.labels.shape[0]]
            generator = inputs["architecture"].network
            counterparts = constant_output(generator, **inputs["generator"], noise=noise, labels=batch.labels)
            teacher = model.for_extra_inputs().classify(counterparts)
            terms["divergence"] = inputs["beta"] * teacher_divergence(logits, teacher, batch.weight)
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if self.generates:
            message = {**message, gen.LABEL_COUNTS: TensorDict({"drawn": trained.drawn_labels()})}
        return message, client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        train: dict[str, fl.ServerStep] = {"train-generator": self.train_generator} if self.generates else {}
        return {**train, **super().server_steps()}

    def objective(self, server: Record, heads: gen.Heads, passed: int) -> gen.Objective:
        def loss(outputs: Tensor, noise: Tensor, labels: Tensor) -> Terms:
            logits = frozen_head_logits(outputs, heads.params)
            terms = {"fidelity": (self.alpha, fidelity_loss(logits, labels, heads.shares, self.fidelity))}
            if self.eta > 0:
                terms["diversity"] = (self.eta, diversity_loss(outputs, noise, labels, "all", self.div_metric))
            return terms

        return loss
