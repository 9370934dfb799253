// Charts made with uPlot: distributions, and time charts that share one cursor and one zoom.

const dark = matchMedia("(prefers-color-scheme: dark)");
const FONT = '11px system-ui, "DejaVu Sans", sans-serif';

function axis(format, more = {}) {
  return {
    font: FONT,
    stroke: () => (dark.matches ? "#98a4b7" : "#5c687a"),
    size: 46,
    gap: 4,
    grid: { stroke: "#8a96a826", width: 1 },
    ticks: { stroke: "#8a96a84d", width: 1, size: 4 },
    ...(format && { values: (_, splits) => splits.map((value) => (value === null ? "" : format(value))) }),
    ...more,
  };
}

function xAxis(format, label, more = {}) {
  return axis(format, { size: 24, label, labelSize: 16, labelGap: 0, labelFont: FONT, ...more });
}

function axisPercent(share) {
  return `${threeFigures.format(share * 100)}\u00a0%`;
}

/** Create a box with a chart of its width; return both. `columns` and `options` are uPlot's. */
function chartBox(heading, unit, run, columns, options) {
  const plot = element("div", { class: "plot" });
  const chart = new uPlot({ width: 400, height: 190, padding: [8, 12, 0, 0], ...options }, columns, plot);
  dark.addEventListener("change", () => chart.redraw(false, true));
  new ResizeObserver(() => chart.setSize({ width: plot.clientWidth, height: chart.height })).observe(plot);
  return [box(heading, unit, run, plot), chart];
}

/** A series with a value in the legend; `column` has the legend's values if others are drawn. */
function line(label, colour, format, { column = null, fill = null, ...more } = {}) {
  return {
    label,
    stroke: colour,
    fill,
    width: 1.5,
    points: { show: false },
    value: (_, value, __, i) => {
      const shown = column && i !== null ? column[i] : value;
      return shown === null || shown === undefined ? "\u2013" : format(shown);
    },
    ...more,
  };
}

const stepped = uPlot.paths.stepped({ align: 1, alignGaps: 1 });

// ---- distributions

/** 1, 2, 5, 10, 20, ... between two values; only powers of ten for a wide range. */
function logTicks(low, high) {
  const factors = Math.log10(high / low) < 2.5 ? [1, 2, 5] : [1];
  const made = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    made.push(...factors.map((factor) => factor * 10 ** power));
  }
  return made.filter((value) => value >= low && value <= high);
}

function distributionChart({ name, label, log, edges, counts }) {
  if (!edges.length) return box(label, "", null, muted("No request has a value."));
  const columns = [edges];
  const series = [{ label: "from", value: (_, value) => milliseconds(value) }];
  let most = 0;
  counts.forEach((each, run) => {
    const total = Math.max(each.reduce((sum, count) => sum + count, 0), 1);
    const shares = each.map((count) => count / total);
    let sum = 0;
    columns.push([...shares, shares[shares.length - 1]], [0, ...shares.map((share) => (sum += share))]);
    const names = two ? [`${"AB"[run]} share`, `${"AB"[run]} sum`] : ["share", "cumulative"];
    const colour = RUN_COLOURS[run];
    // B has outlines and dashes, so that A shows below where they are equal.
    const filled = run ? { width: 1 } : { fill: `${colour}80`, width: 0 };
    series.push(line(names[0], colour, percent, { ...filled, paths: stepped }));
    series.push(line(names[1], colour, percent, { scale: "sum", dash: run ? [6, 6] : [] }));
    most = Math.max(most, largest(shares));
  });
  const percentiles = ({ latency: { [name]: { p50, p99 } } }) => `p50 ${milliseconds(p50)}, p99 ${milliseconds(p99)}`;
  const ticks = { splits: (_, __, low, high) => logTicks(low, high), filter: (_, values) => values };
  return chartBox(label, data.runs.map(percentiles).join(" | "), null, columns, {
    series,
    scales: {
      x: { time: false, distr: log ? 3 : 1, range: (_, low, high) => [low, high] },
      y: { range: [0, most * 1.08] },
      sum: { range: [0, 1.02] },
    },
    axes: [
      log ? xAxis(milliseconds, "time, logarithmic", ticks) : xAxis(milliseconds, "time"),
      axis(axisPercent),
      axis(axisPercent, { side: 1, scale: "sum", grid: { show: false } }),
    ],
    cursor: { y: false },
  })[0];
}

// ---- over time

const SHORTEST_VIEW = 1e-4;
const whole = { min: data.begin / 1e6, max: Math.max(data.end, data.begin + 100) / 1e6 };
/** The time range in seconds that all time charts and waterfalls show. */
const view = { ...whole, charts: [], listeners: [] };

function showTime(min, max) {
  const span = Math.min(Math.max(max - min, SHORTEST_VIEW), whole.max - whole.min);
  const begin = Math.min(Math.max((min + max - span) / 2, whole.min), whole.max - span);
  if (Math.abs(begin - view.min) + Math.abs(begin + span - view.max) < 1e-9) return;
  Object.assign(view, { min: begin, max: begin + span });
  for (const chart of view.charts) chart.setScale("x", { min: view.min, max: view.max });
  for (const listener of view.listeners) listener();
}

function zoomTime(factor) {
  const [middle, half] = [(view.min + view.max) / 2, ((view.max - view.min) / 2) * factor];
  showTime(middle - half, middle + half);
}

