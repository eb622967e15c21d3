"""Schedules of the deployments of a Prefect server: list them, switch them on and off.

A schedule is off until a person switches it on, and stays on when deployments are registered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flcore.core.errors import ConfigError, RunError
from flcore.core.text import shorten
from pipelines.orchestration import deployments
from pipelines.orchestration.address import Address, configured, connected, problem_with
from pipelines.orchestration.deployments import POOL

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import DeploymentSchedule
    from prefect.client.schemas.responses import DeploymentResponse

_PATIENCE_SECONDS = 20.0  # a server that must answer may be slow on a machine that trains


def answering() -> Address:
    """Return the configured server; ConfigError if there is none, RunError if it does not respond."""
    address = configured()
    if address is None:
        raise ConfigError("no Prefect server is configured: set PREFECT_API_URL, or start one with `protofl up`")
    problem = problem_with(address, _PATIENCE_SECONDS)
    if problem is not None:
        raise RunError(f"the Prefect server at {address.shown} (from {address.source}) cannot be used: {problem}")
    return address


def our_deployments(client: SyncPrefectClient) -> list[tuple[DeploymentResponse, str]]:
    """Return the deployments of our pool with the names of their flows, by name."""
    from prefect.client.schemas.filters import FlowFilter, WorkPoolFilter
    from prefect.client.schemas.sorting import DeploymentSort

    # A server may have other users.
    pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    found = client.read_deployments(work_pool_filter=pool, sort=DeploymentSort.NAME_ASC)
    ids = sorted({each.flow_id for each in found})  # without them, a server returns 200 of its flows
    flows = client.read_flows(flow_filter=FlowFilter.model_validate({"id": {"any_": ids}}))
    names = {flow.id: flow.name for flow in flows}
    return [(each, names[each.flow_id]) for each in found]


def _is_on(deployment: DeploymentResponse, schedule: DeploymentSchedule) -> bool:
    return schedule.active and not deployment.paused


def notes(address: Address) -> list[str]:
    """Return lines for a terminal: the schedules, and what to type if one is off."""
    lines = [f"scheduled   {line}" for line in schedule_lines(address)]
    if not lines:
        return ["scheduled   nothing: `protofl up` and `protofl deploy` register deployments"]
    is_off = any("(off)" in line for line in lines)
    return [*lines, "(off): `protofl schedule on NAME` switches a schedule on"] if is_off else lines


def schedule_lines(address: Address) -> Iterator[str]:
    """Yield a line per deployment: its name, when it runs, and what to type if the file does not have it."""
    declared = {each["name"] for each in deployments.declared()}
    with connected(address) as client:
        registered = our_deployments(client)
    for deployment, flow in registered:
        times = []
        for each in deployment.schedules:
            when = [getattr(each.schedule, "cron", "at intervals"), getattr(each.schedule, "timezone", None)]
            times.append(" ".join([*filter(None, when), *["(off)"] * (not _is_on(deployment, each))]))
        delete = f"prefect deployment delete {flow}/{deployment.name}"
        old = "" if deployment.name in declared else f" (not in the file: `{delete}` ends it)"
        yield f"{deployment.name}: {', '.join(times) or 'by hand'}{old}"


def switch(address: Address, names: Sequence[str], *, on: bool) -> None:
    """Switch all schedules of deployments on or off; switching off also removes their scheduled runs.

    Raises:
        ConfigError: a name is unknown, or that deployment has no schedule; nothing is switched then.
    """
    with connected(address) as client:
        known = {deployment.name: deployment for deployment, _ in our_deployments(client)}
        for name in names:
            if name not in known:
                raise ConfigError(f"schedule {shorten(name)}: unknown; choose from {', '.join(known) or 'none'}")
            if not known[name].schedules:
                raise ConfigError(f"schedule {name}: runs by hand only; add `schedules` to it in infra/prefect.yaml")
        for deployment in (known[name] for name in names):
            for schedule in deployment.schedules:
                client.update_deployment_schedule(deployment.id, schedule.id, active=on)
            if on and deployment.paused:
                client.resume_deployment(deployment.id)


def switched_on(address: Address) -> set[tuple[str, str | None]]:
    """Return deployment and slug of the schedules that are on."""
    with connected(address) as client:
        return {
            (deployment.name, schedule.slug)
            for deployment, _ in our_deployments(client)
            for schedule in deployment.schedules
            if _is_on(deployment, schedule)
        }
