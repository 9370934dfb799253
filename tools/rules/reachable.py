"""Unreachable code: docs/reserved.md lists exactly the code that no product path can reach.

The search is by name. It finds: kernels that the product does not use, directly or through other kernels; parameters of
used kernels that no caller passes; fields of messages, the configuration, KV layouts and attention metadata that are
never written or never read; kinds of KV groups that no layout has; reasons to wait that nothing names; parameters of
block hashes that no caller passes. Tools (benchmarks, replay, demo, top) are not product paths for these. For what a
trace may need, they are: fields of its lines, methods of the scheduler and the router, and values of enumerations.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sources import Source

RESERVED = "docs/reserved.md"
LAYOUTS = "protocol/model/kv_layout.py"
MANAGERS = "scheduler_proc/kv/coordinator.py"
TOOLS = ("bench/", "replay/", "launch/demo/", "launch/top/")
STRUCTS = re.compile(r"protocol/(wire/|config|settings|model/kv_layout)|worker_proc/(attention/backend|models/model\.)")
CHECKED_CALLS = ("group_tables.py", "block_hash.py")  # files whose functions and methods are checked like kernels
KNOBS = {"programs", "min_piece"}  # parameters with which tests make small cases behave like large ones
REASONS = "scheduler_proc/requests/reasons.py"
TRACES = ("scheduler_proc/trace/lines.py", "router_proc/trace.py")
METHODS = ("scheduler_proc/", "router_proc/")
ENUMS = {"Enum", "IntEnum", "StrEnum", "IntFlag", "Flag"}
OTHER = {"Statistics", "AttentionBackend"}  # LLM.statistics returns it whole to users; an interface
OTHER |= {"Header", "RouterHeader", "StepSnapshot"}  # lines for other programs that read traces, and for people
MOST_ROWS = 21

METRIC = re.compile(r"^(?:gauge|counter|histogram) (?:\w+ = )?([\w.]+)", re.MULTILINE)
"""A row in the tables of frontend/http/serving/engine_metrics.py, with the path of its value."""
Place = tuple[str, str]  # of a definition: path of the module, and name
Calls = dict[str, list[str | int]]
"""For each called name, the keywords and positions that some call passes; "**" and "*" mean any."""


def facts(source: Source) -> dict[str, Any]:
    if source.name == RESERVED:
        return {"rows": re.findall(r"^\| `([^`]+)` \|", source.text, re.MULTILINE)}
    if not source.is_product:
        return {}
    if source.name.startswith(TOOLS):
        return {"named": sorted(_reads(source))}
    names, modules = _kernel_names(source)
    definitions = {n.name: n for n in source.tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    if source.package == "kernels":
        return {"kernels": {name: _definition(node, names, modules) for name, node in definitions.items()}}
    attributes = [node for node in source.nodes if isinstance(node, ast.Attribute)]
    found: dict[str, Any] = {
        "uses": sorted(set(_uses(source.nodes, names, modules))),
        "calls": _calls(source.nodes),
        "attributes": sorted({node.attr for node in attributes}),
        "assigned": sorted({node.attr for node in attributes if isinstance(node.ctx, ast.Store)}),
        "read": sorted(_reads(source)),
        "members": sorted(_members(source)),
    }
    if source.name.endswith(CHECKED_CALLS):
        found["optional"] = [each for node in source.nodes for each in _optional(node)]
    if STRUCTS.match(source.name) or source.name in TRACES:
        found["structs"] = [_struct(source, node) for node in definitions.values() if isinstance(node, ast.ClassDef)]
    if source.name == LAYOUTS:
        texts = {node.value for node in source.nodes if isinstance(node, ast.Constant)}
        found["kinds"] = sorted(text for text in texts if isinstance(text, str))
    if source.name == MANAGERS:
        keys = [key for node in source.nodes if isinstance(node, ast.Dict) for key in node.keys]
        found["kinds"] = [key.value for key in keys if isinstance(key, ast.Constant)]
    if source.name == REASONS:
        values = [n.targets[0] for n in ast.walk(definitions["WaitReason"]) if isinstance(n, ast.Assign)]
        found["reasons"] = [each.id for each in values if isinstance(each, ast.Name)]
    return found


def _reads(source: Source) -> set[str]:
    """Return the attributes that the file reads, and its texts that may be names of some."""
    read = {n.attr for n in source.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    texts = [n.value for n in source.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    read |= {text for text in texts if text.isidentifier()}
    read |= {name for text in texts for path in METRIC.findall(text) for name in path.split(".")}
    return read | {name for n in source.nodes if isinstance(n, ast.MatchClass) for name in n.kwd_attrs}


def _members(source: Source) -> Iterator[str]:
    """Yield the values of enumerations, and the methods of the scheduler and the router, as ``Class.name``."""
    for node in source.tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        if ENUMS & {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}:
            values = (n.targets[0] for n in node.body if isinstance(n, ast.Assign))
            yield from (f"{node.name}.{value.id}" for value in values if isinstance(value, ast.Name))
        if source.name.startswith(METHODS):
            names = (n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (f"{node.name}.{name}" for name in names if not name.startswith("__"))


def _kernel_names(source: Source) -> tuple[dict[str, Place], dict[str, str]]:
    """Return what names mean in the file: kernels, its own or imported ones, and modules of kernels."""
    own = [node for node in source.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names, modules = {node.name: (source.name, node.name) for node in own}, {}
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire.kernels"):
            folder = (node.module or "").removeprefix("quire.").replace(".", "/")
            for alias in node.names:
                names[alias.name] = (f"{folder}.py", alias.name)
                modules[alias.name] = f"{folder}/{alias.name}.py"
    return names, modules


def _uses(nodes: Iterable[ast.AST], names: Mapping[str, Place], modules: Mapping[str, str]) -> Iterator[Place]:
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            yield modules[node.value.id], node.attr


def _definition(node: ast.AST, names: Mapping[str, Place], modules: Mapping[str, str]) -> dict[str, Any]:
    nodes = list(ast.walk(node))
    uses = sorted(set(_uses(nodes, names, modules)))
    return {"uses": uses, "calls": _calls(nodes), "optional": list(_optional(node))}


def _calls(nodes: Iterable[ast.AST]) -> Calls:
    found: dict[str, set[str | int]] = {}
    for call in nodes:
        if isinstance(call, ast.Call):
            made, args = call.func, call.args
            if getattr(made, "id", "") == "partial":
                made, *args = args
            name = getattr(made, "id", getattr(made, "attr", ""))
            passed = found.setdefault(name, set())
            passed |= {keyword.arg or "**" for keyword in call.keywords}
            passed |= {"*" if isinstance(arg, ast.Starred) else index for index, arg in enumerate(args)}
    return {name: sorted(passed, key=str) for name, passed in found.items()}


def _optional(node: ast.AST) -> Iterator[tuple[str, str, str | int]]:
    """Yield (function, parameter, position or keyword) for each parameter with a default."""
    if isinstance(node, ast.FunctionDef):
        of = node.args
        first = len(of.args) - len(of.defaults) - (bool(of.args) and of.args[0].arg == "self")
        for index, arg in enumerate(of.args[len(of.args) - len(of.defaults) :]):
            yield node.name, arg.arg, first + index
        for arg, default in zip(of.kwonlyargs, of.kw_defaults, strict=True):
            if default:
                yield node.name, arg.arg, arg.arg


def _struct(source: Source, node: ast.ClassDef) -> dict[str, Any]:
    targets = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    return {
        "name": node.name,
        "is_line": source.name in TRACES,
        "bases": [getattr(base, "id", "") for base in node.bases],
        "fields": [each.id for each in targets if isinstance(each, ast.Name) and each.id[0] != "_"],
        "built": _calls(ast.walk(node)).get("cls", []),
    }


def problems(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = facts[RESERVED]["rows"]
    found = unreachable({path: of for path, of in facts.items() if path != RESERVED})
    for name in sorted(found - set(rows)):
        yield f"{name}: is unreachable: wire it in, remove it, or reserve it in {RESERVED}"
    for name in sorted(set(rows) - found):
        yield f"{name}: is reachable or removed: delete its row from {RESERVED}"
    if not len(rows) == len(set(rows)) <= MOST_ROWS:
        yield f"{RESERVED}: has equal rows, or more than {MOST_ROWS}"


def unreachable(facts: Mapping[str, Mapping[str, Any]]) -> set[str]:
    product = {path: of for path, of in facts.items() if "uses" in of}
    tools = {name for of in facts.values() for name in of.get("named", ())}
    kernels = {(path, name): of for path, each in facts.items() for name, of in each.get("kernels", {}).items()}
    uses = {place: {(path, name) for path, name in of["uses"]} for place, of in kernels.items()}
    reached = closure(((path, name) for of in product.values() for path, name in of["uses"]), uses)
    entry_points = {place for place in kernels if is_entry_point(*place)}
    inner = {use for place in entry_points - reached for use in closure(uses[place], uses) - {place}}
    calls: dict[str, set[str | int]] = {}
    for of in (*product.values(), *(kernels[place] for place in reached)):
        for name, passed in of["calls"].items():
            calls.setdefault(name, set()).update(passed)
    optional = [each for place in entry_points & reached for each in kernels[place]["optional"]]
    optional += [each for of in product.values() for each in of.get("optional", ())]
    lost = {
        f"{function}({name})"
        for function, name, at in optional
        if not (calls.get(function, {"*"}) | KNOBS) & {name, at, "**", "*"}
    }
    lost |= {*_lost_fields(product, calls, tools), *_lost_kinds(product), *_lost_reasons(product)}
    named = tools.union(*(of["read"] for of in product.values()))
    lost |= {each for of in product.values() for each in of["members"] if each.split(".")[1] not in named}
    return lost | {name for _, name in entry_points - reached - inner}


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


def _lost_fields(
    product: Mapping[str, Mapping[str, Any]], calls: Mapping[str, set[str | int]], tools: set[str]
) -> Iterator[str]:
    """Yield the fields that are never read or named, or never written by construction, ``replace`` or assignment."""
    assigned = {name for of in product.values() for name in of["assigned"]}
    read = {name for of in product.values() for name in of["read"]}
    structs = [each for of in product.values() for each in of.get("structs", ())]
    for struct in (struct for struct in structs if struct["name"] not in OTHER):
        heirs = [heir["name"] for heir in structs if struct["name"] in heir["bases"]]
        written = assigned.union(*(calls.get(name, ()) for name in (struct["name"], *heirs)), struct["built"])
        written |= {each for each in calls.get("replace", ()) if isinstance(each, str)}  # a text's has positions
        for index, name in enumerate(struct["fields"]):
            if not written & {name, index, "**", "*"} or name not in (read | tools if struct["is_line"] else read):
                yield f"{struct['name']}.{name}"


def _lost_kinds(product: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the kinds of KV groups that have a manager but are never created."""
    managed, made = (set(product.get(path, {}).get("kinds", ())) for path in (MANAGERS, LAYOUTS))
    return managed - made


def _lost_reasons(product: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the reasons to wait that no other module than their own names."""
    used = {name for path, of in product.items() if path != REASONS for name in of["attributes"]}
    reasons = product.get(REASONS, {}).get("reasons", ())
    yield from (f"WaitReason.{name}" for name in reasons if name not in used)
