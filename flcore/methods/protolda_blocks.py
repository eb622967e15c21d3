"""ProtoLDA where a second moment does not fit the budget: the head from products with it (ours; protolda.md section 3).

The features are ProtoLDA's. Instead of the second moment, D(D + 1)/2 numbers, clients send

3. ``statistics``: class counts, class sums and the diagonal of the second moment. Server ``begin-basis``: standardise;
   the first block of directions spans the class means.
4. ``products-1`` … ``-m``: receive C directions U, send Σ f (fᵀU). Server ``extend-basis``: the head that is best over
   all directions so far (`flcore/math/prototypes/discriminant.py`); its residual is the next block.
5. ``deliver-head``.

All clients answer in the first round, sampled or not; later rounds change nothing. A block costs 2·D·C numbers per
client: at D = 6,400 and C = 10 some 160 of them cost as much as the second moment in float32. Clients compute their
features again for every block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.prototypes.discriminant import Margins, directions, head, next_block, solved, standardised_products
from flcore.math.prototypes.release import clip_to_norm
from flcore.methods import types as fl
from flcore.methods.closed_head import DELIVERY_LEG, LDA_HEAD, STATISTICS_LEG
from flcore.methods.kit.patch_sums import ASKS_ONCE, CLASS_WEIGHTS, FILTERS, PatchSums

MARGINS = Key("margins", TensorDict)
"""``counts`` float64 [C], ``sums`` [C, D], ``squares`` [D] of a client; at the server, in float64, of all."""

BLOCK = Key("block", TensorDict)
"""``vectors`` [D, k]: directions for features that are not standardised."""

MOMENT_PRODUCTS = Key("products", TensorDict)
"""A client's ``products`` [D, k] of its second moment with the block."""

BASIS = Key("basis", TensorDict)
"""At the server, float64: ``basis`` and ``products`` [D, m], of standardised features; ``first`` [1], a size."""


