// The waterfall: one row per request, one bar per state, drawn on a uPlot chart with its axes, zoom and cursor.

const KINDS = {
  "all requests": () => true,
  preempted: ({ requests }, i) => requests.preemptions[i] > 0,
  "with a cache hit": ({ requests }, i) => requests.cached[i] > 0,
  "rejected, failed, aborted": (run, i) => !endedWell(run, i),
};
/** The requests to show; `text` is a part of their request or conversation ids. */
const filter = { text: "", kind: "all requests" };
const waterfalls = [];
let selected = null;

function word(run, number) {
  return number < 0 ? "" : run.words[number];
}

function endedWell(run, i) {
  return !["", "rejected", "abort", "error"].includes(word(run, run.requests.finish[i]));
}

function matchesFilter(run, i) {
  const names = [run.requests.id[i], word(run, run.requests.conversation[i])];
  return KINDS[filter.kind](run, i) && names.some((name) => name.toLowerCase().includes(filter.text));
}

/** Per run, in seconds: begin, end and ordered states [state, begin, end] of each request; no states if rejected. */
const timelines = data.runs.map(({ requests }) => {
  const begins = requests.arrival.map((time) => time / 1e6);
  const states = requests.state_intervals.map((flat, i) => {
    let at = requests.arrival[i];
    const made = [];
    for (let j = 0; j < flat.length; j += 2) made.push([data.states[flat[j]], at / 1e6, (at += flat[j + 1]) / 1e6]);
    return made;
  });
  return { begins, states, ends: states.map((each, i) => (each.length ? each[each.length - 1][2] : begins[i])) };
});

/** The indices of the requests inside the view that match the filter. */
function shownRows(index) {
  const { begins, ends } = timelines[index];
  const isShown = (i) => begins[i] <= view.max && ends[i] >= view.min && matchesFilter(data.runs[index], i);
  return begins.map((_, i) => i).filter(isShown);
}

/** Fill a row from `begin` to `end`, at least `least` pixels wide and high. */
function bar(chart, row, colour, begin, end, least) {
  const x = chart.valToPos(begin, "x", true);
  const top = chart.valToPos(row, "y", true);
  const height = chart.valToPos(row + 1, "y", true) - top;
  const gap = height >= 6 ? height * 0.2 : 0;
  const width = chart.valToPos(end, "x", true) - x;
  chart.ctx.fillStyle = colour;
  chart.ctx.fillRect(x, top + gap / 2, Math.max(width, least), Math.max(height - gap, least));
}

function paintRows(chart, { requests }, { begins, states }, rows) {
  const { left, top, width, height } = chart.bbox;
  chart.ctx.save();
  chart.ctx.beginPath();
  chart.ctx.rect(left, top, width, height);
  chart.ctx.clip();
  rows.forEach((i, row) => {
    if (requests.id[i] === selected) bar(chart, row, "#1f5fbf40", view.min, view.max, 3);
    for (const [state, begin, end] of states[i]) bar(chart, row, COLOURS[state], begin, end, 0.6);
  });
  // Paint preemptions and rejections again, on top, so that short ones are visible.
  rows.forEach((i, row) => {
    if (!states[i].length) bar(chart, row, COLOURS.rejected, begins[i], begins[i], 3);
    for (const [state, begin, end] of requests.preemptions[i] ? states[i] : []) {
      if (state === "preempted") bar(chart, row, COLOURS[state], begin, end, 1.5);
    }
  });
  chart.ctx.restore();
}

function rowLabels(chart, rows, requests) {
  const every = Math.max(1, Math.ceil((rows.length * 14) / (chart.bbox.height / devicePixelRatio)));
  const shortened = (id) => (id.length > 9 ? `\u2026${id.slice(-8)}` : id); // ids differ at their ends
  const labelled = rows.map((i, row) => [row + 0.5, shortened(requests.id[i])]).filter((_, row) => row % every === 0);
  return { splits: labelled.map(([at]) => at), values: labelled.map(([, id]) => id) };
}

/** The text below a waterfall: the request under the pointer, or how many are shown. */
function noteOf({ requests, left_out: missing }, states, rows, i) {
  if (i !== undefined) {
    const spent = states[i].map(([state, begin, end]) => `${state} ${milliseconds((end - begin) * 1e3)}`);
    return `${requests.id[i]}: ${spent.join(", ") || "rejected"}`;
  }
  const shown = `${grouped(rows.length)} of ${grouped(requests.id.length)} requests are shown.`;
  const later = missing.requests ? ` ${grouped(missing.requests)} later requests are omitted from this page.` : "";
  return shown + later + (missing.moments ? ` ${grouped(missing.moments)} events are omitted from the details.` : "");
}

function waterfall(run, index) {
  const { requests } = run;
  const note = element("p", { class: "muted waterfall-note" });
  let rows = shownRows(index);
  const rowAt = (chart) => rows[Math.floor(chart.posToVal(chart.cursor.top, "y"))];
  const updateNote = (chart) => {
    const isOver = chart.cursor.event && chart.cursor.top >= 0;
    note.textContent = noteOf(run, timelines[index].states, rows, isOver ? rowAt(chart) : undefined);
  };
  const options = timeOptions(
    [{ paths: () => null, points: { show: false } }],
    { dir: -1, range: () => [0, Math.max(rows.length, 1)] },
    axis(null, {
      size: 66,
      splits: (chart) => rowLabels(chart, rows, requests).splits,
      values: (chart) => rowLabels(chart, rows, requests).values,
      grid: { show: false },
    }),
    { height: Math.min(460, 60 + 26 * Math.max(requests.id.length, 4)), legend: { show: false } },
  );
  options.hooks.draw = [(chart) => paintRows(chart, run, timelines[index], rows)];
  options.hooks.setCursor = [updateNote];
  const corners = [[view.min, view.max], [0, 0]];
  const [made, chart] = chartBox("Waterfall", "one row per request, by arrival", index, corners, options);
  const legend = [...data.states, "rejected"].map((state) => element("span", {}, swatch(COLOURS[state]), state));
  made.insertBefore(element("div", { class: "legend" }, legend), made.children[1]);
  made.append(note);
  updateNote(chart);
  chart.over.addEventListener("click", () => {
    const i = rowAt(chart);
    if (i !== undefined) select(requests.id[i]);
  });
  const refresh = () => {
    rows = shownRows(index);
    chart.setScale("y", { min: 0, max: Math.max(rows.length, 1) });
    chart.redraw(false, true);
    updateNote(chart);
  };
  view.charts.push(chart);
  view.listeners.push(refresh);
  const found = () => requests.id.filter((_, i) => matchesFilter(run, i));
  waterfalls.push({ refresh, redraw: () => chart.redraw(false), found });
  return made;
}

function swatch(colour) {
  const made = element("i", { class: "swatch" });
  made.style.background = colour;
  return made;
}
