// The waterfall: one row per request, one bar per state, drawn on a uPlot chart, which has the axes, the zoom and the cursor.

const KINDS = {
  "all requests": () => true,
  preempted: ({ requests }, i) => requests.preemptions[i] > 0,
  "with a cache hit": ({ requests }, i) => requests.cached[i] > 0,
  "rejected, failed, aborted": (run, i) => !endedWell(run, i),
};
/** The requests to show; `text` is a part of their ids or conversations. */
const filter = { text: "", kind: "all requests" };
const waterfalls = [];
let selected = null;

function word(run, number) {
  return number < 0 ? "" : run.words[number];
}

function endedWell(run, i) {
  return !["", "rejected", "abort", "error"].includes(word(run, run.requests.finish[i]));
}

function isWanted(run, i) {
  const names = [run.requests.id[i], word(run, run.requests.conversation[i])];
  return KINDS[filter.kind](run, i) && names.some((name) => name.toLowerCase().includes(filter.text));
}

/** The states of a request in order: [state, begin, end] in seconds. A rejected request has none. */
function statesOf({ requests }, i) {
  let at = requests.arrival[i];
  const made = [];
  for (let j = 0; j < requests.stretches[i].length; j += 2) {
    const end = at + requests.stretches[i][j + 1];
    made.push([data.states[requests.stretches[i][j]], at / 1e6, end / 1e6]);
    at = end;
  }
  return made;
}

function waterfall(run, index) {
  const states = run.requests.id.map((_, i) => statesOf(run, i));
  const begins = run.requests.arrival.map((time) => time / 1e6);
  const ends = states.map((each, i) => (each.length ? each[each.length - 1][2] : begins[i]));
  const note = element("p", { class: "muted waterfall-note" });
  const { requests: missing, moments } = run.left_out;
  const missed =
    (missing ? ` ${grouped(missing)} later requests have no room on this page.` : "") +
    (moments ? ` ${grouped(moments)} events are left out of the details.` : "");
  const shownRows = () => begins.map((_, i) => i).filter((i) => begins[i] <= view.max && ends[i] >= view.min && isWanted(run, i));
  let rows = shownRows();

  /** Fill whole device pixels of a row; `width` is the least. */
  function bar(chart, row, colour, begin, end, width) {
    const x = chart.valToPos(begin, "x", true);
    const top = chart.valToPos(row, "y", true);
    const height = chart.valToPos(row + 1, "y", true) - top;
    const gap = height >= 6 ? height * 0.2 : 0;
    chart.ctx.fillStyle = colour;
    chart.ctx.fillRect(x, top + gap / 2, Math.max(chart.valToPos(end, "x", true) - x, width), Math.max(height - gap, width));
  }

  function paint(chart) {
    const { left, top, width, height } = chart.bbox;
    chart.ctx.save();
    chart.ctx.beginPath();
    chart.ctx.rect(left, top, width, height);
    chart.ctx.clip();
    rows.forEach((i, row) => {
      if (run.requests.id[i] === selected) bar(chart, row, "#1f5fbf40", view.min, view.max, 3);
      for (const [state, begin, end] of states[i]) bar(chart, row, COLOURS[state], begin, end, 0.6);
    });
    // Preemptions and rejections again, on top, so that none is too small to be seen.
    rows.forEach((i, row) => {
      if (!states[i].length) bar(chart, row, COLOURS.rejected, begins[i], begins[i], 3);
      for (const [state, begin, end] of run.requests.preemptions[i] ? states[i] : []) {
        if (state === "preempted") bar(chart, row, COLOURS[state], begin, end, 1.5);
      }
    });
    chart.ctx.restore();
  }

  /** Every so many rows have their request's id beside them. */
  function splits(chart) {
    const every = Math.max(1, Math.ceil((rows.length * 14) / (chart.bbox.height / devicePixelRatio)));
    return rows.map((_, row) => row + 0.5).filter((_, row) => row % every === 0);
  }

  function rowAt(chart) {
    return rows[Math.floor(chart.posToVal(chart.cursor.top, "y"))];
  }

  function tell(chart) {
    const i = chart.cursor.event && chart.cursor.top >= 0 ? rowAt(chart) : undefined;
    const spent = i === undefined ? [] : states[i].map(([state, begin, end]) => `${state} ${milliseconds((end - begin) * 1e3)}`);
    note.textContent =
      i === undefined
        ? `${grouped(rows.length)} of ${grouped(begins.length)} requests are shown.${missed}`
        : `${run.requests.id[i]}: ${spent.join(", ") || "rejected"}`;
  }

  const ids = (_, values) => values.map((value) => shortened(run.requests.id[rows[Math.floor(value)]]));
  const options = timeOptions(
    [{ paths: () => null, points: { show: false } }],
    { dir: -1, range: () => [0, Math.max(rows.length, 1)] },
    axis(null, { size: 66, splits, values: ids, grid: { show: false } }),
    { height: 460, legend: { show: false } },
  );
  options.hooks.draw = [paint];
  options.hooks.setCursor = [tell];
  const legend = [...data.states, "rejected"].map((state) => element("span", {}, swatch(COLOURS[state]), state));
  const [made, chart] = chartBox("Waterfall", "one row per request, by arrival", index, [[view.min, view.max], [0, 0]], options);
  made.insertBefore(element("div", { class: "legend" }, legend), made.children[1]);
  made.append(note);
  chart.over.addEventListener("click", () => {
    const i = rowAt(chart);
    if (i !== undefined) select(run.requests.id[i]);
  });
  const refresh = () => {
    rows = shownRows();
    chart.setScale("y", { min: 0, max: Math.max(rows.length, 1) });
    chart.redraw(false, true);
    tell(chart);
  };
  view.charts.push(chart);
  view.listeners.push(refresh);
  waterfalls.push({ refresh, redraw: () => chart.redraw(false), found: () => run.requests.id.filter((_, i) => isWanted(run, i)) });
  tell(chart);
  return made;
}

