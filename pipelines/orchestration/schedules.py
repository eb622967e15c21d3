"""Schedules of the deployments that a Prefect server has: which there are, and switching them on and off.

A schedule is off until somebody switches it on, here, in Prefect's pages or in the file. It stays on when deployments
are registered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flcore.core.errors import ConfigError, RunError
from flcore.core.text import shorten
from pipelines.orchestration import deployments
from pipelines.orchestration.address import Address, configured, problem_with
from pipelines.orchestration.deployments import POOL, ask

_PATIENCE_SECONDS = 20.0  # a server that must answer may be slow on a machine that trains


@dataclass(frozen=True)
class Deployment:
    """A deployment of our pool, as the server has it.

    Attributes:
        id, name, flow: of the deployment; the last is its flow's name.
        schedules: as Prefect's interface describes them.
        is_paused: whether none of them fires.
        is_declared: whether the file has it.
    """

    id: str
    name: str
    flow: str
    schedules: Sequence[Mapping[str, Any]]
    is_paused: bool
    is_declared: bool

    def is_on(self, schedule: Mapping[str, Any]) -> bool:
        """Return whether a schedule of it fires."""
        return bool(schedule["active"]) and not self.is_paused


def answering() -> Address:
    """Return the configured server, which answers.

    Raises:
        ConfigError: no server is configured. RunError: it does not answer.
    """
    address = configured()
    if address is None:
        raise ConfigError("no Prefect server is configured: set PREFECT_API_URL, or start one with `protofl up`")
    problem = problem_with(address, _PATIENCE_SECONDS)
    if problem is not None:
        raise RunError(f"the Prefect server at {address.shown} (from {address.source}) cannot be used: {problem}")
    return address


def our_deployments(address: Address) -> list[Deployment]:
    """Return the deployments of our pool, by name."""
    # On a server that others use too, what they have is theirs.
    asked = {"work_pools": {"name": {"any_": [POOL]}}, "sort": "NAME_ASC"}
    found = ask(address, "POST", "/deployments/filter", asked)
    of_these = {"flows": {"id": {"any_": sorted({each["flow_id"] for each in found})}}}  # a server answers with 200
    flows = {flow["id"]: flow["name"] for flow in ask(address, "POST", "/flows/filter", of_these)}
    names = {each["name"] for each in deployments.declared()}

    def is_declared(name: str, flow: str) -> bool:
        return name in names and f"protofl-{flow}" not in flows.values()  # an earlier name of its flow

    return [
        Deployment(each["id"], each["name"], flow, each["schedules"], each["paused"], is_declared(each["name"], flow))
        for each in found
        for flow in [str(flows.get(each["flow_id"]))]
    ]


def notes(address: Address) -> list[str]:
    """Return lines for a terminal: the schedules, and what to type if one is off."""
    lines = [f"scheduled   {line}" for line in schedule_lines(address)]
    if not lines:
        return ["scheduled   nothing: `protofl up` and `protofl deploy` register deployments"]
    is_off = any("(off)" in line for line in lines)
    return [*lines, "(off): `protofl schedule on NAME` switches a schedule on"] if is_off else lines


def schedule_lines(address: Address) -> Iterator[str]:
    """Yield a line per deployment: its name, when it runs, and what to type if the file does not have it."""
    for deployment in our_deployments(address):
        times = [
            f"{schedule['schedule'].get('cron', 'at intervals')} {schedule['schedule'].get('timezone') or ''}".strip()
            + ("" if deployment.is_on(schedule) else " (off)")
            for schedule in deployment.schedules
        ]
        delete = f"prefect deployment delete {deployment.flow}/{deployment.name}"
        old = "" if deployment.is_declared else f" (not in the file: `{delete}` ends it)"
        yield f"{deployment.name}: {', '.join(times) or 'by hand'}{old}"


def switch(address: Address, names: Sequence[str], *, on: bool) -> None:
    """Switch all schedules of deployments on or off; what is due when one is switched off does not run.

    Args:
        address: of the server. names: of the deployments. on: whether they are to fire.

    Raises:
        ConfigError: a name is unknown, or that deployment has no schedule; nothing is switched then.
    """
    known = {each.name: each for each in sorted(our_deployments(address), key=lambda each: each.is_declared)}
    for name in names:
        if name not in known:
            raise ConfigError(f"schedule {shorten(name)}: unknown; choose from {', '.join(known) or 'none'}")
        if not known[name].schedules:
            raise ConfigError(f"schedule {name}: runs by hand only; add `schedules` to it in infra/prefect.yaml")
    for deployment in (known[name] for name in names):
        for schedule in deployment.schedules:
            ask(address, "PATCH", f"/deployments/{deployment.id}/schedules/{schedule['id']}", {"active": on})
        if on and deployment.is_paused:
            ask(address, "POST", f"/deployments/{deployment.id}/resume_deployment", {})


def switched_on(address: Address) -> set[tuple[str, str | None]]:
    """Return deployment and slug of the schedules that are on."""
    return {
        (deployment.name, schedule.get("slug"))
        for deployment in our_deployments(address)
        for schedule in deployment.schedules
        if deployment.is_declared and deployment.is_on(schedule)
    }
