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
from flcore.methods.api import Method
from flcore.methods.types import (
    MODEL,
    NUM_SAMPLES,
    ClientContext,
    FederationContext,
    Metrics,
    Replies,
    RoundContext,
    ServerStep,
    TrainedClient,
    aggregates,
)


@dataclass(frozen=True)
class FedAvg(Method, name="fedavg", citation="McMahan et al., AISTATS 2017", reduces_to_fedavg={}):
    """Weighted averaging of locally trained weights."""

    @property
    def can_be_base(self) -> bool:
        return self.has_global_model

    def start_server(self, setting: FederationContext) -> Payloads:
        return {MODEL: setting.initial}

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        return {MODEL: server[MODEL]}

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        return {MODEL: trained.weights, NUM_SAMPLES: Count(trained.num_samples)}, {}

    def server_steps(self) -> Mapping[str, ServerStep]:
        return {"aggregate": aggregate}


@aggregates("weights")
def aggregate(server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
    """w_g ← Σ_{k∈S} (n_k / N) w_k, or the fold and server step that the section ``aggregation`` asks for."""
    model, facts = fold_models(replies.of(MODEL), sample_counts(replies), server, ctx)
    return with_model(server, model, ctx), facts


def fold_models(
    models: Mapping[int, Weights], sizes: Mapping[int, int], server: Record, ctx: RoundContext
) -> tuple[Weights, Metrics]:
    """Fold models of clients into one, with weights `sizes`, as the section ``aggregation`` says."""
    return fold_weights(
        models,
        sizes,
        server[MODEL],
        ctx.setting.aggregation,
        cohort=ctx.setting.cohort_size,
        generator=ctx.stream("aggregation noise"),
    )


def with_model(server: Record, model: Weights, ctx: RoundContext) -> Record:
    """Return the record with `model`, or with the step of the server's optimiser towards it."""
    stepped, kept = server_step(server[MODEL], model, server, ctx.setting.aggregation)
    return server | {MODEL: stepped} | kept


def sample_counts(replies: Replies) -> dict[int, int]:
    """Return n_k of every client that answered."""
    return {client: count.value for client, count in replies.of(NUM_SAMPLES).items()}
