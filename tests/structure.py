"""Check the structure of the code, and print what breaks a rule: `python -m tests.structure`.

Packages import one way only. Files, classes and functions stay small. `tests/test_structure.py` runs the same checks.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "raykv"
MOST_FILE_LINES = 450
MOST_METHODS = 30
MOST_FUNCTION_LINES = 50
MOST_PARAMETERS = 7
EXEMPT: dict[str, str] = {}
"""What may be larger than the limits: "path" or "path:name" -> reason. The file begins with the same reason."""

NEVER = {
    "protocol": {"memory", "storage", "eviction", "tier", "transport", "membership", "node", "client", "supervisor"},
    "memory": {"storage", "eviction", "tier", "transport", "membership", "node", "client", "supervisor"},
    "eviction": {"storage", "tier", "transport", "membership", "node", "client", "supervisor"},
    "storage": {"tier", "transport", "membership", "node", "client", "supervisor"},
    "tier": {"transport", "membership", "node", "client", "supervisor"},
    "transport": {"storage", "eviction", "tier", "membership", "node", "client", "supervisor"},
    "membership": {"storage", "eviction", "tier", "node", "client", "supervisor"},
    "node": {"client", "supervisor", "embedded", "gpu"},
    "client": {"storage", "eviction", "tier", "node", "supervisor", "membership", "embedded", "gpu"},
    "gpu": {"storage", "eviction", "tier", "transport", "membership", "node", "client", "supervisor"},
    "supervisor": {"client", "embedded", "gpu"},
}
"""For each package, the packages that it must not import. No package on the left may import TOPMOST either."""
TOPMOST = {"", "cluster", "integrations", "simulation", "tools"}
ENGINES = {"torch", "vllm", "sglang", "transformers", "safetensors"}
INPUT_OUTPUT = {"os", "socket", "subprocess", "mmap", "threading", "asyncio", "fcntl", "shutil", "tempfile", "time"}
PURE = ("protocol", "eviction")

OLD_WORDS = {
    "shard", "marks", "ledger", "locator", "relay", "keeper", "kept", "arrivals", "loan", "borrowed", "steer",
    "troubles", "tally", "tape", "told", "came", "went", "forerunner", "pulse", "bare", "backed", "resting", "spoilt",
    "doomed", "spent", "supplied", "whoever", "anew", "beside", "account", "accounts",
}  # fmt: skip
"""Words that the code no longer uses in names, comments and docstrings, because each has a plainer one."""
OLD_PHRASES = ("as far as", "but for", "so many")

Problem = str


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """Return a file's module name within raykv, such as "memory.table". raykv itself is ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in sources()}


def package_of(module: str) -> str:
    return module.partition(".")[0]


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the full names of all that a file imports, including imports in functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("raykv.")
                found.add(f"raykv.{inner}" if inner in MODULES else str(node.module))
    return frozenset(found)


def raykv_imports_of(path: Path) -> set[str]:
    """Return the modules of raykv that a file imports, with names as in `module_of`."""
    names = {name for name in imports_of(path) if name.split(".")[0] == "raykv"}
    return {name.removeprefix("raykv").removeprefix(".") for name in names}


