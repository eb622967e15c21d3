"""The commands: each calls a function with its parsed arguments and prints the result.

Heavy modules are imported where they are needed, after every check that does not need them. For runs, only keys are
checked here (:mod:`pipelines.cli.typos`): the follower's process must start before torch is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ConfigError
from flcore.core.text import shorten, unknown_key
from pipelines.addresses import redact
from pipelines.runs.standard_error import tell

if TYPE_CHECKING:
    from pipelines.plan.params import Given

SERVICES = {
    "prefect": "Prefect's server, and the worker that needs it",
    "mlflow": "MLflow's server",
    "dashboard": "Optuna's dashboard",
    "worker": "the worker that carries out deployments",
}
"""Servers that `up` starts."""


_PACKAGE = Path(__file__).parents[1]
"""The folder of `pipelines`."""


def run(arguments: argparse.Namespace) -> int:
    """Run one configuration, from data to report (``protofl run``)."""
    from flcore.io.files import json_text
    from pipelines.orchestration import commands

    metrics = commands.run(
        _entry(arguments), arguments.out, quiet=arguments.json, copies=arguments.copies, **_how(arguments)
    )
    if arguments.json:
        print(json_text(metrics, indent=2))
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Run methods × seeds, then print one table (``protofl compare``)."""
    from pipelines.orchestration import commands
    from pipelines.plan.files import claims_of
    from pipelines.plan.params import compared_rows, variants_of, with_values, with_variants

    what = (arguments.methods, arguments.seeds, arguments.out)
    more: list[Given] = variants_of(arguments.variant)
    claims = None if arguments.claims is None else claims_of(arguments.claims)
    if claims is not None:
        more.append(("--claims", ("compare", "claims"), claims))
    raw = with_variants(_raw(arguments, more), arguments.variant)
    _say_models(arguments, raw, compared_rows(raw, arguments.methods))
    if arguments.partition_seeds is not None:
        raw = with_values(raw, {"compare.partition_seeds": list(arguments.partition_seeds)})
    if claims is not None:
        raw = with_values(raw, {"compare.claims": claims})
    commands.compare(
        raw, *what, tuned=arguments.tuned, budget=arguments.budget, copies=arguments.copies, **_how(arguments)
    )
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Run one method over a grid of values, or a list of points, × seeds (``protofl sweep``)."""
    from pipelines.orchestration import commands
    from pipelines.plan.files import points_of

    points = [] if arguments.rows is None else points_of(arguments.rows)
    grid = (arguments.vary, arguments.seeds, arguments.baselines, arguments.metric)
    raw = _raw(arguments)
    _say_models(arguments, raw, [None, *(arguments.baselines or ())])
    commands.sweep(raw, *grid, arguments.out, points=points, **_how(arguments))
    return 0


def tune(arguments: argparse.Namespace) -> int:
    """Search a method's hyper-parameters (``protofl tune``)."""
    from pipelines.orchestration import commands
    from pipelines.tuning.request import StudyRequest

    request = StudyRequest(**{key: getattr(arguments, key) for key in StudyRequest.__dataclass_fields__})
    raw, out = _entry(arguments), arguments.out or Path(f"runs/tune-{arguments.method}")
    raw |= {"tune": {**(raw.get("tune") or {}), "parallel": arguments.at_once}} if arguments.at_once else {}
    commands.tune(raw, request, out, prefect=arguments.prefect, wait=arguments.wait)
    return 0


def _how(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"prefect": arguments.prefect, "restart": arguments.restart, "wait": arguments.wait}


_KEYS = {"method": "method.name", "seed": "seed", "at_once": "tune.parallel"}
_KEYS_OF_SEVERAL = {
    "methods": "compare.methods",
    "seeds": "compare.seeds",
    "partition_seeds": "compare.partition_seeds",
}


def _raw(arguments: argparse.Namespace, more: Sequence[Given] = ()) -> dict[str, Any]:
    """Return a command's parameters, not yet validated.

    Args:
        arguments: of the command. more: its own options that set keys.

    Raises:
        ConfigError: a file cannot be read, or two options contradict each other.
    """
    from pipelines.cli.typos import refuse_typos
    from pipelines.plan.files import read_params, with_plugins
    from pipelines.plan.params import override, with_values

    options: list[Given] = list(more)
    if arguments.plugins:
        options.append(("--plugin", ("plugins",), [str(file.absolute()) for file in arguments.plugins]))
    # A stage's --method and --seed select runs of the comparison.
    for name, key in (_KEYS_OF_SEVERAL if "stage" in arguments else _KEYS | _KEYS_OF_SEVERAL).items():
        value = getattr(arguments, name, None)
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            options.append((flag, tuple(key.split(".")), list(value) if isinstance(value, tuple) else value))
    refuse_without_effect(arguments)
    raw = with_plugins(read_params(arguments.params), arguments.plugins)
    # As its help says: values next to --method are that method's, not the file's.
    if getattr(arguments, "method", None):
        raw = with_values(raw, {"method.name": arguments.method}, "--method: ")
    refuse_typos(raw := override(raw, arguments.assignments, options))
    return raw


