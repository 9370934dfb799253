"""Token ids to text, incrementally: detokenizer, stop strings, and the text of single tokens.

The cost of a token does not grow with the text before it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from quire.frontend.text.parsing.thoughts import Thoughts

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so it spans at most four tokens. More held tokens are bytes that are not UTF-8,
# and DecodeStream would decode all of them again for every token.
MAX_HELD_TOKENS = 32
NUM_CHARACTERS = 0x110000


class Detokenizer:
    """Incremental detokenizer of one sequence. Holds back the bytes of an incomplete character."""

    __slots__ = ("_held", "_silent", "_skip_special_tokens", "_stream", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            prompt_tail: the prompt's last tokens, for tokenizers that drop the blank of the first token.
            shown: special tokens that are not skipped.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens and not shown
        # DecodeStream keeps tokens without text and decodes them again each time, so they are filtered out before it.
        self._silent = special_ids(tokenizer) - shown if skip_special_tokens else frozenset[int]()
        self._held: list[int] = []
        tail = [token for token in prompt_tail if token not in self._silent]
        self._stream = self._new_stream(_whole_tail(tokenizer, tail, self._skip_special_tokens))

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        new = token_ids
        if not self._silent.isdisjoint(token_ids):
            new = [token for token in token_ids if token not in self._silent]
        if not new:
            return ""
        try:
            text: str | None = self._stream.step(self._tokenizer, new)
        except Exception:
            # With byte-fallback decoders, a later byte can change the text of earlier ones, and DecodeStream raises.
            # Text that was sent stays; the held tokens are decoded without it.
            self._stream = self._new_stream([])
            text = self._stream.step(self._tokenizer, [*self._held, *new])
        if text is None:
            self._held += new
            return self._give_up_on_held() if len(self._held) > MAX_HELD_TOKENS else ""
        if self._held:
            self._held = []
        return text

    def finish(self) -> str:
        """Return the text of the tokens still held, with U+FFFD for bytes that are not a character."""
        held, self._held = self._held, []
        return self._decode(held) if held else ""

    def _give_up_on_held(self) -> str:
        """Return the text of held tokens that cannot become a character; keep the last ones that still can."""
        held = self._held
        whole = self._decode(held)
        for keep in range(1, 4):
            head = self._decode(held[:-keep])
            if head + self._decode(held[-keep:]) == whole:
                break
        else:
            keep, head = 0, whole
        self._held = held[len(held) - keep :]
        self._stream = self._new_stream([])
        if self._held:
            self._stream.step(self._tokenizer, self._held)
        return head

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _new_stream(self, context: list[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Finds the first completed stop string in a stream of characters, independent of how the stream is split.

    If two strings end at the same character, the longer one is found.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._automaton = stop_automaton(tuple(stop))
        self._first = frozenset(text[0] for text in stop)
        self._state = 0
        self.held = 0
        """Number of last characters that may be the start of a stop string."""

    def find(self, text: str, *, armed: bool = True) -> tuple[str, int] | None:
        """Return the stop string that ``text`` completes and its end position in ``text``, or None.

        If not ``armed``, completed strings are ignored, but they may be the start of a later one.
        """
        state = self._state
        if not state and self._first.isdisjoint(text):
            return None
        edges, fallback, ends, rest = self._automaton.tables
        for place, char in enumerate(text, 1):
            code = ord(char)
            while (then := edges.get(state * NUM_CHARACTERS + code)) is None and state:
                state = fallback[state]
            state = then or 0
            if armed and (found := ends[state]) is not None:
                return found, place
            state = rest[state]
        self._state = state
        self.held = self._automaton.depth[state]
        return None

    def restart(self) -> None:
        """Forget the text so far: no stop string continues it."""
        self._state = self.held = 0


class StopAutomaton:
    """Aho-Corasick automaton (1975): finds any of several strings with about one look-up per character.

    A state is the longest prefix of any string that the stream so far ends with.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.depth = [0]
        """Length of each state's prefix, in characters."""
        edges: dict[int, int] = {}
        ends: list[str | None] = [None]
        inner = {0}
        for text in strings:
            state = 0
            for char in text:
                inner.add(state)
                key = state * NUM_CHARACTERS + ord(char)
                if key not in edges:
                    edges[key] = len(ends)
                    ends.append(None)
                    self.depth.append(self.depth[state] + 1)
                state = edges[key]
            ends[state] = text
        fallback = self._fallbacks(edges)
        rest = [0] * len(ends)
        for state in sorted(range(1, len(ends)), key=self.depth.__getitem__):
            # A string may end inside a longer one. Where no string continues, ``rest`` is the longest suffix that does.
            if ends[state] is None:
                ends[state] = ends[fallback[state]]
            rest[state] = state if state in inner else rest[fallback[state]]
        self.tables = edges, fallback, ends, rest

    def _fallbacks(self, edges: dict[int, int]) -> list[int]:
        """Return for each state the longest shorter state that is a suffix of it."""
        fallback = [0] * len(self.depth)
        for key, state in sorted(edges.items(), key=lambda edge: self.depth[edge[1]]):
            parent, code = divmod(key, NUM_CHARACTERS)
            while parent:
                parent = fallback[parent]
                found = edges.get(parent * NUM_CHARACTERS + code)
                if found is not None:
                    fallback[state] = found
                    break
        return fallback


