"""Automations of a Prefect server, and the webhook that they call: a block, whose address only the server keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.plan import yaml_text

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

WEBHOOK = "PROTOFL_WEBHOOK"
"""Variable with the address of the webhook, which may be a secret and so is in no file."""
_BLOCK = "protofl-notify"


def register_automations(client: SyncPrefectClient, path: Path) -> None:
    """Create or update automations; without an address of the webhook, leave out those that call it.

    Args:
        client: of the server.
        path: of the automations, a list as ``prefect automation create`` takes it. An action's ``block`` is the name of
            a block instead of its id.
    """
    from prefect.blocks.webhook import Webhook
    from prefect.events.schemas.automations import AutomationCore
    from prefect.types import SecretDict
    from pydantic import SecretStr

    automations: list[dict[str, Any]] = yaml_text.parse(path.read_text(encoding="utf-8"))
    address, block = os.environ.get(WEBHOOK), ""
    if address:
        headers = SecretDict({"Content-Type": "application/json"})
        block = str(Webhook(url=SecretStr(address), headers=headers).save(_BLOCK, overwrite=True))
    else:
        automations = [each for each in automations if all(action.get("block") != _BLOCK for action in each["actions"])]
    for each in automations:
        actions = [_with_id(action, block) for action in each["actions"]]
        automation = AutomationCore.model_validate({**each, "actions": actions})
        known = client.read_automations_by_name(automation.name)
        if known:
            client.update_automation(known[0].id, automation)
        else:
            client.create_automation(automation)


def _with_id(action: Mapping[str, Any], block: str) -> dict[str, Any]:
    """Return an action with the block's id instead of its name."""
    others = {key: value for key, value in action.items() if key != "block"}
    return others | ({"block_document_id": block} if action.get("block") == _BLOCK else {})
