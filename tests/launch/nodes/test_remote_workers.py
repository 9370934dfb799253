"""Workers on node agents, which are processes of this machine: the same tokens, also after deaths."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_agents import llm_on_nodes, node_agents

from quire import LLM, SamplingParams
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.launch.nodes import remote_workers
from quire.launch.nodes.keys import HEAD_SECRET, load_node_key, make_keys
from quire.launch.nodes.remote_workers import NodeWorkers
from quire.protocol.config import EngineConfig, RankPlace
from quire.protocol.errors import EngineError
from quire.protocol.process.child import Command, Report
from quire.protocol.process.log import LogOptions
from quire.protocol.wire.link_messages import PROTOCOL_VERSION
from quire.protocol.wire.node_messages import KillWorker, NodeInfo, StartWorker, WorkerReport

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15] * 20, [16, 17]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def _config(num_ranks: int, model: str | None = None) -> EngineConfig:
    options = EngineOptions(model=model, tensor_parallel_size=num_ranks, max_num_seqs=8, num_gpu_blocks_override=200)
    return make_engine_config(options, folder=find_model(model))


NODES = ("tcp://127.0.0.1:7100", "tcp://127.0.0.2:7100")


class FakeThread:
    """A NodeThread that records what is sent."""

    def __init__(self, *_: Any) -> None:
        self.sent: list[tuple[str, Any]] = []

    def add(self, address: str, node_key: str) -> None:
        pass

    def send(self, address: str, message: Any) -> None:
        self.sent.append((address, message))

    def close(self) -> None:
        pass


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NodeWorkers, FakeThread]]:
    """The workers of an engine with a rank on each of two nodes, which are connected, and the thread of their links."""
    thread = FakeThread()
    monkeypatch.setattr(remote_workers, "NodeThread", lambda *_: thread)
    _, head = make_keys(tmp_path / "keys")
    ranks = [RankPlace(node, 0, load_node_key(head)) for node in NODES]
    config = msgspec.structs.replace(_config(2), ranks=ranks, head_key_file=str(head / HEAD_SECRET))
    workers = NodeWorkers(config, LogOptions())
    workers.open(tmp_path)
    for node in NODES:
        workers.ready(node, NodeInfo(PROTOCOL_VERSION, "1.0", node, 1, 4321))
    yield workers, thread
    workers.close()


def test_a_worker_that_runs_is_killed_while_its_order_waits_for_a_node(linked: tuple[NodeWorkers, FakeThread]) -> None:
    workers, thread = linked
    workers.prepare_group(1)
    first, second = (workers.start(rank, is_quiet=True) for rank in (0, 1))
    workers.lost(NODES[1], "silent", is_final=False)
    first.send(Command("join", worker_epoch=1))
    later = workers.start(0, is_quiet=True)
    for process in (first, second, later):
        process.kill()
    assert [(node, type(message)) for node, message in thread.sent] == [
        (NODES[0], StartWorker),
        (NODES[1], StartWorker),
        (NODES[0], KillWorker),
    ]
    for process in (first, second, later):
        process.close()


def test_a_report_is_whole_or_not_at_all(linked: tuple[NodeWorkers, FakeThread]) -> None:
    workers, _ = linked
    process = workers.start(0, is_quiet=True)
    for text in ("x" * 100_000, "\0" * 1000, "😀" * 1000):
        workers.received(NODES[0], WorkerReport(process.number, Report("failed", text)))
    workers.received(NODES[0], WorkerReport(process.number, Report("ready", detail={"x" * 10_000: 1.0})))
    for _ in range(10_000):
        workers.received(NODES[0], WorkerReport(process.number, Report("alive")))
    reports, has_ended = process.read_reports()
    assert [report.text[0] for report in reports[:3]] == ["x", "\0", "😀"] and not has_ended
    assert len(reports) > 100 and {report.event for report in reports[3:]} == {"alive"}
    process.kill()
    process.close()


def _tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.full
def test_two_nodes_give_the_tokens_of_one_process_also_after_the_death_of_a_node() -> None:
    with LLM.from_config(_config(1), quiet=True) as llm:
        expected = _tokens(llm)
    with node_agents(2) as agents, llm_on_nodes(_config(2), agents, 0, 1) as llm:
        assert _tokens(llm) == expected
        agents.kill(1)
        agents.start(1)
        assert _tokens(llm) == expected


@pytest.mark.full
def test_a_missing_node_is_one_line() -> None:
    with node_agents(1) as agents:
        agents.kill(0)
        with (
            pytest.raises(EngineError, match="does not answer: no connection: is `quire node` running there"),
            llm_on_nodes(_config(1), agents, 0),
        ):
            pass
