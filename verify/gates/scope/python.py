"""Static rules for Python files of candidates (kernel generators), on the syntax tree.

Decides nothing about what the code computes. It refuses imports beyond the allow-list, dynamic code, introspection,
built-ins that reach outside, and state that outlives a call. The process boundary, not this list, keeps a determined
author away from the evaluator; the list tells an honest one where the line is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from verify.gates.scope.observation import Observation

__all__ = ["scan"]

_DYNAMIC = frozenset({"exec", "eval", "compile", "__import__", "globals", "locals", "vars", "dir"})
_COMPUTED = frozenset({"getattr", "setattr", "delattr", "hasattr"})
_REACHING = frozenset({"open", "input", "breakpoint", "exit", "quit", "help", "memoryview", "id", "__build_class__"})
_MODULES = frozenset({
    "os", "sys", "subprocess", "socket", "ctypes", "builtins", "importlib", "inspect", "gc", "threading",
    "multiprocessing", "signal", "pickle", "marshal", "shutil", "pathlib", "io", "tempfile", "time", "random",
    "atexit", "environ", "getenv", "putenv", "system", "popen", "hub", "cpp_extension", "load_library", "load",
    "save", "classes", "_C", "modules", "path_hooks", "meta_path", "settrace", "setprofile", "_getframe",
    "manual_seed", "set_default_dtype", "use_deterministic_algorithms",
})  # fmt: skip
"""Attribute names that lead from an allowed module to the process, or to process-wide settings."""
_FRAMES = frozenset({
    "f_back", "f_globals", "f_locals", "f_builtins", "f_code", "gi_frame", "gi_code", "cr_frame", "cr_code",
    "ag_frame", "tb_frame", "tb_next", "co_code", "co_consts", "func_globals", "func_code", "mro",
})  # fmt: skip
_DUNDER_READABLE = frozenset({"__name__", "__doc__", "__all__"})
_DUNDER_CALLABLE = frozenset({"__init__", "__post_init__", "__call__"})
_MUTATORS = frozenset({
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard",
    "sort", "reverse",
})  # fmt: skip
_PACKAGE = "k3_backend"
_PACKAGE_PARTS = ("k3_backend.kernels", "k3_backend.geometry", "k3_backend.aot.cuda.contract")
_DSL_LOAD = "cute.arch.load"
"""The one `load` that reads device memory and not a file."""
_EXPECTED_DYNAMIC = "names and code written out"


def scan(text: str, *, imports: Sequence[str]) -> list[Observation]:
    """All violated rules of one file, in line order.

    Args:
        text: the file.
        imports: top-level modules that may be imported.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return [
            Observation(
                "scope.py_syntax", line, f"does not parse: {error.args[0] if error.args else error}", "Python 3.11"
            )
        ]
    scanner = _Scanner(tree, frozenset(imports))
    found = set(scanner.observations())
    return sorted(found, key=lambda o: (o.line, o.code, o.message))


