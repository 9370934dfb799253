"""The figures of the code: what counts as a name of a capability or as an argument, and where old files are."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import house

CORE = (
    '''"""Words of a docstring, such as tenant, are not counted."""
from quire.kernels.lora import rows, other
from quire.protocol import wire
class Planner:
    def __init__(self, a, b, *, c, d, e, f, g): self.maxLoraRank = "a draft"
def program_of(request):  # a comment on beams
'''
    + "    pass\n" * 60
)


def test_figures_of_a_made_up_tree() -> None:
    files = {
        "scheduler_proc/core/planner.py": CORE,
        "scheduler_proc/adapters/slots.py": "class Planner: ...\nlora = 1\n",
        "kernels/lora/rows.py": "program = 1\n",
        "replay/run.py": "class _Planner: ...\ntenant = 1\n",
        "tests/replay/test_run.py": "\n",
        "tests/support/launch/replay_traces.py": "\n",
        "tests/nightly/run.py": "\n",
        "docs/engine.py": "\n",
    }
    found = house.figures(files)
    assert found["lines"] == {"serves": 69, "replay and bench": 2, "tests of replay and bench": 2, "tests, nightly": 1}
    named = {"adapters": 1, "drafts": 1, "programs": 1, "tenants": 1}
    assert found["files that name a capability from outside"] == named
    assert found["of these, files that serve"] == {"adapters": 1, "drafts": 1, "programs": 1}
    assert found["constructor arguments over 6"] == {"scheduler_proc/core/planner.py:Planner": 7}
    assert found["functions over 60 lines"] == {"scheduler_proc/core/planner.py:program_of": 61}
    assert found["modules that share the name of a class"] == {"Planner": 2}


def test_files_of_earlier_commits_are_counted_in_the_rooms_of_today() -> None:
    moved = ["launch/http/app.py", "tests/worker_proc/bench/test_run.py", "tests/acceptance/run.py", "launch/cli.py"]
    today = [
        "frontend/http/app.py",
        "tests/bench/worker/test_run.py",
        "tests/nightly/acceptance/run.py",
        "launch/cli.py",
    ]
    assert [house.path_today(path) for path in moved] == today


def test_cpu_seconds_are_summed_by_package(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    rows = {"tests/kernels/cpu/test_a.py": [2, 1.0, 0.5], "tests/kernels/test_b.py": [1, 1, 0], "(no test)": [0, 3, 0]}
    file.write_text(json.dumps(rows))
    assert house.costs_of(file) == {
        "tests that ran": {"tests/kernels": 3, "(no test)": 0},
        "their CPU seconds": {"tests/kernels": 2.5, "(no test)": 3},
    }
