// What changes over time: queues, KV blocks, tokens per step, the hit rate.

/** A chart in a box with a heading and a legend. ``legend``: [colour, label, thin?]. */
function boxed(heading, unit, legend, plot, run) {
  return element(
    "div",
    { class: "box" },
    element("h3", {}, badge(run), heading, " ", element("span", { class: "unit" }, unit)),
    element(
      "div",
      { class: "legend" },
      legend.map(([name, label, thin]) => element("span", {}, swatch(name, thin), label)),
    ),
    plot.node,
  );
}

/** Room above the highest value, up to a round number. */
function ceiling(highest) {
  const values = ticks(0, Math.max(highest, 1) * 1.02, 4);
  const step = values.length > 1 ? values[1] - values[0] : 1;
  return Math.ceil((Math.max(highest, 1) * 1.02) / step) * step;
}

function highestOf(column) {
  return largest(column.max || column.mean);
}

/** The indices of bins that the view shows, one more on each side. */
function visibleBins(steps) {
  const first = Math.max(0, lastAtMost(steps.begin, view.begin));
  return [first, Math.min(steps.begin.length, lastAtMost(steps.begin, view.end) + 1)];
}

/**
 * Steps over time. ``series``: {name, label, column}; ``stacked``: on top of each other, as areas; else lines with
 * a band from the lowest to the highest of a bin. ``envelope``: a column whose highest lies behind. ``limit``: {value,
 * label}. ``marks``: [time, count] along the top.
 */
