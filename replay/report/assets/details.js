// Details of the selected request: times, tokens and events, in both runs if both have it.

const indices = data.runs.map((run) => new Map(run.requests.id.map((id, i) => [id, i])));
const details = element(
  "section",
  { class: "box details", id: "details", "aria-live": "polite", "aria-label": "Request" },
  element("h3", {}, "Request"),
  muted("Click a row or search for a request to see its times, tokens and events."),
);

function select(id) {
  selected = id;
  const both = data.runs.map((run, index) => {
    const i = indices[index].get(id);
    return i === undefined ? null : requestDetails(run, index, i);
  });
  details.replaceChildren(element("h3", {}, `Request ${id}`), element("div", { class: "grid" }, both));
  for (const { redraw } of waterfalls) redraw();
}

function requestLink(id) {
  return element("button", { class: "link", type: "button", onclick: () => focusRequest(id) }, id);
}

/** Select a request and show the time around it. */
function focusRequest(id) {
  const index = indices.findIndex((each) => each.has(id));
  const i = indices[index].get(id);
  const [begin, end] = [timelines[index].begins[i], timelines[index].ends[i]];
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
  const [finish, detail] = [word(run, requests.finish[i]) || "unfinished", word(run, requests.detail[i])];
  const share = percent(requests.cached[i] / Math.max(requests.prompt[i], 1));
  const rows = [
    ["Finish", detail ? `${finish}: ${detail}` : finish],
    ["Conversation", word(run, requests.conversation[i]) || "\u2013"],
    ["Priority", `${requests.priority[i]}`],
    ["Prompt tokens", grouped(requests.prompt[i])],
    ["Cached prompt tokens", `${grouped(requests.cached[i])} (${share})`],
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
  const list = events.length ? scrolled("Events", table(["after", "event", "reason"], events, [0, 1, 2])) : null;
  return element("div", {}, badge(index), table(["", ""], rows), list);
}

/** All events of a request, or those of one kind: [microseconds since arrival, what, reason, link to the other request
 * or null]. */
function momentsOf(run, i, kind = null) {
  const flat = run.requests.moments[i];
  const made = [];
  for (let j = 0; j < flat.length; j += 4) {
    const [since, what, reason, other] = flat.slice(j, j + 4);
    if (kind !== null && word(run, what) !== kind) continue;
    const link = other === -1 ? null : other < 0 ? run.words[-2 - other] : requestLink(run.requests.id[other]);
    made.push([since, word(run, what), word(run, reason), link]);
  }
  return made;
}