def edges() -> dict[str, set[str]]:
    """Return the modules that each module imports. The import of `cluster` inside `raykv.connect` is left out."""
    found = {module_of(path): raykv_imports_of(path) for path in sources()}
    found[""].discard("cluster")
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of names that reach each other: strongly connected components of two or more names."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in numbers:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], numbers[other])
        if lowest[name] == numbers[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in numbers:
            visit(name)
    return found


def import_problems() -> Iterator[Problem]:
    graph = edges()
    for module, imported in sorted(graph.items()):
        package = package_of(module)
        never = NEVER.get(package, set()) | (TOPMOST - {package} if package in NEVER else set())
        for other in sorted(imported):
            if package_of(other) in never and package_of(other) != package:
                yield f"raykv.{module} imports raykv.{other}: {package} never imports {package_of(other) or 'raykv'}"
    for circle in circles(graph):
        yield "a circle of modules: " + ", ".join(circle)
    packages: dict[str, set[str]] = {}
    for module, imported in graph.items():
        others = {package_of(other) for other in imported} - {package_of(module)}
        packages.setdefault(package_of(module), set()).update(others)
    for circle in circles(packages):
        yield "a circle of packages: " + ", ".join(circle)
    for path in sources():
        package, roots = package_of(module_of(path)), {name.partition(".")[0] for name in imports_of(path)}
        if "ray" in roots and package not in ("cluster", "integrations", "tools"):
            yield f"{path}: only cluster imports Ray"
        if roots & ENGINES and package != "integrations":
            yield f"{path}: only integrations imports {sorted(roots & ENGINES)}"
        if package in PURE and roots & INPUT_OUTPUT:
            yield f"{path}: {package} does no input or output, and imports {sorted(roots & INPUT_OUTPUT)}"


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Count the lines of code in a function, without its docstring, comments and empty lines."""
    assert node.end_lineno is not None
    skipped: set[int] = set()
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        skipped = set(range(first.lineno, first.end_lineno + 1))
    numbers = (number for number in range(node.lineno, node.end_lineno + 1) if number not in skipped)
    return sum(bool(line) and not line.startswith("#") for line in (lines[number - 1].strip() for number in numbers))


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters of a function, without self and cls."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def size_problems() -> Iterator[tuple[str, Problem]]:
    """Yield everything that is too large, as (key for EXEMPT, problem)."""
    for path in sorted([*sources(), *ROOT.rglob("*.c"), *ROOT.rglob("*.h")]):
        name, lines = str(path.relative_to(ROOT.parent)), path.read_text().splitlines()
        if len(lines) > MOST_FILE_LINES:
            yield name, f"{name}: {len(lines)} lines, at most {MOST_FILE_LINES}"
        if path.suffix != ".py":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                if methods > MOST_METHODS:
                    yield (
                        f"{name}:{node.name}",
                        f"{name}: class {node.name} has {methods} methods, at most {MOST_METHODS}",
                    )
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (count := code_lines(node, lines)) > MOST_FUNCTION_LINES:
                    yield (
                        f"{name}:{node.name}",
                        f"{name}: {node.name} has {count} lines of code, at most {MOST_FUNCTION_LINES}",
                    )
                if (count := parameters(node)) > MOST_PARAMETERS:
                    yield (
                        f"{name}:{node.name}",
                        f"{name}: {node.name} has {count} parameters, at most {MOST_PARAMETERS}",
                    )


def word_problems() -> Iterator[Problem]:
    for path in [*sources(), *ROOT.rglob("*.c"), *ROOT.rglob("*.h")]:
        name, text = str(path.relative_to(ROOT.parent)), path.read_text()
        for number, line in enumerate(words_in(path, text), 1):
            parts = re.findall(r"[A-Z]?[a-z]+", line)
            found = sorted({part.lower() for part in parts} & OLD_WORDS)
            found += [phrase for phrase in OLD_PHRASES if phrase in line.lower()]
            if found:
                yield f"{name}:{number}: old words: {', '.join(found)}"


def words_in(path: Path, text: str) -> list[str]:
    """Return the lines of a file. In Python files, one-line strings become "", except docstrings."""
    lines = text.splitlines()
    if path.suffix != ".py":
        return lines
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and before not in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL):
            first, last = token.start[0] - 1, token.end[0] - 1
            if first == last:
                lines[first] = lines[first].replace(token.string, '""')
        if token.type not in (tokenize.COMMENT, tokenize.DEDENT):
            before = token.type
    return lines


def problems() -> list[Problem]:
    found = [*import_problems(), *word_problems()]
    large = [*size_problems()]
    found += [problem for name, problem in large if name not in EXEMPT]
    return found + [f"EXEMPT names {name}, which is not too large" for name in EXEMPT if name not in dict(large)]


def total_lines() -> int:
    files = [*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi"), *ROOT.rglob("*.c"), *ROOT.rglob("*.h")]
    return sum(len(path.read_text().splitlines()) for path in files)


if __name__ == "__main__":
    found = problems()
    print(*found, sep="\n")
    print(f"raykv/: {total_lines()} lines, {len(sources())} Python files, {len(found)} problems")
    sys.exit(bool(found))
