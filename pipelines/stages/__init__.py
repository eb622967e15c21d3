"""The five stages and the comparison: thin functions that load, call `flcore` and save.

DVC calls them through ``protofl stage``, flows call them as tasks; both give the same bytes.
"""

from flcore.run_folder import refuse_other_run
from pipelines.stages.compare import collect, compare, comparison_runs, partition_folder
from pipelines.stages.evaluate import evaluate
from pipelines.stages.partition import partition, partition_table
from pipelines.stages.prepare import prepare
from pipelines.stages.report import report
from pipelines.stages.train import train

__all__ = [
    "collect",
    "compare",
    "comparison_runs",
    "evaluate",
    "partition",
    "partition_folder",
    "partition_table",
    "prepare",
    "refuse_other_run",
    "report",
    "train",
]
