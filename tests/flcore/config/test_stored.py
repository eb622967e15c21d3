"""Keys that earlier versions had: stored runs are read and keep their names, new configurations do not have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flcore
from flcore.config.schema import Config
from flcore.config.stored import without_removed
from flcore.core.errors import ConfigError

RAW = {"method": {"name": "local"}, "federation": {"rounds": 1}, "partition": {"num_clients": 2}}


@pytest.mark.parametrize("value", [False, True])
def test_a_configuration_that_names_a_removed_key_is_refused(value: bool) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.stack_runs: unknown key"):
        Config.from_mapping({"engine": {"stack_runs": value}})


def test_a_stored_value_that_is_not_done_any_more_is_refused_too() -> None:
    """True means stacks of several runs, which are gone; false means what every run does now."""
    assert without_removed({"engine": {"stack": True, "stack_runs": False}}) == {"engine": {"stack": True}}
    with pytest.raises(ConfigError, match=r"^engine\.stack_runs"):
        Config.from_mapping(without_removed({"engine": {"stack_runs": True}}))


def test_a_configuration_file_of_an_earlier_version_is_found_under_its_name(tmp_path: Path) -> None:
    config = Config.from_mapping(RAW)
    stored = config.to_mapping()
    stored["engine"]["stack_runs"] = False
    (tmp_path / "config.json").write_text(json.dumps({"config": stored}))
    first = flcore.run(config, tmp_path / "run")
    again = flcore.run(tmp_path / "config.json", tmp_path / "run")  # else it would be refused as another run
    assert again == first
    assert json.loads((tmp_path / "run" / "config.json").read_text())["identity"]["engine"]["stack_runs"] is False
