"""Automations of a Prefect server, and the webhook that they call: a block, whose address only the server keeps."""

from __future__ import annotations

import os
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

    ``path`` is a list as ``prefect automation create`` takes it, but an action's ``block`` is the name of a block.
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
        for action in each["actions"]:
            if action.pop("block", None) is not None:
                action["block_document_id"] = block
        automation = AutomationCore.model_validate(each)
        known = client.read_automations_by_name(automation.name)
        if known:
            client.update_automation(known[0].id, automation)
        else:
            client.create_automation(automation)
