"""Writes runs as one HTML page without other files or network access. The same runs give the same bytes."""

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from quire.frontend.http.page.content_policy import source_of
from quire.replay.report.page_data import page_data
from quire.replay.run.run_record import RunRecord

SCRIPTS = ("base.js", "charts.js", "waterfall.js", "details.js", "tables.js", "main.js")
"""In order: each script uses the previous ones."""


def write_html(path: Path, runs: Sequence[RunRecord]) -> None:
    """Write a page of one run, or of two side by side with the same axes.

    Raises:
        ValueError: ``runs`` are neither one nor two.
        OSError: the file cannot be written.
    """
    if len(runs) not in (1, 2):
        raise ValueError(f"a page shows one run or two (got {len(runs)})")
    style = _asset("vendor/uPlot.min.css") + "\n" + _asset("page.css")
    # One scope for all files, so that the page defines no global names.
    own = '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    script = f"/*\n{_asset('vendor/LICENSE')}*/\n{_asset('vendor/uPlot.iife.min.js')}\n{own}"
    parts = {
        "title": html.escape(" against ".join(run.title or run.source or "replay" for run in runs)),
        # Only this script and this style may run, never text that a client put into the data.
        "policy": f"default-src 'none'; img-src data:; style-src {source_of(style)}; script-src {source_of(script)}; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "data": data_island(page_data(runs)),
    }
    # In one pass, so that a mark inside a title is not replaced.
    page = re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))
    path.write_bytes(page.encode("utf-8", "replace"))


def data_island(data: object) -> str:
    """Return JSON that is safe inside a script element: it can neither end the element nor begin a comment."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", *name.split("/")).read_text(encoding="utf-8")
