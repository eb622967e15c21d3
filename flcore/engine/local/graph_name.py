"""A hash of a traced step: equal steps are compiled once.

Two values of a hyper-parameter that no loss reads, such as a threshold of the server's, give one graph; so does code
before and after an edit that no step notices. Compiling takes a minute, tracing some seconds.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMESPACES = ("aten", "prims")
"""Namespaces of operations that PyTorch's version fixes; a plug-in's may change under its name."""


def graph_name(graph: torch.fx.GraphModule, example: Sequence[Tensor], made_with: Mapping[str, Any]) -> str | None:
    """A word for a graph, its constants, and the tensors that it is for.

    Args:
        graph: as traced. example: the tensors that it is called with; their values do not count.
        made_with: everything else that a program depends on, as JSON values.

    Returns:
        24 hexadecimal digits; None where what is written in the graph does not say all that it does.
    """
    constants = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph, node.target, None)
            if type(value) is not Tensor or value.device.type != "cpu":
                return None
            content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            constants.append([node.target, _described(value), hashlib.sha256(content).hexdigest()])
        elif node.op == "call_function":
            if node.target is not operator.getitem and getattr(node.target, "namespace", None) not in _NAMESPACES:
                return None
        elif node.op not in ("placeholder", "output"):
            return None
    found = {
        "code": graph.code,  # numbers are written whole
        "constants": constants,
        "tensors": [_described(tensor) for tensor in example],
        "made_with": made_with,
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:24]


def _described(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), str(tensor.device)]
