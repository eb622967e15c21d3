"""What travels with each method in two rounds of four clients (baselines.md section 22): one table, beside FedAvg's.

Methods whose messages depend on more than the classes held have a test of their own: CCVR, FedCSPC, FedMLP, FedPA,
FedPG, GFPL, the ProtoLDAs, quantised FedAvg and VHL.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.cases import SMALL

# fedgen_cnn at 1x16x16 with d = 8 and C = 6 classes: 984 + (256·8 + 8) + (8·6 + 6) = 3,094 parameters; statistics of
# BatchNorm: 2·6 + 2·16 floats and 2 counters, 44·4 + 16 = 192 bytes, which are no scalars.
BODY, HEAD, STATISTICS = 984 + 2056, 54, 192
PARAMETERS = BODY + HEAD
ROW = 8 * 4 + 8  # of a class: d float32, and an id
GENERATOR, OF_IT = (38 * 256 + 256) + 2 * 256 + (256 * 8 + 8), 2 * 256 * 4 + 8
FEDAVG_UP = {"model": 4 * PARAMETERS, "model_buffers": STATISTICS, "num_samples": 8}
FEDAVG_DOWN = {"model": 4 * PARAMETERS, "model_buffers": STATISTICS}
BASE_UP, BASE_DOWN = {**FEDAVG_UP, "model": 4 * BODY}, {**FEDAVG_DOWN, "model": 4 * BODY}


def times(number: int, sizes: dict[str, int]) -> Counter[str]:
    return Counter({kind: number * size for kind, size in sizes.items()})


def expected(name: str, held: int) -> tuple[Counter[str], Counter[str], int]:
    """Bytes by kind up and down, and scalars up, of 8 turns; clients hold ``held`` classes, counted for each."""
    up, down, plain = times(8, FEDAVG_UP), times(8, FEDAVG_DOWN), 8 * PARAMETERS
    both = 2 * held  # in two rounds
    every_class = 4 * 6  # down to four clients, from round 2 on
    return {
        "local": (Counter[str](), Counter[str](), 0),
        "central": (Counter[str](), Counter[str](), 0),
        **dict.fromkeys(("fedavg", "ditto", "fedensemble", "fesem"), (up, down, plain)),
        "fednova": (up + times(8, {"effective_steps": 8}), down, plain + 8),
        "scaffold": (
            up + times(8, {"control_change": 4 * PARAMETERS}), down + times(8, {"control": 4 * PARAMETERS}), 2 * plain
        ),
        "feddc": (
            up + times(8, {"change_step": 4 * PARAMETERS}), down + times(8, {"change": 4 * PARAMETERS}), 2 * plain
        ),
        "fedfa": (up + times(8, {"anchors": 4 * 48}), down + times(8, {"anchors": 4 * 48}), plain + 8 * 48),
        "creff": (
            up + times(both, {"gradients": 4 * HEAD + 8}),
            down + times(8, {"classifier": 4 * HEAD}),
            plain + both * HEAD,
        ),
        "fedproc": (
            up + times(both, {"prototypes": ROW}), down + times(every_class, {"prototypes": ROW}), plain + both * 8
        ),
        "fedproc, weighted": (
            up + times(both, {"prototypes": ROW, "class_counts": 8}),
            down + times(every_class, {"prototypes": ROW}),
            plain + both * 8,
        ),
        # Knowledge is a mean feature and mean soft predictions: d + C.
        "fedhkd": (
            up + times(both, {"knowledge": 14 * 4 + 8, "class_counts": 8}),
            down + times(every_class, {"knowledge": 14 * 4 + 8}),
            plain + both * 14,
        ),
        "fedgen": (
            up + times(8, {"label_counts": 6 * 8}),
            down + times(4, {"generator": 4 * GENERATOR, "generator_buffers": OF_IT, "label_distribution": 6 * 4}),
            plain,
        ),
        **dict.fromkeys(("fedper", "fedrep"), (times(8, BASE_UP), times(8, BASE_DOWN), 8 * BODY)),
        "fedproto": (times(both, {"prototypes": ROW}), times(every_class, {"prototypes": ROW}), both * 8),
    }[name]  # fmt: skip


METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("local", "central", "fedavg", "ditto", "fedensemble", "fednova", "scaffold", "feddc")},
    **{name: {} for name in ("fedfa", "fedproc", "fedhkd", "fedper", "fedrep", "fedproto")},
    "fedproc, weighted": {"weighted": True},
    "fesem": {"centres": 2},
    "creff": {**SMALL["creff"]},
    "fedgen": {**SMALL["fedgen"]},
}


@pytest.mark.parametrize("name", METHODS)
def test_traffic(lab: Any, name: str, tmp_path: Any) -> None:
    method = {"name": name.removesuffix(", weighted"), **METHODS[name]}
    run = lab.run(lab.experiment(method=method, federation__rounds=2, local__lr=0.01, local__steps=1), tmp_path / "run")
    up, down, scalars = expected(name, int((lab.partition.counts > 0).sum()))
    last = run.history[-1]
    assert (last["bytes_up"], last["bytes_down"]) == (dict(up), dict(down))
    assert last["scalars_up"] == scalars == sum(size.scalars for size in run.state.up.values())
