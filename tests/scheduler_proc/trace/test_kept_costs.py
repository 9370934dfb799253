"""Learned costs outlive the engine, in a file; a broken file costs only what was learned."""

import logging
from pathlib import Path
from typing import Any

import pytest
from scheduler_driver import make_config, make_layout

from quire.scheduler_proc.costs.costs import CostState, Prefill
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.journal import Journal


def begin(folder: Path | str, num_host_pages: int = 9, **settings: Any) -> tuple[Journal, Scheduler]:
    config = make_config(learned_costs_dir=str(folder), **settings)
    journal = Journal(config, lambda: 0.0)
    return journal, journal.begin(TraceHeader(config, make_layout(config), 20, num_host_pages))


def learn(scheduler: Scheduler) -> CostState:
    scheduler.transfers.costs.step_took(Prefill.between(0, 300), 2, 0.5)
    scheduler.transfers.costs.load_took("host", 30, 0.02)
    return scheduler.transfers.costs.state


@pytest.mark.parametrize("when", ["idle", "close"])
def test_the_next_engine_begins_with_what_was_learned(tmp_path: Path, when: str) -> None:
    journal, scheduler = begin(tmp_path / "new" / "costs")
    learned = learn(scheduler)
    getattr(journal, when)()
    (file,) = (tmp_path / "new" / "costs").iterdir()
    assert begin(file.parent)[1].transfers.costs.state == learned
    assert begin(file.parent, block_size=8)[1].transfers.costs.state == CostState(), "another layout"
    assert begin(file.parent, dtype="bfloat16")[1].transfers.costs.state == CostState()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"prefill":[1]}', b'{"prefill":"x"}', b'{"loads":{"host":[1e999]}}', b"\xff" * 9]
)
def test_a_broken_file_is_ignored_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal, scheduler = begin(tmp_path)
    learned = learn(scheduler)
    journal.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        journal, scheduler = begin(tmp_path)
    assert scheduler.transfers.costs.state == CostState() and file.name in caplog.text
    assert learn(scheduler) == learned
    journal.idle()
    assert begin(tmp_path)[1].transfers.costs.state == learned


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    journal, scheduler = begin(tmp_path / "file" / "costs")
    learn(scheduler)
    with caplog.at_level(logging.WARNING):
        journal.idle()
        journal.idle()
    assert caplog.text.count("cannot keep the learned costs") == 1


def test_an_engine_without_tiers_or_without_a_folder_keeps_no_file(tmp_path: Path) -> None:
    for folder, num_host_pages in ((tmp_path, 0), ("", 9)):
        journal, scheduler = begin(folder, num_host_pages)
        learn(scheduler)
        journal.close()
    assert not list(tmp_path.iterdir())
