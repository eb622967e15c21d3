"""Noise on vectors in feature space: who adds it, its account, and what cannot be promised."""

from __future__ import annotations

from typing import Any

import pytest

from flcore.math.prototypes.release import privacy_spent
from flcore.methods import METHODS
from flcore.methods.fedcspc import FedCSPC
from flcore.methods.fedhkd import FedHKD
from flcore.methods.fedmlp import FedMLP
from flcore.methods.fedpg import FedPG
from flcore.methods.fedproc import FedProc
from flcore.methods.fedproto import FedProto
from flcore.methods.gfpl import GFPL
from flcore.methods.kit.class_prototypes import ReleasesPrototypes, ReleasesVectors

NOISY: dict[str, Any] = {"proto_clip": 1.0, "proto_noise": 4.0}
CLIENT: dict[str, Any] = {**NOISY, "proto_unit": "client"}
# FedHKD: replacing one of n features of norm ζ moves their mean by 2ζ/n at most: σ = 0.6 is z = 0.6·n/(2·1.2) = n/4 for
# the smallest n that goes up, ``min_count``: 1, or 8 with z = 2. σ without ζ promises nothing.
OWN: dict[str, Any] = {"noise": 0.6, "clip": 1.2}


@pytest.mark.parametrize(
    ("method", "releases", "expected"),
    [  # z, releases that count, δ, unit; None: nothing is sent, or nothing is promised
        (ReleasesVectors(proto_clip=2.0, proto_noise=0.5), 4, (0.5, 4, 1e-5, "client")),
        (FedProto(**NOISY, proto_delta=1e-3), 6, (4.0, 6, 1e-3, "sample")),
        (FedProto(proto_clip=1.0, min_count=9), 6, None),
        (FedProc(**NOISY, alpha=0), 6, None),
        (FedCSPC(**NOISY), 3, (4.0, 3, 1e-5, "client")),
        (FedCSPC(), 3, None),
        (FedCSPC(**NOISY, use_lrl=False, use_ca=False, use_kp=False), 3, None),
        (FedMLP(**NOISY), 3, (4.0, 3, 1e-5, "sample")),
        (FedMLP(**NOISY, weight_prototypes=0, weight_memory=0, alpha=0), 3, None),
        (GFPL(**NOISY), 80, (4.0, 7, 1e-5, "client")),  # its exchanges (gfpl.md, fact 9)
        (GFPL(**NOISY, first_exchange=0, interval=1), 7, (4.0, 7, 1e-5, "client")),
        (GFPL(proto_clip=1.0), 80, None),
        (GFPL(**NOISY, retrain_source="own"), 80, None),
        (FedPG(**CLIENT), 9, (4.0, 9, 1e-5, "client")),
        (FedPG(**CLIENT, stop_round=5), 3, (4.0, 3, 1e-5, "client")),
        (FedPG(**CLIENT, stop_round=5), 9, (4.0, 5, 1e-5, "client")),
        (FedPG(), 9, None),
        (FedHKD(**OWN), 3, (0.25, 3, 1e-5, "sample")),
        (FedHKD(**OWN, min_count=8, proto_delta=1e-3), 3, (2.0, 3, 1e-3, "sample")),
        (FedHKD(noise=0.6), 3, None),
        (FedHKD(clip=1.2), 3, None),
        (FedHKD(**OWN, lambda_head=0, gamma=0), 3, None),
        (FedHKD(**CLIENT), 3, (4.0, 3, 1e-5, "client")),
    ],
)
def test_the_account_is_of_the_noise_on_what_is_sent(method: Any, releases: int, expected: Any) -> None:
    account = method.privacy(releases)
    if expected is None:
        assert account is None
    else:
        multiplier, counted, delta, unit = expected
        assert account["epsilon"] == privacy_spent(multiplier, counted, delta)
        assert (account["delta"], account["unit"], account["releases"]) == (delta, unit, counted)
        assert ("soft predictions" if isinstance(method, FedHKD) else "weights") in account["covers"]


def test_the_account_of_a_base_is_its_wrappers() -> None:
    noisy = {"fedproc": {f"method.{key}": value for key, value in NOISY.items()}}
    wrapper = FedCSPC(base="fedproc", base_settings=noisy)
    assert wrapper.privacy(3) == wrapper.base_method.privacy(3) is not None
    with pytest.raises(ValueError, match="fedproc adds noise to prototypes too"):
        FedCSPC(base="fedproc", base_settings=noisy, **NOISY)


PER_CLASS = {"fedproto", "fedproc", "fedhkd", "fedpa", "fedpg", "fedmlp"}


def test_whoever_sends_vectors_in_feature_space_has_the_release_step() -> None:
    """One prototype per class, or vectors of any number."""
    assert {name for name, cls in METHODS.items() if issubclass(cls, ReleasesPrototypes)} == PER_CLASS
    senders = {name for name, cls in METHODS.items() if issubclass(cls, ReleasesVectors)}
    assert senders - PER_CLASS == {"fedcspc", "gfpl"}
    for name in senders:
        unit = {"proto_unit": "client"} if name in PER_CLASS else {}
        with pytest.raises(ValueError, match="proto_noise needs proto_clip"):
            METHODS[name](proto_noise=2.0, **unit)


@pytest.mark.parametrize(
    ("cls", "values", "words"),
    [
        # Running prototypes have a sample once per pass, each time another one.
        (FedProto, {"proto_mode": "running", "proto_clip": 1.0}, "set proto_mode = final or proto_unit = client"),
        # A support drawn with replacement may hold an image m times: then it moves the mean by 2C, not by 2C/m.
        (FedPG, {"proto_clip": 1.0}, r"drawn with replacement .* set proto_unit = client"),
        *(
            (FedHKD, {**own, **other}, r"clip and noise .* set one or the other")
            for own in ({"clip": 1.0}, {"noise": 1.0})
            for other in ({"proto_clip": 1.0}, NOISY, {"proto_unit": "client"})
        ),
    ],
)
def test_what_cannot_be_promised_is_refused(cls: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cls(**values)
    FedProto(proto_mode="running", proto_clip=1.0, proto_unit="client")
