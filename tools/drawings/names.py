"""Names that a drawing shows, each looked up in the code: a name that the code does not have is a LookupError."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from tools.house import ROOT, parsed

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _members(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that these statements define, with what defines them."""
    for node in body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))


def defined(file: str, name: str) -> ast.stmt:
    """The definition of `name`, or of `Class.name`, in a file of the package."""
    body: Sequence[ast.stmt] = parsed(ROOT / "unfuse" / file).body
    for part in name.split("."):
        found = dict(_members(body)).get(part)
        if found is None:
            raise LookupError(f"unfuse/{file} does not define {name}")
        body = getattr(found, "body", ())
    return found


def name_in(file: str, name: str) -> str:
    """The last part of a name that a file of the package defines."""
    defined(file, name)
    return name.rpartition(".")[2]


def text_in(file: str, text: str) -> str:
    """A text that a file of the package has as a string, or in one."""
    strings = (node.value for node in ast.walk(parsed(ROOT / "unfuse" / file)) if isinstance(node, ast.Constant))
    if not any(isinstance(value, str) and text in value for value in strings):
        raise LookupError(f"unfuse/{file} has no string with {text!r}")
    return text


def member(union: Any, name: str) -> str:
    """The name of a member of a union of structs, or of a Literal."""
    if name not in {getattr(one, "__name__", one) for one in get_args(union)}:
        raise LookupError(f"{name} is no member of {union}")
    return name


def callers(file: str, owner: str, called: str) -> set[str]:
    """The methods of a class that call `self.<called>`, also by other methods of the class. Without underscores."""
    methods = [node for node in getattr(defined(file, owner), "body", ()) if isinstance(node, FUNCTIONS)]
    calls = {
        method.name: {ast.unparse(node.func) for node in ast.walk(method) if isinstance(node, ast.Call)}
        for method in methods
    }
    reached: set[str] = set()
    wanted = {f"self.{called}"}
    while new := {name for name, targets in calls.items() if targets & wanted} - reached:
        reached |= new
        wanted |= {f"self.{name}" for name in new}
    if not reached:
        raise LookupError(f"no method of {owner} in unfuse/{file} calls self.{called}")
    return {name for name in reached if not name.startswith("_")}


def takes(file: str, name: str, *parameters: str) -> bool:
    """Whether a function has a parameter of one of these names."""
    node = defined(file, name)
    assert isinstance(node, FUNCTIONS)
    return not {argument.arg for argument in node.args.args}.isdisjoint(parameters)
