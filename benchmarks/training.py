"""One run of the library: ``python -m benchmarks.training PARAMS PREPARED PARTITION RUN [KEY=VALUE]...``."""

import sys
from pathlib import Path

import flcore
from flcore.core.errors import ProtoflError
from pipelines.plan.files import read_params
from pipelines.plan.params import override

if __name__ == "__main__":
    params, prepared, partition, run, *assignments = sys.argv[1:]
    try:
        flcore.run(override(read_params(Path(params)), assignments), run, prepared=prepared, partition=partition)
    except ProtoflError as error:
        sys.exit(f"protofl: {error}")
