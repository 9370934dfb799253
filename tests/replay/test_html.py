"""The page's structure, size and safety. Its behaviour in a browser is tested in test_html_browser.py."""

import copy
import hashlib
import json
import re
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from replay_runs import made_up_run, simulated_run

from quire.replay.report import html, page_data
from quire.replay.report.html import write_html
from quire.replay.run.run_record import Moment, RequestRun, RunRecord

VENDOR = Path(html.__file__).parent / "assets" / "vendor"
EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>{{data}}\u2028"


class Elements(HTMLParser):
    """Collects tags with their attributes, and the text of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self.texts[tag].append("")
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data


def written(path: Path, *runs: RunRecord) -> tuple[Elements, dict[str, Any]]:
    write_html(path, runs)
    elements = Elements(path.read_text(encoding="utf-8"))
    return elements, json.loads(elements.texts["script"][0])


def test_page_needs_no_other_file(tmp_path: Path) -> None:
    elements, _ = written(tmp_path / "run.html", simulated_run())
    assert [tag for tag, _ in elements.tags].count("script") == 2
    for tag, attributes in elements.tags:
        assert "src" not in attributes and tag not in ("img", "iframe", "object")
        assert attributes.get("href", "data:,") == "data:,"
    library = (VENDOR / "uPlot.iife.min.js").read_text(encoding="utf-8")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page.count(library) == 1
    assert "http" not in page.replace(library, "").replace("http-equiv", "")


def test_vendored_files_match_their_checksums() -> None:
    readme = (VENDOR / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    assert found.pop("README.md")
    assert listed == found


def test_page_contains_the_library_licence(tmp_path: Path) -> None:
    elements, _ = written(tmp_path / "run.html", RunRecord())
    assert (VENDOR / "LICENSE").read_text(encoding="utf-8") in elements.texts["script"][1]


def test_policy_allows_only_own_script_and_style(tmp_path: Path) -> None:
    elements, _ = written(tmp_path / "run.html", simulated_run())
    policy = next(a["content"] or "" for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    for kind, text in (("script", elements.texts["script"][1]), ("style", elements.texts["style"][0])):
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_client_ids_cannot_end_the_data_element(tmp_path: Path) -> None:
    run = RequestRun(EVIL, 0.0, 5, EVIL, end=0.0, finish="rejected", finish_detail=EVIL)
    run.moments = [Moment(0.0, EVIL, EVIL, EVIL)]
    record = RunRecord(EVIL, EVIL, EVIL, {EVIL: EVIL}, [EVIL], requests=[run], first_difference={EVIL: EVIL})
    record.decisions_equal = False
    elements, data = written(tmp_path / "run.html", record)
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert not [tag for tag, _ in elements.tags if tag == "img"]
    assert data["runs"][0]["requests"]["id"] == [EVIL]
    assert data["runs"][0]["words"][0] == EVIL
    assert elements.texts["title"] == [f"{EVIL} - Quire replay"]


def test_writes_lone_surrogates(tmp_path: Path) -> None:
    _, data = written(tmp_path / "run.html", RunRecord("half \ud800", requests=[RequestRun("\udcff", 0.0, 1)]))
    assert data["runs"][0]["requests"]["id"] == ["\udcff"]


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    record = simulated_run()
    other = copy.deepcopy(record)
    other.wall_s, other.extra = 99.0, {"began": "now"}
    write_html(tmp_path / "a.html", [record, record])
    write_html(tmp_path / "b.html", [other, other])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_figures_match_the_run(tmp_path: Path) -> None:
    record = simulated_run()
    _, data = written(tmp_path / "run.html", record)
    run = data["runs"][0]
    assert run["facts"]["preemptions"] == sum(each.num_preemptions for each in record.requests) > 0
    assert run["facts"]["rejected"] == 1
    assert sum(count for _, count, _ in run["reasons"]) == run["facts"]["preemptions"]
    assert sum(run["steps"]["preemptions"]) == run["facts"]["preemptions"]
    assert run["left_out"] == {"requests": 0, "moments": 0}
    requests = run["requests"]
    for i, each in enumerate(record.requests):
        assert sum(requests["state_intervals"][i][1::2]) == (0 if each.finish == "rejected" else requests["end"][i])
        assert len(requests["moments"][i]) == 4 * len(each.moments)
    for distribution in data["distributions"]:
        ended = sum(count for _, count in record.itl) if distribution["name"] == "itl" else 60
        assert sum(distribution["counts"][0]) == ended


def test_moment_names_its_beneficiary(tmp_path: Path) -> None:
    first, second = RequestRun("first", 0.0, 1), RequestRun("second", 0.0, 1)
    second.moments = [Moment(1.0, "preempt", "youngest", "first"), Moment(2.0, "preempt", "youngest", "gone")]
    _, data = written(tmp_path / "run.html", RunRecord(requests=[first, second]))
    words, flat = data["runs"][0]["words"], data["runs"][0]["requests"]["moments"][1]
    assert flat[3] == 0
    assert words[-2 - flat[7]] == "gone"


def test_compares_two_runs(tmp_path: Path) -> None:
    runs = simulated_run(160), simulated_run()
    _, data = written(tmp_path / "run.html", *runs)
    found = data["comparison"]
    assert found["both"] == 60 and found["slower"] + found["faster"] <= 60
    assert len(found["delayed"]) == found["slower"] > 0
    assert all(e2e > 0 and why for _, _, _, e2e, why in found["delayed"])
    lives = [sum(run.end - run.arrival for run in each.requests) for each in runs]
    for run in (0, 1):
        assert sum(row[1 + run] for row in found["seconds"]) == pytest.approx(lives[run])


@pytest.mark.full
def test_five_thousand_requests_fit_in_five_megabytes(tmp_path: Path) -> None:
    record = made_up_run(5000, 60_000)
    write_html(tmp_path / "run.html", [record, record])
    assert (tmp_path / "run.html").stat().st_size <= 5e6


def test_counts_omitted_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "MAX_REQUESTS", 50)
    monkeypatch.setattr(page_data, "MAX_MOMENTS", 240)
    _, data = written(tmp_path / "run.html", made_up_run(60, 10))
    run = data["runs"][0]
    kinds = [run["words"][what] for flat in run["requests"]["moments"] for what in flat[1::4]]
    assert len(run["requests"]["id"]) == 50
    assert run["left_out"] == {"requests": 10, "moments": 60}
    assert (kinds.count("preempt"), kinds.count("resume"), kinds.count("wait")) == (100, 100, 40)
    assert run["facts"]["requests"] == 60


def test_cuts_long_texts(tmp_path: Path) -> None:
    _, data = written(tmp_path / "run.html", RunRecord(requests=[RequestRun("x" * 10_000, 0.0, 1)]))
    assert re.fullmatch("x{199}…", data["runs"][0]["requests"]["id"][0])


def test_writes_empty_run(tmp_path: Path) -> None:
    _, data = written(tmp_path / "run.html", RunRecord(), RunRecord())
    assert data["runs"][0]["facts"]["hit_rate"] == 0


@pytest.mark.parametrize("count", [0, 3])
def test_rejects_other_than_one_or_two_runs(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match=f"got {count}"):
        write_html(tmp_path / "run.html", [RunRecord()] * count)
