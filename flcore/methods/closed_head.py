"""A head in closed form over the features of a given model, from sums that clients send once.

The model is the initial one: random, or from a file (``model.pretrained``). It is never trained and never travels: all
parties have it. The exchanges:

1. ``statistics``: a client sends class counts, class sums (the prototypes, before division) and the second moment of
   its features. Server ``solve-head``: standardise by the summed moments, w_c = (S_w + λI)⁻¹ μ_c
   (`flcore/math/prototypes/discriminant.py`).
2. ``deliver-head``: the head goes to all clients, in the last round.

All messages are sums over images, so the head is the same for every division of the data, every order and any number
of clients. With ``federation.participation: 1`` one round does it all; otherwise clients sampled later add their sums
once.
In a stream of tasks a client answers once per task.

Clients in ``forget`` send their sums once more in the last round, and the server subtracts them: the result is exactly
the head without them.

``covariance: means`` sends no second moment: that within a class is estimated from the spread of its clients' means
(FedCOF, 2412.14326, pooled over classes). That head depends on the division.

``personal: mixture`` gives every client its own head, solved at the server from the total sums and κ times the client's
own: the head of data with each of its images 1 + κ times. It costs no more bytes than the global head, and is
impossible with secure aggregation.

Relatives: AFL (He et al., CVPR 2025), Fed3R (Fanì et al., ICML 2024): ``head: ridge``; FedCGS (2025), GH-OFL (Turazza
et al., ICLR 2026): ``head: discriminant``; GH-OFL's FisherMix: ``head: fisher_mix``, trained at the server on features
drawn from the sums (`flcore/math/prototypes/fisher_mix.py`).

Privacy: class sums of one image are its features, second moments of few have low rank; secure aggregation would show
sums over clients alone. With ``noise_multiplier`` every message is noisy, see :meth:`ClosedHead.privacy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.core.params import Search, param
from flcore.core.rng import torch_stream
from flcore.io.messages import Count, Payload, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.prototypes import discriminant as lda
from flcore.math.prototypes.client_means import pack_means, spread_of_means, unpack_means
from flcore.math.prototypes.fisher_mix import fisher_mix
from flcore.math.prototypes.gaussians import from_upper_triangles, upper_triangles
from flcore.math.prototypes.release import clip_to_norm
from flcore.methods import types as fl
from flcore.methods.api import ScoreKind
from flcore.methods.kit.noisy_sums import NoisySums
from flcore.methods.kit.patch_sums import CLASS_WEIGHTS, FILTERS

CLASS_STATISTICS = Key("statistics", TensorDict)
"""A client's class sums, see :func:`flcore.math.prototypes.discriminant.pack_sums`."""

TASK = Key("task", Count)
"""The task of a client's statistics."""

TOTALS = Key("totals", TensorDict)
"""At the server, float64: ``counts`` [C], ``sums`` [C, D], ``second`` [D(D + 1)/2]; ``answered`` int64 [m, 2]: client
and task of every answer in them; with ``covariance: means`` also ``holders`` int64 [C]: answers by class."""

LDA_HEAD = Key("head", Weights)
"""The head as it is delivered."""

TOTAL_COUNTS = Key("class_counts", TensorDict)
"""For scoring, on its way down: ``counts`` float64 [C], all clients' samples by class."""

OWN = Key("own", TensorDict)
"""In a client's state: ``counts`` int64 [C] that it reported, ``tasks`` int64 [m] that it answered for."""

EACH = Key("each", TensorDict)
"""At the server: ``clients`` int64 [m], their sums ``counts`` [m, C], ``sums`` [m, C, D], ``second`` [m, D(D + 1)/2],
and their heads ``weight`` [m, C, D] and ``bias`` [m, C]."""

STATISTICS_LEG, DELIVERY_LEG, FORGET_LEG = "statistics", "deliver-head", "forget"


