// One request, all that is known of it; of both runs where both have it.

const indices = data.runs.map((run) => new Map(run.requests.id.map((id, i) => [id, i])));

function requestLink(id) {
  return element("button", { class: "link", type: "button", onclick: () => focusRequest(id) }, id);
}

/** Select a request and show the time around its life. */
function focusRequest(id) {
  for (const [run, each] of data.runs.entries()) {
    const i = indices[run].get(id);
    if (i === undefined) continue;
    const begin = each.requests.arrival[i];
    const end = endOf(each, i);
    const room = Math.max((end - begin) * 0.15, 1000);
    view.set(begin - room, end + room);
    break;
  }
  select(id);
  document.getElementById("details").scrollIntoView({ block: "nearest" });
}

function detailRows(run, i) {
  const { requests, words } = run;
  const arrival = requests.arrival[i];
  const point = (since) => (since < 0 ? "\u2013" : `${((arrival + since) / 1e6).toFixed(6)} s`);
  const successful = !["", "rejected", "abort", "error"].includes(finishOf(run, i));
  const gaps = requests.output[i] - 1;
  const between = successful && gaps > 0 ? (requests.end[i] - requests.first[i]) / gaps : -1;
  const finish = finishOf(run, i) || "had not ended";
  return [
    ["Ended", requests.detail[i] < 0 ? finish : `${finish}: ${words[requests.detail[i]]}`],
    ["Conversation", requests.conversation[i] < 0 ? "\u2013" : words[requests.conversation[i]]],
    ["Priority", `${requests.priority[i]}`],
    ["Prompt tokens", grouped(requests.prompt[i])],
    [
      "of them cached",
      `${grouped(requests.cached[i])} (${percent(requests.cached[i] / Math.max(requests.prompt[i], 1))})`,
    ],
    ["Output tokens", grouped(requests.output[i])],
    ["Arrived", point(0)],
    ["First let in", point(requests.scheduled[i])],
    ["First token", point(requests.first[i])],
    ["End", point(requests.end[i])],
    ["In queue", microseconds(requests.scheduled[i])],
    ["Time to first token", microseconds(requests.first[i])],
    ["Per output token", microseconds(between)],
    ["End to end", microseconds(requests.end[i])],
    ["Preemptions", `${requests.preemptions[i]}`],
  ];
}

function momentTable(run, i) {
  const flat = run.requests.moments[i];
  if (!flat.length) return element("p", { class: "muted" }, "It never waited for a reason worth noting.");
  const rows = [];
  for (let j = 0; j < flat.length; j += 4) {
    const [since, what, reason, other] = flat.slice(j, j + 4);
    rows.push(
      element(
        "tr",
        {},
        element("td", {}, `+${microseconds(since)}`),
        element("td", {}, run.words[what]),
        element("td", {}, reason < 0 ? "" : run.words[reason], other === -1 ? null : [" for ", otherOf(run, other)]),
      ),
    );
  }
  const head = ["after", "what", "why"].map((name) => element("th", {}, name));
  return element(
    "div",
    { class: "moments", tabindex: 0, role: "region", "aria-label": "What happened to it" },
    element("table", { class: "full" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows)),
  );
}

function otherOf(run, other) {
  return other >= 0 ? requestLink(run.requests.id[other]) : run.words[-2 - other];
}

function lifeTable(index, i) {
  const run = data.runs[index];
  const rows = detailRows(run, i).map(([name, value]) =>
    element("tr", {}, element("th", {}, name), element("td", {}, value)),
  );
  return element(
    "div",
    {},
    two ? element("p", {}, badge(index)) : null,
    element("table", { class: "full" }, rows),
    momentTable(run, i),
  );
}

function detailsPanel() {
  const panel = element("section", {
    class: "box details",
    id: "details",
    "aria-live": "polite",
    "aria-label": "Request",
  });
  selection.listeners.push((id) => {
    const found = data.runs.map((_, run) => [run, indices[run].get(id)]).filter(([, i]) => i !== undefined);
    panel.replaceChildren(
      element("h3", {}, `Request ${id}`),
      element(
        "div",
        { class: "pair" },
        found.map(([run, i]) => lifeTable(run, i)),
      ),
    );
  });
  panel.append(
    element("h3", {}, "Request"),
    element("p", { class: "muted" }, "Click a bar, or search, to see one request's times, tokens and moments."),
  );
  return panel;
}
