"""Integer expressions of launch descriptors: grid sizes, workspace sizes, derived arguments, conditions.

A descriptor is data that crosses machines, so its rules are text in a closed language: names, integer literals,
`+ - * // %`, comparisons, `and`, `or`, and the functions `ceil_div`, `min`, `max`. Nothing else parses; no code runs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

from k3_backend.errors import BackendError

__all__ = ["ExpressionError", "evaluate", "names"]

MAX_LENGTH = 300
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"ceil_div": lambda a, b: -(-a // b), "min": min, "max": max}


class ExpressionError(BackendError):
    """An expression outside the language, or one that has no value for the sizes at hand."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(
            what, where=f"expression {text[:MAX_LENGTH]!r}",
            expected="names, integers, + - * // %, comparisons, and/or, ceil_div, min, max",
            next="docs/kernel-authoring.md",
        )  # fmt: skip


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """The value of an expression; conditions give 0 or 1.

    Raises:
        ExpressionError: not in the language, a name without value, a division by zero.
    """
    return _value(_parse(text), values, text)


def names(text: str) -> frozenset[str]:
    """Names that an expression reads; ExpressionError if it is not in the language."""
    tree = _parse(text)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called)


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"{len(text)} characters", text)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError("is not an expression", text) from error
    _check(tree, text)
    return tree


def _check(node: ast.expr, text: str) -> None:
    """Refuse every construct outside the language before any value is at hand."""
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return
        case ast.Name():
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            parts = [left, right]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            parts = [left, right]
        case ast.BoolOp(values=values):
            parts = values
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            if not (len(args) == 2 if name == "ceil_div" else args):
                raise ExpressionError(f"{name} with {len(args)} arguments", text)
            parts = args
        case _:
            raise ExpressionError(f"{type(node).__name__} is not allowed", text)
    for part in parts:
        _check(part, text)


def _value(node: ast.expr, values: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            if name not in values:
                raise ExpressionError(f"no value for {name}", text)
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            try:
                return _BINARY[type(op)](_value(left, values, text), _value(right, values, text))
            except ZeroDivisionError as error:
                raise ExpressionError("division by zero", text) from error
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return int(_COMPARE[type(op)](_value(left, values, text), _value(right, values, text)))
        case ast.BoolOp(op=ast.And(), values=parts):
            return int(all(_value(part, values, text) for part in parts))
        case ast.BoolOp(values=parts):
            return int(any(_value(part, values, text) for part in parts))
        case ast.Call(func=ast.Name(id=name), args=args):
            if name == "ceil_div" and _value(args[1], values, text) == 0:
                raise ExpressionError("division by zero", text)
            return _FUNCTIONS[name](*(_value(arg, values, text) for arg in args))
    raise ExpressionError(f"{type(node).__name__} is not allowed", text)
