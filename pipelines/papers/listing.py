"""Text of ``protofl paper show``: a table's common settings, then what columns, rows and cells add."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pipelines.papers.catalogue import PaperTable
from pipelines.runs.compared import flatten


def listing(table: PaperTable, rows: Collection[str] | None = None, columns: Collection[str] | None = None) -> str:
    """Return the settings of a table with dotted keys: the common ones, then what columns, rows and cells add."""
    return "\n".join(_lines(table, rows, columns))


def _lines(table: PaperTable, rows: Collection[str] | None, columns: Collection[str] | None) -> Iterator[str]:
    shown = [column for column in table.columns if columns is None or column.key in columns]
    whole = [{**table.common, **column.values} for column in shown]
    alike = {key: value for key, value in whole[0].items() if all(other.get(key, _NONE) == value for other in whole)}
    yield "all cells:"
    yield from (f"  {key}: {text}" for key, text in flatten(alike).items())
    yield "columns:"
    for column, every in zip(shown, whole, strict=True):
        differing = {key: value for key, value in every.items() if key not in alike}
        yield f"  {column.key}: {column.title}; figure {column.metric}{_said(differing)}"
    yield "rows:"
    for row in table.rows:
        if rows is None or row.key in rows:
            method = f"method {row.method}" if row.method is not None else "not built"
            read = "".join(f"; {metric} for {usual}" for usual, metric in row.metrics.items())
            yield f"  {row.key}: {row.title}; {method}{read}{_said(row.values)}"
    own_cells = [
        (one.rows or {"all rows"}, one.columns or {"all columns"}, one.values)
        for one in table.cells
        if _meets(one.rows, rows) and _meets(one.columns, columns)
    ]
    if own_cells:
        yield "some cells:"
    for of_rows, of_columns, values in own_cells:
        yield f"  {', '.join(sorted(of_rows))} on {', '.join(sorted(of_columns))}{_said(values)}"


def _meets(keys: Collection[str], shown: Collection[str] | None) -> bool:
    return not keys or shown is None or any(key in shown for key in keys)


def _said(values: Mapping[str, Any]) -> str:
    return "".join(f"; {key}: {text}" for key, text in flatten(values).items())


_NONE = object()
