"""Unreachable code: docs/reserved.md lists exactly the code that no product path can reach.

The search is by name. It finds: kernels that the product does not use, directly or through other kernels; parameters of
used kernels that no caller passes; fields of messages, the configuration, KV layouts and attention metadata that are
never written or never read; kinds of KV groups that no layout has; reasons to wait that nothing names; parameters of
block hashes that no caller passes. Tools (benchmarks, replay, demo, top) are not product paths.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packages import PACKAGES

ROOT = Path(__file__).parent.parent
TOOLS = ("bench/", "replay/", "launch/demo/", "launch/top/")
STRUCTS = re.compile(r"protocol/(wire/|config|settings|model/kv_layout)|worker_proc/attention/backend")
KNOBS = {"programs", "min_piece"}  # parameters with which tests make small cases behave like large ones
REASONS = "scheduler_proc/requests/reasons.py"
OTHER = {"Statistics", "AttentionBackend"}  # LLM.statistics returns it whole to users; an interface
MOST_ROWS = 21

Place = tuple[str, str]  # of a definition: path of the module, and name
Arguments = Mapping[str, set[str | int]]


class Module:
    """One file: its nodes, its definitions, and the names of kernel modules that it imports."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        body = ast.parse(source).body
        self.nodes = [node for part in body for node in ast.walk(part)]
        self.definitions = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        self._names = {name: (path, name) for name in self.definitions}
        self._modules: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire.kernels"):
                folder = (node.module or "").removeprefix("quire.").replace(".", "/")
                for alias in node.names:
                    self._names[alias.name] = (f"{folder}.py", alias.name)
                    self._modules[alias.name] = f"{folder}/{alias.name}.py"

    def uses(self, nodes: Iterable[ast.AST]) -> Iterator[Place]:
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in self._names:
                yield self._names[node.id]
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in self._modules:
                yield self._modules[node.value.id], node.attr


def modules() -> list[Module]:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    read = (Module(file.relative_to(ROOT).as_posix(), file.read_text()) for file in files)
    return [module for module in read if not module.path.startswith(TOOLS)]


def unreachable(of: list[Module]) -> set[str]:
    product = [module for module in of if not module.path.startswith("kernels/")]
    kernels = {module.path: module for module in of if module not in product}
    defined = {(path, name): node for path, module in kernels.items() for name, node in module.definitions.items()}
    uses = {place: set(kernels[place[0]].uses(ast.walk(node))) for place, node in defined.items()}
    reached = closure((use for module in product for use in module.uses(module.nodes)), uses)
    entry_points = {place for place in defined if is_entry_point(*place)}
    inner = {use for place in entry_points - reached for use in closure(uses[place], uses) - {place}}
    nodes = [node for module in product for node in module.nodes]
    calls = given([*nodes, *(node for place in reached for node in ast.walk(defined[place]))])
    others = [(module.path, node) for module in product for node in module.definitions.values()]
    launchers = [defined[place] for place in entry_points & reached]
    launchers += [node for path, node in others if path.endswith("group_tables.py")]
    launchers += [
        each for path, node in others if path.endswith("block_hash.py") for each in ast.iter_child_nodes(node)
    ]
    structs = [node for path, node in others if STRUCTS.match(path) and isinstance(node, ast.ClassDef)]
    lost = [
        *lost_parameters(launchers, calls),
        *lost_fields(structs, calls, nodes),
        *lost_kinds(product),
        *lost_reasons(product),
    ]
    return {*lost, *(name for _, name in entry_points - reached - inner)}


def is_entry_point(path: str, name: str) -> bool:
    """Whether a kernel definition is public, no reference implementation (for tests), and not behind a launcher."""
    return not (name.startswith("_") or name.endswith("_reference") or path.endswith("_triton.py"))


def closure(start: Iterable[Place], uses: Mapping[Place, set[Place]]) -> set[Place]:
    found: set[Place] = set()
    waiting = list(start)
    while waiting:
        place = waiting.pop()
        if place in uses and place not in found:
            found.add(place)
            waiting += uses[place]
    return found


def given(nodes: Iterable[ast.AST]) -> dict[str, set[str | int]]:
    """Return, for each called name, the keywords and positions that some call passes; "**" and "*" mean any."""
    found: dict[str, set[str | int]] = {}
    for call in nodes:
        if isinstance(call, ast.Call):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            passed = found.setdefault(name, set())
            passed |= {keyword.arg or "**" for keyword in call.keywords}
            passed |= {"*" if isinstance(arg, ast.Starred) else index for index, arg in enumerate(call.args)}
    return found


