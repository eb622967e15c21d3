"""Tables of cells as pictures: accuracy by class, who holds what, and the cells of analyses."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from pipelines.reporting.figures.curves import Panels
from pipelines.reporting.figures.parts import accuracy_bar, heatmap, whole_line
from pipelines.reporting.figures.style import COUNTS, INK, WIDTH, house_style
from pipelines.reporting.partition_table import PartitionTable
from pipelines.runs.analyses import StoredAnalysis


def draw_class_accuracy(table: pd.DataFrame) -> Panels:
    """Draw class-wise accuracy on the global test set: methods by classes, 0 to 1, grey without a value."""
    methods, classes = table.shape
    with house_style():
        figure = whole_line(min(max(1.15 + 0.27 * methods, 1.5), 7.5))
        axes = figure.add_subplot()
        names = list(table.index), [str(name) for name in table.columns]
        text = _percent if classes <= 24 else None
        mesh = heatmap(figure, axes, table.to_numpy(dtype=float), names, text=text)
        axes.set_xlabel("class")
        accuracy_bar(figure, mesh, axes)
    return {"": figure}


def draw_partition(partition: PartitionTable) -> Figure:
    """Draw samples per class (rows) and client (columns): white is none, darker is more, one colour bar."""
    clients, classes = partition.counts.shape
    with house_style():
        height = min(max(1.4 + 0.24 * classes, 2.2), 7.5)
        figure = whole_line(height)
        axes = figure.add_subplot()
        ids = [str(int(client)) if client.isdigit() else client for client in partition.client_ids]
        text = (lambda value: f"{value:.0f}" if value else "") if clients <= 24 and classes <= 20 else None
        top = max(int(partition.counts.max()), 1)
        mesh = heatmap(
            figure, axes, partition.counts.T, (partition.class_names, ids), text=text, colours=COUNTS, top=top, most=32
        )
        axes.set_xlabel("client")
        axes.set_ylabel("class")
        figure.colorbar(mesh, ax=axes, label="training samples", pad=0.015, fraction=0.03, aspect=max(15, 6 * height))
    return figure


def draw_class_heatmap(analysis: StoredAnalysis) -> Figure:
    """Draw accuracy by client and class, on the whole test set and on clients' own test data."""
    rows = pd.DataFrame(analysis.rows)
    rows["accuracy"] = pd.to_numeric(rows["accuracy"].replace("", np.nan))
    models, classes = (list(dict.fromkeys(rows[key])) for key in ("model", "class"))
    tests = [test for test in ("all", "own") if (rows["test"] == test).any()]
    if not ((rows["test"] == "all") & (rows["model"] != "global")).any():
        tests = ["own"]  # one panel, whose last row is the global model's
    figure = whole_line(min(max(1.3 + 0.24 * len(models), 2.2), 9.0))
    panels = figure.subplots(1, len(tests), squeeze=False)[0]
    for position, (axes, test) in enumerate(zip(panels, tests, strict=True)):
        shown = rows[(rows["test"] == test) | ((rows["model"] == "global") & (len(tests) == 1))]
        values = shown.groupby(["model", "class"])["accuracy"].last().unstack().reindex(index=models, columns=classes)
        text = _percent if values.size <= 400 and len(classes) <= 24 // len(tests) else None
        mesh = heatmap(figure, axes, values.to_numpy(float), (models, classes), text=text, most=26 // len(tests))
        if "global" in models:
            axes.axhline(len(models) - 1, color=INK, linewidth=1.2)
        axes.set_xlabel("class")
        axes.set_ylabel("client" if position == 0 else "")
        if len(tests) > 1:
            axes.set_title({"all": "whole test set", "own": "clients' own test data"}[test])
    accuracy_bar(figure, mesh, list(panels))
    return figure


def draw_confusion(analysis: StoredAnalysis) -> Figure:
    """Draw the share of a true class's test images by predicted class."""
    counts, names = analysis.arrays["counts"].astype(float), [str(name) for name in analysis.arrays["class_names"]]
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    side = min(max(1.8 + 0.3 * len(names), 3.2), WIDTH)
    figure = Figure(figsize=(side + 0.8, side))
    axes = figure.add_subplot()
    text = (lambda share: _percent(share) if share > 0 else "") if len(names) <= 20 else None
    mesh = heatmap(figure, axes, shares, (names, names), text=text)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    accuracy_bar(figure, mesh, axes, "share of the true class")
    return figure


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"
