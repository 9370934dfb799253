"""Text is written in the words of docs/glossary.md: no comment, docstring, message or page has a turn of the list.

The list is short on purpose: it holds the private words that this code once had for standard terms, requests as
persons, and a few sentences without their noun. Plain English is a reviewer's business: a newcomer's correct sentence
must pass. A text that needs a word of the list for another meaning is rephrased; there are no exceptions per file.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import PurePosixPath

from sources import Source

DOC_COLUMNS = 100

TURNS: dict[str, str] = {
    # Requests, workers and blocks are things.
    "nobody": r"nobody|somebody|whoever|whomever",
    "he, his": r"he|she|him|his|hers|himself",
    # Private words where the field has one.
    "put out": r"put(s|ting)? out|put (a|the|its) \w+ out",
    "let in": r"(let|lets|letting) (\w+ |\w+ \w+ )?in(?= [a-z]|[.,;:]|$)(?! (a|the) )",
    "cruise": r"cruis(e|es|ed|ing)",
    "coast": r"coast(s|ed|ing)?",
    "doors": r"doors?",
    "life": r"(of|in) (this|that|its|one|another|each) li(fe|ves)|(scheduler|engine)'s li(fe|ves)",
    "deaf": r"deaf",
    "foretell": r"foret(ell|ells|old)",
    "spell": r"spells?|spelt|speller",
    "condemn": r"condemn(s|ed|ing)?",
    "crew": r"crews?",
    "overseer": r"overseers?",
    "fares": r"fares?",
    "for want of": r"for want of",
    "means it ill": r"means? it ill",
    "to be had": r"to be had",
    # Nouns that are left out.
    "none that": r"(that|which) (is|are|was|were) none(?= [.,;:]|[.,;:]|$)",
    "is no number": r"(was|were|is|are) no (numbers?|handles?)(?! of)",
}
"""Name → regular expression of whole words, any case: the private dialect that this code once had, and nothing else."""

_PATTERNS = {name: re.compile(rf"(?<!\w)(?:{turn})(?!\w)", re.IGNORECASE) for name, turn in TURNS.items()}
_CODE = re.compile(r"``[^`]*``|`[^`]*`|https?://\S+|<[^>\n]+>|\$\{?\w+\}?|%\(\w+\)s")
_DATA = ("launch/demo/", "tools/demo_model/", "tests/data/", "/assets/vendor/")
_MARKERS = {".cpp": "//", ".h": "//", ".js": "//", ".css": "/*", ".toml": "#", ".yml": "#", ".yaml": "#", "": "#"}
_WORDS = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,}")


Block = list[tuple[int, str]]
"""Text that belongs together, as (line number, text) of each of its lines."""


def facts(source: Source) -> list[tuple[int, str, str]]:
    """Return (line, turn, text around it) for each turn of the list, and for each line of a page that is too long."""
    kind = PurePosixPath(source.name).suffix
    if source.name == "tools/rules/prose.py" or any(part in source.name for part in _DATA):
        return []
    if kind == ".py":
        blocks = _blocks_of_tests(source) if source.package == "tests" else _product_blocks(source)
    else:
        blocks = _page_blocks(source) if kind == ".md" else _other_blocks(source, _MARKERS[kind])
    found = {match for block in blocks for match in _matches(block)}
    return sorted(found.union(_wide_lines(source) if kind == ".md" else ()))


def problems(facts: dict[str, list[tuple[int, str, str]]]) -> Iterator[str]:
    for file, found in facts.items():
        for line, turn, text in found:
            yield f"{file}:{line}: [{turn}] {text}"


def _product_blocks(source: Source) -> Iterator[Block]:
    """Yield the comments, docstrings and texts of a product file; a text has two words in a row at least."""
    yield from _comments(source)
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORDS.search(node.value):
            yield _block(node.lineno, node.value)


def _blocks_of_tests(source: Source) -> Iterator[Block]:
    """Yield the comments, docstrings and names of tests of a test file; its other texts are data."""
    yield from _comments(source)
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and re.match(r"(?i)test", node.name):
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).replace("_", " ").strip()
            yield [(node.lineno, words)]
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield _block(value.lineno, value.value)


def _other_blocks(source: Source, marker: str) -> Iterator[Block]:
    """Yield the comments of a file in another language, one block per run of lines."""
    lines: Block = []
    for number, line in enumerate(source.text.splitlines(), 1):
        _, found, text = line.partition(marker)
        if found:
            lines.append((number, text.strip("/*# ")))
        elif lines:
            yield lines
            lines = []
    if lines:
        yield lines


def _page_blocks(source: Source) -> Iterator[Block]:
    """Yield the paragraphs and table rows of a Markdown file, without code blocks."""
    paragraph: Block = []
    is_code = False
    for number, line in enumerate(source.text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        text = "" if is_code or line.startswith(("    ", "```")) else line
        if not text.strip() or text.startswith(("|", "#", "* ", "- ")):
            if paragraph:
                yield paragraph
            paragraph = []
        if text.strip():
            paragraph.append((number, text))
    if paragraph:
        yield paragraph


def _matches(block: Block) -> Iterator[tuple[int, str, str]]:
    """Yield each turn of the list in the text, code left out."""
    starts, text = list[tuple[int, int]](), ""
    for number, line in block:
        starts.append((len(text), number))
        text += " ".join(line.split()) + " "
    plain = _CODE.sub(lambda code: "x" * len(code.group()), text)
    for turn, pattern in _PATTERNS.items():
        for found in pattern.finditer(plain):
            at = max(number for start, number in starts if start <= found.start())
            around = text[max(0, found.start() - 50) : found.end() + 50].strip()
            yield at, turn, around


def _wide_lines(source: Source) -> Iterator[tuple[int, str, str]]:
    """Yield lines of prose over DOC_COLUMNS columns; tables, code, headings and links may be longer."""
    is_code = False
    for number, line in enumerate(source.text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        exempt = is_code or line.startswith(("|", "    ", "#")) or "](" in line
        if len(line) > DOC_COLUMNS and not exempt:
            yield number, f"over {DOC_COLUMNS} columns", line[:80]


def _comments(source: Source) -> Iterator[Block]:
    lines: Block = []
    # The tokenizer is the dearest part of this rule, and most files have no comment.
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline) if "#" in source.text else ():
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] > lines[-1][0] + 1:
                yield lines
                lines = []
            lines.append((token.start[0], token.string.lstrip("# ")))
    if lines:
        yield lines


def _block(first: int, text: str) -> Block:
    return list(enumerate(text.splitlines() or [""], first))
