"""Script checkpoints (``script_checkpoint.py``): the answers are the script's, also after kills and preemptions."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from chaos import disturbed
from fault_server import FaultServer
from live_streams import StreamRequest
from raw_http import get
from script_checkpoint import make_script_checkpoint

from quire import LLM, SamplingParams

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt", "lines": [1, 2, 3]}}\n</tool_call>'
ANSWERS = [
    "<think>\nTwo files, then a third one.\n</think>\n\nFirst the files.\n"
    + CALL
    + "\n"
    + CALL.replace("a.txt", "b.txt"),
    CALL.replace("a.txt", "größe/日本/🎈.txt"),
    "a",
    "aa",
    "aaaaaaaaaaaaaaaaaaaa",
    "Done: " + "all files are read, and " * 6 + "nothing is left.",
]


def _conversation(answers: list[str], number: int, first: str = "Read the files.") -> list[dict[str, str]]:
    """The messages before answer ``number``: each earlier answer is followed by a tool's result."""
    messages = [{"role": "user", "content": first}]
    for answer in answers[:number]:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"result of {len(answer)}"}]
    return messages


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_every_answer_is_the_scripts(tmp_path: Path, seed: int) -> None:
    lengths = make_script_checkpoint(tmp_path, {"other": ["Something else."], "files": ANSWERS}, seed=seed)
    settings = SamplingParams(temperature=0.0, max_tokens=1000)
    markers = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    with LLM(tmp_path, dtype="bfloat16", **markers) as llm:
        stop = SamplingParams(temperature=0.0, max_tokens=1000, stop=["third", "First"])
        (cut,) = llm.chat(_conversation(ANSWERS, 0), stop)
        assert cut.outputs[0].text == ANSWERS[0].partition("First")[0], "thoughts have no stop strings"
        with llm.session() as session:
            assert session.chat(_conversation(ANSWERS, 0), stop).outputs[0].text == cut.outputs[0].text
        turns = [_conversation(ANSWERS, number) for number in range(len(ANSWERS) + 1)]
        turns.append(_conversation([], 0, "Another one, and other words."))
        outputs = [output.outputs[0] for output in llm.chat(turns, settings)]
    assert [output.text for output in outputs] == [*ANSWERS, "", "Something else."]
    assert [len(output.token_ids) - 1 for output in outputs] == [*lengths[1:], 0, lengths[0]]
    assert all(output.finish_reason == "stop" for output in outputs)


@pytest.mark.full
def test_answers_with_drafts_preemption_and_a_killed_worker(tmp_path: Path) -> None:
    """First and second turns over a pool that is too small for them, with a draft model."""
    script = [" ".join(str(i * 7919 % 10007) for i in range(turn, 160, 2)) for turn in range(2)]
    make_script_checkpoint(tmp_path, script)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    flags = ["--speculative-config", json.dumps(drafts), "--num-gpu-blocks-override", "100"]
    flags += ["--max-model-len", "1024", "--max-num-seqs", "16"]
    requests = [
        StreamRequest("/v1/chat/completions", {"messages": _conversation(script, turn), "temperature": 0.0})
        for turn in [0, 1] * 12
    ]
    with FaultServer([str(tmp_path), *flags]) as server:
        answers = asyncio.run(disturbed(server.port, requests, server.victims("worker")[0].kill, 60))
        _, text = asyncio.run(get(server.port, "/metrics"))
        assert server.stop() == 0
    for index, answer in enumerate(answers):
        assert answer.error == "" and answer.choices[0].text == script[index % 2]
    counters = {name: float(value) for name, value in re.findall(r"^quire:(\w+)\{[^}]*\} ([\d.e+-]+)$", text, re.M)}
    assert counters["num_preemptions_total"] > 0 and counters["spec_decode_num_accepted_tokens_total"] > 0
    assert any("restarting the workers" in line for line in server.log)
