"""FedAvg (McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017): weighted averaging of trained weights.

Client: minimise CE(w; D_k) from w_g. Server: w_g ← Σ_{k∈S} (n_k / N) w_k, N over the *sampled* clients (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flcore.aggregation.optimizers import server_step
from flcore.aggregation.weights import fold_weights
from flcore.io.messages import Count, Weights
from flcore.io.records import Payloads, Record
from flcore.methods import types as fl
from flcore.methods.api import Method


@dataclass(frozen=True)
class FedAvg(Method, name="fedavg", citation="McMahan et al., AISTATS 2017", reduces_to_fedavg={}):
    """Weighted averaging of locally trained weights."""

    @property
    def can_be_base(self) -> bool:
        return self.has_global_model

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        return {fl.MODEL: setting.initial}

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {fl.MODEL: server[fl.MODEL]}

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        return {fl.MODEL: trained.weights, fl.NUM_SAMPLES: Count(trained.num_samples)}, {}

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"aggregate": aggregate}


@fl.aggregates("weights")
def aggregate(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Return w_g ← Σ_{k∈S} (n_k / N) w_k, or the mean and server step of section ``aggregation``."""
    model, facts = fold_models(replies.of(fl.MODEL), sample_counts(replies), server, ctx)
    return with_model(server, model, ctx), facts


def fold_models(
    models: Mapping[int, Weights], sizes: Mapping[int, int], server: Record, ctx: fl.RoundContext
) -> tuple[Weights, fl.Metrics]:
    """Aggregate models of clients with weights `sizes` by the rule of section ``aggregation``."""
    return fold_weights(
        models,
        sizes,
        server[fl.MODEL],
        ctx.setting.aggregation,
        cohort=ctx.setting.cohort_size,
        generator=ctx.stream("aggregation noise"),
    )


def with_model(server: Record, model: Weights, ctx: fl.RoundContext) -> Record:
    """Return the record with `model`, or with a step of the server's optimiser towards it."""
    stepped, moments = server_step(server[fl.MODEL], model, server, ctx.setting.aggregation)
    return server | {fl.MODEL: stepped} | moments


def sample_counts(replies: fl.Replies) -> dict[int, int]:
    """Return n_k of every client with a reply."""
    return {client: count.value for client, count in replies.of(fl.NUM_SAMPLES).items()}
