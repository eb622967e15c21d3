"""Types of options, and options that several commands have; imports nothing that only a running command needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import ArgumentCollection, Group, Parameter, Token
from cyclopts.exceptions import RepeatArgumentError

from flcore.core.errors import ConfigError
from flcore.core.text import shorten, unknown_key
from pipelines.cli.headlines import names as names_of
from pipelines.plan.files import dated

if TYPE_CHECKING:
    from pipelines.plan.params import Given

T = TypeVar("T")

DEFAULTS = Parameter(negative=())
"""No option has a negative form unless it declares one."""


# -------------------------------------------------------------------------------------------------------- their values


def _whole(text: str) -> int:
    """Return a whole number in the syntax of YAML and JSON; Python also accepts 010 and 1_000."""
    if not re.fullmatch(r"\s*[-+]?(0|[1-9][0-9]*)\s*", text):
        raise ValueError("not a whole number in plain digits")
    return int(text)


def whole_number(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers that are not below ``least``."""

    def read(text: str) -> int:
        try:
            number = _whole(text)
        except ValueError:
            number = least - 1
        if number < least:
            zeros = ", without leading zeros" if re.match(r"[-+]?0\d", text) else ""
            raise ValueError(f"expected a whole number >= {least}{zeros}")
        return number

    return read


def size(text: str) -> int:
    """Read a number of bytes, 1 or more, with a decimal unit as in tables: ``50MB`` is 50,000,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?)b?", text.strip().lower())
    count = round(Decimal(match[1]) * 1000 ** " kmg".index(match[2] or " ")) if match else 0
    if count < 1:
        raise ValueError("expected a size such as 800kB, 50MB or 1.5GB")
    return count


def positive(text: str) -> float:
    """Read a number above 0."""
    try:
        number = 0.0 if "_" in text else float(text)  # Python also accepts 1_000
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError("expected a number > 0")
    return number


def whole_numbers(text: str) -> tuple[int, ...]:
    """Read ``0,1,2`` without duplicates."""
    try:
        numbers = [_whole(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError("expected whole numbers separated by commas, such as 0,1,2") from error
    return _once(numbers)


def names(text: str) -> tuple[str, ...]:
    """Read ``a,b,c`` without duplicates."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError("expected names separated by commas, such as fedavg,fedproto")
    return _once(parts)


def _once(values: Iterable[T]) -> tuple[T, ...]:
    unique = tuple(values)
    for value in unique:
        if unique.count(value) > 1:
            raise ValueError(f"{shorten(str(value))} appears twice; name each once")
    return unique


def read_by(read: Callable[[str], Any], metavar: str) -> Parameter:
    """Return the declaration of an option with one word as its value, also if that word is a list."""

    def convert(_type: object, tokens: Sequence[Token]) -> Any:
        if len(tokens) > 1:
            raise RepeatArgumentError(token=tokens[1], msg=f"write one list, {tokens[1].keyword} {metavar}")
        return read(tokens[0].value)

    return Parameter(converter=convert, n_tokens=1, metavar=metavar)


Seed = Annotated[int, read_by(whole_number(0), "N")]
Count = Annotated[int, read_by(whole_number(1), "N")]
Size = Annotated[int, read_by(size, "SIZE")]
Number = Annotated[float, read_by(positive, "F")]
Numbers = Annotated[tuple[int, ...], read_by(whole_numbers, "0,1,...")]
Names = Annotated[tuple[str, ...], read_by(names, "A,B,...")]
Name = Annotated[str, Parameter(metavar="NAME")]
MethodName = Annotated[str, Parameter(metavar="NAME", completer=lambda _: names_of("methods"))]
File = Annotated[Path, Parameter(metavar="FILE")]
Folder = Annotated[Path, Parameter(metavar="DIR")]
Out = Annotated[Path, read_by(lambda text: dated(Path(text), datetime.now(UTC).date()), "DIR")]
"""A folder of results; ``{date}`` becomes today's date."""
Results = Annotated[Out, Parameter(help="folder of the results; {date} becomes today's date (UTC)")]
Repeated = tuple[str, ...]
Assignments = Annotated[Repeated, Parameter(name="--set", metavar="KEY=VALUE")]
Restart = Annotated[
    bool, Parameter(help="discard unusable checkpoints, damaged results and results of other code; resume the rest")
]
Json = Annotated[bool, Parameter(name="--json", help="print JSON, and nothing else, on standard output")]


