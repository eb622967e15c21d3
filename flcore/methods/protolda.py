"""ProtoLDA (ours; no paper): label-free features from summed moments, class prototypes, one shared second moment.

There are no gradients. All messages of clients are sums over their images, so the model is the same for every division
of the data, every order and any number of clients (protolda.md). Each client answers once, in these exchanges:

1. ``patch-moments``, 2. ``dictionary-1`` … ``-s``: a whitened dictionary (`flcore/methods/kit/patch_sums.py`).
3. ``statistics`` and ``deliver-head``: the head over these features (`flcore/methods/closed_head.py`,
   `flcore/models/patch_dictionary.py`), to which the filters go down first.

The first cohort makes the dictionary. ``balance`` weights samples by one over the number of their class. ``forget``
subtracts sums over the same dictionary (and, with ``balance``, the same weights).

Relatives: Coates, Lee, Ng (AISTATS 2011), Thiry et al. (ICLR 2021): the features; those of
`flcore/methods/closed_head.py`: the head; DeepAFL (ICLR 2026): features, too, from clients' sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flcore.core.errors import ConfigError
from flcore.io.records import Payloads, Record
from flcore.methods import types as fl
from flcore.methods.closed_head import DELIVERY_LEG, FORGET_LEG, STATISTICS_LEG, ClosedHead
from flcore.methods.kit.patch_sums import FILTERS, PatchSums

_HEAD_LEGS = (STATISTICS_LEG, FORGET_LEG, DELIVERY_LEG)


@dataclass(frozen=True)
class ProtoLDA(ClosedHead, PatchSums, name="protolda", citation="protofl, 2026"):
    """Features from summed moments, class prototypes and one second moment, head in closed form."""

    def __post_init__(self) -> None:
        """Refuse sums that hide a client's class shares."""
        super().__post_init__()
        if self.personal == "mixture" and self.balance:
            raise ValueError("personal = mixture: sums with balance hide a client's class shares; use shares")

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        """Refuse a run whose first round had no client.

        Raises:
            ConfigError: no client was in the first round, which makes the dictionary.
        """
        if ctx.exchange in (STATISTICS_LEG, DELIVERY_LEG) and FILTERS not in server:
            raise ConfigError(
                "federation.dropout and federation.participation left no client in round 1, which makes the "
                f"dictionary (a cohort of {ctx.setting.cohort_size}); lower dropout, or raise participation"
            )
        part = ClosedHead if ctx.exchange in _HEAD_LEGS else PatchSums
        return part.broadcast(self, server, client, ctx)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        return (ClosedHead if ctx.exchange in _HEAD_LEGS else PatchSums).reply(self, ctx, trained)

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        return {**PatchSums.server_steps(self), **ClosedHead.server_steps(self)}
