"""FeSEM (Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, *Multi-center federated learning*, 2020): clients around J centres.

Stochastic expectation maximisation of Σ_k ‖w_k − v_{r_k}‖², once per round. Client k minimises CE from its centre
v_{r_k}; then, over the clients S of the round,

* server step *assign-clients* (E): r_k ← argmin_j ‖w_k − v_j‖², the first of equals; other clients keep r_k;
* server step *aggregate* (M): v_j ← mean of the w_k with r_k = j; without such a client in S it stays.

Distances are over all parameters, in float64. A centre without any member, sampled or not, takes the client of S that
is farthest from its own centre, unless that empties another cluster.

First assignment (baselines.md section 18; clients that start from independent centres would never leave them): in round
1 *all* clients train from the initial model, and k-means with a k-means++ start on their models assigns them. With J =
1 round 1 samples too, and the run is FedAvg with uniform weights, or with ``weighted`` FedAvg itself. A client that
failed in round 1 starts from centre 0, and belongs to no centre until it replies.

A client predicts with its centre. The mean over centres, weighted by members, is scored as global (section 21).

Metrics: ``cluster_size_j`` (of all clients), ``objective`` (over S, after the M-step, every client once), ``moved``
(clients of S that changed centres).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flcore.aggregation.mean import average_weights
from flcore.core.params import Search, param
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg, sample_counts

Models = Mapping[int, Weights]

CLUSTER_ASSIGNMENT = Key("assignment", TensorDict)
"""``centre`` int64 [K]: the centre of each client; −1 before its first answer."""

MOST_ITERATIONS = 50
"""Limit of the first k-means, which settles in a few."""


@dataclass(frozen=True)
class FeSEM(FedAvg, name="fesem", citation="Xie et al., 2020", has_global_model=False):
    """Several global models; a client belongs to the one nearest to its trained weights."""

    centres: int = param(3, "J, global models side by side", low=1, high=1000, search=Search(choices=(2, 3, 4)))
    weighted: bool = param(False, "weigh clients by their samples in the mean of their cluster")

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        unknown = TensorDict({"centre": torch.full((setting.num_clients,), -1, dtype=torch.int64)})
        return {CLUSTER_ASSIGNMENT: unknown, **{centre_slot(j): setting.initial for j in range(self.centres)}}

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        return (fl.Exchange(participants="all" if round_number == 1 and self.centres > 1 else "cohort"),)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return {fl.MODEL: server[centre_slot(max(assignment_of(server)[client], 0))]}

    @property
    def poisonable_payloads(self) -> frozenset[fl.Kind]:
        return frozenset({"weights"})

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"assign-clients": self.assign_clients, "aggregate": self.aggregate}

    def assign_clients(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Assign each client with a reply to its centre (E)."""
        models, before = replies.of(fl.MODEL), assignment_of(server)
        if all(centre < 0 for centre in before):
            assigned = cluster_models(models, self.centres, ctx.numpy_stream("fesem centres"))
        else:
            absent = Counter(centre for k, centre in enumerate(before) if k not in models and centre >= 0)
            assigned = assign(models, self.centres_of(server), absent)
        after = [assigned.get(client, centre) for client, centre in enumerate(before)]
        moved = sum(before[client] not in (-1, centre) for client, centre in assigned.items())
        assignment = TensorDict({"centre": torch.tensor(after, dtype=torch.int64)})
        return server | {CLUSTER_ASSIGNMENT: assignment}, {"moved": float(moved)}

    def aggregate(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        models, assignment = replies.of(fl.MODEL), assignment_of(server)
        sizes = sample_counts(replies) if self.weighted else dict.fromkeys(models, 1)
        own = {client: assignment[client] for client in models}
        centres = {**self.centres_of(server), **cluster_means(models, own, sizes)}
        members = Counter(assignment)
        facts = {f"cluster_size_{j}": float(members[j]) for j in range(self.centres)}
        facts["objective"] = sum(squared_distance(models[client], centres[j]) for client, j in own.items())
        return server | {centre_slot(j): centre for j, centre in centres.items()}, facts

    def centres_of(self, server: Record) -> dict[int, Weights]:
        return {j: server[centre_slot(j)] for j in range(self.centres)}

    def global_model(self, server: Record) -> Weights | None:
        members = Counter(centre for centre in assignment_of(server) if centre >= 0)
        if not members:
            return server[centre_slot(0)]  # before the first reply: still the initial model
        return average_weights({j: server[centre_slot(j)] for j in members}, members)

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return self.broadcast(server, client, ctx)

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        return received[fl.MODEL]


def centre_slot(number: int) -> Key[Weights]:
    """Return the key of a centre."""
    return Key(f"centre_{number:04d}", Weights)


def assignment_of(server: Record) -> list[int]:
    """Return the centre of each client, −1 if unknown."""
    assignment: list[int] = server[CLUSTER_ASSIGNMENT]["centre"].tolist()
    return assignment


def squared_distance(first: Weights, second: Weights) -> float:
    """Return ‖w − v‖² over all parameters."""
    parts = ((first.params[name] - tensor).square().sum(dtype=torch.float64) for name, tensor in second.params.items())
    return float(sum(parts))


def assign(models: Models, centres: Models, absent: Mapping[int, int] | None = None) -> dict[int, int]:
    """Return the nearest centre of each model, with a model moved to every centre without a member.

    ``absent`` counts the members of a centre, by number, that are not among the models.
    """
    assignment, distance = {}, {}
    for client, model in models.items():
        distances = {j: squared_distance(model, centre) for j, centre in centres.items()}
        assignment[client] = min(distances, key=lambda j: distances[j])
        distance[client] = distances[assignment[client]]
    members = Counter(assignment.values()) + Counter(absent or {})
    for empty in (j for j in centres if members[j] == 0):
        spare = [client for client in models if members[assignment[client]] > 1 and distance[client] > 0]
        if not spare:
            break
        farthest = max(spare, key=lambda client: distance[client])
        members[assignment[farthest]] -= 1
        assignment[farthest], distance[farthest], members[empty] = empty, 0.0, 1
    return assignment


def cluster_means(models: Models, assignment: Mapping[int, int], sizes: Mapping[int, int]) -> dict[int, Weights]:
    """Return per centre the mean of its models; none for centres without a model or a sample."""
    means = {}
    for j in sorted(set(assignment.values())):
        own = {client: model for client, model in models.items() if assignment[client] == j}
        if any(sizes[client] > 0 for client in own):
            means[j] = average_weights(own, sizes)
    return means


def cluster_models(models: Models, count: int, generator: np.random.Generator) -> dict[int, int]:
    """Cluster models by their parameters: k-means++ start, then E and M until nothing changes.

    If fewer than ``count`` models differ, the last clusters have no member. A float64 matrix of all models is avoided.
    """
    equal = dict.fromkeys(models, 1)
    centres = dict(enumerate(spread_models(models, count, generator)))
    assignment: dict[int, int] = {}
    for _ in range(MOST_ITERATIONS):
        before, assignment = assignment, assign(models, centres)
        if assignment == before:
            break
        centres = {**centres, **cluster_means(models, assignment, equal)}
    return assignment


def spread_models(models: Models, count: int, generator: np.random.Generator) -> list[Weights]:
    """Start k-means++ (Arthur, Vassilvitskii, SODA 2007): draw each next model with probability ∝ its squared distance.

    The distance is to the nearest chosen one; fewer than ``count`` are chosen if fewer models differ.
    """
    clients = list(models)
    chosen = [models[clients[int(generator.integers(len(clients)))]]]
    nearest = np.array([squared_distance(models[client], chosen[0]) for client in clients])
    while len(chosen) < count and nearest.any():
        chosen.append(models[clients[int(generator.choice(len(clients), p=nearest / nearest.sum()))]])
        nearest = np.minimum(nearest, [squared_distance(models[client], chosen[-1]) for client in clients])
    return chosen