def lost_parameters(launchers: Iterable[ast.AST], calls: Arguments) -> Iterator[str]:
    """Yield the parameters with a default that no call passes."""
    for launcher in (node for node in launchers if isinstance(node, ast.FunctionDef)):
        of = launcher.args
        first = len(of.args) - len(of.defaults) - (bool(of.args) and of.args[0].arg == "self")
        optional: list[tuple[str, int | str]] = [
            (arg.arg, first + i) for i, arg in enumerate(of.args[len(of.args) - len(of.defaults) :])
        ]
        optional += [(arg.arg, arg.arg) for arg, default in zip(of.kwonlyargs, of.kw_defaults, strict=True) if default]
        passed = calls.get(launcher.name, {"*"}) | KNOBS
        yield from (f"{launcher.name}({n})" for n, at in optional if not passed & {n, at, "**", "*"})


def lost_fields(structs: list[ast.ClassDef], calls: Arguments, nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the fields that are never read or named, or never written by construction, ``replace`` or assignment."""
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    assigned = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    read = {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read |= {name for node in nodes if isinstance(node, ast.MatchClass) for name in node.kwd_attrs}
    for struct in (struct for struct in structs if struct.name not in OTHER):
        targets = [node.target for node in struct.body if isinstance(node, ast.AnnAssign)]
        names = [target.id for target in targets if isinstance(target, ast.Name) and target.id[0] != "_"]
        heirs = [heir.name for heir in structs if struct.name in {getattr(base, "id", "") for base in heir.bases}]
        written = assigned.union(*(calls.get(name, set()) for name in ("replace", struct.name, *heirs)))
        written |= given(ast.walk(struct)).get("cls", set())
        unwritten = {name for index, name in enumerate(names) if not written & {name, index, "**", "*"}}
        yield from (f"{struct.name}.{name}" for name in names if name in unwritten or name not in read)


def lost_kinds(product: list[Module]) -> set[object]:
    """Return the kinds of KV groups that have a manager but are never created."""
    nodes = {module.path: module.nodes for module in product}
    made = {node.value for node in nodes.get("protocol/model/kv_layout.py", ()) if isinstance(node, ast.Constant)}
    tables = [node for node in nodes.get("scheduler_proc/kv/coordinator.py", ()) if isinstance(node, ast.Dict)]
    return {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)} - made


def lost_reasons(product: list[Module]) -> Iterator[str]:
    """Yield the reasons to wait that no other module than their own names."""
    home = {each.path == REASONS: each for each in product}.get(True)
    if home is not None:
        used = {n.attr for each in product if each is not home for n in each.nodes if isinstance(n, ast.Attribute)}
        values = [node.targets[0] for node in ast.walk(home.definitions["WaitReason"]) if isinstance(node, ast.Assign)]
        yield from (f"WaitReason.{each.id}" for each in values if isinstance(each, ast.Name) and each.id not in used)


def test_unreachable_code_is_listed_as_reserved() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "reserved.md").read_text(), re.MULTILINE)
    found = unreachable(modules())
    assert found - set(rows) == set(), "unreachable: wire it in, remove it, or reserve it in docs/reserved.md"
    assert set(rows) - found == set(), "reachable or removed: delete its row from docs/reserved.md"
    assert len(rows) == len(set(rows)) <= MOST_ROWS


def test_finds_unreachable_code() -> None:
    kernels = "def lost_kernel(): helper()\ndef helper(): ...\ndef kept_kernel(a, knob=0): ..."
    added = [
        Module("kernels/cache/lost.py", kernels),
        Module("worker_proc/uses.py", "from quire.kernels.cache.lost import kept_kernel\nkept_kernel(1)"),
        Module("protocol/wire/lost.py", "class Sent(Message):\n    lost_field: int\nSent(lost_field=1)"),
        Module("scheduler_proc/kv/coordinator.py", "MANAGERS = {'lost_kind': int}"),
        Module(REASONS, "class WaitReason:\n    LOST = 'lost'\n    USED = 'used'\nWaitReason.LOST"),
        Module("scheduler_proc/core/uses.py", "WaitReason.USED"),
        Module(
            "protocol/block_hash.py", "class Hasher:\n    def link(self, salt='', lost=()): ...\nHasher().link('a')"
        ),
    ]
    more = {"WaitReason.LOST", "link(lost)"}
    assert unreachable(added) == {"lost_kernel", "kept_kernel(knob)", "Sent.lost_field", "lost_kind", *more}
