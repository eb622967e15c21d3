"""The command line as a cyclopts app: commands are functions that are imported when they are called."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cyclopts import App

from flcore.version import VERSION
from pipelines.cli.options import DEFAULTS

CHECKOUT = Path(__file__).parents[2]
"""The source checkout, if this package is not installed."""

_COMMANDS = (
    ("experiments", "entries", "init"),
    ("experiments", "train", "run compare sweep tune"),
    ("experiments", "stage", "stage_code stage_prepare stage_partition stage_train stage_compare stage_paper"),
    ("experiments", "paper", "paper_list paper_show paper_run paper_keep paper_claims"),
    ("methods and parameters", "entries", "list_ show schema new check"),
    ("finished runs", "results", "track analyse archive reproduce board"),
    ("this machine", "machine", "up deploy schedule_list schedule_on schedule_off status down doctor clean completion"),
)
"""Group, module of :mod:`pipelines.cli`, and its functions: ``stage_train`` is the command ``stage train``."""
_PARENTS = {
    "stage": "Run one stage of dvc.yaml, without any server.",
    "paper": "Run tables of the five papers, next to the printed figures, and judge their claims.",
    "schedule": "List the schedules of deployments, and switch them on and off.",
}
"""Command with commands of its own → summary."""


class CommandLine(App):
    """The app with plain help texts (:mod:`pipelines.cli.help`)."""

    def help_print(self, tokens: str | Iterable[str] | None = None, *, console: Any = None) -> None:
        """Print the help text of the command that the words name."""
        from pipelines.cli.help import help_text

        console.print(help_text(self, tokens))


def command_names(app: App, *parents: str) -> Iterator[str]:
    """Yield the names of all commands, such as ``stage train``."""
    if app.default_command:
        yield " ".join(parents)
    for name in app:
        if not name.startswith("-"):
            yield from command_names(app[name], *parents, name)


def make_app(*, with_benchmarks: bool = True) -> CommandLine:
    """Return the command line; ``with_benchmarks`` in a source checkout, which imports torch."""
    # Not rich, whose import takes a third of the time that `protofl --help` may take.
    console: Any = SimpleNamespace(print=print)
    app = CommandLine(
        name="protofl",
        help="Prototype-based federated learning on non-IID images.",
        version_flags=(),
        console=console,
        error_console=console,
        default_parameter=DEFAULTS,
        print_error=False,
        exit_on_error=False,
    )
    app.command(lambda: print(f"protofl {VERSION}"), "--version")
    for group, module, functions in _COMMANDS:
        for function in functions.split():
            parent, _, command = function.removesuffix("_").rpartition("_")
            if parent and parent not in app:
                app.command(App(name=parent, help=_PARENTS[parent], group=group, version_flags=()))
            (app[parent] if parent else app).command(f"pipelines.cli.{module}:{function}", command, group=group)
    if with_benchmarks and _has_benchmarks():
        app.command("benchmarks.command:app", "bench", group=group, help="Run a benchmark.")
    else:
        app.command("pipelines.cli.machine:bench", "bench", group=group, help_flags=())
    return app


def _has_benchmarks() -> bool:
    """Return whether the benchmarks are next to this package; make them importable then."""
    if not ((CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "benchmarks").is_dir()):
        return False
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return True
