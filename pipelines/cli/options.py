"""Options that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.cli.arguments import Parser

_PREFECT = {"auto": None, "inline": False, "prefect": True}


class _Orchestrator(argparse._StoreAction):
    """Stores the same value as ``--prefect`` and ``--no-prefect``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, "prefect", **keywords)

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, *flag: Any) -> None:
        namespace.prefect = _PREFECT[values]


def params(parser: Parser, what: str = "parameter file") -> None:
    """Add the parameter file."""
    parser.add_argument("--params", type=Path, metavar="FILE", help=f"{what} (default: params.yaml, if it exists)")


def values(parser: Parser) -> None:
    """Add the parameter file and ``--set``."""
    params(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="set a value, e.g. partition.alpha=0.1, over the file and compare.settings; repeatable",
    )


def out(parser: Parser, default: str, what: str = "folder of the results") -> None:
    """Add ``--out``. A default in angle brackets is only shown, and determined later."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=None if "<" in default else Path(default),
        help=f"{what}; {{date}} becomes today's date (UTC) (default: {default})",
    )


def orchestration(parser: Parser, *, may_restart: bool = True) -> None:
    """Add the options for Prefect, and for waiting."""
    about = "run as a flow of the configured Prefect server, which must answer (default: if one answers)"
    prefect = parser.add_mutually_exclusive_group()
    prefect.add_argument("--prefect", action="store_true", default=None, help=about)
    prefect.add_argument("--no-prefect", action="store_false", default=None, dest="prefect", help="run without Prefect")
    about = "older name: inline is --no-prefect, prefect is --prefect, auto is the default"
    prefect.add_argument("--orchestrator", action=_Orchestrator, choices=(*_PREFECT,), metavar="NAME", help=about)
    if may_restart:
        restart(parser)
    parser.add_argument(
        "--no-wait",
        action="store_false",
        dest="wait",
        help="exit once results are on disk; figures, page and MLflow follow in the background",
    )


def no_cache(parser: Parser) -> None:
    """Add ``--no-cache``: train runs again that have finished in another folder."""
    parser.add_argument(
        "--no-cache",
        action="store_false",
        dest="copies",
        help="train again instead of copying results of runs that have finished in another folder",
    )


def restart(parser: Parser) -> None:
    """Add ``--restart``: discard results and checkpoints that are unusable, damaged, or from other code."""
    parser.add_argument(
        "--restart",
        action="store_true",
        help="discard unusable checkpoints, damaged results and results of other code; resume the rest",
    )


def as_json(parser: Parser, what: str) -> None:
    """Add ``--json``: output for programs."""
    parser.add_argument("--json", action="store_true", help=f"print {what}, and nothing else, on standard output")
