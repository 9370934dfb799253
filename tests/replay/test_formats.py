"""Each format, by an excerpt of a public trace or a few lines: lengths, times, contents, order, predecessors."""

import gzip
import json
import lzma
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.text.text_in import TextIn
from quire.launch.config.model_folder import DEMO_MODEL
from quire.replay.formats.content import chain_ids
from quire.replay.formats.detect import detect_format, load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.workload.workload import SHORT_HASH_BYTES, Call, Workload, block_names

DATA = Path(__file__).parents[1] / "data"
EXCERPTS = {
    "mooncake": "mooncake_excerpt.jsonl",
    "agentic": "agentic_excerpt.jsonl",
    "agent-text": "taubench_excerpt.jsonl",
    "azure": "azure_excerpt.csv",
}


def load(path: Path, format: str = "auto", **options: Any) -> Workload:
    """Load a workload and check the invariants of workloads."""
    workload = load_workload(path, format, LoadOptions(**options))
    calls = workload.calls
    assert [call.number for call in calls] == list(range(len(calls)))
    assert all(a.arrival <= b.arrival for a, b in pairwise(calls))
    assert all(call.num_prompt_tokens > 0 and call.num_output_tokens > 0 and call.pause >= 0 for call in calls)
    assert len({call.request_id for call in calls}) == len(calls)
    for call in calls:
        assert call.after is None or calls[call.after].conversation == call.conversation
    return workload


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prompt_names(call: Call, block_size: int, *, reuse_answers: bool = False) -> list[bytes]:
    names = block_names(call, block_size, reuse_answers=reuse_answers)
    return [names[i : i + SHORT_HASH_BYTES] for i in range(0, len(names), SHORT_HASH_BYTES)]


def shared(a: Call, b: Call, block_size: int, *, reuse_answers: bool = False) -> int:
    """Return the number of leading blocks of ``b`` that equal those of ``a``."""
    first, second = (prompt_names(call, block_size, reuse_answers=reuse_answers) for call in (a, b))
    return next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )


