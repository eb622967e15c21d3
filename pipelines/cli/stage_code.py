"""``protofl stage code``."""

from __future__ import annotations

import argparse


def stage_code(arguments: argparse.Namespace) -> int:
    """``protofl stage code``: digests of the code that each other stage of `dvc.yaml` depends on."""
    from pipelines.stages.code import write_digests

    write_digests(arguments.out / "code")
    return 0
