"""Node agents on this machine, as processes of their own."""

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec

from quire import LLM
from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.agent import Agent
from quire.launch.nodes.keys import HEAD_SECRET, load_node_key, make_keys
from quire.launch.nodes.remote_workers import NodeWorkers
from quire.launch.offline import llm as offline
from quire.launch.supervision.supervisor import Supervisor
from quire.protocol.config import EngineConfig, RankPlace
from quire.protocol.process.log import LogOptions
from quire.protocol.wire.curve_keys import load_curve_keys


class NodeAgents:
    """Some agents, with one key pair; ``start`` starts one again at the same address.

    Attributes:
        addresses: of all agents.
        head_keys: the folder for ``--node-keys``.
    """

    def __init__(self, num_agents: int, folder: Path, *, devices: int = 1) -> None:
        self.node_keys, self.head_keys = make_keys(folder / "keys")
        self._devices = devices
        self._ports = [ReservedPort("127.0.0.1") for _ in range(num_agents)]
        self.addresses = [f"tcp://127.0.0.1:{port.number}" for port in self._ports]
        self.processes: list[subprocess.Popen[str] | None] = [None] * num_agents

    def start(self, index: int, *more: str) -> None:
        """Start an agent and wait until it listens."""
        flags = ["--listen", self.addresses[index], "--keys", str(self.node_keys), "--devices", str(self._devices)]
        command = [sys.executable, "-P", "-m", "quire.launch.cli", "node", *flags, *more]
        process = self.processes[index] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None and "runs up to" in process.stderr.readline()

    def kill(self, index: int) -> None:
        process, self.processes[index] = self.processes[index], None
        if process is not None:
            process.kill()
            process.communicate()

    def places(self, *indices: int) -> list[RankPlace]:
        """Return a place per rank, on these agents."""
        key = load_node_key(self.head_keys)
        return [
            RankPlace(self.addresses[index], indices[:rank].count(index), key) for rank, index in enumerate(indices)
        ]

    def close(self) -> None:
        for index in range(len(self.processes)):
            self.kill(index)
        for port in self._ports:
            port.close()


@contextlib.contextmanager
def node_agents(num_agents: int, *, devices: int = 1) -> Iterator[NodeAgents]:
    """Run agents until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        agents = NodeAgents(num_agents, Path(folder), devices=devices)
        try:
            for index in range(num_agents):
                agents.start(index)
            yield agents
        finally:
            agents.close()


@contextlib.contextmanager
def llm_on_nodes(config: EngineConfig, agents: NodeAgents, *indices: int) -> Iterator[LLM]:
    """Run an engine with a rank on each of these agents."""
    config = msgspec.structs.replace(
        config, ranks=agents.places(*indices), head_key_file=str(agents.head_keys / HEAD_SECRET)
    )
    make = partial(Supervisor, remote=NodeWorkers(config, LogOptions()))
    with mock.patch.object(offline, "Supervisor", make), LLM.from_config(config, quiet=True) as llm:
        yield llm


@contextlib.contextmanager
def agent_in_thread(folder: Path, *, devices: int = 1) -> Iterator[tuple[str, Path]]:
    """Run an agent, which must not get signals or start workers, in a thread; yield its address and the head's keys."""
    node, head = make_keys(folder / f"keys-{len(list(folder.iterdir()))}")
    port = ReservedPort("127.0.0.1")
    address = f"tcp://127.0.0.1:{port.number}"
    agent = Agent(address, load_curve_keys(node, "--keys"), devices)
    is_stopping = threading.Event()

    def run() -> None:
        while not is_stopping.is_set():
            agent.turn(0.05)
            agent.heads.check()
        agent.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield address, head
    finally:
        is_stopping.set()
        thread.join()
        port.close()
