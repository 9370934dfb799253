"""Text is written in the words of docs/glossary.md: no comment, docstring, message or page has a turn of the list.

The list holds turns that a reader of this field stumbles over: requests as persons, private words for standard terms,
nouns that are left out. A text that needs one of these words for another meaning is rephrased; the list has no
exceptions per file.
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
    "who": r"who|whom|whoever|whomever",
    "nobody": r"nobody|somebody|everybody|anybody|nobody's|somebody's",
    "anyone": r"anyone|everyone|someone|no one",
    "whose it is": r"whose (it|they|that|the last|this) (is|are)|whose is",
    "he, his": r"he|she|him|his|hers|himself",
    "ours, theirs": r"ours|theirs",
    # Private words where the field has one.
    "put out": r"put(s|ting)? out|put (a|the|its) \w+ out",
    "let in": r"(let|lets|letting) (\w+ |\w+ \w+ )?in(?= [a-z]|[.,;:]|$)(?! (a|the) )",
    "begin to run": r"beg(in|ins|an|un) to run",
    "begun": r"begun",
    "begin again": r"beg(in|ins|an|inning) (again|anew)|anew",
    "go on": r"(go|goes|going|went|gone) on(?! (a|an|the|its) )",
    "cruise": r"cruis(e|es|ed|ing)",
    "coast": r"coast(s|ed|ing)?",
    "doors": r"doors?",
    "life": r"(of|in) (this|that|its|one|another|each) li(fe|ves)|(scheduler|engine)'s li(fe|ves)",
    "deaf": r"deaf",
    "foretell": r"foret(ell|ells|old)",
    "spell": r"spells?|spelt|speller",
    "condemn": r"condemn(s|ed|ing)?",
    "crew": r"crews?",
    "news": r"news",
    "overseer": r"overseers?",
    "told": r"(is|are|was|were|be|been|being|never|not|once) (told|heard|spoken)|told (of|to|that|about|how|which)",
    "tell it": r"tells? (it|them|the (scheduler|worker|workers|client|clients|supervisor|front|group|other))",
    "said": r"(is|are|was|were|be|being) said|said (with|once|in|at|so|of)",
    "say nothing": r"sa(y|ys|id) nothing|says? so|says? how it|has said",
    "hear": r"hears?|hearing|heard (of|from|in)",
    "speak": r"speaks?|spoke|spoken",
    "without a word": r"without a word|a word of|in words for|(its|their|own|some|few) words",
    "complain": r"complain(s|ed|ing|t|ts)?",
    "wish": r"wish(es|ed)?",
    "again": r"(computed|started|submitted|sent|asked|begun|built|drawn|tried|counted|scheduled) again",
    "from here on": r"from (here|there|now|then) on",
    "for want of": r"for want of",
    "the one that": r"the ones? (that|which|before|after|beside|who) (is|are|was|were|has|have|had|it|runs?|ran)",
    # A process exits, a client disconnects, a block is freed.
    "is gone": r"(is|are|was|were|be|been|has|have|had) gone|gone (from|for|by|when)|goes away|go away",
    "come": r"(does|do|did|will|may|can) not come|(has|have|had) come|comes? (in|too|late)(?= |[.,;:])|came",
    "as it is": r"(taken|left|given|used|shown|sent|kept|stays?) as (it|they) (is|are|was|were|comes?)",
    "left alone": r"(left|leave|leaves|let|lets) alone",
    "looked at": r"(is|are|was|were|be|being) looked (at|after|into)",
    "to be had": r"to be had",
    "stands": r"stands?(?= (in|at|on|behind|beside|before|after|there|where|here|first|last))",
    "fares": r"fares?",
    "means it ill": r"means? (it )?(ill|well)",
    "will not do": r"(will|would|does|do) not do",
    "know of": r"(know|knows|knew|known) of",
    "runs short": r"(run|runs|ran) short",
    "open the server": r"(that|which) open the",
    "gets how many": r"gets? (how|what|which|whose|who)",
    # Existence, turned round.
    "nothing at": r"there (is|was|are|were) nothing(?! to )|there is no such",
    "none that": r"(that|which) (is|are|was|were) none|(is|are) none(?= (of|that|there))",
    "that there is": r"(that|as|than) there (is|are|was|were)|where there (is|are) (none|one|any)",
    "not there": r"(is|are|was|were|be) not there|not there (yet|any)",
    "is no": r"(?<!there )(?<!that )(is|are) no (?!(long|lat|larg|fast|oth)er|more|less|need|way|such)\w+(?=[ .,;:]|$)",
    "nothing of": r"nothing of (it|this|that|them|those|what|all)|and nothing else(?! (than|is|may|can))",
    "so many": r"so (many|much) (?!that|more|as)\w+(?! that)",
    # Nouns that are left out.
    "of a": r"(?<![\w,] )(?<![\w,])Of (a|an|the|each|one|all|some|its|those|these|what|this|that|any|no|such)",
    "what runs": r"what (runs|stands|ran|comes|came|goes|went|lives|waits|fits|stays) (is|are|was|has|in|at|then)",
    "what is, is": r"what (is|are|was|were) (\w+ )?(\w+ )?(is|are|was|were|has|have|goes|comes|gets|must|may|can)",
    "whatever": r"whatever|whatsoever|wherever|however (it|many|long|they)",
    "else": r"(?<=[;.:]) else|(?<=\w) else (it|they|there|one)",
    "where it": r"where it (is|was|stands|goes|comes|came|can|has) (?!not|a |an |the |\w+ed)\w+",
    "may not be what": r"(may|must|can|need) not be (what|where|the one)",
    "no number": r"(was|were|is|are) no(t a)? numbers?(?! of)",
    "as one": r"(those|these) of (before|others|another)|that of (before|another)",
    "it took": r"it (took|takes) no",
    "does not matter": r"does not care|do not care|cares? (for|about)",
    "and is that": r"and (is|are|was|were) (that|those|then that)",
}
"""Name → regular expression of whole words, any case."""

_PATTERNS = {
    name: re.compile(rf"(?<!\w)(?:{turn})(?!\w)", re.IGNORECASE if name != "of a" else 0)
    for name, turn in TURNS.items()
}
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
    if facts:
        yield "docs/glossary.md has the plain words"


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
