"""Parameters and models that a method cannot work with are refused, with the key, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest

from flcore.core.errors import ConfigError
from flcore.methods.gfpl import GFPL

AUTHORS = {"div_mask": "all", "noise": "normal", "po_form": "l2", "gen_label_dist": "frequency"}


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ({"name": "feddc"}, {"local__optimizer": "adam"}, r"^local\.optimizer = adam: feddc works with sgd alone"),
        ({"name": "fednova"}, {"local__optimizer": "adam"}, r"^local\.optimizer = adam: fednova"),
        ({"name": "scaffold"}, {"local__optimizer": "adam"}, r"^local\.optimizer = adam: scaffold"),
        ({"name": "scaffold"}, {"local__momentum": 0.5}, r"^local\.momentum = 0.5: scaffold"),
        ({"name": "scaffold"}, {"local__clip": 1.0}, r"^local\.clip = 1.0: scaffold"),
        # EM lets a sample move every component: there is no bound for one.
        ({"name": "gfpl", "proto_clip": 1.0, "proto_unit": "sample"}, {}, r"method.proto_unit"),
        # Answers of a head that is not there, or is not trained.
        ({"name": "gfpl", "head": "etf", "use_dcs": False}, {}, "head = etf needs use_dcs"),
        ({"name": "gfpl", "head": "etf", "weight": 0}, {}, "head = etf needs use_dcs"),
        ({"name": "gfpl", "head": "linear", "use_ce": False}, {}, "use_ce = false"),
        ({"name": "gfpl", "head": "etf", "use_ce": False, "use_dcs": False}, {}, "use_ce = false"),
        ({"name": "ccvr", "tap": "hidden", "power": 0.5}, {}, "power needs tap = feature"),
        *(
            ({"name": "fedpa", "preset": "authors", key: value}, {}, f"preset = authors means {key} = ")
            for key, value in AUTHORS.items()
        ),
        *(
            ({"name": "protolda_distilled", "teacher": teacher}, {}, words)
            for teacher, words in (
                ({"local.lr": 1}, "teacher: local.lr: expected keys such as"),
                ({"method.shrinkag": 1}, "method.teacher: method.shrinkag"),
                ({"model.atoms": 0}, "method.teacher: model.atoms = 0"),
            )
        ),
    ],
)
def test_refused_as_it_is_configured(lab: Any, method: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lab.config(method=method, **changes)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"name": "fedper"}, "head_from = head: this model has no other layers"),
        ({"name": "fedmlp", "share": "extractor"}, "share = extractor: this model has no layers below its head"),
        ({"name": "ccvr", "tap": "hidden"}, r"method\.tap = hidden: the model's projection does not end in a linear"),
    ],
)
def test_refused_with_a_head_alone(lab: Any, method: dict[str, Any], words: str) -> None:
    experiment = lab.linear(method=method)
    with pytest.raises(ConfigError, match=words):
        experiment.method.start_server(experiment.setting)


def test_a_projection_too_short_for_the_frame(lab: Any) -> None:
    """d_p = 80 for the 100 classes of CIFAR-100 is impossible (gfpl.md, section 2)."""
    with pytest.raises(ConfigError, match=r"method.projection_dim = 80: a frame of 100 classes"):
        GFPL(projection_dim=80).extra_layers(512, 100, 512)
    with pytest.raises(ConfigError, match=r"^method.projection_dim = 5"):
        lab.experiment(method={"name": "gfpl", "projection_dim": 5}).setting  # noqa: B018