@dataclass(frozen=True)
class ProtoLDABlocks(PatchSums, name="protolda_blocks", citation="protofl, 2026"):
    """ProtoLDA with many features: the head from products with their second moment."""

    exchanges: int = param(18, "m, blocks of directions that are exchanged", low=1, search=Search(4, 40, log=True))
    shrinkage: float = param(
        0.001, "λ, added to the standardised covariance's diagonal", above=0, search=Search(1e-5, 0.3, log=True)
    )

    @property
    def task_stream_error(self) -> str:
        return ASKS_ONCE

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        return {fl.MODEL: setting.initial}

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        delivery = fl.Exchange(DELIVERY_LEG, participants="all", phases=(), server_steps=())
        if round_number > 1:
            return (delivery,)
        statistics = replace(delivery, name=STATISTICS_LEG, server_steps=("begin-basis",))
        numbers = range(1, self.exchanges + 1)
        products = (replace(delivery, name=f"products-{i}", server_steps=("extend-basis",)) for i in numbers)
        dictionary = (replace(exchange, participants="all") for exchange in self.first_legs())
        return (*dictionary, statistics, *products, delivery)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        if ctx.exchange == DELIVERY_LEG:
            if ctx.round > 1:
                return {}
            return {LDA_HEAD: server[fl.MODEL].part("head.")}
        if ctx.exchange.startswith("products-"):
            return server.only(BLOCK)
        if ctx.exchange == STATISTICS_LEG:
            return server.only(FILTERS, CLASS_WEIGHTS)
        return super().broadcast(server, client, ctx)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        if ctx.exchange == DELIVERY_LEG:
            return {}, ctx.client_state
        if ctx.exchange == STATISTICS_LEG:
            return {MARGINS: self.margins(ctx, trained)}, ctx.received.only(FILTERS, CLASS_WEIGHTS)
        if not ctx.exchange.startswith("products-"):
            return super().reply(ctx, trained)
        return {MOMENT_PRODUCTS: self.products(ctx, trained)}, ctx.client_state

    def margins(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> TensorDict:
        """Return class counts, class sums and Σ f² of the client's features; noise as in ProtoLDA's statistics."""
        features, labels, weights = self._features(ctx, trained, ctx.received)
        weighted = features * weights[labels].unsqueeze(1)
        sums = features.new_zeros(ctx.setting.num_classes, features.shape[1]).index_add_(0, labels, weighted)
        squares = (weighted * features).sum(0)
        moved = math.sqrt(4.5) * self.clip
        own = {
            "sums": sums + self._noise(ctx, "class sums", sums.shape, moved),
            "squares": squares + self._noise(ctx, "squares", squares.shape, moved * self.clip),
        }
        counts = ctx.class_counts.cpu() * weights
        return TensorDict({"counts": counts, **{name: self._sent(value) for name, value in own.items()}})

    def products(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> TensorDict:
        """Return Σ f (fᵀU) of the client's features.

        With noise: replacing an image moves f fᵀU by at most √2·clip² times the largest singular value of U.
        """
        vectors = ctx.received[BLOCK]["vectors"].cpu().double()
        if vectors.shape[1] == 0:  # the residual is 0
            return TensorDict({"products": self._sent(vectors)})
        features, labels, weights = self._features(ctx, trained, ctx.client_state)
        products = features.mT @ ((features @ vectors) * weights[labels].unsqueeze(1))
        moved = math.sqrt(2) * self.clip**2 * float(torch.linalg.matrix_norm(vectors, 2))
        return TensorDict({"products": self._sent(products + self._noise(ctx, "products", products.shape, moved))})

    def _features(
        self, ctx: fl.ClientContext, trained: fl.TrainedClient, known: Record
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features float64 [n, D], labels [n], and the weights of classes [C]."""
        features, labels = trained.features(ctx.setting.initial.with_params(known[FILTERS]))
        features = clip_to_norm(features, self.clip) if self.noise_multiplier else features
        one = torch.ones(ctx.setting.num_classes, dtype=torch.float64)
        weights = known[CLASS_WEIGHTS]["weights"].cpu() if CLASS_WEIGHTS in known else one
        return features.cpu().double(), labels.cpu(), weights

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {**super().server_steps(), "begin-basis": self.begin_basis, "extend-basis": self.extend_basis}

    def begin_basis(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Sum over clients, and make the first block."""
        sent = list(replies.of(MARGINS).values())
        totals = {name: torch.stack([own[name].double() for own in sent]).sum(0) for name in sent[0].named}
        margins = Margins(**totals)
        first = float(torch.linalg.matrix_norm(margins.class_means, 2))
        none = torch.zeros(margins.sums.shape[1], 0, dtype=torch.float64)
        block = self._sent(directions(next_block(none, margins.class_means.mT, first), margins))
        basis = {"basis": none, "products": none, "first": torch.tensor([first], dtype=torch.float64)}
        after: Payloads = {MARGINS: TensorDict(totals), BLOCK: TensorDict({"vectors": block}), BASIS: TensorDict(basis)}
        return server | after, {}

    def extend_basis(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Solve the head over all directions so far, and make the next block.

        Metrics: the residual's size in units of the first one, and the number of directions.
        """
        margins, before = Margins(**server[MARGINS].named), server[BASIS]
        vectors = server[BLOCK]["vectors"].double()
        summed = torch.stack([own["products"].double() for own in replies.of(MOMENT_PRODUCTS).values()]).sum(0)
        # Directions as they arrived, so that their rounding has no effect.
        scale = torch.where(margins.scale.isinf(), 0.0, margins.scale).unsqueeze(1)
        basis = torch.cat([before["basis"], vectors * scale], 1)
        products = torch.cat([before["products"], standardised_products(vectors, summed, margins)], 1)
        noisy = self.noise_multiplier > 0
        solution, residual = solved(basis, products, margins, self.shrinkage, noisy=noisy)
        first = float(before["first"])
        block = self._sent(directions(next_block(basis, residual, first), margins))
        weight, bias = head(solution, margins)
        solved_head = Weights({"head.weight": weight.float(), "head.bias": bias.float()})
        model = ctx.setting.initial.with_params(server[FILTERS]).with_params(solved_head)
        kept = {"basis": basis, "products": products, "first": before["first"]}
        after = server | {fl.MODEL: model} | {BASIS: TensorDict(kept), BLOCK: TensorDict({"vectors": block})}
        size = float(torch.linalg.matrix_norm(residual, 2)) / first
        return after, {"residual": size, "directions": float(basis.shape[1])}

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        return self.account(1 + self.exchanges, "class sums, squares and products with the second moment")
