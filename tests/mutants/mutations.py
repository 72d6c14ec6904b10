"""What may be wrong with a condition: every way to break one on purpose. Pure.

if a and not b:     always, never, a or not b, a alone, not b alone, a and b
x < y               x >= y, x <= y
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
NEIGHBOURS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
"""They differ only where both sides are equal."""

Place = tuple[str | int, ...]
"""The way from the root of a tree to a node: names of fields and indices in lists."""


@dataclass(frozen=True)
class Mutant:
    """One condition of a module, broken in one way."""

    module: str
    """The path of the file, from the root of the repository."""
    function: str
    """The qualified name of the outermost function around it."""
    line: int
    last_line: int
    before: str
    after: str
    place: Place
    changed: ast.expr

    @property
    def key(self) -> str:
        """The same for as long as the function's condition is, wherever its lines move. Conditions with the same text
        in one function share it."""
        return f"{self.module}::{self.function}: {self.before} -> {self.after}"

    def tree(self, source: str) -> ast.Module:
        """The module with this one change, ready to be compiled."""
        tree = ast.parse(source)
        parent: object = tree
        for step in self.place[:-1]:
            parent = parent[step] if isinstance(step, int) else getattr(parent, step)  # type: ignore[index]
        last, changed = self.place[-1], copy.deepcopy(self.changed)
        if isinstance(last, int):
            parent[last] = changed  # type: ignore[index]
        else:
            setattr(parent, last, changed)
        return ast.fix_missing_locations(tree)


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All of them inside functions, in the order of the lines."""
    found = []
    for node, place, function in _conditions(ast.parse(source), (), ""):
        for changed in _changes(node, is_test=_is_test(place)):
            if ast.dump(changed) == ast.dump(node):
                continue
            moved = ast.copy_location(changed, node)
            lines = node.lineno, node.end_lineno or node.lineno
            found.append(Mutant(module, function, *lines, ast.unparse(node), ast.unparse(moved), place, moved))
    return sorted(found, key=lambda mutant: mutant.line)


def _conditions(
    node: ast.AST, place: Place, function: str, *, is_inside: bool = False
) -> Iterator[tuple[ast.expr, Place, str]]:
    """Every expression in a function that is a condition or a part of one. Assertions are left out: they only say what
    is true. `is_inside`: inside `function`, which is else the class around the node."""
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not is_inside:
        function = f"{function}.{node.name}".lstrip(".")
        is_inside = not isinstance(node, ast.ClassDef)
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    if (
        is_inside
        and isinstance(node, ast.expr)
        and (is_not or isinstance(node, ast.Compare | ast.BoolOp) or _is_test(place))
    ):
        yield node, place, function
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST):
                way = (*place, name) if index is None else (*place, name, index)
                yield from _conditions(child, way, function, is_inside=is_inside)


def _is_test(place: Place) -> bool:
    """Whether something is done or not done by it: the condition of an if, a while, or a comprehension."""
    return place[-1:] == ("test",) or (len(place) > 1 and place[-2] == "ifs")


def _changes(node: ast.expr, *, is_test: bool) -> Iterator[ast.expr]:
    if is_test:
        yield ast.Constant(True)
        yield ast.Constant(False)
    if isinstance(node, ast.Compare):
        yield from _compared_otherwise(node)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values)
        for index in range(len(node.values)):
            left = [*node.values[:index], *node.values[index + 1 :]]
            yield left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif is_test:
        yield ast.UnaryOp(ast.Not(), node)


def _compared_otherwise(node: ast.Compare) -> Iterator[ast.expr]:
    for index, op in enumerate(node.ops):
        for table in (OPPOSITES, NEIGHBOURS):
            if type(op) in table:
                ops = [*node.ops[:index], table[type(op)](), *node.ops[index + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
