"""FedDyn (Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, ICLR 2021): dynamic regularisation of local losses.

Client k keeps g_k, the gradient of its loss after its last turn (0 at first), and minimises from w (Algorithm 1)

    CE(w_k) − ⟨g_k, w_k⟩ + (α/2) ‖w_k − w‖²,    then    g_k ← g_k − α (w_k − w).

Server, over the S clients of the round, K in all, h = 0 at first:

    h ← h − (α/K) Σ_{k∈S} (w_k − w),    w ← (1/|S|) Σ_{k∈S} w_k − h / α.

w goes down and w_k comes up: P each way, as FedAvg. g_k stays on the client, h on the server.

Choices. Clients count alike. The authors' code divides α by n_k / mean(n), left out here as in FedDC; it keeps −g_k/α,
which is the same. ``alpha: 0`` is FedAvg with uniform weights, not the limit α → 0 of h/α. The update of g_k
assumes that clients reach their minimum; any optimiser is accepted. BatchNorm statistics are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import inner_product, proximal
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg, fold_models, with_model

GRADIENT = Key("gradient", Weights)
"""g_k at a client, h at the server."""


@dataclass(frozen=True)
class FedDyn(FedAvg, name="feddyn", citation="Acar et al., ICLR 2021", reduces_to_fedavg={"alpha": 0.0}):
    """FedAvg with a dynamic regulariser that aligns the minima of clients."""

    alpha: float = param(
        0.01, "weight α of the regulariser; 0 switches it off", low=0, search=Search(choices=(0.001, 0.01, 0.1))
    )

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        return {**server, GRADIENT: setting.initial.zeros()} if self.alpha > 0 else server

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        return {"anchor": ctx.received[fl.MODEL].params, "gradient": own_gradient(ctx).params} if self.alpha > 0 else {}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        terms = super().loss(model, batch, inputs)
        if self.alpha > 0:
            terms["linear"] = -inner_product(model.params, inputs["gradient"])
            terms["proximal"] = proximal(model.params, inputs["anchor"], self.alpha)
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if self.alpha > 0:
            client_state = {GRADIENT: own_gradient(ctx) - self.alpha * (trained.weights - ctx.received[fl.MODEL])}
        return message, client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"aggregate": self.aggregate}

    @fl.aggregates("weights")
    def aggregate(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Update h and w, both by the mean of the round's w_k."""
        mean, facts = fold_models(replies.of(fl.MODEL), dict.fromkeys(replies, 1), server, ctx)
        if self.alpha == 0:
            return with_model(server, mean, ctx), facts
        share = len(replies) / ctx.setting.num_clients
        h = server[GRADIENT] - self.alpha * share * (mean - server[fl.MODEL])
        model = Weights((mean - h * (1 / self.alpha)).params, mean.buffers)
        return with_model(server, model, ctx) | {GRADIENT: h}, facts


def own_gradient(ctx: fl.ClientContext) -> Weights:
    """Return g_k, 0 before the client's first turn."""
    return ctx.client_state.get(GRADIENT, ctx.received[fl.MODEL].zeros())
