"""What `protofl paper show` prints of a setting."""

from __future__ import annotations

from pipelines.papers.listing import listing

from .conftest import tiny


def test_what_columns_have_alike_stands_once_and_what_differs_with_each() -> None:
    """Two columns of which both have a smallest size; a row's own key, another figure, and a cell's own value."""
    table = tiny(
        common={"data.name": "digits", "federation.rounds": 10},
        columns={
            "a": {"title": "first", "values": {"partition.alpha": 0.1, "partition.min_size": 5}},
            "b": {"values": {"partition.alpha": 1.0, "partition.min_size": 5}},
        },
        rows={
            "fedavg": {"title": "FedAvg", "method": "fedavg"},
            "near": {
                "title": "FedProx",
                "method": "fedprox",
                "values": {"method.mu": 0.1},
                "metrics": {"top1_global": "top1_vote"},
            },
            "other": {"title": "Unheard-of", "method": None},
        },
        cells=[{"rows": ["near"], "columns": ["b"], "values": {"local.lr": 0.5}}, {"values": {"local.epochs": 2}}],
        printed={},
        missing=[],
    )
    assert listing(table).splitlines() == [
        "all cells:",
        "  data.name: digits",
        "  federation.rounds: 10",
        "  partition.min_size: 5",
        "columns:",
        "  a: first; figure top1_global; partition.alpha: 0.1",
        "  b: b; figure top1_global; partition.alpha: 1.0",
        "rows:",
        "  fedavg: FedAvg; method fedavg",
        "  near: FedProx; method fedprox; top1_vote for top1_global; method.mu: 0.1",
        "  other: Unheard-of; not built",
        "some cells:",
        "  near on b; local.lr: 0.5",
        "  all rows on all columns; local.epochs: 2",
    ]
    assert listing(table, ["fedavg"], ["a"]).splitlines()[-5:] == [
        "  a: first; figure top1_global",
        "rows:",
        "  fedavg: FedAvg; method fedavg",
        "some cells:",
        "  all rows on all columns; local.epochs: 2",
    ]
