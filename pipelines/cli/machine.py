"""Commands about this machine and its servers: ``protofl up`` to ``down``, ``doctor``, ``clean``, ``completion``."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from flcore.core.errors import ConfigError
from pipelines.addresses import redact
from pipelines.cli.options import Common, Count, Json, Name

Schedules = Annotated[Name, Parameter(required=True, help="deployment, see 'protofl schedule list'")]


def up(
    *,
    no_prefect: bool = False,
    no_mlflow: bool = False,
    no_dashboard: bool = False,
    no_worker: bool = False,
    flows_per_gpu: Count = 1,
    common: Common = Common(),
) -> int:
    """Start servers on this machine: Prefect with a worker, MLflow, Optuna's dashboard.

    Args:
        no_prefect: without Prefect's server, and the worker that needs it
        no_mlflow: without MLflow's server
        no_dashboard: without Optuna's dashboard
        no_worker: without the worker that runs deployments
        flows_per_gpu: flows that share a GPU of this machine
    """
    from pipelines.orchestration import services

    services.up(
        prefect=not no_prefect,
        mlflow=not no_mlflow,
        dashboard=not no_dashboard,
        worker=not no_worker,
        flows_per_gpu=flows_per_gpu,
    )
    return 0


def deploy(*, flows_per_gpu: Count = 1, common: Common = Common()) -> int:
    """Register the deployments with the configured Prefect server.

    Args:
        flows_per_gpu: flows that share a GPU of this machine
    """
    from pipelines.orchestration import services

    services.deploy(flows_per_gpu=flows_per_gpu)
    return 0


def schedule_list(*, common: Common = Common()) -> int:
    """List the deployments of the configured Prefect server, when they run, and which are off.

    Schedules of infra/prefect.yaml are off until they are switched on, here or in Prefect's pages, and then stay on.
    With `active: true` in the file, `protofl up` and `protofl deploy` switch them on.
    """
    return _schedule(())


def schedule_on(*names: Schedules, common: Common = Common()) -> int:
    """Activate the schedules of deployments, until they are switched off."""
    return _schedule(names, on=True)


def schedule_off(*names: Schedules, common: Common = Common()) -> int:
    """Deactivate the schedules of deployments; runs that are already due are dropped."""
    return _schedule(names)


def _schedule(names: tuple[str, ...], *, on: bool = False) -> int:
    """Switch the named schedules, and print all of them."""
    from pipelines.orchestration import schedules

    address = schedules.answering()
    schedules.switch(address, names, on=on)
    print("\n".join(schedules.notes(address)))
    return 0


def status(*, as_json: Json = False, common: Common = Common()) -> int:
    """Show which of these servers run, and their addresses.

    Exit code 0: all servers answer; 4: none was started, or one has ended or does not answer.
    """
    from pipelines.orchestration import services

    return 0 if services.status(as_json=as_json) else 4


def down(*, common: Common = Common()) -> int:
    """Stop the servers that `up` started."""
    from pipelines.orchestration import services

    services.down()
    return 0


def doctor(*, common: Common = Common()) -> int:
    """Check this machine, and say what to do about what is missing.

    Exit code 0, or 3 if a line begins with `miss`: something that was requested is missing.
    """
    from pipelines.cli.doctor import examine, is_missing

    lines = [redact(line) for line in examine()]
    print("\n".join(lines))
    return 3 if any(map(is_missing, lines)) else 0


def clean(*, common: Common = Common()) -> int:
    """Delete the cache and old logs of this folder; runs, tables and stores stay.

    Deletes prepared data, partitions and the index of finished runs (.protofl/cache, or PROTOFL_CACHE), and logs of
    processes that have ended. Runs stay, and prepare their data again when they need them. Refused while a run trains.
    """
    from flcore.io import disk
    from pipelines.orchestration import background
    from pipelines.runs.cache import Cache

    root = Cache.here().root
    folders = [root / name for name in ("index", "prepared", "partitions")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    written = {service.log for service in background.recorded() if background.is_running(service)}
    logs = [log for log in background.LOGS.glob("*.log") if str(log) not in written]
    freed = sum(path.stat().st_size for path in (*files, *logs))
    for folder in folders:
        disk.remove_tree(folder)
    for log in logs:
        disk.remove(log)
    print(f"{freed / 1e6:.1f} MB deleted: {root}, and {len(logs)} logs of {background.LOGS}")
    return 0


def bench(*words: Annotated[str, Parameter(metavar="NAME [OPTION]", allow_leading_hyphen=True)]) -> int:
    """Run a benchmark; in a source checkout only.

    There, 'protofl bench --help' lists the benchmarks, and 'protofl bench NAME --help' the options of one.
    """
    raise ConfigError("bench: the installed package has no benchmarks; run the command in a source checkout")


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(metavar="SHELL")], /, *, common: Common = Common()
) -> int:
    """Print a script that completes commands and options in a shell.

    bash:  protofl completion bash > ~/.local/share/bash-completion/completions/protofl
    zsh:   protofl completion zsh > FOLDER/_protofl, with a FOLDER of $fpath
    fish:  protofl completion fish > ~/.config/fish/completions/protofl.fish
    """
    from pipelines.cli.commands import make_app

    print(make_app(with_benchmarks=False).generate_completion(prog_name="protofl", shell=shell))
    return 0