function swatch(colour) {
  const made = element("i", { class: "swatch" });
  made.style.background = colour;
  return made;
}

/** The end of a long id, where ids differ. */
function shortened(id) {
  return id.length > 9 ? `\u2026${id.slice(-8)}` : id;
}

// ---- the selected request

const indices = data.runs.map((run) => new Map(run.requests.id.map((id, i) => [id, i])));
const details = element("section", { class: "box details", id: "details", "aria-live": "polite", "aria-label": "Request" },
  element("h3", {}, "Request"),
  muted("Click a row, or search, to see one request's times, tokens and events."),
);

function select(id) {
  selected = id;
  const found = data.runs.flatMap((run, index) => (indices[index].has(id) ? [requestDetails(run, index, indices[index].get(id))] : []));
  details.replaceChildren(element("h3", {}, `Request ${id}`), element("div", { class: "grid" }, found));
  for (const { redraw } of waterfalls) redraw();
}

function requestLink(id) {
  return element("button", { class: "link", type: "button", onclick: () => focusRequest(id) }, id);
}

/** Select a request and show the time around it. */
function focusRequest(id) {
  const index = indices.findIndex((each) => each.has(id));
  const run = data.runs[index];
  const i = indices[index].get(id);
  const states = statesOf(run, i);
  const begin = run.requests.arrival[i] / 1e6;
  const end = states.length ? states[states.length - 1][2] : begin;
  const room = Math.max((end - begin) * 0.15, 1e-3);
  showTime(begin - room, end + room);
  select(id);
  details.scrollIntoView({ block: "nearest" });
}

function requestDetails(run, index, i) {
  const { requests } = run;
  const point = (since) => (since < 0 ? "\u2013" : clock((requests.arrival[i] + since) / 1e6, 6));
  const gaps = requests.output[i] - 1;
  const between = endedWell(run, i) && gaps > 0 ? (requests.end[i] - requests.first[i]) / gaps : -1;
  const [finish, detail] = [word(run, requests.finish[i]) || "not ended", word(run, requests.detail[i])];
  const rows = [
    ["Finish", detail ? `${finish}: ${detail}` : finish],
    ["Conversation", word(run, requests.conversation[i]) || "\u2013"],
    ["Priority", `${requests.priority[i]}`],
    ["Prompt tokens", grouped(requests.prompt[i])],
    ["of them cached", `${grouped(requests.cached[i])} (${percent(requests.cached[i] / Math.max(requests.prompt[i], 1))})`],
    ["Output tokens", grouped(requests.output[i])],
    ["Arrival", point(0)],
    ["First admission", point(requests.scheduled[i])],
    ["First token", point(requests.first[i])],
    ["End", point(requests.end[i])],
    ["Time in queue", microseconds(requests.scheduled[i])],
    ["Time to first token", microseconds(requests.first[i])],
    ["Time per output token", microseconds(between)],
    ["End-to-end latency", microseconds(requests.end[i])],
    ["Preemptions", `${requests.preemptions[i]}`],
  ];
  const events = momentsOf(run, i).map(([since, what, reason, other]) => [
    `+${microseconds(since)}`, what, element("span", {}, reason, other === null ? null : [" for ", other]),
  ]);
  return element("div", {},
    badge(index),
    element("table", {}, rows.map(([name, value]) => element("tr", {}, element("th", { class: "text" }, name), element("td", { class: "number" }, value)))),
    events.length ? scrolled("Events of the request", table(["after", "event", "reason"], events, [0, 1, 2])) : muted("It has no events."),
  );
}

/** [microseconds since the arrival, what, reason, other request as an element, or null]. */
function momentsOf(run, i) {
  const flat = run.requests.moments[i];
  const made = [];
  for (let j = 0; j < flat.length; j += 4) {
    const [since, what, reason, other] = flat.slice(j, j + 4);
    const link = other === -1 ? null : other < 0 ? run.words[-2 - other] : requestLink(run.requests.id[other]);
    made.push([since, word(run, what), word(run, reason), link]);
  }
  return made;
}
