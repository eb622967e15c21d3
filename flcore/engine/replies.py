"""A client's reply as a file: safetensors, or JSON that says why there is none.

Each names its run, exchange and client. A damaged or foreign file counts as missing: the reply is made again, with the
same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.engine.turns import Failure, Reply
from flcore.io.files import read_json, sealed, unsealed, write_json
from flcore.io.records import load_record, save_record

ClientResult = Reply | Failure

ExchangeKey = tuple[int, int]
"""Leg, counted over the run from 1, and client."""


def save_result(path: Path, result: ClientResult, place: ExchangeKey, run: str) -> None:
    """Write a reply to ``path``; a failure, to the same name with ``.json``.

    Args:
        path: of the reply.
        result: to be written.
        place: its exchange and client.
        run: digest of the run's name.
    """
    owner = {"place": list(place), "run": run}
    if isinstance(result, Failure):
        write_json(path.with_suffix(".json"), sealed({**vars(result), **owner}))
        return
    names = ("losses", "steps", "has_state", "seconds")
    values = {name: getattr(result, name) for name in names}
    save_record(path, result.message, {**values, **owner, "losses": dict(result.losses)})


def load_result(path: Path, place: ExchangeKey, run: str | None) -> ClientResult | None:
    """Return the result that :func:`save_result` wrote; None if it is missing, damaged, or of another place or run.

    Args:
        path: of the reply. place: expected exchange and client.
        run: digest of the run's name; None: any.
    """
    try:
        if path.with_suffix(".json").exists():
            content = unsealed(read_json(path.with_suffix(".json"), ""))
            if content is None or not _is_of(content, place, run):
                return None
            return Failure(**content)
        if not path.exists():
            return None
        message, extra = load_record(path)
        if not _is_of(extra, place, run):
            return None
        return Reply(message, **extra)
    except (DataError, KeyError, TypeError, AttributeError):
        return None


def _is_of(content: dict[str, Any], place: ExchangeKey, run: str | None) -> bool:
    """Return whether a file is of this place and run; remove both from its content."""
    same_place, owner = content.pop("place") == list(place), content.pop("run")
    return same_place and run in (None, owner)
