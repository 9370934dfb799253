// How latencies are distributed: a histogram with the cumulative share on top, both runs in one drawing.

function distributionChart({ name, label, log, edges, counts }) {
  if (!edges.length) {
    return element(
      "div",
      { class: "box" },
      element("h3", {}, label),
      element("p", { class: "muted" }, "No request has one."),
    );
  }
  const totals = counts.map((each) => each.reduce((sum, count) => sum + count, 0));
  const shares = counts.map((each, run) => each.map((count) => count / Math.max(totals[run], 1)));
  const sums = shares.map((each) => {
    let sum = 0;
    return each.map((share) => (sum += share));
  });
  const top = Math.max(...shares.map(largest)) * 1.08;
  const [low, high] = [edges[0], edges[edges.length - 1]];
  const plot = new Plot({
    label: `${label}: histogram and cumulative share`,
    height: 190,
    right: 46,
    paint,
    interactive: false,
  });
  const position = (value) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  const x = (value) => plot.box.left + position(value) * (plot.box.right - plot.box.left);
  const y = (share, most) => plot.box.bottom - (share / most) * (plot.box.bottom - plot.box.top);
  const names = two ? ["run-a", "run-b"] : ["run-a"];

  function paint() {
    plot.yAxis(
      ticks(0, top, 4),
      (share) => y(share, top),
      (share) => percent(share, top < 0.03 ? 1 : 0),
    );
    plot.yAxis(
      [0, 0.25, 0.5, 0.75, 1],
      (share) => y(share, 1.04),
      (share) => percent(share, 0),
      "right",
    );
    plot.clipped(() => names.forEach(paintRun));
    const most = (plot.box.right - plot.box.left) / 62;
    const values = log ? logTicks(low, high, most) : ticks(low, high, most);
    plot.xAxis(values, x, milliseconds, `${label.toLowerCase()}${log ? ", logarithmic" : ""}`);
  }

  function paintRun(name_, run) {
    const pen = plot.context;
    pen.fillStyle = pen.strokeStyle = colour(name_);
    pen.globalAlpha = two ? 0.45 : 0.6;
    shares[run].forEach((share, i) => {
      const left = x(edges[i]);
      const width = Math.max(1, x(edges[i + 1]) - left - (two ? 0 : 0.7));
      if (share) pen.fillRect(left, Math.min(y(share, top), plot.box.bottom - 1), width, plot.box.bottom);
    });
    pen.globalAlpha = 1;
    pen.lineWidth = 1.7;
    pen.beginPath();
    pen.moveTo(x(edges[0]), y(0, 1.04));
    sums[run].forEach((sum, i) => pen.lineTo(x(edges[i + 1]), y(sum, 1.04)));
    pen.stroke();
    const { p50, p99 } = data.runs[run].latency[name];
    for (const value of [p50, p99]) {
      if (value !== null)
        plot.line(
          x(Math.max(value, low)),
          plot.box.top,
          x(Math.max(value, low)),
          plot.box.bottom,
          colour(name_),
          [2, 3],
        );
    }
  }

  plot.canvas.addEventListener("pointermove", (event) => {
    const share = (plot.pointer(event).x - plot.box.left) / (plot.box.right - plot.box.left);
    if (share < 0 || share > 1) return hideTip();
    const value = log ? low * (high / low) ** share : low + share * (high - low);
    const i = Math.min(Math.max(lastAtMost(edges, value), 0), edges.length - 2);
    const rows = names.flatMap((each, run) => [
      [
        each,
        two ? `${LETTERS[run].toUpperCase()}: here` : "here",
        `${grouped(counts[run][i])} (${percent(shares[run][i])})`,
      ],
      [each, two ? `${LETTERS[run].toUpperCase()}: up to here` : "up to here", percent(sums[run][i])],
    ]);
    // Zeros have no place on a logarithm's axis: they are counted with the smallest.
    const from = log && !i ? "up" : milliseconds(edges[i]);
    showTip(event, `${from} to ${milliseconds(edges[i + 1])}`, rows);
  });
  plot.canvas.addEventListener("pointerleave", hideTip);
  const legend = two
    ? names.map((each, run) => [each, `${LETTERS[run].toUpperCase()}: ${spreadText(name, run)}`])
    : [
        [
          "run-a",
          `bars: share of ${name === "itl" ? "tokens" : "requests"}; line: cumulative; dotted: ${spreadText(name, 0)}`,
        ],
      ];
  return boxed(label, "", legend, plot, null);
}

function spreadText(name, run) {
  const { p50, p99 } = data.runs[run].latency[name];
  return `p50 ${milliseconds(p50)}, p99 ${milliseconds(p99)}`;
}

function distributionCharts() {
  return data.distributions.map(distributionChart);
}
