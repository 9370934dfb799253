"""What ends an LLM, and what ends its calls: references, forks, callbacks, signals, other threads."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from configs import config_of
from engine_processes import engine_processes

from quire import LLM, SamplingParams
from quire.launch.offline import llm as module
from quire.protocol.errors import EngineError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class Part:
    """Stands for the engine's thread, or for its client."""

    supervisor = SimpleNamespace(directory=Path("/nonexistent"))

    def __init__(self, name: str, closed: list[str]) -> None:
        self.close = lambda: closed.append(name)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts of LLMs that have been closed."""
    found: list[str] = []
    monkeypatch.setattr(module, "EngineThread", lambda make: Part("engine", found))
    monkeypatch.setattr(module, "BlockingClient", lambda *args: Part("client", found))
    return found


class TestEnd:
    def test_nothing_refers_to_it(self, closed: list[str]) -> None:
        llm = LLM.from_config(config_of())
        session = llm.session()
        del llm
        assert not closed
        del session
        assert closed == ["client", "engine"]

    def test_close(self, closed: list[str]) -> None:
        llm = LLM.from_config(config_of())
        llm.close()
        llm.close()
        del llm
        assert closed == ["client", "engine"]

    def test_a_forked_process_ends_nothing(self, closed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        dropped, kept = LLM.from_config(config_of()), LLM.from_config(config_of())
        monkeypatch.setattr(os, "getpid", lambda: -1)
        del dropped
        kept.close()
        assert not closed


@pytest.mark.full
def test_callbacks_signals_and_a_close_from_another_thread() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    others = {process.pid for process in engine_processes()}
    llm = LLM(max_model_len=256, num_gpu_blocks_override=60)

    def answer(params: SamplingParams = GREEDY, **more: object) -> str:
        return llm.generate("Once", params, **more)[0].outputs[0].text  # type: ignore[arg-type]

    def fail(index: int, text: str) -> None:
        raise ValueError("mine")

    expected, nested = answer(), []
    with pytest.raises(ValueError, match="mine"):
        answer(LONG, on_text=fail)
    with pytest.raises(KeyboardInterrupt):
        answer(LONG, on_text=lambda index, text: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, before)
    assert answer(on_text=lambda index, text: nested.append(answer())) == expected == nested[0]
    statistics = llm.statistics()
    assert statistics.num_running == 0 and statistics.num_free_blocks == statistics.num_usable_blocks
    running = threading.Event()
    closing = threading.Thread(target=lambda: running.wait(60) and llm.close())
    closing.start()
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.generate(["Once"] * 500, LONG, on_text=lambda index, text: running.set())
    with pytest.raises(EngineError, match="this LLM is closed"):
        answer()
    closing.join()
    assert {process.pid for process in engine_processes()} <= others  # those of an earlier test may have ended


SCRIPT = """
import gc, pickle, psutil
from quire import LLM, SamplingParams
exec(compile('''
llm = LLM(max_model_len=256, num_gpu_blocks_override=60)
outputs = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=4))
assert pickle.loads(pickle.dumps(outputs)) == outputs
running = llm.start("Once", SamplingParams(max_tokens=9, ignore_eos=True))
''', "cell", "exec"), globals())
llm = None
print(len(running.read().token_ids))
class Cycle: pass
cycle = Cycle()
cycle.cycle, cycle.running = cycle, running
running = cycle = None
print(len(psutil.Process().children(recursive=True)) > 0, gc.collect() > 0)
print(len(psutil.Process().children(recursive=True)))
"""


@pytest.mark.full
def test_a_notebook_whose_last_running_request_is_dropped() -> None:
    """Without a file, and without a guard for ``__main__``."""
    command = [sys.executable, "-P", "-W", "error::ResourceWarning", "-"]
    done = subprocess.run(command, input=SCRIPT, capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.returncode) == (["9", "True", "True", "0"], 0), done.stderr
