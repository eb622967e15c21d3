"""FedDC (Gao, Fu, Li, Chen, Xu, Xu, CVPR 2022): clients learn how far they drift, and the server corrects it.

Client k keeps its drift h_k and its last change g_k, both 0 before its first turn, and minimises from w = w_g

    CE + (α/2)·‖h_k + w − w_g‖² + 1/(η·S_k)·⟨w, g_k − g⟩,

η the learning rate of the round. η·S_k is how far a constant gradient of 1 moves a weight in the T_k steps of a turn:
the correction moves it by g − g_k in all. S_k = T_k for plain SGD (the paper's), and with momentum m

    S_k = Σ_{t=1..T_k} (1 − m^t)/(1 − m) = (T_k − m·(1 − m^T_k)/(1 − m))/(1 − m).

Deviation: the authors divide by η·T_k even with momentum; at m = 0.9 the correction is ten times too strong. Adam is
refused. With Δ = w_k − w_g the turn ends with h_k ← h_k + Δ and g_k ← Δ.

Server, over the S clients of the round and all K clients, those absent with their last values:

    track-drift:  h ← h + (1/K) Σ_{k∈S} (w_k − w_g),    g ← g + (1/K) Σ_{k∈S} (new g_k − old g_k);
    aggregate:    w_g ← (1/S) Σ_{k∈S} w_k + h,          h the mean of all h_k.

Down go w_g and g, up w_k and the change of g_k: 2P each way. Clients count alike. BatchNorm statistics are averaged.

``correction: recursive`` is the authors' code: their state s_k ← s_k − s − Δ/(η·S_k) enters the loss as ⟨w, s − s_k⟩
and replaces g_k everywhere else. That code also multiplies α and s by n_k / mean(n), left out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.aggregation.mean import uniform_mean
from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import inner_product, proximal
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg
from flcore.methods.kit.preset import AuthorsPreset

DRIFT = Key("drift", Weights)
"""h_k in a client's state; at the server h, the mean over all clients."""

LOCAL_CHANGE = Key("change", Weights)
"""g_k (or s_k) in a client's state; at the server and on its way down g, the mean over all clients."""

STEP = Key("change_step", Weights)
"""Change of a client's g_k (or s_k), on its way up."""


@dataclass(frozen=True)
class FedDC(
    AuthorsPreset,
    FedAvg,
    name="feddc",
    citation="Gao et al., CVPR 2022",
    reduces_to_fedavg={"use_drift": False, "use_correction": False},
):
    """FedAvg with a learned drift per client, decoupled from its weights and corrected."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {"correction": "recursive"}
    required_config: ClassVar[Mapping[str, tuple[Any, ...]]] = {"local.optimizer": ("sgd",)}

    alpha: float = param(
        0.01,
        "weight α of the penalty; 0.01 for CIFAR, 0.1 for MNIST",
        low=0,
        search=Search(choices=(0.001, 0.005, 0.01, 0.1), when=lambda m: m.use_drift),
    )
    correction: Literal["last", "recursive"] = param(
        "last", "gradients are corrected by the last change g_k, or by the state s_k of the authors' code"
    )
    use_drift: bool = param(True, "the drift h_k: its penalty at clients, its mean at the server", switch=True)
    use_correction: bool = param(True, "the correction of gradients by g_k − g", switch=True)

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = {**super().start_server(setting)}
        if self.use_drift:
            server[DRIFT] = setting.initial.zeros()
        if self.use_correction:
            server[LOCAL_CHANGE] = setting.initial.zeros()
        return server

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return server.only(fl.MODEL, LOCAL_CHANGE)

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        inputs = {}
        if self.use_drift and self.alpha > 0:
            drift = ctx.client_state.get(DRIFT, ctx.received[fl.MODEL].zeros())
            inputs["anchor"] = (ctx.received[fl.MODEL] - drift).params
        if self.use_correction:
            own, mean = ctx.client_state.get(LOCAL_CHANGE, ctx.received[fl.MODEL].zeros()), ctx.received[LOCAL_CHANGE]
            inputs["direction"] = (own - mean if self.correction == "last" else mean - own).params
        return inputs

    def random_inputs(self, ctx: fl.ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Return the factor of the correction in each step: 1/(η·S_k), which s_k includes already."""
        if not self.use_correction:
            return {}
        factor = 1 / response(ctx, steps) if self.correction == "last" else 1.0
        return {"correction": torch.full((steps,), factor)}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        terms = super().loss(model, batch, inputs)
        if "anchor" in inputs:
            terms["drift"] = proximal(model.params, inputs["anchor"], self.alpha)
        if "direction" in inputs:
            terms["correction"] = batch.random_inputs["correction"] * inner_product(model.params, inputs["direction"])
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = (dict(part) for part in super().reply(ctx, trained))
        moved = trained.weights - ctx.received[fl.MODEL]
        if self.use_drift:
            client_state[DRIFT] = ctx.client_state.get(DRIFT, ctx.received[fl.MODEL].zeros()) + moved
        if self.use_correction:
            before = ctx.client_state.get(LOCAL_CHANGE, ctx.received[fl.MODEL].zeros())
            client_state[LOCAL_CHANGE] = after = self.next_change(ctx, before, moved, trained.steps)
            message[STEP] = after - before
        return message, client_state

    def next_change(self, ctx: fl.ClientContext, before: Weights, moved: Weights, steps: int) -> Weights:
        """Return the new g_k = Δ, or s_k ← s_k − s − Δ/(η·S_k)."""
        if self.correction == "last":
            return moved
        return before - ctx.received[LOCAL_CHANGE] - moved * (1 / response(ctx, steps))

    @property
    def poisonable_payloads(self) -> frozenset[fl.Kind]:
        return frozenset({"weights"})

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        tracks = self.use_drift or self.use_correction
        return {**({"track-drift": track_drift} if tracks else {}), "aggregate": aggregate_with_drift}


def response(ctx: fl.ClientContext, steps: int) -> float:
    """Return η·S_k, the displacement of a weight by a constant gradient of 1; 0 steps count as 1."""
    count, kept = max(steps, 1), ctx.momentum
    return ctx.learning_rate * ((count - kept * (1 - kept**count) / (1 - kept)) / (1 - kept))


def track_drift(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Update h and g, means over all clients; absent clients keep theirs."""
    share = len(replies) / ctx.setting.num_clients
    if DRIFT in server:
        moved = uniform_mean(replies.of(fl.MODEL)) - server[fl.MODEL]
        server = server | {DRIFT: server[DRIFT] + share * moved}
    if LOCAL_CHANGE in server:
        server = server | {LOCAL_CHANGE: server[LOCAL_CHANGE] + share * uniform_mean(replies.of(STEP))}
    return server, {}


def aggregate_with_drift(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Set w_g to the mean of the round plus h; BatchNorm statistics are not shifted."""
    mean = uniform_mean(replies.of(fl.MODEL))
    if DRIFT in server:
        mean = Weights((mean + server[DRIFT]).params, mean.buffers)
    return server | {fl.MODEL: mean}, {}
