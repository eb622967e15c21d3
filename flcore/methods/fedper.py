"""FedPer (Arivazhagan, Aggarwal, Singh, Choudhary, 2019): a shared base under personal top layers, trained jointly.

Client: minimise CE over base f and top h together, from the received f and its own last h (at first the initial one);
upload f. Server: FedAvg of f (Algorithm 1). A client predicts with the current f and its h.

There is no global model. For scoring alone the base is completed by the mean of all clients' tops, weighted by samples
(baselines.md section 21). BatchNorm statistics belong to the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flcore.core.errors import ConfigError
from flcore.core.params import param
from flcore.io.messages import Weights
from flcore.io.records import Key, Payloads, Record
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg

TOP = Key("top", Weights)
"""A client's personal layers, in its state."""


@dataclass(frozen=True)
class FedPer(FedAvg, name="fedper", citation="Arivazhagan et al., 2019", has_global_model=False):
    """Shared lower layers, personal upper layers, trained together."""

    head_from: Literal["head", "fully_connected"] = param(
        "head", "personal: the last layer, or all fully connected layers (GFPL's choice for small CNNs)"
    )

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        shared = self.base(setting.initial)
        if not shared.params:
            raise ConfigError(f"method.head_from = {self.head_from}: this model has no other layers to share")
        return {fl.MODEL: shared}

    def initial_weights(self, ctx: fl.ClientContext) -> Weights:
        return self.whole(ctx.received[fl.MODEL], ctx.client_state, ctx.setting)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        top = trained.weights.only(self.personal(trained.weights)).without_buffers()
        return {**message, fl.MODEL: self.base(trained.weights)}, {**client_state, TOP: top}

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {fl.MODEL: server[fl.MODEL]}

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        return self.whole(received[fl.MODEL], client_state, setting)

    def personal(self, weights: Weights) -> tuple[str, ...]:
        """Return the names of the personal parameters of a whole model."""
        prefixes = ["head."]
        if self.head_from == "fully_connected":
            prefixes += [layer_of(name) for name, tensor in weights.params.items() if tensor.ndim == 2]
        return tuple(name for name in weights.params if name.startswith(tuple(prefixes)))

    def base(self, weights: Weights) -> Weights:
        """Return the shared part of a whole model."""
        personal = self.personal(weights)
        return weights.only([name for name in weights.params if name not in personal])

    def whole(self, base: Weights, client_state: Record, setting: fl.FederationContext) -> Weights:
        """Return a base under the top in a client state, or under the initial one."""
        top = client_state[TOP].params if TOP in client_state else {}
        return Weights({**setting.initial.params, **base.params, **top}, base.buffers)


def layer_of(parameter: str) -> str:
    """Return the prefix that a layer's parameters share: ``encoder.2.`` of ``encoder.2.weight``."""
    return parameter.rpartition(".")[0] + "."
