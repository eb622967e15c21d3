"""One run and nothing else: ``python -m benchmarks.training PARAMS PREPARED PARTITION RUN [KEY=VALUE]...``.

No server, no recorder, no page: what the library alone takes for training and evaluation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import flcore
from flcore.core.errors import ProtoflError
from pipelines.config.files import read_params
from pipelines.config.params import override


def main(params: str, prepared: str, partition: str, run: str, *assignments: str) -> int:
    """Train and evaluate on data that are there; 3, with a line that says why, if that failed."""
    try:
        flcore.run(override(read_params(Path(params)), assignments), run, prepared=prepared, partition=partition)
    except ProtoflError as error:
        print(f"protofl: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
