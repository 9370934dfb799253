"""Print the size and the shape of the code, beside those of an earlier commit.

    python -P tools/house.py [--against COMMIT] [--cpu FILE] [--json FILE]

The earlier commit is the last one that CHANGELOG.md names, unless ``--against`` names another. ``--cpu`` reads the
file that ``make test`` leaves in .pytest_cache/cpu_seconds.json. ``--json`` writes every figure, also those of which
the tables have only the worst.
These are figures to judge, not limits: docs/packaging.md has the budget of lines per package.

A product file names a capability from outside if its path has no word of ``WORDS`` and is not in ``ROOMS``, and an
identifier, a keyword or a string of its code has one, cut at underscores and capitals. Comments and docstrings are
left out. ``program`` in ``kernels`` is a program of Triton, and is not counted.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("replay", "bench")  # packages of the product that serve nothing
PACKAGES = ("protocol", "kernels", "worker_proc", "scheduler_proc", "router_proc", "frontend", "launch", *TOOLS)
MOVED = {
    "launch/frontend/": "frontend/engine/",
    "launch/http/": "frontend/http/",
    "launch/text/": "frontend/text/",
    "launch/sessions/": "frontend/sessions/",
    "launch/adapters/": "frontend/adapters/",
    "launch/replay/": "replay/",
    "launch/bench/": "bench/",
    "launch/measure/": "bench/measure/",
    "worker_proc/bench/": "bench/worker/",
    "tests/acceptance/": "tests/nightly/acceptance/",
    "tests/gpu/": "tests/nightly/gpu/",
    "tests/support/clients/": "tests/nightly/clients/",
}
"""Former folder → folder with the same contents today, for figures of rooms of earlier commits."""
WORDS = {
    "adapters": "adapters?|loras?",
    "programs": "programs?",
    "tenants": "tenants?",
    "forks and beams": "forks?|forked|forking|beams?",
    "tiers": "tiers?|tiered|offload|host_memory|disk",
    "drafts": "drafts?|drafted|drafters?|speculative",
    "pooling": "pooling|pooled|poolers?",
    "routed experts": "routed_experts?",
    "sessions": "sessions?",
    "grammars": "grammars?",
}
ROOMS = {
    "programs": "/pins\\.py",
    "tenants": "/fair_pool|/key_queues|/request_queue|/session_store|/response_store",
    "tiers": "/transfers?[/.]|/kv/saves|/kv/found|/kv/store_choice",
    "routed experts": "/experts",
    "grammars": "^scheduler_proc/structured/",
}
MANY_IMPORTS, MANY_ARGUMENTS, LONG_FUNCTION = 12, 6, 60
SHOWN = 12

TABLES = ("lines", "files", "lines per package", "lines per room", "comment lines")
BUDGET = "lines left in the budget of docs/packaging.md"
TABLES += ("files that name a capability from outside", "of these, files that serve", "of these, files of the core")
LONG = (f"own imports over {MANY_IMPORTS}", f"constructor arguments over {MANY_ARGUMENTS}")
LONG += (f"functions over {LONG_FUNCTION} lines", "modules that share the name of a class")
"""Tables of single files, classes and functions, of which only the largest are printed."""
COSTS = ("tests that ran", "their CPU seconds")


def files_of(commit: str) -> dict[str, str]:
    """Return path → source of the Python files of a commit, or of the checkout if ``commit`` is empty."""
    if not commit:
        listed = _git("ls-files", "-co", "--exclude-standard", "*.py").decode().split("\n")
        paths = [name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
        return {name: (ROOT / name).read_text(encoding="utf-8") for name in sorted(paths)}
    found = {}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        for member in archive:
            data = archive.extractfile(member) if member.isfile() and member.name.endswith(".py") else None
            if data is not None:
                found[path_today(member.name)] = data.read().decode()
    return dict(sorted(found.items()))


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def path_today(path: str) -> str:
    path = next((path.replace(old, new, 1) for old, new in MOVED.items() if path.startswith(old)), path)
    inner = path.removeprefix("tests/")
    changed = next((inner.replace(old, new, 1) for old, new in MOVED.items() if inner.startswith(old)), inner)
    return f"tests/{changed}" if path.startswith("tests/") else path


def room(path: str) -> str:
    """Return the package of a file and the folder in it, or the package alone for the files beside the folders."""
    return "/".join(path.split("/")[:-1][:2])


def kind(path: str) -> str | None:
    """Return which of the sums of the first table a file belongs to, or None for a file of none of them."""
    package = path.split("/")[0]
    if package == "tests":
        name = path.split("/", 1)[1]
        if name.startswith("nightly/"):
            return "tests, nightly"
        apart = re.match(rf"({'|'.join(TOOLS)})/|support/(\w+/)?({'|'.join(TOOLS)})[_/]", name)
        return "tests of replay and bench" if apart else "tests of the engine"
    if package in TOOLS:
        return "replay and bench"
    return "serves" if package in PACKAGES else "tools" if package == "tools" else None


def figures(files: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return every figure: table → row → number."""
    found: dict[str, dict[str, float]] = defaultdict(Counter)
    classes: dict[str, set[str]] = defaultdict(set)
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    for path, source in files.items():
        of, lines = kind(path), source.count("\n")
        if of is None:
            continue
        found["lines"][of] += lines
        found["files"][of] += 1
        found["lines per room"][room(path)] += lines
        found["lines per package"][path.split("/")[0]] += lines
        if not path.startswith(PACKAGES):
            continue
        found["comment lines"][path.split("/")[0]] += sum(line.lstrip().startswith("#") for line in source.split("\n"))
        nodes = list(ast.walk(ast.parse(source)))
        imports = own_imports(nodes, modules)
        if len(imports) > MANY_IMPORTS:
            found[LONG[0]][path] = len(imports)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONG_FUNCTION:
                    found[LONG[2]][f"{path}:{node.name}"] = length
            elif isinstance(node, ast.ClassDef):
                arguments = constructor_arguments(node)
                if arguments > MANY_ARGUMENTS:
                    found[LONG[1]][f"{path}:{node.name}"] = arguments
                if node.col_offset == 0 and not node.name.startswith("_"):
                    classes[node.name].add(path)
        text = words_of(nodes)
        for capability in WORDS:
            if is_named_outside(capability, path, text):
                found[TABLES[5]][capability] += 1
                if of == "serves":
                    found[TABLES[6]][capability] += 1
                if path.startswith("scheduler_proc/core/"):
                    found[TABLES[7]][capability] += 1
    found[LONG[3]] = {name: len(at) for name, at in classes.items() if len(at) > 1}
    return found


