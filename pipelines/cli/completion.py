"""``protofl completion SHELL``: a script that completes commands, options, choices, files and folders."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab  # a dependency of DVC

from pipelines.cli.headlines import names


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion script of a shell that `shtab` knows; the parser is unusable afterwards."""
    methods = names("methods")
    for action in _actions(parser):
        if action.dest == "method":
            action.choices = methods  # suggestions only: nothing is parsed here
        if action.type is Path:
            is_folder = str(action.metavar).endswith("DIR")
            vars(action)["complete"] = shtab.DIRECTORY if is_folder else shtab.FILE
    return str(shtab.complete(parser, shell=shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
