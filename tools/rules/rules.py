"""Check the rules about the repository: `make lint` runs this.

    python tools/rules/rules.py            # facts of unchanged files come from .rules_cache
    python tools/rules/rules.py --whole    # every file is read again, as in continuous integration

A rule is a module with two functions. ``facts(source)`` returns what the rule needs from one file, as JSON; it is
cached under the hash of the file and of the rules themselves. ``problems(facts)`` yields a line for each breach, from
the facts of all files that have any: so rules about the whole tree, such as import cycles, are always checked whole.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import bans
import layers
import pages
import prose
import reachable
from sources import ROOT, Source, all_names

RULES: tuple[ModuleType, ...] = (bans, layers, reachable, pages, prose)
CACHE = ROOT / ".rules_cache" / "facts.json"


def facts_of(source: Source) -> dict[str, Any]:
    """Return the facts of each rule that has any about the file."""
    found = {rule.__name__: rule.facts(source) for rule in RULES}
    return {rule: facts for rule, facts in found.items() if facts}


def problems(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the breaches of all rules; ``facts`` holds those of each file by its path."""
    for rule in RULES:
        name = rule.__name__
        yield from rule.problems({file: of[name] for file, of in facts.items() if name in of})


def read_tree(cached: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the hash and the facts of each file; those of unchanged files come from ``cached``."""
    read = {}
    for name in all_names():
        content = (ROOT / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        known = cached.get(name)
        if known is None or known[0] != digest:
            known = digest, facts_of(Source(name, content.decode(errors="replace")))
        read[name] = known
    return read


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the rules about the repository.")
    parser.add_argument("--whole", action="store_true", help="read every file again")
    whole = parser.parse_args().whole
    rules = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    key = hashlib.sha256(rules + sys.version.encode()).hexdigest()
    try:
        cached = json.loads(CACHE.read_bytes())
    except (OSError, ValueError):
        cached = {}
    files = read_tree({} if whole or cached.get("key") != key else cached["files"])
    CACHE.parent.mkdir(exist_ok=True)
    new = CACHE.with_suffix(".new")
    new.write_text(json.dumps({"key": key, "files": files}))
    new.replace(CACHE)  # a reader that runs at the same time sees one of both files, whole
    found = list(problems({name: facts for name, (_, facts) in files.items()}))
    pages = "; docs/glossary.md has the plain words, CONTRIBUTING.md the rules" if found else ""
    print("\n".join([*found, f"{len(found)} breaches of rules in {len(files)} files{pages}"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
