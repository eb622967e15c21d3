"""What a flow of one method makes of its parameters."""

from __future__ import annotations

from pathlib import Path

import yaml

from pipelines.orchestration.flow_runs import configuration


def test_a_deployment_has_the_settings_of_its_method_as_the_command_has(tmp_path: Path) -> None:
    """`compare.settings` of that method, and of no other; a configuration that a command has made stays what it is."""
    settings = {"fedpa": {"local.lr": 0.03}, "gfpl": {"local.lr": 0.5}}
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump({"local": {"lr": 0.1}, "compare": {"settings": settings}}))
    found = {name: configuration(str(params), [f"method.name={name}"], None) for name in ("fedavg", "fedpa")}
    assert {name: config.local.lr for name, config in found.items()} == {"fedavg": 0.1, "fedpa": 0.03}
    made = {"method": {"name": "fedpa"}, "local": {"lr": 0.2}, "compare": {"settings": settings}}
    assert configuration(None, None, made).local.lr == 0.2
