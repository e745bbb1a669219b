"""Calls without their refs: the structure of the arguments with placeholders, and code made from it.

The controller builds a CallTree once for each kind of call; the worker turns it into an expression over local
names, so that calling it costs what writing the call by hand would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from monarch_lab.tensors import naming


@dataclass(frozen=True, slots=True)
class Input:
    """Stands for input tensor ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """Stands for number operand ``index``; with ``dtype`` it is made a 0-dim tensor."""

    index: int
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """Stands for what the worker's function at ``path`` makes of ``args``, afresh at each call."""

    path: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CallTree:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Source:
    """Builds the source of an expression; constants that have no literal get a name in ``names``."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def constant(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def expression(self, tree: Any) -> str:
        kind = type(tree)
        if kind is Input:
            return f"t{tree.index}"
        if kind is Number:
            if tree.dtype is None:
                return f"n{tree.index}"
            return f"{self.constant(torch.tensor)}(n{tree.index}, dtype={self.constant(tree.dtype)})"
        if kind is Built:
            function = self.constant(naming.resolve(tree.path, {}))
            return f"{function}({', '.join(self.expression(x) for x in tree.args)})"
        if tree is None or kind is bool or kind is int:
            return repr(tree)
        if kind is tuple:
            return "(" + "".join(self.expression(x) + ", " for x in tree) + ")"
        if kind is list:
            return "[" + ", ".join(self.expression(x) for x in tree) + "]"
        if kind is dict:
            return "{" + ", ".join(f"{self.expression(k)}: {self.expression(v)}" for k, v in tree.items()) + "}"
        if kind is slice:
            return f"slice({self.expression(tree.start)}, {self.expression(tree.stop)}, {self.expression(tree.step)})"
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return f"{self.constant(kind)}({', '.join(self.expression(x) for x in tree)})"
        return self.constant(tree)

    def call(self, function: Callable[..., Any], tree: CallTree) -> str:
        arguments = [self.expression(a) for a in tree.args]
        for key, value in tree.kwargs.items():
            if key.isidentifier():
                arguments.append(f"{key}={self.expression(value)}")
            else:
                arguments.append(f"**{{{key!r}: {self.expression(value)}}}")
        return f"{self.constant(function)}({', '.join(arguments)})"
