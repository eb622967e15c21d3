"""ProtoLDA: sums per client at the server, for client-specific heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from flcore.io.messages import TensorDict
from flcore.io.records import Key, Record
from flcore.math.prototypes.discriminant import ClassSums
from flcore.math.prototypes.gaussians import from_upper_triangles, upper_triangles

EACH = Key("each", TensorDict)
"""At the server: ``clients`` int64 [m], and of each its sums: ``counts`` [m, C], ``sums`` [m, C, D], ``second``
[m, D(D + 1)/2]; and its head, ``weight`` [m, C, D] and ``bias`` [m, C]."""


def merge_sums(server: Record, new: Iterable[tuple[int, ClassSums]]) -> TensorDict:
    """Return the sums per client, in order of ids, with the new ones added."""
    found: dict[int, ClassSums] = {}
    if EACH in server:
        found = dict(zip(server[EACH]["clients"].tolist(), sums_of_each(server[EACH]), strict=True))
    for client, own in new:
        found[client] = found[client] + own if client in found else own
    clients = sorted(found)
    return TensorDict(
        {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "counts": torch.stack([found[client].counts for client in clients]),
            "sums": torch.stack([found[client].sums for client in clients]),
            "second": torch.stack([upper_triangles(found[client].second) for client in clients]),
        }
    )


def only(each: TensorDict, clients: set[int]) -> TensorDict:
    """Return the sums and heads of some clients."""
    kept = [place for place, client in enumerate(each["clients"].tolist()) if client in clients]
    return TensorDict({name: values[kept] for name, values in each.named.items()})


def sums_of_each(each: TensorDict) -> Iterator[ClassSums]:
    """Yield each client's sums, in order of ids."""
    for counts, sums, second in zip(each["counts"], each["sums"], each["second"], strict=True):
        yield ClassSums(counts, sums, from_upper_triangles(second))