@lru_cache(maxsize=32)
def stop_automaton(strings: tuple[str, ...]) -> StopAutomaton:
    """Return a cached automaton: all answers of a request, and often of an application, have the same strings."""
    return StopAutomaton(strings)


@dataclass(frozen=True, slots=True)
class StopFound:
    """A stop string, and the number of output tokens after which it was complete."""

    text: str
    num_output_tokens: int


class TextOut:
    """The text of one answer: detokenized and cut at its stop string.

    Attributes:
        stop: set once a stop string was found; the text is then complete, and later tokens are ignored.
        num_chars: characters decoded so far, including those held back for a stop string: the text offset of the
            next token.
    """

    __slots__ = (
        "_detokenizer", "_include_stop", "_min_tokens", "_num_tokens", "_stops", "_thoughts", "_unsent", "num_chars",
        "stop",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt_tail: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
        thoughts: Callable[[], Thoughts] | None = None,
    ) -> None:
        """
        Args:
            min_tokens: stop strings that are complete within this many tokens are ignored.
            shown: special tokens that are in the text even if such tokens are skipped.
            thoughts: makes what finds the thoughts, on which stop strings do not act.
        """
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail, shown=shown)
        )
        self._stops = StopStrings(stop) if stop else None
        self._thoughts = thoughts() if thoughts is not None and stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._unsent = ""
        self._num_tokens = 0
        self.num_chars = 0
        self.stop: StopFound | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that can be sent after these tokens: all but a possible start of a stop string."""
        if self._stops is None:
            text = self._detokenizer.push(token_ids) if self._detokenizer else ""
            self.num_chars += len(text)
            return text
        sent: list[str] = []
        for token in token_ids:
            if self.stop:
                break
            self._num_tokens += 1
            sent.append(self._advance(self._detokenizer.push((token,)) if self._detokenizer else ""))
        return "".join(sent)

    def finish(self) -> str:
        """Return the rest of the text, when the answer ends without a stop string."""
        if self.stop:
            return ""
        text = self._advance(self._detokenizer.finish() if self._detokenizer else "", last=True)
        if self.stop:
            return text
        rest, self._unsent = self._unsent, ""
        return text + rest

    def _advance(self, new: str, *, last: bool = False) -> str:
        self.num_chars += len(new)
        if self._stops is None or not (new or last):
            return new
        if self._thoughts is None:
            return self._search(self._stops, new)
        sent: list[str] = []
        for text, is_searched in self._thoughts.push(new, last=last):
            if is_searched:
                sent.append(self._search(self._stops, text))
            else:
                sent += [self._unsent, text]
                self._unsent = ""
                self._stops.restart()
            if self.stop:
                break
        return "".join(sent)

    def _search(self, stops: StopStrings, new: str) -> str:
        found = stops.find(new, armed=self._num_tokens > self._min_tokens)
        text = self._unsent + new
        if found is None:
            cut = len(text) - stops.held
            self._unsent = text[cut:]
            return text[:cut]
        stop, place = found
        self.stop = StopFound(stop, self._num_tokens)
        end = len(self._unsent) + place
        self._unsent = ""
        return text[: end if self._include_stop else end - len(stop)]


class TokenTexts:
    """The bytes and text of single tokens, for log probabilities; ``token_id:7`` without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset[int]() if tokenizer is None else special_ids(tokenizer)
        self._byte_level = tokenizer is not None and _is_byte_level(tokenizer)

    def text(self, token_id: int) -> str:
        return self.raw(token_id).decode("utf-8", "replace")

    def raw(self, token_id: int) -> bytes:
        """Return the token's bytes, which may be incomplete characters."""
        piece: str | None = None if self._tokenizer is None else self._tokenizer.id_to_token(token_id)
        if self._tokenizer is None or piece is None:
            return f"token_id:{token_id}".encode()
        if token_id in self._special:
            return piece.encode()
        if self._byte_level:
            table = _byte_of_char()
            return b"".join(table.get(char) or char.encode() for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()


@lru_cache(maxsize=8)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the special tokens. Cached, because every stream needs them."""
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _whole_tail(tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Return the shortest suffix of the prompt, of at least four tokens, that is whole characters, or []."""
    tail = list(prompt_tail)[-12:]
    for length in range(min(4, len(tail)), len(tail) + 1):
        part = tail[len(tail) - length :]
        if part and REPLACEMENT not in tokenizer.decode(part, skip_special_tokens=skip_special_tokens):
            return part
    return []


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, bytes]:
    """Return GPT-2's byte table: printable Latin-1 bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    table.update({chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)})
    return table
