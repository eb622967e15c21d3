"""Register the automations of a file with Prefect's server; a webhook that they call is a block of the server.

    PROTOFL_WEBHOOK=https://... python -m pipelines.orchestration.notifications infra/automations.yaml

``protofl up`` and ``protofl deploy`` do this. The webhook's address is in no file: Prefect's server alone keeps it,
encrypted. Without the variable, automations that call the webhook are left out. Registering again changes those there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect import get_client
from prefect.blocks.webhook import Webhook
from prefect.events.schemas.automations import AutomationCore
from prefect.types import SecretDict
from pydantic import SecretStr

from pipelines.orchestration.deployments import WEBHOOK

BLOCK = "protofl-notify"


def main() -> None:
    """Register a file of automations with the server that is configured."""
    address, files = os.environ.get(WEBHOOK), sys.argv[1:]
    if len(files) != 1:
        raise SystemExit("type python -m pipelines.orchestration.notifications FILE.yaml")
    for name in register(Path(files[0]), address):
        print(f"{name}: registered")


def register(path: Path, address: str | None) -> list[str]:
    """Make or change the automations, and the block with the address.

    Args:
        path: of the automations, a list as `prefect automation create` takes it; an action's ``block`` is the name of
            a block instead of its id.
        address: of the webhook; None leaves out automations that call it.

    Returns:
        The names of the automations.
    """
    described = yaml.safe_load(path.read_text(encoding="utf-8"))
    block = ""
    if address:
        headers = SecretDict({"Content-Type": "application/json"})
        block = str(Webhook(url=SecretStr(address), headers=headers).save(BLOCK, overwrite=True))
    else:
        described = [each for each in described if not any(action.get("block") == BLOCK for action in each["actions"])]
    with get_client(sync_client=True) as client:
        for each in described:
            automation = AutomationCore.model_validate(
                {**each, "actions": [_action(a, block) for a in each["actions"]]}
            )
            known = client.read_automations_by_name(automation.name)
            if known:
                client.update_automation(known[0].id, automation)
            else:
                client.create_automation(automation)
    return [each["name"] for each in described]


def _action(described: Mapping[str, Any], block: str) -> dict[str, Any]:
    """An action with the block's id in place of its name."""
    action = dict(described)
    if action.pop("block", None) == BLOCK:
        action["block_document_id"] = block
    return action


if __name__ == "__main__":
    main()
