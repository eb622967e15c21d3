"""``python -m pipelines.cli``: the command ``protofl``."""

import sys

from pipelines.cli.app import main

sys.exit(main())
