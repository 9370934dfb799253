"""Text is written in the words of docs/glossary.md: no comment, docstring, message or page has a turn of the list.

    python -P tests/test_prose.py [PATH ...]     # every match with file and line

The list holds turns that a reader of this field stumbles over: requests as persons, private words for standard terms,
nouns that are left out. A text that needs one of these words for another meaning is rephrased; the list has no
exceptions per file.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
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

REVIEWED = (
    "A trial is one; who runs short alone is put out for itself",
    "who gets how many positions and blocks, who is put out, who is let in, and why not",
    "To who is gone already: nothing happens. Who does not take it, is gone from now on.",
    "Who is to run with nobody beside it.",
    "nobody knows of a size that is new how long it takes",
    "Whose it is, and what that one may ask for.",
    "Where in ``tokens`` ... one stands that ends somebody.",
    "may not be what it should be: nobody may find it again",
    "Somebody was put out in this very step; letting others in would put out more.",
    "Whom ``request``, which finds no row, may put out for one; None: nobody.",
    "who wants more is damaged, or means it ill",
    "what is taken are no handles",
    "it took no time that there is",
    "a log probability that is none",
    "another rank does not come to the sum",
    "CXX names X, which is not there",
    "the body did not come in time",
    "there is nothing at /x",
    "Requests sent back to wait for want of blocks.",
    "...; what runs is computed again by other workers",
    "who goes first: the earliest, or the lowest priority number",
    "keys that open the server",
    "Who attends; said with the reason.",
    "Who is to live: which processes are started, ended and told what.",
)
"""Texts that this code once had, from a review of it."""

PLAIN = (
    "Return the victim to preempt for a batch slot, or None.",
    "max_tokens must be between 1 and 2047 (got 5000): raise --max-model-len or shorten the prompt",
    "A request was preempted in this step; admitting more would cause further preemption.",
    "Running requests will be recomputed by new workers.",
    "There are no free blocks, so that the request waits.",
    "The scheduler sends the diff to the workers and receives one result per step.",
)

_PATTERNS = {
    name: re.compile(rf"(?<!\w)(?:{turn})(?!\w)", re.IGNORECASE if name != "of a" else 0)
    for name, turn in TURNS.items()
}
_CODE = re.compile(r"``[^`]*``|`[^`]*`|https?://\S+|<[^>\n]+>|\$\{?\w+\}?|%\(\w+\)s")
_DATA = ("launch/demo/", "tools/demo_model/", "tests/data/", "/assets/vendor/")
_MARKERS = {".cpp": "//", ".h": "//", ".js": "//", ".css": "/*", ".toml": "#", ".yml": "#", ".yaml": "#", "": "#"}
_WORDS = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,}")


class Block(NamedTuple):
    """Text that belongs together, as (line number, text) of each of its lines."""

    file: str
    lines: list[tuple[int, str]]


class Match(NamedTuple):
    file: str
    line: int
    turn: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: [{self.turn}] {self.text}"


def product_blocks(file: Path) -> Iterator[Block]:
    """Yield the comments, docstrings and texts of a product file; a text has two words in a row at least."""
    source, name = file.read_text(), _name(file)
    yield from _comments(source, name)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORDS.search(node.value):
            yield _block(name, node.lineno, node.value)


def blocks_of_tests(file: Path) -> Iterator[Block]:
    """Yield the comments, docstrings and names of tests of a test file; its other texts are data."""
    source, name = file.read_text(), _name(file)
    yield from _comments(source, name)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and re.match(r"(?i)test", node.name):
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).replace("_", " ").strip()
            yield Block(name, [(node.lineno, words)])
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield _block(name, value.lineno, value.value)


def other_blocks(file: Path) -> Iterator[Block]:
    """Yield the comments of a file in another language, one block per run of lines."""
    marker, lines = _MARKERS[file.suffix], list[tuple[int, str]]()
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        _, found, text = line.partition(marker)
        if found:
            lines.append((number, text.strip("/*# ")))
        elif lines:
            yield Block(_name(file), lines)
            lines = []
    if lines:
        yield Block(_name(file), lines)


def page_blocks(file: Path) -> Iterator[Block]:
    """Yield the paragraphs and table rows of a Markdown file, without code blocks."""
    is_code, paragraph = False, list[tuple[int, str]]()
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        text = "" if is_code or line.startswith(("    ", "```")) else line
        if not text.strip() or text.startswith(("|", "#", "* ", "- ")):
            if paragraph:
                yield Block(_name(file), paragraph)
            paragraph = []
        if text.strip():
            paragraph.append((number, text))
    if paragraph:
        yield Block(_name(file), paragraph)


def matches(block: Block) -> Iterator[Match]:
    """Yield each turn of the list in the text, code left out."""
    starts, text = list[tuple[int, int]](), ""
    for number, line in block.lines:
        starts.append((len(text), number))
        text += " ".join(line.split()) + " "
    plain = _CODE.sub(lambda code: "x" * len(code.group()), text)
    for turn, pattern in _PATTERNS.items():
        for found in pattern.finditer(plain):
            at = max(number for start, number in starts if start <= found.start())
            around = text[max(0, found.start() - 50) : found.end() + 50].strip()
            yield Match(block.file, at, turn, around)


def wide_lines(file: Path) -> Iterator[Match]:
    """Yield lines of prose over DOC_COLUMNS columns; tables, code, headings and links may be longer."""
    is_code = False
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        exempt = is_code or line.startswith(("|", "    ", "#")) or "](" in line
        if len(line) > DOC_COLUMNS and not exempt:
            yield Match(_name(file), number, f"over {DOC_COLUMNS} columns", line[:80])


def all_matches(paths: list[Path]) -> list[Match]:
    """Return the matches under ``paths``, which are files or folders, in order of file and line."""
    found: list[Match] = []
    for file in sorted({file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))}):
        name = _name(file)
        if (
            name.startswith((".", "build/"))
            or "/." in name
            or any(part in name for part in _DATA)
            or file == Path(__file__)
        ):
            continue
        if file.suffix == ".md":
            found += [match for block in page_blocks(file) for match in matches(block)]
            found += wide_lines(file)
        elif file.suffix in _MARKERS and file.is_file():
            found += [match for block in other_blocks(file) for match in matches(block)]
        elif file.suffix == ".py":
            blocks = blocks_of_tests(file) if name.startswith("tests/") else product_blocks(file)
            found += [match for block in blocks for match in matches(block)]
    return sorted(set(found))


def _comments(source: str, name: str) -> Iterator[Block]:
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] > lines[-1][0] + 1:
                yield Block(name, lines)
                lines = []
            lines.append((token.start[0], token.string.lstrip("# ")))
    if lines:
        yield Block(name, lines)


def _block(name: str, first: int, text: str) -> Block:
    return Block(name, list(enumerate(text.splitlines() or [""], first)))


def _name(file: Path) -> str:
    return file.resolve().relative_to(ROOT).as_posix() if file.resolve().is_relative_to(ROOT) else str(file)


def _folders() -> list[Path]:
    hidden = [ROOT / ".ci", ROOT / ".github", ROOT / ".pre-commit-config.yaml"]
    return [*hidden, *(path for path in ROOT.iterdir() if not path.name.startswith(".") and path.name != "build")]


@pytest.mark.parametrize("text", REVIEWED, ids=range(len(REVIEWED)))
def test_the_list_finds_each_reviewed_example(text: str) -> None:
    assert list(matches(Block("review", [(1, text)])))


@pytest.mark.parametrize("text", PLAIN, ids=range(len(PLAIN)))
def test_the_list_passes_plain_text(text: str) -> None:
    assert not list(matches(Block("plain", [(1, text)])))


def test_a_match_names_its_line_across_a_line_break(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Fine.\n\nThe request is put\nout.\n"""\n\n# Nobody\n\nx = "it is `who`"\nraise E(f"{x} is no handle")\n'
    )
    found = [(match.line, match.turn) for block in product_blocks(file) for match in matches(block)]
    assert sorted(found) == [(3, "put out"), (7, "nobody"), (10, "is no")]


def test_no_text_has_a_turn_of_the_list() -> None:
    assert len(TURNS) >= 40
    found = all_matches(_folders())
    assert not found, "\n".join(["docs/glossary.md has the plain words", *map(str, found)])


if __name__ == "__main__":
    listed = all_matches([Path(name).resolve() for name in sys.argv[1:]] or _folders())
    print("\n".join(map(str, listed)))
    print(f"{len(listed)} matches of {len(TURNS)} turns")
    sys.exit(bool(listed))
