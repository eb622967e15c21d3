"""``python -m benchmarks NAME``: like ``protofl bench NAME``."""

import sys

from pipelines.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
