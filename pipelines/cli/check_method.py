"""``protofl check method``: the checks of :mod:`flcore.testing` on a registered method or on a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ConfigError, RunError
from flcore.core.text import unknown_key
from pipelines.cli import options
from pipelines.cli.arguments import Parser

if TYPE_CHECKING:
    from flcore.methods.api import Method

_WIDTH = 13


def add_to(add: Callable[..., Parser]) -> None:
    """Add the command."""
    about = "Check a method on synthetic data: repeatable, resumable, traffic counted."
    parser = add("check", check, about, "Exit code 0: all checks pass; 4: one fails.")
    parser.add_argument("kind", choices=("method",), metavar="KIND", help="method")
    parser.add_argument("name", metavar="NAME", help="a method (see 'protofl list methods'), or a file: mine.py")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="set a parameter, e.g. method.mu=0.1; repeatable",
    )
    parser.add_argument("--slow", action="store_true", help="also train in a worker process")
    options.as_json(parser, "a list of objects")


def check(arguments: argparse.Namespace) -> int:
    """Check methods and print the results as a table (``protofl check method``)."""
    from flcore.config.plugins import load

    for file in arguments.plugins or ():
        load(file)
    checked_methods = list(checked(arguments.name, arguments.assignments, slow=arguments.slow))
    outcomes = [one for _, found in checked_methods for one in found]
    if arguments.json:
        print(json.dumps(outcomes, indent=2))
    else:
        print("\n".join(line for name, found in checked_methods for line in lines(name, found)))
    failed = [f"{one['method']}: {one['check']}" for one in outcomes if one["result"] == "failed"]
    if failed:
        raise RunError(f"check method: failed: {', '.join(failed)}")
    return 0


def checked(name: str, assignments: Sequence[str], *, slow: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each method with the results of its checks, as JSON values.

    Args:
        name: of a method, or a file with methods.
        assignments: ``KEY=VALUE`` of the method's parameters and of other sections.
        slow: also train in a worker process.

    Raises:
        ConfigError: the method or file does not exist, or a value cannot be used.
    """
    from flcore.testing import check_method
    from pipelines.plan.params import override

    raw = {section: dict(values) for section, values in override({}, assignments).items()}
    params = raw.pop("method", {})
    for cls in _classes(name):
        found = [
            {
                "method": cls.name,
                "check": one.check,
                "result": "failed" if one.problem else "skipped" if one.reason else "passed",
                "finding": one.problem or one.reason,
                "meaning": one.meaning,
            }
            for one in check_method(cls, raw, slow=slow, stop=False, **params)
        ]
        yield cls.name, found


def _classes(name: str) -> list[type[Method]]:
    from flcore.config import plugins
    from flcore.methods import METHODS

    if name in METHODS:
        return [METHODS[name]]
    if not name.endswith(".py"):
        raise ConfigError(f"check method: {unknown_key(name, name, METHODS).replace('key', 'method', 1)}")
    module = plugins.load(name).module
    return [cls for cls in METHODS.values() if cls.__module__ == module]


def lines(name: str, outcomes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a heading and a line per check."""
    passed = sum(one["result"] == "passed" for one in outcomes)
    yield f"{name}: {passed} of {sum(one['result'] != 'skipped' for one in outcomes)} checks passed"
    for one in outcomes:
        yield f"  {one['result']:7} {one['check']:{_WIDTH}} {one['finding'] or one['meaning']}"
