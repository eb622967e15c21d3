"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

from pipelines.cli.arguments import Parser


def params(parser: Parser, what: str = "the parameter file") -> None:
    """The parameter file."""
    parser.add_argument(
        "--params", type=Path, metavar="FILE", help=f"{what} (default: params.yaml, where there is one)"
    )


def values(parser: Parser) -> None:
    """The parameter file, and values beside it."""
    params(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="override, e.g. partition.alpha=0.1; wins over the file and over compare.settings; several times",
    )


def out(parser: Parser, default: str, what: str = "where results go") -> None:
    """A default that is a folder is used as such, one in angle brackets is made later."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=None if "<" in default else Path(default),
        help=f"{what}; {{date}} in it becomes today's date, in UTC (default: {default})",
    )


def orchestration(parser: Parser, *, may_restart: bool = True) -> None:
    """Who carries work out, and whether its end is waited for."""
    parser.add_argument(
        "--orchestrator",
        choices=("auto", "inline", "prefect"),
        metavar="NAME",
        default="auto",
        help="auto: a Prefect server where a configured one answers, else none (default); inline: never one; "
        "prefect: one must answer",
    )
    if may_restart:
        restart(parser)
    parser.add_argument(
        "--no-wait",
        action="store_false",
        dest="wait",
        help="return when results are on disk; figures, page and MLflow follow in the background",
    )


def no_cache(parser: Parser) -> None:
    """Leave to train what has finished in another folder."""
    parser.add_argument(
        "--no-cache",
        action="store_false",
        dest="copies",
        help="train runs again that have finished in another folder, instead of copying their results",
    )


def restart(parser: Parser) -> None:
    """Leave to throw away what cannot be gone on with, is damaged, or was finished by other code."""
    parser.add_argument(
        "--restart",
        action="store_true",
        help="throw away a checkpoint that cannot be used, and what is damaged or other code has finished; "
        "the rest is gone on with",
    )


def as_json(parser: Parser, what: str) -> None:
    """Print for programs."""
    parser.add_argument("--json", action="store_true", help=f"print {what}, and nothing else, on standard output")
