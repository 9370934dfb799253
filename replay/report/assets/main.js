// The page from top to bottom.

function heading(run, index) {
  const parts = [run.source, run.cost, `${milliseconds(run.facts.virtual_s * 1e3)} of virtual time`].filter(Boolean);
  return [element("h1", {}, badge(index), run.title || run.source || "Replay"), muted(parts.join(" \u00b7 "))];
}

const list = (items) => element("ul", {}, items.map((item) => element("li", {}, item)));
const noteBox = (notes, run) => (notes.length ? [box("Notes", "", run, list(notes))] : []);
/** Notes of both runs are shown once. */
const shared = two ? data.runs[0].notes.filter((note) => data.runs[1].notes.includes(note)) : [];

function notes(run, index) {
  const boxes = [];
  if (run.equal !== null) {
    const text = `${run.equal ? "All decisions equal" : "Decisions differ from"} the recorded ones.`;
    const difference = Object.entries(run.difference || {}).map(([key, value]) => `${key}: ${value}`);
    const content = [badge(index), element("strong", {}, text), list(difference)];
    boxes.push(element("div", { class: `box ${run.equal ? "calm" : "alarm"}` }, content));
  }
  return boxes.concat(noteBox(run.notes.filter((note) => !shared.includes(note)), index));
}

/** The time range shown, and buttons to change it without a mouse. */
function viewBar() {
  const shown = element("output", { id: "view" });
  const update = () => {
    shown.textContent = `${clock(view.min)} to ${clock(view.max)}`;
  };
  view.listeners.push(update);
  update();
  const button = (label, title, onclick) => element("button", { type: "button", title, onclick }, label);
  const move = (share) => showTime(view.min + (view.max - view.min) * share, view.max + (view.max - view.min) * share);
  return element("div", { class: "bar sticky" },
    "Time shown: ", shown,
    button("\u2212", "Zoom out", () => zoomTime(1 / 0.6)),
    button("+", "Zoom in", () => zoomTime(0.6)),
    button("\u25c0", "Earlier", () => move(-0.25)),
    button("\u25b6", "Later", () => move(0.25)),
    button("All", "Show the whole run", () => showTime(whole.min, whole.max)),
    element("span", { class: "muted" }, "Drag over a chart to zoom. Double-click to show the whole run."),
  );
}

const MAX_RESULTS = 12;

function searchBar() {
  const results = element("span", { id: "results", role: "status" });
  const found = () => [...new Set(waterfalls.flatMap((each) => each.found()))];
  const apply = () => {
    filter.text = text.value.trim().toLowerCase();
    filter.kind = kinds.value;
    for (const { refresh } of waterfalls) refresh();
    const ids = filter.text ? found() : [];
    const links = ids.slice(0, MAX_RESULTS).map(requestLink);
    results.replaceChildren(filter.text ? `${grouped(ids.length)} found ` : "", ...links);
  };
  const open = (event) => {
    const ids = found();
    const id = ids.find((each) => each.toLowerCase() === filter.text) ?? ids[0];
    if (event.key === "Enter" && filter.text && id !== undefined) focusRequest(id);
  };
  const text = element("input", {
    type: "search", id: "search", placeholder: "Request or conversation id", "aria-label": "Search requests",
    oninput: apply, onkeydown: open,
  });
  const options = Object.keys(KINDS).map((kind) => element("option", {}, kind));
  const kinds = element("select", { id: "kind", "aria-label": "Kind of requests", onchange: apply }, options);
  return element("div", { class: "bar" }, text, kinds, results);
}

function section(title, ...content) {
  return element("section", { "aria-label": title }, element("h2", {}, title), content);
}

function grid(...content) {
  return element("div", { class: "grid" }, content);
}

const LATENCY_NOTE =
  "Successful requests only: not rejected, aborted or failed. Percentiles are nearest-rank. " +
  "Inter-token latency is weighted by tokens, all others by requests.";

document.body.classList.toggle("two", two);
document.getElementById("main").append(
  element("header", {}, data.runs.map(heading)),
  ...noteBox(shared, null),
  ...data.runs.flatMap(notes),
  cards(),
  section("Latency", muted(LATENCY_NOTE), grid(latencyTable(), data.distributions.map(distributionChart))),
  ...(data.comparison ? [section("B against A", grid(comparisonBoxes(data.comparison)))] : []),
  // The bar stays visible while a chart below it follows the view.
  element("div", {},
    viewBar(),
    section("Over time", grid(timeCharts())),
    section("Requests", searchBar(), element("div", { class: "requests" }, data.runs.map(waterfall), details)),
  ),
  section("Preemptions", grid(data.runs.flatMap(preemptionBoxes))),
  section("Settings", settingsTable()),
  element("footer", { class: "muted" }, "Made by quire replay. Times are seconds on the run's own clock, from its start."),
);
