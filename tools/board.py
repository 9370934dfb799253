"""Evaluates the queries of the Grafana board (``deploy/grafana.json``) on a Prometheus server, and draws its panels.

Prints one line per panel, then each query that failed or has no data; the exit status is then 1. ``--png`` needs
matplotlib. Usage::

    python -P tools/board.py --prometheus http://127.0.0.1:9090 --minutes 5 --png board.png
"""

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

BOARD = Path(__file__).parent.parent / "deploy" / "grafana.json"
NUM_STEPS = 300
UNITS = {"s": (1e3, "ms"), "percentunit": (1e2, "%"), "reqps": (1, "requests/s")}
"""Factor and unit in the picture, by the unit of a panel."""


class Source(NamedTuple):
    """A Prometheus server, a range in seconds since 1970, and the values of the board's variables."""

    url: str
    start: float
    step: float
    variables: dict[str, str]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of ``expression``. Raises ValueError with the server's reason if it fails."""
        for name, value in self.variables.items():
            expression = expression.replace(name, value)
        end = self.start + NUM_STEPS * self.step
        fields = {"query": expression, "start": self.start, "end": end, "step": self.step}
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(fields)}") as answer:
                series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None
        return series


def evaluate(panel: dict[str, Any], source: Source) -> tuple[dict[str, list[float]], list[str]]:
    """Return the curves of a panel by legend, NaN where there is no value; and a line for each query that failed."""
    curves, failed = {}, []
    for target in panel["targets"]:
        try:
            found = source.query(target["expr"])
            reason = "" if found else "no data"
        except ValueError as error:
            found, reason = [], str(error)
        if reason:
            failed.append(f"{panel['title']}: {reason}: {target['expr']}")
        for series in found:
            legend = target["legendFormat"]
            for label, text in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", text)
            curves[legend] = [math.nan] * (NUM_STEPS + 1)
            for at, value in series["values"]:
                curves[legend][round((at - source.start) / source.step)] = float(value)
    return curves, failed


def draw(panels: list[tuple[dict[str, Any], dict[str, list[float]]]], step: float, file: Path) -> None:
    """Draw the panels as the board describes them: titles, legends, units, stacks. Curves that stay 0 are left out."""
    from matplotlib import pyplot
    from PIL import Image

    figure, axes = pyplot.subplots(-(-len(panels) // 3), 3, figsize=(15, 0.9 * len(panels)))
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    times = [step * number for number in range(NUM_STEPS + 1)]
    for axis, (panel, found) in zip(axes.flat, panels, strict=False):
        look = panel["fieldConfig"]["defaults"]
        factor, unit = UNITS.get(look["unit"], (1, ""))
        curves = {name: [factor * v for v in values] for name, values in found.items() if any(v > 0 for v in values)}
        if look["custom"]["stacking"]["mode"] == "normal":
            heights = [[0.0 if math.isnan(v) else v for v in values] for values in curves.values()]
            axis.stackplot(times, heights, labels=[*curves], alpha=0.6)
        else:
            for name, values in curves.items():
                axis.plot(times, values, linewidth=1, label=name)
        axis.set_title(panel["title"] + (f", {unit}" if unit else ""), fontsize=10, loc="left")
        axis.set_ylim(0, factor * look["max"] if "max" in look else None)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        if curves:
            axis.legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=70)
    with Image.open(file) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="length of the range (5)")
    parser.add_argument("--end", type=float, metavar="TIME", help="end of the range in seconds since 1970 (now)")
    parser.add_argument("--rate-interval", default="1m", metavar="TIME", help="value of $__rate_interval (1m)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the panels; needs matplotlib")
    args = parser.parse_args()
    variables = {"${prefix}": "quire", "$__rate_interval": args.rate_interval, "$model": ".*"}
    start = (args.end or time.time()) - 60 * args.minutes
    source = Source(args.prometheus, start, 60 * args.minutes / NUM_STEPS, variables)
    panels = [(panel, *evaluate(panel, source)) for panel in json.loads(BOARD.read_text())["panels"]]
    for panel, curves, _ in panels:
        print(f"{panel['title']}: {', '.join(curves)}")
    if args.png is not None:
        draw([(panel, curves) for panel, curves, _ in panels], source.step, args.png)
    sys.exit("\n".join(line for *_, failed in panels for line in failed) or 0)


if __name__ == "__main__":
    main()
