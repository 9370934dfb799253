"""Fixtures for every test. Code that tests share is in ``support/``, which pytest puts on the path."""

import faulthandler
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from checkpoints import make_checkpoint
from lent_engines import LentEngines
from side_runs import PROGRAMS, SideRuns
from tiers import examples, is_default

# Threads of several test processes that share a few cores wait for each other at every barrier.
os.environ.setdefault("OMP_NUM_THREADS", "1")


pytest_plugins = ["cpu_seconds"]

TESTS = Path(__file__).parent
SIDE_RUNS = pytest.StashKey[SideRuns]()

# With xdist each process collects every test, and would start every program, even those whose tests run elsewhere.
ONE_OF_SEVERAL = "PYTEST_XDIST_WORKER" in os.environ

LONG_FILES = (
    *("kernels/test_triton.py", "worker_proc/execute/test_gpu_step.py"),
    *("end_to_end/test_recovery.py", "end_to_end/test_tensor_parallel.py"),
    *("simulation/test_slice.py", "simulation/test_mutations.py"),
)
"""The longest test files, in the order in which several processes start them, so that none runs alone at the end."""


SAME_ENGINE = {
    "tests/end_to_end/test_adapters.py": "server",
    "tests/end_to_end/test_background.py": "server",
    "tests/end_to_end/test_forks.py": "tiny",
    "tests/end_to_end/test_grammar_beams.py": "demo",
    "tests/end_to_end/test_offline_pause.py": "demo",
    "tests/end_to_end/test_processes.py": "tiny",
    "tests/end_to_end/test_recovery.py": "server",
    "tests/end_to_end/test_running_forks.py": "demo",
    "tests/end_to_end/test_server.py": "server",
    "tests/end_to_end/test_sessions.py": "server",
    "tests/end_to_end/test_structured.py": "demo",
    "tests/launch/offline/test_llm_sampling.py": "demo",
    "tests/launch/offline/test_offline.py": "tiny",
    "tests/test_small_engine.py": "demo",
}
"""Files that borrow the same engine (``lent_engines.py``) or server (``end_to_end/conftest.py``): with xdist one
process runs them, and starts it once."""

LIMITS = {"slow": 7200, "gpu": 1800, "full": 900}
"""Seconds that a test of a tier may take, also on a busy machine; pyproject.toml has the limit of the others."""

OTHER_TIERS = re.compile(rb"^pytestmark = \[?\s*pytest\.mark\.(full|slow|gpu)\b", re.MULTILINE)
"""In files of whose tests ``make test`` runs none."""

STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # Side programs inherit it. Test modules are imported later, and read it for the number of their examples.
    os.environ["QUIRE_TESTS_TIER"] = "default" if "not full" in config.option.markexpr else "full"
    # In continuous integration a failure must come from the change, so the examples are always the same; elsewhere they
    # are new in every run.
    hypothesis.settings.register_profile(
        "here", derandomize="CI" in os.environ, deadline=None, max_examples=examples(100)
    )
    hypothesis.settings.load_profile("here")
    config.stash[STDERR] = os.dup(2)  # while no test runs, whose output pytest captures


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Print the stacks of all threads and exit when a test exceeds its limit, even while it holds the GIL.

    The plugin's own method prints to the standard output, which a process of pytest-xdist does not have.
    """
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[STDERR])
    return True


def pytest_timeout_cancel_timer() -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: the longest files first with xdist; without it, tests of side programs last."""
    for item in items:
        limits = [seconds for tier, seconds in LIMITS.items() if item.get_closest_marker(tier)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(limits)))
    if ONE_OF_SEVERAL:
        places = {name: place for place, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(places)))
    else:
        items.sort(key=lambda item: item.name in PROGRAMS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of other tiers, unless they are named: each process would import what they need."""
    if not is_default() or collection_path.suffix != ".py":
        return None
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return True if collection_path not in named and OTHER_TIERS.search(collection_path.read_bytes()) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SAME_ENGINE.get(file, file)

    return ByEngine(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    runs = session.config.stash[SIDE_RUNS] = SideRuns()
    if not session.config.option.collectonly and not ONE_OF_SEVERAL:
        runs.start(item.name for item in session.items if item.name in PROGRAMS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    runs = session.config.stash.get(SIDE_RUNS, None)
    if runs is not None:
        runs.close()


@pytest.fixture
def side_run(request: pytest.FixtureRequest) -> str:
    """Return the output of the program that belongs to this test (``support/common/side_runs.py``)."""
    return request.config.stash[SIDE_RUNS].output(request.node.name)


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Return a factory: ``factory(family, **overrides)`` → (folder, transformers model), as in
    ``checkpoints.make_checkpoint``.

    Equal arguments give the same folder, made once per session: a test that changes it has to copy it first.
    """
    made: dict[str, tuple[Path, Any]] = {}

    def factory(family: str, **overrides: Any) -> tuple[Path, Any]:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, make_checkpoint(folder, family, **overrides))
        return made[key]

    return factory


@pytest.fixture(scope="session")
def lent_engines() -> Iterator[LentEngines]:
    engines = LentEngines()
    yield engines
    engines.close()


@pytest.fixture
def lend(lent_engines: LentEngines) -> Iterator[Callable[..., Any]]:
    """Return ``LentEngines.lend``; what the test borrowed is checked after it."""
    yield lent_engines.lend
    lent_engines.check()