def refuse_without_effect(arguments: argparse.Namespace) -> None:
    """Refuse ``--set`` of keys that the command ignores; in a file they may be for other commands."""
    of_several = "stage" in arguments or "seeds" in arguments
    for key in (assignment.partition("=")[0].strip() for assignment in arguments.assignments):
        if of_several and key == "seed":
            where = "--seeds" if "seeds" in arguments else "compare.seeds"
            raise ConfigError(f"--set seed: has no effect here; the seeds come from {where}")
        if "methods" in arguments and key == "method.name":
            raise ConfigError("--set method.name: has no effect here; use --methods or compare.methods")
        if getattr(arguments, "partition_seeds", None) and key == "partition.seed":
            raise ConfigError("--set partition.seed: no effect together with --partition-seeds; remove one")
        if not of_several and key.startswith("compare.") and not key.startswith("compare.settings"):
            raise ConfigError(f"--set {shorten(key)}: has no effect here, where one configuration is run")


def _entry(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of one run, not yet validated."""
    from pipelines.plan.params import for_entry

    raw = _raw(arguments)
    _say_models(arguments, raw, [arguments.method])
    return for_entry(raw, arguments.method, getattr(arguments, "seed", None))


def _say_models(arguments: argparse.Namespace, raw: Mapping[str, Any], rows: Sequence[str | None]) -> None:
    """Report which methods bring their own model; refuse another model in ``--set``."""
    from pipelines.plan.params import brought_models

    for line in brought_models(raw, rows, arguments.assignments):
        tell(line)


def stage(arguments: argparse.Namespace) -> int:
    """Run one stage of `dvc.yaml` without Prefect (``protofl stage``)."""
    from flcore.core.loaded_code import EditedError, read_sources, refuse_edited
    from pipelines.plan.files import DEFAULT_FILE
    from pipelines.stages import commands

    params = arguments.params or DEFAULT_FILE

    def used() -> tuple[bytes | None, Mapping[str, bytes]]:
        return params.read_bytes() if params.is_file() else None, read_sources(_PACKAGE)

    before = used()
    which = (arguments.method, arguments.seed)
    commands.stage(arguments.stage, _raw(arguments), arguments.out, *which, restart=arguments.restart)
    # DVC records parameters and code at the end of a stage as the inputs of its results.
    refuse_edited()
    if used() != before:
        raise EditedError.of(f"{params} or a file of {_PACKAGE.name}")
    return 0


def list_(arguments: argparse.Namespace) -> int:
    """Print the entries of a registry (``protofl list``)."""
    from pipelines.cli.headlines import TABLES, headlines

    has_more = _load_plugins(arguments)  # also refuses missing ones
    if not arguments.json and not (has_more and arguments.kind in TABLES):
        print("\n".join(entry.line for entry in headlines(arguments.kind)))
        return 0
    from pipelines.cli import registry

    if arguments.json:
        print(json.dumps(registry.describe(arguments.kind), indent=2))
    else:
        print("\n".join(entry.line for entry in registry.loaded(arguments.kind)))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print one entry in full (``protofl show``)."""
    from pipelines.cli import registry

    _load_plugins(arguments)
    described = registry.describe_one(arguments.kind, arguments.name)
    print(json.dumps(described, indent=2) if arguments.json else "\n".join(registry.lines(described)))
    return 0


def _load_plugins(arguments: argparse.Namespace) -> bool:
    """Load the plug-ins of the parameter file and the command line; return whether there are any."""
    from pipelines.plan.files import read_params, with_plugins

    entries = with_plugins(read_params(arguments.params), arguments.plugins).get("plugins")
    if not entries:
        return False
    from flcore.config.plugins import load_all

    return bool(load_all(entries))


def schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of parameter files (``protofl schema``)."""
    from pipelines.plan import schema as schemas

    print(schemas.text(), end="")
    return 0


def new(arguments: argparse.Namespace) -> int:
    """Write a new method and its test (``protofl new method``)."""
    from pipelines.cli.new_method import write

    method, test = write(arguments.name, arguments.out)
    print(f"{method}: the method; run it with  protofl run --plugin {method} --method {arguments.name}")
    print(f"{test}: its test; run it with  python -m pytest {test}")
    return 0


def track(arguments: argparse.Namespace) -> int:
    """Log runs to MLflow that it lacks (``protofl track``), or find the best one there (``protofl track best``)."""
    from pipelines.orchestration import commands
    from pipelines.plan.files import read_params
    from pipelines.tracking.store import is_possible, no_store, resolve_uri

    is_best = _asks_for_the_best(arguments)
    section = read_params(None).get("tracking")
    section = section if isinstance(section, Mapping) else {}
    uri = resolve_uri(arguments.uri or section.get("uri"))
    if not is_possible(uri):
        raise ConfigError(f"{no_store(uri)}; name another with --uri, tracking.uri or MLFLOW_TRACKING_URI")
    if is_best:
        commands.best(uri, arguments.metric, arguments.experiment, arguments.where, promote=arguments.promote)
        return 0
    return 0 if commands.track(arguments.directories, uri, register=section.get("register") is True) else 4


def _asks_for_the_best(arguments: argparse.Namespace) -> bool:
    """Return whether ``best`` is a subcommand, not a folder.

    Raises:
        ConfigError: options of ``track best`` are given with folders, or ``track best`` lacks its metric.
    """
    named = arguments.directories == [Path("best")]
    options = ("metric", "experiment", "where", "promote")
    given = [option for option in options if getattr(arguments, option) not in (None, False)]
    if given and not named:
        raise ConfigError(f"--{given[0]}: goes with 'protofl track best', and that with no folders")
    if named and arguments.metric is None and (given or not Path("best").is_dir()):
        raise ConfigError("track best: --metric is missing; say by which, such as --metric mean_local")
    return named and arguments.metric is not None


def analyse(arguments: argparse.Namespace) -> int:
    """Compute analyses of a finished run, and write its page (``protofl analyse``)."""
    from flcore.config.analyses import SUMMARIES
    from flcore.config.schema import Config
    from flcore.experiment.run_folder import stored_mapping
    from pipelines.reporting.run_report import report

    directory: Path = arguments.directory
    stored = stored_mapping(directory)
    chosen = stored["evaluation"].get("analyses") if arguments.analyses is None else arguments.analyses
    if not chosen:
        raise ConfigError(f"--analyses: name at least one of {', '.join(SUMMARIES)}")
    for name in arguments.analyses or ():
        if name not in SUMMARIES:
            raise ConfigError(unknown_key(f"--analyses {shorten(name)}", name, SUMMARIES).replace("key", "analysis", 1))
    config = Config.from_mapping({**stored, "evaluation": {**stored["evaluation"], "analyses": chosen}})
    print(report(directory, config=config, prepared=arguments.prepared, partition=arguments.partition))
    return 0


def up(arguments: argparse.Namespace) -> int:
    """Start the servers (``protofl up``)."""
    from pipelines.orchestration import services

    wanted = {service: getattr(arguments, service) for service in SERVICES}
    services.up(**wanted, flows_per_gpu=arguments.flows_per_gpu)
    return 0


def deploy(arguments: argparse.Namespace) -> int:
    """Register the deployments with the configured server (``protofl deploy``)."""
    from pipelines.orchestration import services

    services.deploy(flows_per_gpu=arguments.flows_per_gpu)
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Print which servers run (``protofl status``); return 4 if none does, or one does not answer."""
    from pipelines.orchestration import services

    return 0 if services.status(as_json=arguments.json) else 4


def down(arguments: argparse.Namespace) -> int:
    """Stop the servers that `up` started (``protofl down``)."""
    from pipelines.orchestration import services

    services.down()
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Examine this machine (``protofl doctor``); return 3 if a requirement is missing."""
    from pipelines.cli.doctor import examine, is_missing

    lines = [redact(line) for line in examine()]
    print("\n".join(lines))
    return 3 if any(map(is_missing, lines)) else 0


def bench(arguments: argparse.Namespace) -> int:
    """Run a benchmark of the checkout that contains this package (``protofl bench``)."""
    checkout = Path(__file__).resolve().parents[2]
    if not ((checkout / "pyproject.toml").is_file() and (checkout / "benchmarks").is_dir()):
        raise ConfigError("bench: the installed package has no benchmarks; run the command in a source checkout")
    sys.path.append(str(checkout))
    from benchmarks.command import main

    return main(arguments.words)


def completion(arguments: argparse.Namespace) -> int:
    """Print a script for a shell (``protofl completion``)."""
    from pipelines.cli.completion import script

    print(script(arguments.shell, arguments.parser))
    return 0
