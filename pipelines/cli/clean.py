"""``protofl clean``: deletes the cache and the logs of a folder, which can be made again."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pipelines.cli.arguments import Parser

_EPILOG = """\
Deletes prepared data, partitions and the index of finished runs (.protofl/cache, or PROTOFL_CACHE), and logs of
processes that have ended. Runs stay, and prepare their data again when they need them. Refused while a run trains.
"""


def add_to(add: Callable[..., Parser]) -> None:
    """Add the command."""
    add("clean", clean, "Delete the cache and old logs of this folder; runs, tables and stores stay.", _EPILOG)


def clean(arguments: argparse.Namespace) -> int:
    """Delete cache and logs, and print their size."""
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