def exclusive() -> Group:
    """Return a group of options of which only one may be given."""

    def check(options: ArgumentCollection) -> None:
        typed = [option.tokens[0].keyword for option in options if option.tokens]
        if len(typed) > 1:
            raise ValueError(f"{typed[0]} and {typed[1]} exclude each other; remove one")

    return Group("", show=False, validator=check)


# ---------------------------------------------------------------------------------------------- of several commands

OF_EVERY_COMMAND = Group("of every command")
_ONE_ORCHESTRATOR = exclusive()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command.

    Attributes:
        debug: show where an error comes from
        plugins: load a file with your own methods, sources, partitioners, models or samplers; repeatable
    """

    debug: Annotated[bool, Parameter(group=OF_EVERY_COMMAND)] = False
    plugins: Annotated[tuple[Path, ...], Parameter(name="--plugin", metavar="FILE.py", group=OF_EVERY_COMMAND)] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Flow:
    """Options for Prefect, and for waiting.

    Attributes:
        prefect: run as a flow of the configured Prefect server, which must answer, or without Prefect (default: as a
            flow if a server answers)
        orchestrator: older name: inline is --no-prefect, prefect is --prefect, auto is the default
        no_wait: exit once results are on disk; figures, page and MLflow follow in the background
    """

    prefect: Annotated[bool | None, Parameter(negative="--no-prefect", group=_ONE_ORCHESTRATOR)] = None
    orchestrator: Annotated[Literal["auto", "inline", "prefect"] | None, Parameter(group=_ONE_ORCHESTRATOR)] = None
    no_wait: bool = False

    @property
    def is_wanted(self) -> bool | None:
        """True: run as a flow; False: without Prefect; None: as a flow if a server answers."""
        older = {"inline": False, "prefect": True}.get(str(self.orchestrator))
        return older if self.prefect is None else self.prefect


ONE_RUN: Mapping[str, str] = {"compare.*": "one configuration is run"}
SEVERAL_RUNS: Mapping[str, str] = {"seed": "the seeds come from --seeds"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Values(Common):
    """The parameters of a command.

    Attributes:
        params: parameter file (default: params.yaml, if it exists)
        assignments: set a value, e.g. partition.alpha=0.1, over the file and compare.settings; repeatable
    """

    params: File | None = None
    assignments: Assignments = ()

    def read(
        self,
        options: Mapping[str, tuple[str, Any]],
        *,
        without_effect: Mapping[str, str],
        method: str | None = None,
        more: Sequence[Given] = (),
    ) -> dict[str, Any]:
        """Return the parameters; only sections without a ``name`` are validated, which needs no torch.

        Args:
            options: the command's own options that set keys: flag → key and value, None if not given.
            without_effect: keys that the command ignores → reason.
            method: replaces the file's; values in ``--set`` are this method's.
            more: further options that set keys.
        """
        from flcore.config.sections import PLAIN, SECTIONS
        from flcore.core.params import build
        from pipelines.plan.files import read_params, with_plugins
        from pipelines.plan.params import override, with_values

        typed: list[Given] = list(more)
        if self.plugins:
            typed.append(("--plugin", ("plugins",), [str(file.absolute()) for file in self.plugins]))
        for flag, (key, value) in options.items():
            if value is not None:
                typed.append((flag, tuple(key.split(".")), list(value) if isinstance(value, tuple) else value))
        refuse_without_effect(self.assignments, without_effect)
        raw = with_plugins(read_params(self.params), self.plugins)
        if method:
            raw = with_values(raw, {"method.name": method}, "--method: ")
        raw = override(raw, self.assignments, typed)
        for key, section in raw.items():
            if key not in SECTIONS:
                raise ConfigError(unknown_key(shorten(key), key, SECTIONS))
            if key in PLAIN and isinstance(section, Mapping):
                build(PLAIN[key], section, key)
        return raw


def refuse_without_effect(assignments: Iterable[str], keys: Mapping[str, str]) -> None:
    """Refuse ``--set`` of keys, or ``section.*``, that the command ignores; a file may have them for other commands."""
    for key in (assignment.partition("=")[0].strip() for assignment in assignments):
        section = "" if key.startswith("compare.settings") else f"{key.partition('.')[0]}.*"
        why = keys.get(key) or keys.get(section)
        if why:
            raise ConfigError(f"--set {shorten(key)}: has no effect here; {why}")