/** Options of a chart that follows the view. Dragging over one zooms all; a double click shows the whole run. */
function timeOptions(series, yScale, yAxis, more = {}) {
  return {
    series: [{ label: "time", value: (_, value) => (value === null ? "\u2013" : clock(value)) }, ...series],
    scales: {
      x: { time: false, min: view.min, max: view.max },
      y: yScale,
      count: { range: (_, __, most) => [0, (most || 1) * 4] },
    },
    axes: [xAxis(null, "time, s"), yAxis],
    hooks: { setScale: [(chart, key) => key === "x" && showTime(chart.scales.x.min, chart.scales.x.max)] },
    cursor: {
      y: false,
      sync: { key: "time", scales: ["x", null], filters: { pub: (type) => /move|leave/.test(type) } },
      bind: { dblclick: () => () => showTime(whole.min, whole.max) },
    },
    ...more,
  };
}

/** Ticks from 0 to the top of an axis, which has one too. */
const toTop = { splits: (_, __, low, high) => [0, 0.25, 0.5, 0.75, 1].map((share) => low + (high - low) * share) };
/** A scale on which small figures stay visible beside large ones, and its ticks. */
const rootScale = { distr: 100, fwd: (value) => Math.sqrt(Math.max(value, 0)), bwd: (value) => value * value };
const rootTicks = {
  splits: (_, __, ___, high) => [0, ...[4, 2, 1].map((part) => high / part ** 2).filter((value) => value >= 1)],
  filter: (_, values) => values,
};

function timeChart(heading, unit, run, columns, series, top, { format = compact, ticks = {}, scale = {} } = {}) {
  const shape = { class: series[0].fill ? "areas" : "lines" };
  const options = timeOptions(series, { range: [0, top], ...scale }, axis(format, ticks), shape);
  const [times, ...values] = columns;
  const [made, chart] = chartBox(heading, unit, run, [times.map((time) => time / 1e6), ...values], options);
  view.charts.push(chart);
  return made;
}

/** Cumulative sums of columns, largest first, so that each is drawn over the previous one. */
function stacked(columns) {
  const sum = (one, other) => one.map((value, i) => (value === null ? null : value + other[i]));
  return columns.map((_, n) => columns.slice(0, n + 1).reduce(sum)).reverse();
}

function area(name, label, column) {
  return line(label, COLOURS[name], compact, { column, fill: COLOURS[name], width: 0, paths: stepped });
}

function budgetText({ budget }) {
  return budget ? `, dashed: max_num_batched_tokens, ${grouped(budget)}` : "";
}

/** Time charts; each kind has one chart per run, with the same axes. */
const TIME_CHARTS = [
  (run, { steps }, highest) =>
    timeChart(
      "Requests running and waiting", "", run,
      [steps.time, steps.running, steps.waiting, steps.preemptions.map((count) => count || null)],
      [
        line("running", COLOURS.running, compact, { paths: stepped }),
        line("waiting", COLOURS.waiting, compact, { paths: stepped }),
        line("preemptions", COLOURS.preempted, grouped, {
          scale: "count", fill: COLOURS.preempted, width: 0, paths: uPlot.paths.bars({ size: [1, 3, 1.5], align: 1 }),
        }),
      ],
      Math.max(highest(({ steps: each }) => Math.max(largest(each.running), largest(each.waiting))), 1) * 1.05,
    ),
  (run, { steps, facts }, highest) =>
    timeChart(
      "KV cache", facts.block_size ? `blocks of ${facts.block_size} tokens` : "blocks", run,
      [steps.time, ...stacked([steps.held, steps.cached, steps.free])],
      [
        area("free", "free", steps.free),
        area("cached", "cached, evictable", steps.cached),
        area("held", "held by requests", steps.held),
      ],
      Math.max(highest(({ facts: each }) => each.pool), 1),
      { ticks: toTop },
    ),
  (run, { steps, facts }, highest) =>
    timeChart(
      "Tokens per step", `${steps.count ? "means over several steps; " : ""}square-root scale${budgetText(facts)}`, run,
      [
        steps.time, steps.largest, ...stacked([steps.decode_tokens, steps.prefill_tokens]),
        steps.time.map(() => facts.budget || null),
      ],
      [
        area("largest", "largest", steps.largest),
        area("prefill", "prefill", steps.prefill_tokens),
        area("decode", "decode", steps.decode_tokens),
        line("budget", COLOURS.budget, grouped, { dash: [5, 4], width: 1 }),
      ],
      Math.max(highest(({ steps: { largest: most } }) => largest(most)), 1) * 1.05,
      { ticks: rootTicks, scale: rootScale },
    ),
  (run, { hits }, highest) =>
    timeChart(
      "Prefix cache hit rate", "of prompt tokens, at the first admission", run,
      [hits.time, hits.rate, hits.total],
      [
        line("recently admitted", COLOURS.rate, percent, { points: { show: hits.time.length < 2 } }),
        line("all so far", COLOURS.total, percent),
      ],
      Math.min(Math.max(highest(({ hits: each }) => largest(each.rate)) * 1.1, 0.05), 1.02),
      { format: axisPercent },
    ),
];

function timeCharts() {
  const highest = (pick) => Math.max(...data.runs.map(pick));
  return TIME_CHARTS.flatMap((make) => data.runs.map((each, run) => make(run, each, highest)));
}