def own_imports(nodes: Iterable[ast.AST], modules: set[str]) -> set[str]:
    """Return the modules of this project that a file imports."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire."):
            base = (node.module or "").removeprefix("quire.")
            inner = {f"{base}.{alias.name}" for alias in node.names} & modules
            found |= inner or {base}
    return found


def constructor_arguments(node: ast.ClassDef) -> int:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return len(part.args.posonlyargs) + len(part.args.args) + len(part.args.kwonlyargs) - 1
    return 0


def words_of(nodes: Iterable[ast.AST]) -> str:
    """Return the identifiers and strings of a file's code, without its docstrings, one a line."""
    nodes = list(nodes)
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = [getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name", "module")]
    found += [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in texts]
    return _flat("\n".join({word for word in found if isinstance(word, str)}))


def is_named_outside(capability: str, path: str, text: str) -> bool:
    if capability == "programs" and path.startswith("kernels/"):
        return False
    words = re.compile(rf"(?<![a-z])({WORDS[capability]})(?![a-z])")
    is_own = words.search(_flat(path)) or re.search(ROOMS.get(capability, r"(?!)"), path)
    return not is_own and words.search(text) is not None


def _flat(text: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()


def costs_of(file: Path) -> dict[str, dict[str, float]]:
    """Return the number of tests, and their CPU seconds, by package; ``file``: as pytest's --cpu-seconds writes it."""
    found: dict[str, dict[str, float]] = {name: Counter() for name in COSTS}
    for path, (count, own, children) in json.loads(file.read_text(encoding="utf-8")).items():
        package = "/".join(path.split("/")[:-1][:2]) or path
        found[COSTS[0]][package] += count
        found[COSTS[1]][package] = round(found[COSTS[1]][package] + own + children, 1)
    return found


def print_tables(now: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]) -> None:
    """Print each table with its sum; of single files, classes and functions only the largest of today."""
    for name in (*TABLES, BUDGET, *LONG, *COSTS):
        new, old = now.get(name, {}), before.get(name, {})
        rows = sorted(new, key=lambda row: -new[row])[:SHOWN] if name in LONG else sorted({*new, *old})
        sums = (len(new), len(old)) if name in LONG else (sum(new.values()), sum(old.values()))
        if not rows:
            continue
        print(f"\n{name:<74}{'now':>9}{'before':>9}{'change':>9}")
        last = "number of them" if name in LONG else "sum", *sums
        for label, value, past in [*((row, new.get(row), old.get(row)) for row in rows), last]:
            change = f"{(value or 0) - (past or 0):+,.10g}" if old else ""
            print(f"  {label:<72}{_shown(value):>9}{_shown(past) if old else '':>9}{change:>9}")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.10g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", metavar="COMMIT", help="the earlier commit; default: the last one in CHANGELOG.md")
    parser.add_argument("--cpu", type=Path, metavar="FILE", help="what pytest --cpu-seconds FILE has written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    flags = parser.parse_args()
    named = re.findall(r"`([0-9a-f]{8,40})`", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    commit = flags.against or (named[0] if named else "")
    if not commit:
        parser.error("CHANGELOG.md names no commit: give one with --against")
    now: dict[str, Any] = figures(files_of(""))
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| ([\d,]+) \|$", (ROOT / "docs/packaging.md").read_text(encoding="utf-8"), re.M
    )
    now[BUDGET] = {name: int(most.replace(",", "")) - now["lines per package"][name] for name, most in rows}
    before: dict[str, Any] = figures(files_of(commit))
    if flags.cpu:
        now |= costs_of(flags.cpu)
    print(f"Checkout beside commit {commit}")
    print_tables(now, before)
    if flags.json:
        flags.json.write_text(json.dumps({"commit": commit, "now": now, "before": before}, indent=1) + "\n")


if __name__ == "__main__":
    main()
