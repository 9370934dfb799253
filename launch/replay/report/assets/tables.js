// Figures as text: the cards, latencies, preemptions, settings.

/** [label, value as text, the number to compare, more, which way is better: 1 up, -1 down, 0 neither]. */
function cardRows({ facts, latency, equal }) {
  const refused = facts.rejected + facts.aborted + facts.failed + facts.unfinished;
  const times = (name, label) => [
    label,
    milliseconds(latency[name].p50),
    latency[name].p50,
    `p99 ${milliseconds(latency[name].p99)}`,
    -1,
  ];
  const kinds = ["rejected", "aborted", "failed", "unfinished"].filter((kind) => facts[kind]);
  const rows = [
    ["Requests", grouped(facts.requests), facts.requests, `${short(facts.input_tokens)} prompt tokens`, 0],
    [
      "Rejected",
      grouped(facts.rejected),
      facts.rejected,
      refused ? kinds.map((kind) => `${grouped(facts[kind])} ${kind}`).join(", ") : "all ended well",
      -1,
    ],
    ["Prefix cache hit rate", percent(facts.hit_rate, 2), facts.hit_rate, `${short(facts.hit_tokens)} tokens`, 1],
    ["Preemptions", grouped(facts.preemptions), facts.preemptions, `of ${grouped(facts.preempted)} requests`, -1],
    times("ttft", "Time to first token, p50"),
    times("tpot", "Time per output token, p50"),
    times("e2e", "End-to-end latency, p50"),
    [
      "Output",
      `${short(facts.output_per_s)} tokens/s`,
      facts.output_per_s,
      `${short(facts.total_per_s)} tokens/s with prompts`,
      1,
    ],
    ["Steps", grouped(facts.steps), facts.steps, `in ${milliseconds(facts.virtual_s * 1000)}`, 0],
    [
      "KV pool",
      `${grouped(facts.pool)} blocks`,
      facts.pool,
      `of ${facts.block_size} tokens; ${short(facts.evicted)} evicted`,
      0,
    ],
  ];
  if (equal !== null) rows.push(["Exact replay", equal ? "equal" : "differs", equal ? 1 : 0, "decisions", 1]);
  return rows;
}

function cards() {
  const all = data.runs.map((run) => cardRows(run));
  const labels = all[0].map(([label]) => label);
  return element(
    "div",
    { class: "cards" },
    labels.map((label) =>
      element(
        "div",
        { class: "box card" },
        element("div", { class: "label" }, label),
        all.map((rows, run) =>
          cardLine(
            rows.find((row) => row[0] === label),
            all[0].find((row) => row[0] === label),
            run,
          ),
        ),
      ),
    ),
  );
}

function cardLine(row, base, run) {
  if (!row) return element("div", { class: "line" }, badge(run), element("span", { class: "more" }, "\u2013"));
  const [, value, number, more, better] = row;
  return element(
    "div",
    {},
    element(
      "div",
      { class: "line" },
      badge(run),
      element("span", { class: "value" }, value),
      run ? change(number, base[2], better) : null,
    ),
    element("div", { class: "more" }, more),
  );
}

/** How much more or less than the first run's. */
function change(number, base, better) {
  if (number === null || base === null || Math.abs(number - base) <= 5e-4 * Math.abs(base)) return null;
  const sign = number > base ? 1 : -1;
  const verdict = better === 0 ? "" : sign === better ? " good" : " bad";
  const size = base ? percent(Math.abs(number / base - 1)) : "from 0";
  return element("span", { class: `change${verdict}` }, `${sign > 0 ? "\u25b2" : "\u25bc"} ${size}`);
}

function table(heads, rows, { textColumns = [0], full = true } = {}) {
  const cell = (tag) => (content, i) => element(tag, { class: textColumns.includes(i) ? "text" : null }, content);
  return element(
    "table",
    { class: full ? "full" : null },
    element("thead", {}, element("tr", {}, heads.map(cell("th")))),
    element(
      "tbody",
      {},
      rows.map((row) => element("tr", {}, row.map(cell("td")))),
    ),
  );
}

function latencyTable() {
  const names = [
    ["ttft", "Time to first token"],
    ["tpot", "Time per output token"],
    ["itl", "Inter-token latency"],
    ["e2e", "End to end"],
    ["queue", "In queue"],
  ];
  const rows = names.flatMap(([name, label]) =>
    data.runs.map(({ latency }, run) => [
      element("span", {}, badge(run), run ? "" : label),
      ...["mean", "p50", "p90", "p99"].map((q) => milliseconds(latency[name][q])),
    ]),
  );
  return element(
    "div",
    { class: "box latencies" },
    table(["", "mean", "p50", "p90", "p99"], rows),
    element(
      "p",
      { class: "muted" },
      "Of requests that ended well: not rejected, aborted or failed. Percentiles are nearest-rank. " +
        "Inter-token latency is weighted by tokens, all others by requests.",
    ),
  );
}

const MAX_LISTED = 400;

function listedPreemptions(run) {
  const { requests, words } = run;
  const found = [];
  requests.moments.forEach((flat, i) => {
    for (let j = 0; j < flat.length; j += 4) {
      if (words[flat[j + 1]] === "preempt") found.push([requests.arrival[i] + flat[j], i, flat[j + 2], flat[j + 3]]);
    }
  });
  return found.sort((one, other) => one[0] - other[0]);
}

/** Two boxes: by reason, and one by one. */
function preemptionBoxes(run, index) {
  if (!run.reasons.length) {
    return element("div", { class: two ? "box" : "box wide" }, element("p", {}, badge(index), "Nobody was preempted."));
  }
  const listed = listedPreemptions(run);
  const rows = listed
    .slice(0, MAX_LISTED)
    .map(([time, i, reason, other]) => [
      clock(time, 1e4),
      requestLink(run.requests.id[i]),
      reason < 0 ? "" : run.words[reason],
      other === -1 ? "" : otherOf(run, other),
    ]);
  const reasons = run.reasons.map(([why, count, met]) => [why || "none given", grouped(count), grouped(met)]);
  const boxes = [
    [element("h3", {}, badge(index), "By reason"), table(["reason", "preemptions", "requests"], reasons)],
    [
      element("h3", {}, two ? null : badge(index), "In order of time"),
      element(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Preemptions in order of time" },
        table(["time", "request", "reason", "for whose blocks"], rows, { textColumns: [0, 1, 2, 3] }),
      ),
      listed.length > MAX_LISTED
        ? element("p", { class: "muted" }, `The first ${MAX_LISTED} of ${grouped(listed.length)}.`)
        : null,
    ],
  ];
  if (two) return element("div", { class: "box" }, boxes);
  return boxes.map((each) => element("div", { class: "box" }, each));
}

function settingsTable() {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))].sort();
  if (!keys.length) return element("p", { class: "muted" }, "None were given.");
  const rows = keys.map((key) => {
    const values = data.runs.map((run) => run.settings[key] ?? "\u2013");
    const differs = two && values[0] !== values[1];
    return element(
      "tr",
      { class: differs ? "differs" : null },
      element("td", {}, key),
      values.map((value) => element("td", { class: "text" }, value)),
    );
  });
  const heads = ["setting", ...data.runs.map((_, run) => badge(run) || "value")];
  return element(
    "table",
    {},
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        heads.map((head, i) => element("th", { class: i ? "text" : null }, head)),
      ),
    ),
    element("tbody", {}, rows),
  );
}
