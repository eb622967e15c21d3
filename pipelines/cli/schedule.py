"""``protofl schedule``: switch the schedules of deployments on and off."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

_ACTIONS = {
    "list": "List the deployments of the configured Prefect server, when they run, and which are off.",
    "on": "Activate the schedules of deployments, until they are switched off.",
    "off": "Deactivate the schedules of deployments; runs that are already due are dropped.",
}
_EPILOG = """\
Schedules of infra/prefect.yaml are off until they are switched on, here or in Prefect's pages, and then stay on. With
`active: true` in the file, `protofl up` and `protofl deploy` switch them on.
"""


def add_to(group: Callable[..., Any]) -> None:
    """Add the command."""
    actions = group("schedule", "actions", "List the schedules of deployments, and switch them on and off.")
    for action, summary in _ACTIONS.items():
        parser = actions(action, schedule, summary, _EPILOG, action=action)
        if action == "list":
            parser.set_defaults(names=())
        else:
            parser.add_argument("names", nargs="+", metavar="NAME", help="deployment, see 'protofl schedule list'")


def schedule(arguments: argparse.Namespace) -> int:
    """Switch the named schedules, and print all of them."""
    from pipelines.orchestration import schedules

    address = schedules.answering()
    schedules.switch(address, arguments.names, on=arguments.action == "on")
    print("\n".join(schedules.notes(address)))
    return 0