class _Scanner:
    """One walk over the tree. `owned` are names of module level: imports, functions, classes and constants."""

    def __init__(self, tree: ast.Module, imports: frozenset[str]) -> None:
        self.tree = tree
        self.imports = imports
        self.owned = _module_names(tree)

    def observations(self) -> Iterator[Observation]:
        in_function = _nodes_in_functions(self.tree)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._import(node)
            elif isinstance(node, ast.Call):
                yield from self._call(node, node in in_function)
            elif isinstance(node, ast.Attribute):
                yield from self._attribute(node)
            elif isinstance(node, ast.Name):
                yield from self._name(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._string(node, node.value)
            elif isinstance(node, ast.Global):
                yield Observation(
                    "scope.py_state", node.lineno, f"global {', '.join(node.names)}", "values passed as arguments"
                )
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from _defaults(node)
            yield from self._stores(node, node in in_function)

    def _import(self, node: ast.Import | ast.ImportFrom) -> Iterator[Observation]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level:
            # Relative imports stay inside the package; how far up they may go is its kernels folder.
            names = [] if node.level <= 2 else [f"{'.' * node.level}{node.module or ''}"]
        else:
            names = [node.module or ""]
            if node.module == _PACKAGE:
                names = [f"{_PACKAGE}.{alias.name}" for alias in node.names]
        expected = "one of " + ", ".join(sorted(self.imports)) + f" ({_PACKAGE}: only {' and '.join(_PACKAGE_PARTS)})"
        for name in names:
            if not self._may_import(name):
                yield Observation("scope.py_import", node.lineno, f"import of {name}", expected)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    yield Observation(
                        "scope.py_import", node.lineno, f"star import from {node.module}", "names written out"
                    )
                elif alias.name in _MODULES or _is_dunder(alias.name):
                    yield Observation("scope.py_import", node.lineno, f"import of {node.module}.{alias.name}", expected)

    def _may_import(self, name: str) -> bool:
        parts = name.split(".")
        if parts[0] not in self.imports or any(part in _MODULES for part in parts):
            return False
        return parts[0] != _PACKAGE or any(name == part or name.startswith(part + ".") for part in _PACKAGE_PARTS)

    def _call(self, node: ast.Call, in_function: bool) -> Iterator[Observation]:
        if isinstance(node.func, ast.Name) and node.func.id in _COMPUTED:
            name = node.args[1] if len(node.args) > 1 else None
            if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                yield Observation(
                    "scope.py_dynamic", node.lineno, f"{node.func.id} with a computed name", _EXPECTED_DYNAMIC
                )
            elif name.value in _MODULES | _FRAMES or _is_dunder(name.value):
                yield Observation(
                    "scope.py_introspection", node.lineno, f"{node.func.id} of {name.value}", "ordinary attributes"
                )
            elif node.func.id in ("setattr", "delattr"):
                yield Observation("scope.py_dynamic", node.lineno, node.func.id, "assignments written out")
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) != 1:
            yield Observation("scope.py_dynamic", node.lineno, "class made by type()", _EXPECTED_DYNAMIC)
        if in_function and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            root = _root(node.func.value)
            if root in self.owned:
                yield Observation(
                    "scope.py_state",
                    node.lineno,
                    f"{root}.….{node.func.attr}() changes a module-level object",
                    "local objects",
                )

    def _attribute(self, node: ast.Attribute) -> Iterator[Observation]:
        if (node.attr in _FRAMES or node.attr in _MODULES) and ast.unparse(node) != _DSL_LOAD:
            yield Observation(
                "scope.py_introspection", node.lineno, f"attribute .{node.attr}", "arithmetic and the kernel DSL"
            )
        elif _is_dunder(node.attr) and node.attr not in _DUNDER_READABLE | _DUNDER_CALLABLE:
            yield Observation("scope.py_introspection", node.lineno, f"attribute .{node.attr}", "no dunder access")

    def _name(self, node: ast.Name) -> Iterator[Observation]:
        if node.id in _DYNAMIC:
            yield Observation("scope.py_dynamic", node.lineno, f"name {node.id}", _EXPECTED_DYNAMIC)
        elif node.id in _REACHING:
            yield Observation(
                "scope.py_builtin", node.lineno, f"name {node.id}", "no files, input, debugger or object identity"
            )
        elif node.id in _COMPUTED and not _is_called(node, self.tree):
            yield Observation("scope.py_dynamic", node.lineno, f"{node.id} as a value", _EXPECTED_DYNAMIC)
        elif _is_dunder(node.id) and node.id not in _DUNDER_READABLE:
            yield Observation("scope.py_introspection", node.lineno, f"name {node.id}", "no dunder access")

    def _string(self, node: ast.Constant, value: str) -> Iterator[Observation]:
        """Attribute paths inside format strings reach what the attribute rule forbids."""
        for word in (
            "__class__",
            "__globals__",
            "__builtins__",
            "__subclasses__",
            "__import__",
            "__dict__",
            "__code__",
        ):
            if word in value:
                yield Observation("scope.py_introspection", node.lineno, f"{word} in a string", "no dunder access")

    def _stores(self, node: ast.AST, in_function: bool) -> Iterator[Observation]:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            targets = [node.target]
        for target in [t for outer in targets for t in ast.walk(outer)]:
            if isinstance(target, ast.Attribute | ast.Subscript) and isinstance(target.ctx, ast.Store | ast.Del):
                root = _root(target)
                if root in self.owned and (in_function or isinstance(target, ast.Attribute)):
                    yield Observation(
                        "scope.py_state",
                        target.lineno,
                        f"assignment into {root}, which outlives the call",
                        "local objects",
                    )


def _root(node: ast.expr) -> str | None:
    """The name at the left end of an attribute, subscript or call chain."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_dunder(name: str) -> bool:
    return name.startswith("__")


def _is_called(node: ast.Name, tree: ast.Module) -> bool:
    return any(isinstance(call, ast.Call) and call.func is node for call in ast.walk(tree))


def _module_names(tree: ast.Module) -> frozenset[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(
                n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
    return frozenset(names)


def _nodes_in_functions(tree: ast.Module) -> frozenset[ast.AST]:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    return frozenset(inner for function in functions for inner in ast.walk(function) if inner is not function)


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[Observation]:
    for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
        if isinstance(default, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call):
            yield Observation(
                "scope.py_state", default.lineno, "mutable default argument", "None, numbers, strings or tuples"
            )