@dataclass(frozen=True)
class ClosedHead(
    NoisySums, name="closed_head", citation="He et al., CVPR 2025; Fanì et al., ICML 2024", needs_linear_head=True
):
    """A linear head in closed form over the features of the initial (pretrained) model."""

    head: Literal["discriminant", "ridge", "fisher_mix"] = param(
        "discriminant",
        "Fisher's discriminant, ridge regression, or cosines trained on features drawn from sums",
    )
    covariance: Literal["moment", "means"] = param(
        "moment", "from a second moment of all samples, or from the spread of the clients' class means"
    )
    shrinkage: float | None = param(
        0.001, "λ of the standardised covariance; null: cross-validation", above=0, search=Search(1e-5, 0.3, log=True)
    )
    personal: Literal["none", "shares", "mixture"] = param(
        "none", "clients answer with the global head, that head with their class shares, or a head of weighted sums"
    )
    own_weight: float = param(1.0, "κ, weight of a client's own sums in its head (mixture)", low=0)
    deliver: Literal["end", "every_round"] = param("end", "when the head goes down to clients")
    forget: tuple[int, ...] = param((), "clients whose sums are subtracted in the last round", low=0)
    min_count: int = param(1, "samples that a client needs of a class to report it", low=1)

    def __post_init__(self) -> None:
        """Refuse forgetting noise, and heads of sums or class shares that the server lacks."""
        super().__post_init__()
        if self.forget and self.noise_multiplier:
            raise ValueError(f"forget = {list(self.forget)}: noisy sums cannot be subtracted; set noise_multiplier = 0")
        if self.personal != "none" and self.head != "discriminant":
            raise ValueError(f"personal = {self.personal}: {self.head} has no class shares; set head = discriminant")
        if self.personal == "mixture" and self.noise_multiplier and self.noise_of == "sum":
            raise ValueError("personal = mixture: noise_of = sum hides a client's own sums; use shares")
        if self.covariance == "means" and (self.forget or self.noise_multiplier or self.personal == "mixture"):
            raise ValueError("covariance = means: without forget, noise and personal = mixture; use moment")

    @property
    def task_stream_error(self) -> str | None:
        value = list(self.forget)
        error = f"with method.forget = {value} subtracts one task's sums alone; set it to none, or forget=[]"
        return error if value else None

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        if self.forget and max(self.forget) >= setting.num_clients:
            raise ConfigError(f"method.forget = {max(self.forget)}: the last client is {setting.num_clients - 1}")
        return {fl.MODEL: setting.initial}

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        exchanges = list(self.first_legs() if round_number == 1 else ())
        exchanges.append(fl.Exchange(STATISTICS_LEG, phases=(), server_steps=("solve-head",)))
        last = round_number == setting.rounds
        if last and self.forget:
            exchanges.append(fl.Exchange(FORGET_LEG, "all", phases=(), server_steps=("forget-clients",)))
        if last or self.deliver == "every_round":
            exchanges.append(fl.Exchange(DELIVERY_LEG, "all" if last else "cohort", phases=(), server_steps=()))
        return tuple(exchanges)

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        """Send what makes the features to new clients; at the end the head."""
        if ctx.exchange == FORGET_LEG and client not in self.forget:
            return {}
        if ctx.exchange == DELIVERY_LEG:
            model = self._own_model(server, client) or server[fl.MODEL]
            return {LDA_HEAD: model.part("head.")}
        if TOTALS in server and bool((server[TOTALS]["answered"][:, 0] == client).any()):
            return {}
        return server.only(FILTERS, CLASS_WEIGHTS)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        if ctx.exchange == DELIVERY_LEG:
            return {}, ctx.client_state
        if ctx.exchange == FORGET_LEG:
            if ctx.client not in self.forget or OWN not in ctx.client_state:
                return {}, ctx.client_state
            return self.statistics(ctx, trained, ctx.client_state), ctx.client_state
        task = ctx.task or 0
        none = TensorDict({"counts": torch.zeros_like(ctx.class_counts), "tasks": ctx.class_counts[:0]})
        own = ctx.client_state.get(OWN, none)
        if task in own["tasks"].tolist():
            return {}, ctx.client_state
        known = Record({**ctx.client_state, **ctx.received})
        counts, tasks = own["counts"].cpu() + ctx.class_counts.cpu(), [*own["tasks"].tolist(), task]
        own = TensorDict({"counts": counts, "tasks": torch.tensor(tasks, dtype=torch.int64)})
        return {**self.statistics(ctx, trained, known), TASK: Count(task)}, {**known, OWN: own}

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {"solve-head": self.solve_head, "forget-clients": self.forget_clients}

    def statistics(self, ctx: fl.ClientContext, trained: fl.TrainedClient, known: Record) -> Payloads:
        """Return class sums of the client's features as they travel; none if no class has ``min_count`` samples.

        With noise: features of norm at most ``clip``. Replacing an image's f by g moves (sums/clip, second/clip²) by at
        most √(2 − 2c + 2 − 2c²) ≤ √4.5 for their cosine c = −½. Class counts are taken to be public.
        """
        setting = ctx.setting
        frequent = ctx.class_counts.cpu() >= max(self.min_count, 1)
        if not frequent.any():
            return {}
        weights = setting.initial.with_params(known.get(FILTERS))
        features, labels = (values.cpu() for values in trained.features(weights))
        features, labels = features[frequent[labels]], labels[frequent[labels]]
        if self.noise_multiplier:
            features = clip_to_norm(features, self.clip)
        own = known[CLASS_WEIGHTS]["weights"].cpu() if CLASS_WEIGHTS in known else None
        sums = lda.discriminant_sums(features, labels, setting.num_classes, own)
        if self.noise_multiplier:
            moved = math.sqrt(4.5) * self.clip
            noise = self._noise(ctx, "class sums", sums.sums.shape, moved)
            # The other clients add the rest of the noise of a class that one holds: all report all classes then.
            held = (sums.counts > 0).unsqueeze(1) | (self.noise_of == "sum")
            second = self._symmetric(ctx, "second moment", setting.feature_dim, moved * self.clip)
            sums = lda.ClassSums(sums.counts, sums.sums + noise * held, sums.second + second)
        if self.covariance == "means":
            return {CLASS_STATISTICS: TensorDict(pack_means(sums, self.wire))}
        every = bool(self.noise_multiplier) and self.noise_of == "sum"
        return {CLASS_STATISTICS: TensorDict(lda.pack_sums(sums, self.wire, every=every))}

    def solve_head(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Add new answers to the sums, and solve the head. Metrics: answers in the sums, λ, and repeated answers."""
        totals, before = _sums(server, ctx.setting)
        answered, classes = before.tolist(), ctx.setting.num_classes
        sent, tasks = replies.of(CLASS_STATISTICS), replies.of(TASK)
        new = [client for client in sent if [client, tasks[client].value] not in answered]
        unpack = unpack_means if self.covariance == "means" else lda.unpack_sums
        totals = lda.add_sums((unpack(sent[client].named, classes) for client in new), totals)
        pairs = torch.tensor([*answered, *([c, tasks[c].value] for c in new)], dtype=torch.int64).reshape(-1, 2)
        if self.personal == "mixture" and new:
            server |= {EACH: _merged(server, {client: lda.unpack_sums(sent[client].named, classes) for client in new})}
        holders = None
        if self.covariance == "means":
            known = torch.zeros(classes, dtype=torch.int64)
            holders = server[TOTALS]["holders"] if TOTALS in server else known
            for client in new:
                holders = holders.index_add(0, sent[client]["classes"], torch.ones_like(sent[client]["classes"]))
        after, facts = self._solved(server, totals, pairs, ctx.setting, holders)
        repeated = len(sent) - len(new)
        return after, {**facts, "repeated_answers": float(repeated)} if repeated else facts

    def forget_clients(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Subtract the sums of forgotten clients, and solve the head."""
        totals, pairs = _sums(server, ctx.setting)
        for client, statistics in replies.of(CLASS_STATISTICS).items():
            totals = totals - lda.unpack_sums(statistics.named, ctx.setting.num_classes)
            pairs = pairs[pairs[:, 0] != client]
        if EACH in server:
            present = torch.isin(server[EACH]["clients"], pairs[:, 0])
            server |= {EACH: TensorDict({name: values[present] for name, values in server[EACH].named.items()})}
        return self._solved(server, totals, pairs, ctx.setting)

    def _solved(
        self,
        server: Record,
        totals: lda.ClassSums,
        pairs: Tensor,
        setting: fl.FederationContext,
        holders: Tensor | None = None,
    ) -> tuple[Record, fl.Metrics]:
        facts = {"answers": float(len(pairs))}
        model = setting.initial
        if float(totals.counts.sum()) > 0:
            used = totals if holders is None else spread_of_means(totals, holders)
            # Cross-validation does not see what the wire rounds, and would take λ from among these errors.
            grid = [value for value in lda.GRID if value > 0.99 * lda.ROUNDING[self.wire]]
            shrinkage = lda.cross_validated(used, grid) if self.shrinkage is None else self.shrinkage
            facts["shrinkage"] = shrinkage
            weight, bias = self._head(used, shrinkage, setting.seed)
            head = Weights({"head.weight": weight.float(), "head.bias": bias.float()})
            model = setting.initial.with_params(server.get(FILTERS)).with_params(head)
            if EACH in server:
                server |= {EACH: self._with_heads(server[EACH], totals, shrinkage, setting.seed)}
        sums = {"counts": totals.counts, "sums": totals.sums, "second": upper_triangles(totals.second)}
        sums |= {"answered": pairs} | ({} if holders is None else {"holders": holders})
        return server | {fl.MODEL: model, TOTALS: TensorDict(sums)}, facts

    def _head(self, totals: lda.ClassSums, shrinkage: float, seed: int) -> lda.LinearMap:
        noisy = self.noise_multiplier > 0
        if self.head == "fisher_mix":
            return fisher_mix(totals, shrinkage, torch_stream(seed, "fisher mix"), noisy=noisy)
        solve = lda.discriminant if self.head == "discriminant" else lda.ridge
        return solve(totals, shrinkage, noisy=noisy)

    def _with_heads(self, each: TensorDict, totals: lda.ClassSums, shrinkage: float, seed: int) -> TensorDict:
        """Add the head of each client: of the total sums and κ times its own, with its own class shares."""
        heads = []
        for own in _sums_by_client(each):
            weight = self.own_weight
            mixed = totals + lda.ClassSums(weight * own.counts, weight * own.sums, weight * own.second)
            solved, bias = self._head(mixed, shrinkage, seed)
            heads.append((solved.float(), lda.reweighted(bias, mixed.counts, own.counts).float()))
        weights, biases = (torch.stack(list(part)) for part in zip(*heads, strict=True))
        return TensorDict({**each.named, "weight": weights, "bias": biases})

    def _own_model(self, server: Record, client: int) -> Weights | None:
        """Return the model with the client's own head, if it has one."""
        if EACH not in server or client not in (clients := server[EACH]["clients"].tolist()):
            return None
        row = clients.index(client)
        head = {f"head.{name}": server[EACH][name][row] for name in ("weight", "bias")}
        return server[fl.MODEL].with_params(Weights(head))

    @property
    def score_kind(self) -> ScoreKind:
        """The discriminant gives log-posteriors; ridge estimates indicators of the classes, FisherMix cosines."""
        return "logits" if self.head == "discriminant" else "ranks"

    @property
    def predicts_from_client_state(self) -> bool:
        return self.personal != "none"

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        message: dict[str, Payload] = {**super().scoring_message(server, client, ctx)}
        if self.personal == "mixture" and (own := self._own_model(server, client)):
            message[LDA_HEAD] = own.part("head.")
        if self.personal == "shares" and TOTALS in server:
            message[TOTAL_COUNTS] = TensorDict({"counts": server[TOTALS]["counts"]})
        return message

    def client_model(self, received: Record, client_state: Record, setting: fl.FederationContext) -> Weights | None:
        if self.personal == "mixture":
            return received[fl.MODEL].with_params(received[LDA_HEAD]) if LDA_HEAD in received else None
        if self.personal == "none" or OWN not in client_state:
            return None
        model, before = received[fl.MODEL], received[TOTAL_COUNTS]["counts"]
        bias = lda.reweighted(model.params["head.bias"], before, client_state[OWN]["counts"].double())
        return model.with_params(Weights({"head.bias": bias.float()}))

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        return self.account(1, "class sums and second moments")


def _sums(server: Record, setting: fl.FederationContext) -> tuple[lda.ClassSums, Tensor]:
    """Return the server's sums, and the (client, task) pairs in them."""
    if TOTALS not in server:
        nothing = lda.ClassSums.nothing(setting.num_classes, setting.feature_dim)
        return nothing, torch.zeros(0, 2, dtype=torch.int64)
    totals = server[TOTALS]
    sums = lda.ClassSums(totals["counts"], totals["sums"], from_upper_triangles(totals["second"]))
    return sums, totals["answered"]


def _merged(server: Record, new: Mapping[int, lda.ClassSums]) -> TensorDict:
    """Return the sums per client, in order of ids, with the new ones added."""
    every: dict[int, lda.ClassSums] = {}
    if EACH in server:
        every = dict(zip(server[EACH]["clients"].tolist(), _sums_by_client(server[EACH]), strict=True))
    for client, sums in new.items():
        every[client] = every[client] + sums if client in every else sums
    clients = sorted(every)
    return TensorDict(
        {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "counts": torch.stack([every[client].counts for client in clients]),
            "sums": torch.stack([every[client].sums for client in clients]),
            "second": torch.stack([upper_triangles(every[client].second) for client in clients]),
        }
    )


def _sums_by_client(each: TensorDict) -> Iterator[lda.ClassSums]:
    """Yield each client's sums, in order of ids."""
    for counts, sums, second in zip(each["counts"], each["sums"], each["second"], strict=True):
        yield lda.ClassSums(counts, sums, from_upper_triangles(second))
