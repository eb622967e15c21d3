"""ProtoLDA (ours; no paper): label-free features from summed moments, class prototypes, one shared second moment.

Nothing is trained by gradients. Everything that clients send is a sum over their images, so that the model is the same
for every division of the data, every order and any number of clients (protolda.md). Each client answers once, in legs:

1. ``patch-moments``, 2. ``dictionary-1`` … ``-s``: a whitened dictionary (`flcore/methods/kit/patch_sums.py`).
3. ``statistics``: receives the filters, sends class counts, class sums (the prototypes, before division) and the second
   moment of its features (`flcore/models/patch_dictionary.py`). Server ``solve-head``: standardise by the summed
   moments, w_c = (S_w + λI)⁻¹ μ_c (`flcore/math/prototypes/discriminant.py`).
4. ``deliver-head``: the head goes to everybody, in the last round.

With ``federation.participation: 1`` one round does it all. Otherwise the first cohort makes the dictionary (where
everybody in it drops out the run stops), and whoever is sampled later and has not answered yet adds its sums; who
failed may answer in a later round. In a stream of tasks a
client answers once per task, and old tasks, being in the sums, are not forgotten. A client that is told of (``forget``)
sends its sums once more in the last round, and they are taken off: what is left is exactly the head without it, over
the same dictionary (and, with ``balance``, the same weights). Not with noise, which would be another, or tasks.

Relatives: Coates, Lee, Ng (AISTATS 2011), Thiry et al. (ICLR 2021): the features; AFL (He et al., CVPR 2025), Fed3R
(Fanì et al., ICML 2024): heads in closed form over pretrained features; CCVR; FedCGS (2025).

``personal: mixture`` gives every client a head of its own, solved at the server from everybody's sums and κ times the
client's own: since sums add up, that is the head of data in which each of its images stands 1 + κ times. It costs no
byte more than the global head, and cannot be had with secure aggregation.

Choice: ``balance`` weights samples by one over the number of their class, which clients then tell beforehand.

Privacy: class sums of one image are its features, second moments of few have low rank; sums over clients are what
secure aggregation gives. With ``noise_multiplier`` every message is noisy, see :meth:`ProtoLDA.privacy`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.core.params import Search, param
from flcore.io.messages import Count, Payload, TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.prototypes.discriminant import (
    GRID,
    ClassSums,
    LinearMap,
    add_sums,
    cross_validated,
    discriminant,
    discriminant_sums,
    pack_sums,
    reweighted,
    ridge,
    unpack_sums,
)
from flcore.math.prototypes.gaussians import from_upper_triangles, upper_triangles
from flcore.math.prototypes.release import clip_to_norm
from flcore.methods.api import ScoreKind
from flcore.methods.kit.patch_sums import CLASS_WEIGHTS, FILTERS, PatchSums
from flcore.methods.kit.sums_by_client import EACH, merge_sums, only, sums_of_each
from flcore.methods.types import (
    MODEL,
    ClientContext,
    Exchange,
    FederationContext,
    Metrics,
    Replies,
    RoundContext,
    ServerStep,
    TrainedClient,
)

CLASS_STATISTICS = Key("statistics", TensorDict)
"""A client's class sums, see :func:`flcore.math.prototypes.discriminant.pack_sums`."""

TASK = Key("task", Count)
"""The task of the stream that statistics are of."""

TOTALS = Key("totals", TensorDict)
"""At the server, float64: ``counts`` [C], ``sums`` [C, D], ``second`` [D(D + 1)/2]; ``answered`` int64 [m, 2]: the
client and task of every answer in them."""

LDA_HEAD = Key("head", Weights)
"""The head as it is delivered."""

CLASS_COUNTS = Key("class_counts", TensorDict)
"""For scoring, on its way down: ``counts`` float64 [C], everybody's samples by class."""

OWN = Key("own", TensorDict)
"""In a client's memory: ``counts`` int64 [C] of what it told, ``tasks`` int64 [m] that it answered for."""

STATISTICS_LEG, DELIVERY_LEG, FORGET_LEG = "statistics", "deliver-head", "forget"


