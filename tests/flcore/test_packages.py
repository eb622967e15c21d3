"""Packages that only some configurations need are missed before any work."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from flcore.core.errors import ConfigError
from flcore.experiment.experiment import Experiment


@pytest.mark.parametrize(
    ("package", "changes"),
    [
        ("dp_accounting", {"aggregation": {"clip": 1.0, "noise": 0.5}}),
        ("dp_accounting", {"method": {"name": "fedproto", "proto_clip": 1.0, "proto_noise": 0.5}}),
        (
            "dp_accounting",
            {"method": {"name": "protolda", "noise_multiplier": 0.5}, "model": {"name": "patch_dictionary"}},
        ),
        ("ray", {"engine": {"name": "ray", "workers": 1}}),
    ],
)
def test_a_package_that_is_missing_is_named_before_data_are_read(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, package: str, changes: dict[str, Any]
) -> None:
    """There are no data in these folders, which would be the next error."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package} is not installed; pip install "):
        Experiment.open(lab.config(**changes), tmp_path / "nothing", tmp_path / "nothing")


def test_who_asks_for_no_noise_needs_no_account(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    experiment = Experiment.open(lab.config(method__name="fedproto"), lab.prepared, lab.partition_folder)
    assert experiment.method.name == "fedproto"