function stepChart({
  run,
  heading,
  unit,
  series,
  top,
  stacked = false,
  envelope = null,
  limit = null,
  marks = [],
  label,
}) {
  const steps = data.runs[run].steps;
  const plot = new Plot({ label, height: 176, paint: paintSteps });
  const y = (value) => plot.box.bottom - (value / top) * (plot.box.bottom - plot.box.top);

  function paintSteps() {
    plot.yAxis(ticks(0, top, 4), y, short);
    plot.clipped(() => {
      if (stacked) paintStack();
      else series.forEach(paintLine);
      if (limit) plot.line(plot.box.left, y(limit.value), plot.box.right, y(limit.value), colour("muted"), [5, 4]);
      for (const [time] of marks) {
        const x = Math.round(plot.xOf(time)) + 0.5;
        plot.line(x, plot.box.top, x, plot.box.top + 7, colour("preempted"));
      }
    });
    plot.timeAxis();
  }

  /** Bins as one path per stretch of time without a pause: ``heights(i)`` gives the lower and the upper edge. */
  function area(lower, upper) {
    const pen = plot.context;
    const [first, last] = visibleBins(steps);
    for (let begin = first; begin < last;) {
      let end = begin + 1;
      while (end < last && steps.begin[end] <= steps.end[end - 1]) end++;
      pen.beginPath();
      for (let i = begin; i < end; i++) {
        pen.lineTo(plot.xOf(steps.begin[i]), y(upper(i)));
        pen.lineTo(plot.xOf(steps.end[i]), y(upper(i)));
      }
      for (let i = end - 1; i >= begin; i--) {
        pen.lineTo(plot.xOf(steps.end[i]), y(lower(i)));
        pen.lineTo(plot.xOf(steps.begin[i]), y(lower(i)));
      }
      pen.fill();
      begin = end;
    }
  }

  function paintStack() {
    const pen = plot.context;
    if (envelope && envelope.max) {
      pen.fillStyle = colour("muted");
      pen.globalAlpha = 0.22;
      area(
        () => 0,
        (i) => envelope.max[i],
      );
      pen.globalAlpha = 1;
    }
    const below = new Float64Array(steps.begin.length);
    for (const { name, column } of series) {
      pen.fillStyle = colour(name);
      area(
        (i) => below[i],
        (i) => below[i] + column.mean[i],
      );
      for (let i = 0; i < below.length; i++) below[i] += column.mean[i];
    }
  }

  function paintLine({ name, column }) {
    const pen = plot.context;
    if (column.max) {
      pen.fillStyle = colour(name);
      pen.globalAlpha = 0.25;
      area(
        (i) => column.min[i],
        (i) => column.max[i],
      );
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = colour(name);
    pen.lineWidth = 1.5;
    const [first, last] = visibleBins(steps);
    pen.beginPath();
    for (let i = first; i < last; i++) {
      const move = i === first || steps.begin[i] > steps.end[i - 1];
      pen[move ? "moveTo" : "lineTo"](plot.xOf(steps.begin[i]), y(column.mean[i]));
      pen.lineTo(plot.xOf(steps.end[i]), y(column.mean[i]));
    }
    pen.stroke();
  }

  plot.canvas.addEventListener("pointermove", (event) => {
    const time = plot.timeAt(plot.pointer(event).x);
    const i = lastAtMost(steps.begin, time);
    showCursors(time);
    if (i < 0) return hideTip();
    const idle = time > steps.end[i];
    const rows = series.map(({ name, label: text, column }) => [name, text, read(column, i)]);
    const near = marks.filter(([at]) => Math.abs(plot.xOf(at) - plot.xOf(time)) < 4);
    if (near.length) rows.push(["preempted", "preemptions here", grouped(near.reduce((sum, [, n]) => sum + n, 0))]);
    if (limit) rows.push([null, limit.label, grouped(limit.value)]);
    if (steps.count) rows.push([null, "steps in this bin", grouped(steps.count[i])]);
    showTip(event, clock(time, view.span) + (idle ? ", no step runs" : ""), idle ? [] : rows);
  });
  plot.canvas.addEventListener("pointerleave", leave);
  makeZoomable(plot);
  const legend = series.map(({ name, label: text }) => [name, text]);
  if (marks.length) legend.push(["preempted", "preemption (tick at the top)", true]);
  if (envelope && envelope.max) legend.push(["muted", "largest step of a bin (grey)"]);
  if (limit) legend.push(["muted", `${limit.label} ${grouped(limit.value)} (dashed)`, true]);
  return boxed(heading, unit, legend, plot, run);
}

function read(column, i) {
  const mean = short(column.mean[i]);
  const varies = column.max && column.max[i] !== column.min[i];
  return varies ? `${mean} (${short(column.min[i])} to ${short(column.max[i])})` : mean;
}

function leave() {
  hideTip();
  showCursors(null);
}

/** Share of prompt tokens found in the cache, of those let in lately and of all so far. */
function hitChart(run, top) {
  const hits = data.runs[run].hits;
  const plot = new Plot({ label: "Prefix cache hit rate over time", height: 176, paint: paintHits });
  const y = (value) => plot.box.bottom - (value / top) * (plot.box.bottom - plot.box.top);

  function paintHits() {
    plot.yAxis(ticks(0, top, 4), y, (value) => percent(value, 0));
    plot.clipped(() => {
      paintLine(hits.rate, "rate", 1);
      paintLine(hits.total, "total", 2);
    });
    plot.timeAxis();
  }

  function paintLine(values, name, width) {
    const pen = plot.context;
    pen.strokeStyle = pen.fillStyle = colour(name);
    pen.lineWidth = width;
    pen.beginPath();
    values.forEach((value, i) => pen.lineTo(plot.xOf(hits.time[i]), y(value)));
    pen.stroke();
    if (values.length === 1) pen.fillRect(plot.xOf(hits.time[0]) - 2, y(values[0]) - 2, 4, 4);
  }

  plot.canvas.addEventListener("pointermove", (event) => {
    const time = plot.timeAt(plot.pointer(event).x);
    const i = Math.min(lastAtMost(hits.time, time) + 1, hits.time.length - 1);
    showCursors(time);
    if (i < 0) return;
    showTip(event, `until ${clock(hits.time[i], view.span)}`, [
      ["rate", "let in lately", percent(hits.rate[i])],
      ["total", "all so far", percent(hits.total[i])],
    ]);
  });
  plot.canvas.addEventListener("pointerleave", leave);
  makeZoomable(plot);
  const legend = [
    ["rate", "requests let in lately", true],
    ["total", "all so far", true],
  ];
  return boxed("Prefix cache hit rate", "% of prompt tokens, when first let in", legend, plot, run);
}

/** All charts of time, each with the same axes for both runs. */
function timeCharts() {
  const over = (pick) => Math.max(...data.runs.map(pick));
  const queueTop = ceiling(over(({ steps }) => Math.max(highestOf(steps.running), highestOf(steps.waiting))));
  const poolTop = over(({ facts, steps }) => Math.max(facts.pool, highestOf(steps.held), 1));
  const tokenTop = ceiling(over(({ facts, steps }) => Math.max(facts.budget, highestOf(steps.tokens))));
  const hitTop = Math.min(1, Math.max(0.05, Math.ceil(over(({ hits }) => largest(hits.rate)) * 10) / 10));
  const makers = [
    (run, { steps, marks }) =>
      stepChart({
        run,
        heading: "Requests running and waiting",
        unit: "requests",
        top: queueTop,
        label: "Running and waiting requests over time",
        series: [
          { name: "running", label: "running", column: steps.running },
          { name: "waiting", label: "waiting", column: steps.waiting },
        ],
        marks,
      }),
    (run, { steps, facts }) =>
      stepChart({
        run,
        heading: "KV cache",
        unit: facts.block_size ? `blocks of ${facts.block_size} tokens` : "blocks",
        top: poolTop,
        stacked: true,
        label: "KV blocks over time: held, cached, free",
        series: [
          { name: "held", label: "held by requests", column: steps.held },
          { name: "cached", label: "cached, can be evicted", column: steps.cached },
          { name: "free", label: "free", column: steps.free },
        ],
      }),
    (run, { steps, facts }) =>
      stepChart({
        run,
        heading: "Tokens per step",
        unit: steps.count ? "tokens, mean of the steps in a bin" : "tokens",
        top: tokenTop,
        stacked: true,
        label: "Tokens per step over time: decode and prefill",
        series: [
          { name: "decode", label: "decode", column: steps.decode_tokens },
          { name: "prefill", label: "prefill", column: steps.prefill_tokens },
        ],
        envelope: steps.tokens,
        limit: facts.budget ? { value: facts.budget, label: "max_num_batched_tokens" } : null,
      }),
    (run) => hitChart(run, hitTop),
  ];
  return element(
    "div",
    { class: "grid" },
    makers.flatMap((make) => data.runs.map((each, run) => make(run, each))),
  );
}
