"""The exchange of class prototypes: what leaves a client, by hand on linear models, and what the server makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flcore.io.messages import Prototypes, TensorDict
from flcore.io.records import Payloads, Record
from flcore.methods.fedpa import fuse_client_prototypes
from flcore.methods.fedpg import aggregate_supports
from flcore.methods.fedproc import FedProc
from flcore.methods.fedproto import aggregate_prototypes
from flcore.methods.kit.class_prototypes import CLASS_COUNTS, ReleasesVectors, counts_of_uploads, fused_prototypes
from flcore.methods.kit.feature_generator import LABEL_COUNTS
from flcore.methods.types import PROTOTYPES, ClientContext, Exchange, Replies, RoundContext

T = torch.tensor


def sent(lab: Any, pixels: Any, labels: list[int], *, number: int = 1, client: int = 0, **method: Any) -> Prototypes:
    """What a client with these samples uploads; its features are the pixels. Client 1 holds the same."""
    dataset = lab.toy_dataset(pixels, labels, None, None)
    everything = list(range(len(labels)))
    partition = lab.by_hand(dataset, [everything, everything], [[0]] * 2)
    experiment = lab.experiment(dataset, partition, lab.ToySpec(), method={"name": "fedproto", **method})
    reply, _ = lab.train(experiment, client, number=number)
    found: Prototypes = reply.message[PROTOTYPES]
    return found


def test_one_sample_is_clipped_before_the_mean_and_a_client_after_it(lab: Any) -> None:
    """Class 0: (3, 4) of norm 5 and (0, 0), C = 2.5. Each: (1.5, 2) and (0, 0), mean (0.75, 1). The mean: (1.5, 2)."""
    samples, labels = [[3, 4], [0, 0], [0, 1]], [0, 0, 1]
    plain = sent(lab, samples, labels)
    assert plain.means.tolist() == [[1.5, 2], [0, 1]]
    by_sample = sent(lab, samples, labels, proto_clip=2.5)
    assert by_sample.means.flatten().tolist() == pytest.approx([0.75, 1, 0, 1])
    by_client = sent(lab, samples, labels, proto_clip=2.5, proto_unit="client")
    assert by_client.means.flatten().tolist() == pytest.approx([1.5, 2, 0, 1])
    tighter = sent(lab, samples, labels, proto_clip=1.25, proto_unit="client")
    assert tighter.means.flatten().tolist() == pytest.approx([0.75, 1, 0, 1])


def test_rare_classes_stay_at_home(lab: Any) -> None:
    """Two samples of class 0, one of class 1: with ``min_count`` 2 nothing of class 1 leaves the client."""
    found = sent(lab, [[3, 4], [1, 0], [9, 9]], [0, 0, 1], min_count=2)
    assert found.present.tolist() == [True, False]
    assert found.means.tolist() == [[2, 2], [0, 0]]
    none = sent(lab, [[3, 4], [1, 0], [9, 9]], [0, 0, 1], min_count=3)
    assert not none.present.any() and not none.means.any()


def test_noise_has_the_size_of_the_sensitivity(lab: Any) -> None:
    """C = 3, z = 2. One sample of 4 or of 12: 2·3/4 and 2·3/12, deviations 3 and 1.

    A client's two rows: 2·3·√2, deviation 16.970563. Features are 0; 5/√(2·4000) = 5.6 %.
    """
    samples, labels = [[0] * 4000] * 16, [0] * 4 + [1] * 12
    for unit, deviations in (("sample", [3.0, 1.0]), ("client", [16.970563] * 2)):
        found = sent(lab, samples, labels, proto_clip=3.0, proto_noise=2.0, proto_unit=unit)
        assert found.means.std(dim=1).tolist() == pytest.approx(deviations, rel=0.056)


def test_noise_is_another_for_every_client_and_round(lab: Any) -> None:
    samples, labels, noisy = [[0, 0], [0, 0]], [0, 1], {"proto_clip": 1.0, "proto_noise": 1.0}
    first = sent(lab, samples, labels, **noisy).means
    assert torch.equal(sent(lab, samples, labels, **noisy).means, first)
    assert not torch.equal(sent(lab, samples, labels, client=1, **noisy).means, first)
    assert not torch.equal(sent(lab, samples, labels, number=2, **noisy).means, first)


def test_counts_are_those_of_the_classes_released(lab: Any) -> None:
    """Client 0 of the tiny data: samples of the classes that have 5 or more, in their order."""
    experiment = lab.experiment(method={"name": "fedproc", "weighted": True, "min_count": 5})
    counts = experiment.label_counts(0, 1)
    reply, _ = lab.train(experiment)
    assert reply.message[PROTOTYPES].present.tolist() == (counts >= 5).tolist()
    assert reply.message[CLASS_COUNTS]["held"].tolist() == counts[counts >= 5].tolist()
    assert 0 < int((counts >= 5).sum()) < int((counts > 0).sum())
    (told,) = counts_of_uploads(Replies({7: reply.message})).values()
    assert told.tolist() == torch.where(counts >= 5, counts, 0).tolist()


def turn_of(lab: Any, number: int = 1) -> ClientContext:
    return ClientContext(lab.experiment().setting, number, Exchange().name, client=2)


def test_vectors_of_any_number(lab: Any) -> None:
    """(3, 4) to norm 2.5; three vectors of zeros, z = 0.5, C = 2: deviation 0.5·2·2·√3 = 3.464102."""
    ctx, vectors = turn_of(lab), T([[3.0, 4.0], [0.3, 0.4]])
    assert ReleasesVectors().release_vectors(ctx, vectors) is vectors
    clipped = ReleasesVectors(proto_clip=2.5).release_vectors(ctx, vectors)
    assert clipped.flatten().tolist() == pytest.approx([1.5, 2, 0.3, 0.4])
    noisy = ReleasesVectors(proto_clip=2.0, proto_noise=0.5)
    blurred = noisy.release_vectors(ctx, torch.zeros(3, 4000))
    assert blurred.std().item() == pytest.approx(3.464102, rel=5 / math.sqrt(24_000))
    assert not torch.equal(noisy.release_vectors(turn_of(lab, 2), torch.zeros(3, 4000)), blurred)


def row(*values: float | None) -> Prototypes:
    """One dimension; None for a class without prototype."""
    means = T([[0.0 if value is None else float(value)] for value in values])
    return Prototypes(means, T([value is not None for value in values]))


# FedPA tells of every class (LABEL_COUNTS): client 0's 90 samples of class 1, which it withholds, do not weigh.
UPLOADS: dict[int, Payloads] = {
    client: {PROTOTYPES: sent, CLASS_COUNTS: TensorDict({"held": T(held)}), LABEL_COUNTS: TensorDict({"held": T(told)})}
    for client, sent, held, told in (
        (0, row(1, None, None), [1], [1, 90, 0]),
        (1, row(5, 8, None), [3, 2], [3, 2, 0]),
    )
} | {2: {}}


@pytest.mark.parametrize(
    ("step", "first", "keeps"),
    [
        (fused_prototypes, 3, True),
        (aggregate_prototypes, 3, True),
        (FedProc().fuse_prototypes, 3, True),
        (FedProc(weighted=True).fuse_prototypes, 4, True),
        (fuse_client_prototypes, 4, True),
        (aggregate_supports, 3, False),
    ],
)
def test_uploads_into_one_prototype_per_class(lab: Any, step: Any, first: float, keeps: bool) -> None:
    """Classes 0 and 1 of two clients: (1 + 5)/2, or 1 and 5 as 1:3, 4; client 1's 8. Class 2 was 6: kept, or not."""
    server, ctx = Record({PROTOTYPES: row(9, 9, 6)}), RoundContext(lab.experiment().setting, 2)
    found = step(server, Replies(UPLOADS), ctx)[0][PROTOTYPES]
    assert found.means.flatten().tolist() == [first, 8, 6 if keeps else 0]
    assert found.present.tolist() == [True, True, keeps]
    assert server[PROTOTYPES].means.flatten().tolist() == [9, 9, 6]
    told = counts_of_uploads(Replies(UPLOADS))
    assert {client: counts.tolist() for client, counts in told.items()} == {0: [1, 0, 0], 1: [3, 2, 0]}
    assert fused_prototypes(server, Replies({3: {}}), ctx) == (server, {})