@dataclass(frozen=True)
class ProtoLDA(PatchSums):
    """Sums of patches, then sums of features, then one linear system."""

    name: ClassVar[str] = "protolda"
    summary: ClassVar[str] = "features from summed moments, class prototypes and one second moment, head in closed form"
    citation: ClassVar[str] = "protofl, 2026"

    head: Literal["discriminant", "ridge"] = param("discriminant", "Fisher's discriminant, or ridge regression")
    shrinkage: float | None = param(
        0.001,
        "λ, added to the standardised covariance's diagonal; null: by generalised cross-validation",
        above=0,
        search=Search(1e-5, 0.3, log=True),
    )
    personal: Literal["none", "shares", "mixture"] = param(
        "none",
        "clients answer with the global head, with their own class shares in it, or with a head of their own, of "
        "everybody's sums and own_weight times their own",
    )
    own_weight: float = param(1.0, "κ, weight of a client's own sums beside everybody's, with personal: mixture", low=0)
    deliver: Literal["end", "every_round"] = param("end", "when the head goes down to clients")
    forget: tuple[int, ...] = param((), "clients whose sums are taken off again in the last round", low=0)
    min_count: int = param(1, "samples that a client needs of a class to tell of it", low=1)

    def __post_init__(self) -> None:
        """Refuse what would not be exact: forgetting noise, and heads of sums or shares that the server lacks."""
        super().__post_init__()
        if self.forget and self.noise_multiplier:
            raise ValueError(
                f"forget = {list(self.forget)}: noisy sums cannot be taken off exactly, and asking again is a release "
                "that the account lacks; leave forget out, or set noise_multiplier = 0"
            )
        if self.personal != "none" and self.head == "ridge":
            raise ValueError(
                f"personal = {self.personal}: a ridge head's biases hold no class shares; set head = discriminant"
            )
        if self.personal == "mixture" and self.noise_multiplier and self.noise_of == "sum":
            raise ValueError("personal = mixture: with noise_of = sum nobody knows a client's own sums; use shares")
        if self.personal == "mixture" and self.balance:
            raise ValueError("personal = mixture: with balance sums do not tell a client's class shares; use shares")

    @property
    def task_stream_error(self) -> str | None:
        """With ``forget`` a client sends the sums of the data that it has then, which are one task's."""
        if not self.forget:
            return None
        return f"with method.forget = {list(self.forget)} takes off one task's sums alone; set it to none, or forget=[]"

    # ---- the round -----------------------------------------------------------------------------------------------

    def start_server(self, setting: FederationContext) -> Payloads:
        """The initial model; sums are there once somebody has answered.

        Raises:
            ConfigError: a client to forget does not exist.
        """
        if self.forget and max(self.forget) >= setting.num_clients:
            raise ConfigError(
                f"method.forget = {max(self.forget)}: clients are numbered 0 to {setting.num_clients - 1}"
            )
        return {MODEL: setting.initial}

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        """The dictionary's in the first round; statistics in every one; the head's delivery in the last, or in all."""
        exchanges = list(self.dictionary_legs() if round_number == 1 else ())
        exchanges.append(Exchange(STATISTICS_LEG, phases=(), server_steps=("solve-head",)))
        last = round_number == setting.rounds
        if last and self.forget:
            exchanges.append(Exchange(FORGET_LEG, participants="all", phases=(), server_steps=("forget-clients",)))
        if last or self.deliver == "every_round":
            exchanges.append(
                Exchange(DELIVERY_LEG, participants="all" if last else "cohort", phases=(), server_steps=())
            )
        return tuple(exchanges)

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """Filters to whom they are new; class weights where samples have any; at the end the head.

        Raises:
            ConfigError: nobody was there in the first round, when the dictionary is made.
        """
        if ctx.exchange in (STATISTICS_LEG, DELIVERY_LEG) and FILTERS not in server:
            raise ConfigError(
                "federation.dropout and federation.participation left nobody in round 1, whose cohort (here of "
                f"{ctx.setting.cohort_size}) makes the dictionary; lower dropout, or raise participation"
            )
        if ctx.exchange == FORGET_LEG and client not in self.forget:
            return {}
        if ctx.exchange == DELIVERY_LEG:
            model = self._own_model(server, client) or server[MODEL]
            return {LDA_HEAD: _head_of(model)}
        if ctx.exchange not in (STATISTICS_LEG, FORGET_LEG):
            return super().broadcast(server, client, ctx)
        if TOTALS in server and bool((server[TOTALS]["answered"][:, 0] == client).any()):
            return {}
        return server.only(FILTERS, CLASS_WEIGHTS)

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """What the exchange asks for; nothing where this client has told it already."""
        if ctx.exchange == DELIVERY_LEG:
            return {}, ctx.client_state
        if ctx.exchange == FORGET_LEG:
            if ctx.client not in self.forget or OWN not in ctx.client_state:
                return {}, ctx.client_state
            return self._told(ctx, trained, ctx.client_state), ctx.client_state
        if ctx.exchange != STATISTICS_LEG:
            return super().reply(ctx, trained)
        task = ctx.task or 0
        own = ctx.client_state.get(
            OWN, TensorDict({"counts": torch.zeros_like(ctx.class_counts), "tasks": ctx.class_counts[:0]})
        )
        if task in own["tasks"].tolist():
            return {}, ctx.client_state
        known = Record({**ctx.client_state, **ctx.received})
        counts, tasks = own["counts"].cpu() + ctx.class_counts.cpu(), [*own["tasks"].tolist(), task]
        told = TensorDict({"counts": counts, "tasks": torch.tensor(tasks, dtype=torch.int64)})
        return {**self._told(ctx, trained, known), TASK: Count(task)}, {**known, OWN: told}

    def server_steps(self) -> Mapping[str, ServerStep]:
        """Whitening, k-means, the head, and taking sums off again."""
        return {**super().server_steps(), "solve-head": self.solve_head, "forget-clients": self.forget_clients}

    # ---- clients -------------------------------------------------------------------------------------------------

    def _told(self, ctx: ClientContext, trained: TrainedClient, known: Record) -> dict[str, Payload]:
        """The client's class sums, or nothing where all of its classes are too rare to be told of."""
        found = self.statistics(ctx, trained, known)
        return {} if found is None else {CLASS_STATISTICS: found}

    def statistics(self, ctx: ClientContext, trained: TrainedClient, known: Record) -> TensorDict | None:
        """Class sums of the client's features, as they travel; None where no class has ``min_count`` samples.

        With noise: features of norm at most ``clip``. Replacing an image's f by g moves (sums/clip, second/clip²) by at
        most √(2 − 2c + 2 − 2c²) ≤ √4.5 for their cosine c = −½. Class counts are taken to be public.

        Args:
            ctx: the client's. trained: its samples. known: what it received now and before.
        """
        setting = ctx.setting
        frequent = ctx.class_counts.cpu() >= max(self.min_count, 1)
        if not frequent.any():
            return None
        weights = Weights({**setting.initial.params, **known[FILTERS].params})
        features, labels = trained.features(weights)
        features, labels = features.cpu(), labels.cpu()
        features, labels = features[frequent[labels]], labels[frequent[labels]]
        if self.noise_multiplier:
            features = clip_to_norm(features, self.clip)
        own = known[CLASS_WEIGHTS]["weights"].cpu() if CLASS_WEIGHTS in known else None
        sums = discriminant_sums(features, labels, setting.num_classes, own)
        if self.noise_multiplier:
            moved = math.sqrt(4.5) * self.clip
            noise = self._noise(ctx, "class sums", sums.sums.shape, moved)
            # Of a class that one client holds the others add the rest of the noise: all tell of all classes then.
            held = (sums.counts > 0).unsqueeze(1) | (self.noise_of == "sum")
            second = self._symmetric(ctx, "second moment", setting.feature_dim, moved * self.clip)
            sums = ClassSums(sums.counts, sums.sums + noise * held, sums.second + second)
        every = bool(self.noise_multiplier) and self.noise_of == "sum"
        return TensorDict(pack_sums(sums, self.wire, every=every))

    # ---- the server ----------------------------------------------------------------------------------------------

    def solve_head(self, server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
        """Server stage: new answers join the sums, and the head is solved from them.

        Facts: how many answers are in the sums, the λ that was taken, and answers that were there already.
        """
        totals, before = _sums(server, ctx.setting)
        answered, classes = [(client, task) for client, task in before.tolist()], ctx.setting.num_classes
        tasks, new, repeated = replies.of(TASK), [], 0
        for client, statistics in replies.of(CLASS_STATISTICS).items():
            if (client, tasks[client].value) in answered:
                repeated += 1
                continue
            answered.append((client, tasks[client].value))
            new.append((client, statistics))
        totals = add_sums((unpack_sums(own.named, classes) for _, own in new), totals)
        pairs = torch.tensor(answered, dtype=torch.int64).reshape(-1, 2)
        if self.personal == "mixture" and new:
            server |= {EACH: merge_sums(server, ((client, unpack_sums(own.named, classes)) for client, own in new))}
        after, facts = self._solved(server, totals, pairs, ctx.setting)
        return after, {**facts, "repeated_answers": float(repeated)} if repeated else facts

    def forget_clients(self, server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
        """Server stage: sums of those who are forgotten are taken off, and the head is solved again."""
        totals, pairs = _sums(server, ctx.setting)
        for client, statistics in replies.of(CLASS_STATISTICS).items():
            totals = totals - unpack_sums(statistics.named, ctx.setting.num_classes)
            pairs = pairs[pairs[:, 0] != client]
        if EACH in server:
            server |= {EACH: only(server[EACH], set(pairs[:, 0].tolist()))}
        return self._solved(server, totals, pairs, ctx.setting)

    def _solved(
        self, server: Record, totals: ClassSums, pairs: Tensor, setting: FederationContext
    ) -> tuple[Record, Metrics]:
        facts = {"answers": float(len(pairs))}
        model = setting.initial
        if float(totals.counts.sum()) > 0:
            shrinkage = cross_validated(totals, GRID) if self.shrinkage is None else self.shrinkage
            facts["shrinkage"] = shrinkage
            weight, bias = self._head(totals, shrinkage)
            head = {"head.weight": weight.float(), "head.bias": bias.float()}
            model = Weights({**setting.initial.params, **server[FILTERS].params, **head})
            if EACH in server:
                server |= {EACH: self._with_heads(server[EACH], totals, shrinkage)}
        return server | {MODEL: model, TOTALS: _kept(totals, pairs)}, facts

    def _head(self, totals: ClassSums, shrinkage: float) -> LinearMap:
        solve = discriminant if self.head == "discriminant" else ridge
        return solve(totals, shrinkage, noisy=self.noise_multiplier > 0)

    def _with_heads(self, each: TensorDict, totals: ClassSums, shrinkage: float) -> TensorDict:
        """With the head of each client: of everybody's sums and κ times its own, with the client's own class shares."""
        heads = []
        for own in sums_of_each(each):
            weight = self.own_weight
            mixed = totals + ClassSums(weight * own.counts, weight * own.sums, weight * own.second)
            solved, bias = self._head(mixed, shrinkage)
            heads.append((solved.float(), reweighted(bias, mixed.counts, own.counts).float()))
        weights, biases = (torch.stack(list(part)) for part in zip(*heads, strict=True))
        return TensorDict({**each.named, "weight": weights, "bias": biases})

    def _own_model(self, server: Record, client: int) -> Weights | None:
        """A client's own model, where it has one: the dictionary with its own head."""
        if EACH not in server or client not in (clients := server[EACH]["clients"].tolist()):
            return None
        place = clients.index(client)
        head = {f"head.{name}": server[EACH][name][place] for name in ("weight", "bias")}
        return Weights({**server[MODEL].params, **head})

    # ---- answers -------------------------------------------------------------------------------------------------

    @property
    def score_kind(self) -> ScoreKind:
        """Logits, as the discriminant's are log-posteriors; a ridge head estimates indicators of the classes."""
        return "logits" if self.head == "discriminant" else "ranks"

    @property
    def predicts_from_client_state(self) -> bool:
        """With personal answers, which makes clients be asked; with its own shares it knows its class counts."""
        return self.personal != "none"

    def scoring_message(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The global model, with the client's own head or with everybody's class counts where it answers by these."""
        message: dict[str, Payload] = {**super().scoring_message(server, client, ctx)}
        if self.personal == "mixture" and (own := self._own_model(server, client)):
            message[LDA_HEAD] = _head_of(own)
        if self.personal == "shares" and TOTALS in server:
            message[CLASS_COUNTS] = TensorDict({"counts": server[TOTALS]["counts"]})
        return message

    def client_model(self, received: Record, client_state: Record, setting: FederationContext) -> Weights | None:
        """With personal answers the global head with the client's own class shares, or the client's own head."""
        if self.personal == "mixture":
            return Weights({**received[MODEL].params, **received[LDA_HEAD].params}) if LDA_HEAD in received else None
        if self.personal == "none" or OWN not in client_state:
            return None
        model, before = received[MODEL], received[CLASS_COUNTS]["counts"]
        bias = reweighted(model.params["head.bias"], before, client_state[OWN]["counts"].double())
        return Weights({**model.params, "head.bias": bias.float()})

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """What noise on every message costs: one release for each of the 2 + s messages of a client, once per run."""
        return self.account(1, "class sums and second moments")


def _head_of(model: Weights) -> Weights:
    return Weights({name: value for name, value in model.params.items() if name.startswith("head.")})


def _kept(totals: ClassSums, answered: Tensor) -> TensorDict:
    second = upper_triangles(totals.second)
    return TensorDict({"counts": totals.counts, "sums": totals.sums, "second": second, "answered": answered})


def _sums(server: Record, setting: FederationContext) -> tuple[ClassSums, Tensor]:
    """What the server has summed so far, and whose answers for which task are in it."""
    if TOTALS not in server:
        nothing = ClassSums.nothing(setting.num_classes, setting.feature_dim)
        return nothing, torch.zeros(0, 2, dtype=torch.int64)
    totals = server[TOTALS]
    sums = ClassSums(totals["counts"], totals["sums"], from_upper_triangles(totals["second"]))
    return sums, totals["answered"]