@pytest.mark.parametrize(("format", "name"), EXCERPTS.items())
class TestEveryExcerpt:
    def test_recognizes_format_by_content(self, format: str, name: str, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_bytes((DATA / name).read_bytes())
        assert detect_format(tmp_path / "x.txt") == format == load(tmp_path).format

    def test_reads_compressed_files(self, format: str, name: str, tmp_path: Path) -> None:
        plain = (DATA / name).read_bytes()
        (tmp_path / "a.gz").write_bytes(gzip.compress(plain))
        (tmp_path / "a.xz").write_bytes(lzma.compress(plain))
        expected = load(DATA / name)
        for end in ("gz", "xz"):
            loaded = load(tmp_path / f"a.{end}")
            assert [repr(call) for call in loaded.calls] == [repr(call) for call in expected.calls]

    def test_applies_limit_and_rate(self, format: str, name: str, tmp_path: Path) -> None:
        every = load(DATA / name)
        few = load(DATA / name, limit=7)
        assert [call.request_id for call in few.calls] == [call.request_id for call in every.calls[:7]]
        assert f"7 of {len(every.calls)} requests are used" in few.notes
        fast = load(DATA / name, rate=4.0)
        starts: dict[str, tuple[float, float]] = {}
        slow = {call.request_id: call for call in every.calls}
        for call in fast.calls:
            was = slow[call.request_id].arrival
            began, begins = starts.setdefault(call.conversation or call.request_id, (was, call.arrival))
            assert begins == pytest.approx(began / 4)
            assert call.arrival - begins == pytest.approx(was - began)
            assert call.pause == slow[call.request_id].pause


class TestMooncake:
    def test_excerpt(self) -> None:
        lines = [json.loads(line) for line in (DATA / EXCERPTS["mooncake"]).read_text().splitlines()]
        calls = load(DATA / EXCERPTS["mooncake"]).calls
        for call, line in zip(calls, lines, strict=True):
            assert call.content is not None
            assert call.arrival * 1000 == line["timestamp"]
            assert (call.num_prompt_tokens, call.num_output_tokens) == (line["input_length"], line["output_length"])
            assert list(call.content.ids) == line["hash_ids"]
            assert call.answer is None and call.after is None

    def test_files_of_a_folder_have_separate_ids(self, tmp_path: Path) -> None:
        line = {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]}
        write(tmp_path / "b.jsonl", line)
        write(tmp_path / "a.jsonl", line, {**line, "timestamp": 500})
        (tmp_path / "README.md").write_text("no trace")
        first, other, second = load(tmp_path).calls
        assert (first.request_id, other.request_id, second.request_id) == ("0-1", "1-1", "0-2")
        assert shared(first, second, 512) == 2
        assert shared(first, other, 512) == 0

    def test_window_starts_at_0(self, tmp_path: Path) -> None:
        line = {"input_length": 1, "output_length": 1, "hash_ids": [0]}
        path = write(tmp_path / "a", *({"timestamp": 1000 * t, **line} for t in range(10)))
        assert [c.arrival for c in load(path, start=3.0, duration=2.0).calls] == [0, 1]
        assert [c.arrival for c in load(path, start=3.0, duration=2.0, rate=2.0).calls] == [0, 0.5]

    def test_empty_answer_is_one_token_with_a_note(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", {"timestamp": 0, "input_length": 1, "output_length": 0, "hash_ids": [0]})
        workload = load(path)
        assert workload.calls[0].num_output_tokens == 1
        assert workload.notes == ["1 empty answer is counted as one token"]


def agent_request(t: float, n_in: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": n_in, "out": 4, "hash_ids": ids, **more}


def conversation(*requests: dict[str, Any], name: str = "c") -> dict[str, Any]:
    return {"id": name, "block_size": 4, "requests": list(requests)}


class TestAgentic:
    def test_excerpt(self) -> None:
        loaded = json.loads((DATA / EXCERPTS["agentic"]).read_text())
        calls = load(DATA / EXCERPTS["agentic"]).calls
        for place, (call, request) in enumerate(zip(calls, loaded["requests"], strict=True)):
            assert call.content is not None
            assert call.arrival == request["t"]
            assert (call.num_prompt_tokens, call.num_output_tokens) == (request["in"], request["out"])
            assert (list(call.content.ids), call.content.unit) == (request["hash_ids"], 64)
            assert call.after == (place - 1 if place else None)
            assert call.pause == (request["think_time"] if place else 0.0)
            assert call.is_last_step == (request["stop"] != "tool_use")
        told_answers = [call for call in calls if call.answer is not None]
        assert len(told_answers) > len(calls) // 2

    def test_conversations_are_staggered_and_share_nothing(self, tmp_path: Path) -> None:
        one = conversation(agent_request(0, 8, [1, 2]), agent_request(70, 8, [1, 2]))
        path = write(tmp_path / "a", one, one)
        calls = load(path).calls
        assert [(c.arrival, c.conversation) for c in calls] == [(0, "c"), (60, "c#2"), (70, "c"), (130, "c#2")]
        assert shared(calls[0], calls[2], 4) == 2
        assert shared(calls[0], calls[1], 4) == 0
        assert [c.arrival for c in load(path, stagger=1.0).calls] == [0, 1, 70, 71]
        assert [c.arrival for c in load(path, rate=2.0).calls] == [0, 30, 70, 100]

    def test_answer_is_taken_from_the_next_turn(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a",
            conversation(
                agent_request(0, 6, [1], out=8),
                agent_request(9, 17, [1, 2, 3, 4]),
                agent_request(20, 9, [1, 7]),
                agent_request(30, 2, []),
                agent_request(40, 9, [1, 7]),
            ),
        )
        first, second, third, short, last = load(path).calls
        assert shared(first, second, 4) == 1
        assert shared(first, second, 4, reuse_answers=True) == 3, "14 tokens: three full blocks"
        assert second.answer is None and third.answer is None, "the next turn does not go on where they end"
        assert short.answer is None, "nothing says that the next turn begins with it"
        assert last.answer is None, "there is no next turn"

    def test_pause_without_think_time_starts_at_the_recorded_end(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a",
            conversation(
                agent_request(0, 4, [1], api_time=2.5),
                agent_request(10, 4, [1], think_time=3.25, api_time=99),
                agent_request(20, 4, [1]),
            ),
        )
        assert [call.pause for call in load(path).calls] == [0, 3.25, 0]
        path.write_text(path.read_text().replace('"think_time": 3.25, ', ""))
        assert [call.pause for call in load(path).calls] == [0, 7.5, 0]

    @pytest.fixture
    def with_subagents(self, tmp_path: Path) -> Path:
        """Two concurrent sub-agents; the next main request arrives before the end of the longer one."""
        long = {
            "type": "subagent",
            "t": 5.0,
            "requests": [agent_request(0, 4, [8], api_time=1), agent_request(9, 8, [8, 9], think_time=2, api_time=4)],
        }
        short = {"type": "subagent", "t": 6.0, "requests": [agent_request(0.5, 4, [20], api_time=1)]}
        return write(
            tmp_path / "a",
            conversation(agent_request(0, 4, [1], api_time=3), long, short, agent_request(20, 4, [1], think_time=11)),
        )

    def test_conversation_does_not_wait_for_sub_agents(self, with_subagents: Path) -> None:
        workload = load(with_subagents)
        main, first, other, second, following = workload.calls
        assert [call.request_id for call in workload.calls] == ["c/0", "c/1.0", "c/2.0", "c/1.1", "c/3"]
        assert [call.arrival for call in workload.calls] == [0, 5, 6.5, 14, 20]
        assert (first.after, other.after, second.after, following.after) == (main.number, main.number, first.number, 0)
        assert (first.pause, other.pause, second.pause, following.pause) == (2, 3.5, 2, 11)
        assert first.answer is not None and main.answer is None
        assert any("does not wait for them" in note for note in workload.notes)

    def test_conversation_waits_for_joined_sub_agents(self, with_subagents: Path) -> None:
        workload = load(with_subagents, join_subagents=True)
        assert (workload.calls[4].after, workload.calls[4].pause) == (3, 2), "18 s is the end of the last one"
        assert any("waits for the last of them" in note for note in workload.notes)

    def test_limit_removes_missing_predecessors(self, tmp_path: Path) -> None:
        late = {"type": "subagent", "t": 1.0, "requests": [agent_request(50, 4, [8])]}
        path = write(tmp_path / "a", conversation(agent_request(0, 4, [1]), late, agent_request(20, 4, [1])))
        assert load(path, join_subagents=True).calls[1].after == 2
        assert load(path, join_subagents=True, limit=2).calls[1].after is None

    def test_reads_object_over_several_lines(self, tmp_path: Path) -> None:
        loaded = json.loads((DATA / EXCERPTS["agentic"]).read_text())
        (tmp_path / "trace_1.json").write_text(json.dumps(loaded, indent=1))
        assert [repr(call) for call in load(tmp_path).calls] == [
            repr(c) for c in load(DATA / EXCERPTS["agentic"]).calls
        ]


class TestAgentText:
    def test_counts_tokens_with_the_tokenizer(self) -> None:
        lines = [json.loads(line) for line in (DATA / EXCERPTS["agent-text"]).read_text().splitlines()]
        calls, text_in = load(DATA / EXCERPTS["agent-text"]).calls, TextIn.load(DEMO_MODEL)
        assert {call.text for call in calls} == {line["input"] for line in lines}
        for call in calls:
            assert call.text is not None and call.tokens is not None and call.content is not None
            assert list(call.tokens) == text_in.encode(call.text)
            assert len(call.tokens) == call.num_prompt_tokens
            assert list(call.content.ids) == list(chain_ids(call.tokens, 16))

    def test_orders_turns_by_time(self, tmp_path: Path) -> None:
        def line(seconds: int, session: str, text: str, answer: str = "Yes.") -> dict[str, Any]:
            return {"timestamp": 10**15 + seconds * 10**6, "session_id": session, "input": text, "output": answer}

        story = "Once upon a time there was a little girl who liked to play in the garden with her dog. "
        path = write(
            tmp_path / "a",
            line(1, "a", story),
            line(9, "a", story * 4),
            line(4, "b", story, ""),
            line(7, "a", story * 2),
            line(9, "b", ""),
        )
        workload = load(path)
        calls = workload.calls
        assert [(c.arrival, c.conversation) for c in calls] == [(0, "a"), (3, "b"), (6, "a"), (8, "a"), (8, "b")]
        assert [(c.after, c.pause) for c in calls] == [(None, 0), (None, 0), (0, 6), (2, 2), (1, 5)]
        assert calls[0].content is not None
        assert shared(calls[0], calls[3], 16) == len(calls[0].content.ids) > 0
        assert shared(calls[0], calls[1], 16) > 0, "sessions share what their texts share"
        assert calls[2].answer is calls[3].content and calls[1].answer is None
        assert calls[4].num_prompt_tokens == calls[1].num_output_tokens == 1
        for expected in ("1 empty prompt is", "1 empty answer is", "1 line is earlier"):
            assert any(note.startswith(expected) for note in workload.notes), (expected, workload.notes)

    def test_rejects_folder_without_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(Exception, match="no tokenizer"):
            load(DATA / EXCERPTS["agent-text"], tokenizer=tmp_path)


class TestTables:
    def test_azure(self) -> None:
        workload = load(DATA / EXCERPTS["azure"])
        first, second = workload.calls[:2]
        assert len(workload.calls) == 30
        assert (first.arrival, first.num_prompt_tokens, first.num_output_tokens) == (0, 374, 44)
        assert (second.arrival, second.num_prompt_tokens) == (pytest.approx(4.314579, abs=1e-9), 396)
        assert any("has no contents" in note for note in workload.notes)

    def test_azure_columns_in_another_order_with_time_zone(self, tmp_path: Path) -> None:
        rows = ["GeneratedTokens,TIMESTAMP,ContextTokens", "5,2024-05-10 23:59:59.5+00:00,7", "6,2024-05-11 00:00:01,8"]
        (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + "\n".join(rows).encode())
        loaded = [(c.arrival, c.num_prompt_tokens, c.num_output_tokens) for c in load(tmp_path / "a").calls]
        assert loaded == [(0, 7, 5), (1.5, 8, 6)]
