// The page, from top to bottom.

function heading(run, index) {
  const parts = [run.source, run.cost, `${milliseconds(run.facts.virtual_s * 1000)} of virtual time`].filter(Boolean);
  return [
    element("h1", {}, badge(index), run.title || run.source || "Replay"),
    element("p", { class: "meta" }, parts.join(" \u00b7 ")),
  ];
}

function noteBoxes(run, index) {
  const boxes = [];
  if (run.equal !== null) {
    const words = run.equal
      ? ["All decisions are equal", " to the recorded ones."]
      : ["Decisions differ", " from the recorded ones:"];
    const where = Object.entries(run.difference || {}).map(([key, value]) => element("li", {}, `${key}: ${value}`));
    boxes.push(
      element(
        "div",
        { class: `box notes ${run.equal ? "calm" : "alarm"}` },
        badge(index),
        element("strong", {}, words[0]),
        words[1],
        where.length ? element("ul", {}, where) : null,
      ),
    );
  }
  const same = two && data.runs[0].notes.join("\n") === data.runs[1].notes.join("\n");
  if (run.notes.length && !(same && index)) {
    const items = run.notes.map((note) => element("li", {}, note));
    boxes.push(element("div", { class: "box notes" }, badge(same ? null : index), "Notes", element("ul", {}, items)));
  }
  return boxes;
}

function themeButton() {
  const root = document.documentElement;
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return element(
    "button",
    {
      type: "button",
      id: "theme",
      onclick: () => {
        root.dataset.theme = dark() ? "light" : "dark";
        recolour();
      },
    },
    "Light / dark",
  );
}

/** Which time is shown, and ways to change it without a mouse. */
function viewBar() {
  const shown = element("output", { id: "view", "aria-live": "off" });
  const button = (label, title, action) => element("button", { type: "button", title, onclick: action }, label);
  const reset = button("All", "Show the whole run (0)", () => view.reset());
  reset.id = "reset";
  const tell = () => {
    shown.textContent = `${clock(view.begin, view.span)} to ${clock(view.end, view.span)}`;
    reset.disabled = view.isWhole;
  };
  view.listeners.push(tell);
  tell();
  return element(
    "div",
    { class: "bar sticky", role: "group", "aria-label": "Time shown" },
    element("span", {}, "Time shown: ", shown),
    button("\u2212", "Zoom out (-)", () => view.zoom(1 / 0.6)),
    button("+", "Zoom in (+)", () => view.zoom(0.6)),
    button("\u25c0", "Earlier (arrow left)", () => view.pan(-view.span * 0.25)),
    button("\u25b6", "Later (arrow right)", () => view.pan(view.span * 0.25)),
    reset,
    element("span", { class: "muted" }, "Drag over a chart to zoom into it; double-click shows all."),
  );
}

const MAX_RESULTS = 12;

function searchBar(waterfalls) {
  const results = element("div", { class: "results", id: "results", role: "status" });
  const found = () => [...new Set(waterfalls.flatMap(({ run, matching }) => matching.map((i) => run.requests.id[i])))];
  const apply = () => {
    for (const waterfall of waterfalls) waterfall.filtered();
    drawLater();
    if (!filter.text && filter.kind === "all") return results.replaceChildren();
    const ids = found();
    return results.replaceChildren(
      element(
        "span",
        { class: "muted" },
        `${grouped(ids.length)} found${ids.length > MAX_RESULTS ? ", the first" : ""}:`,
      ),
      ...ids.slice(0, MAX_RESULTS).map(requestLink),
    );
  };
  const text = element("input", {
    type: "search",
    id: "search",
    placeholder: "Request or conversation id",
    "aria-label": "Search requests",
    autocomplete: "off",
    oninput: () => {
      filter.text = text.value.trim().toLowerCase();
      apply();
    },
    onkeydown: (event) => {
      const exact = found().find((id) => id.toLowerCase() === filter.text);
      const [first] = exact === undefined ? found() : [exact];
      if (event.key === "Enter" && filter.text && first !== undefined) focusRequest(first);
    },
  });
  const kinds = element(
    "select",
    {
      id: "kind",
      "aria-label": "Which requests",
      onchange: () => {
        filter.kind = kinds.value;
        apply();
      },
    },
    Object.entries(KINDS).map(([value, { label }]) => element("option", { value }, label)),
  );
  const keys =
    "Wheel zooms, shift and wheel makes rows higher, dragging moves, \u2191 \u2193 go from request to request.";
  return [element("div", { class: "bar" }, text, kinds, element("span", { class: "muted" }, keys)), results];
}

function build() {
  document.body.classList.toggle("two", two);
  const waterfalls = data.runs.map((_, run) => new Waterfall(run));
  document.getElementById("header").append(
    element(
      "div",
      {},
      data.runs.map((run, index) => heading(run, index)),
    ),
    themeButton(),
  );
  const section = (title, ...content) =>
    element("section", { "aria-label": title }, element("h2", {}, title), ...content);
  document.getElementById("main").append(
    ...data.runs.flatMap(noteBoxes),
    cards(),
    section("Latency", element("div", { class: "grid" }, latencyTable(), distributionCharts())),
    ...(two ? [section("B against A", comparisonBoxes())] : []),
    // The bar stays in sight as long as something below it follows the view.
    element(
      "div",
      {},
      viewBar(),
      section("Over time", timeCharts()),
      section(
        "Requests",
        ...searchBar(waterfalls),
        element(
          "div",
          { class: "lives" },
          waterfalls.map(({ node }) => node),
          detailsPanel(),
        ),
      ),
    ),
    section("Preemptions", element("div", { class: "grid" }, data.runs.map(preemptionBoxes))),
    section("Settings", element("div", { class: "box" }, settingsTable())),
    element("footer", {}, "Made by quire replay. All times are the run's own clock, from its start."),
  );
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  printInLight();
}

/** Paper is white and narrow: everything is drawn again for it, and again afterwards. */
function printInLight() {
  const { dataset } = document.documentElement;
  let theme;
  addEventListener("beforeprint", () => {
    theme = dataset.theme;
    dataset.theme = "light";
    dataset.print = "";
    recolour();
  });
  addEventListener("afterprint", () => {
    delete dataset.print;
    if (theme) dataset.theme = theme;
    else delete dataset.theme;
    recolour();
  });
}

build();
