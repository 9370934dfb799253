// Figures as text: cards, latencies, preemptions, settings, and the comparison of two runs.

/** [label, text, number to compare, note, direction: 1 if more is better, -1 if less is better, 0 if neither]. */
function cardRows({ facts, latency, equal }) {
  const failures = ["rejected", "aborted", "failed", "unfinished"].filter((kind) => facts[kind]);
  const failed = failures.map((kind) => `${grouped(facts[kind])} ${kind}`).join(", ");
  const time = (name, label) => {
    const { p50, p99 } = latency[name];
    return [`${label}, p50`, milliseconds(p50), p50, `p99 ${milliseconds(p99)}`, -1];
  };
  const withPrompts = `${compact(facts.total_per_s)} tokens/s including prompts`;
  const rows = [
    ["Requests", grouped(facts.requests), facts.requests, `${compact(facts.input_tokens)} prompt tokens`, 0],
    ["Rejected", grouped(facts.rejected), facts.rejected, failed || "all succeeded", -1],
    ["Prefix cache hit rate", percent(facts.hit_rate, 2), facts.hit_rate, `${compact(facts.hit_tokens)} tokens`, 1],
    ["Preemptions", grouped(facts.preemptions), facts.preemptions, `of ${grouped(facts.preempted)} requests`, -1],
    time("ttft", "Time to first token"),
    time("tpot", "Time per output token"),
    time("e2e", "End-to-end latency"),
    ["Output", `${compact(facts.output_per_s)} tokens/s`, facts.output_per_s, withPrompts, 1],
    ["Steps", grouped(facts.steps), facts.steps, `in ${milliseconds(facts.virtual_s * 1e3)}`, 0],
    ["KV pool", `${grouped(facts.pool)} blocks`, facts.pool, `${compact(facts.evicted)} evicted`, 0],
  ];
  for (const [name, hits, pages, loaded, stored] of facts.tiers) {
    const copied = `${compact(loaded)} of ${compact(pages)} blocks loaded, ${compact(stored)} stored`;
    rows.push([`Tier: ${name}`, hits === null ? "\u2013" : `${compact(hits)} tokens`, hits, copied, 1]);
  }
  if (equal !== null) rows.push(["Exact replay", equal ? "equal" : "differs", Number(equal), "decisions", 1]);
  return rows;
}

/** The relative change of a figure from the first run to the second. */
function change(number, base, better) {
  if (number === null || base === null || Math.abs(number - base) <= 5e-4 * Math.abs(base)) return null;
  const sign = number > base ? 1 : -1;
  const verdict = better === 0 ? "" : sign === better ? "good" : "bad";
  const size = base ? percent(Math.abs(number / base - 1)) : "from 0";
  return element("span", { class: `change ${verdict}` }, `${sign > 0 ? "\u25b2" : "\u25bc"}\u00a0${size}`);
}

function cards() {
  const all = data.runs.map(cardRows);
  const labels = [...new Set(all.flat().map(([label]) => label))];
  const card = (label) => {
    const rows = all.map((each) => each.find((row) => row[0] === label) || [label, "\u2013", null, "", 0]);
    const lines = rows.map(([, text, number, note, better], run) => [
      element("div", { class: "value" }, badge(run), text, run ? change(number, rows[0][2], better) : null),
      element("div", { class: "muted" }, note),
    ]);
    return element("div", { class: "box card" }, element("div", { class: "muted" }, label), lines);
  };
  return element("div", { class: "cards" }, labels.map(card));
}

function latencyTable() {
  const names = Object.fromEntries(data.distributions.map(({ name, label }) => [name, label]));
  const figures = ["mean", "p50", "p90", "p99"];
  const rows = Object.entries(names).flatMap(([name, label]) =>
    data.runs.map(({ latency }, run) => [
      element("span", {}, badge(run), run ? "" : label),
      ...figures.map((figure) => milliseconds(latency[name][figure])),
    ]),
  );
  return box("Percentiles", "", null, table(["", ...figures], rows));
}

const MAX_LISTED = 400;

function preemptionBoxes(run, index) {
  if (!run.reasons.length) return [box("By reason", "", index, muted("No request was preempted."))];
  const reasons = run.reasons.map(([reason, ...counts]) => [reason || "none given", ...counts.map(grouped)]);
  const found = run.requests.id.flatMap((id, i) =>
    momentsOf(run, i, "preempt").map(([since, , ...rest]) => [run.requests.arrival[i] + since, id, ...rest]),
  );
  found.sort((one, other) => one[0] - other[0]);
  const listed = found.slice(0, MAX_LISTED);
  const rows = listed.map(([time, id, ...rest]) => [clock(time / 1e6, 4), requestLink(id), ...rest]);
  const list = table(["time", "request", "reason", "blocks given to"], rows, [0, 1, 2, 3]);
  const rest = found.length > MAX_LISTED ? muted(`The first ${MAX_LISTED} of ${grouped(found.length)} are listed.`) : null;
  return [
    box("By reason", "", index, table(["reason", "preemptions", "requests"], reasons)),
    box("In order of time", "", index, scrolled("Preemptions in order of time", list), rest),
  ];
}

function settingsTable() {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const rows = keys.map((key) => {
    const values = data.runs.map((run) => run.settings[key] ?? "\u2013");
    const differs = two && values[0] !== values[1];
    return [key, ...values].map((text) => element("span", differs ? { class: "differs" } : {}, text));
  });
  const heads = ["setting", ...data.runs.map((_, run) => badge(run) || "value")];
  return element("div", { class: "box" }, keys.length ? table(heads, rows, [0, 1, 2]) : muted("No settings recorded."));
}

function comparisonBoxes({ seconds, delayed, slower, faster, both, only }) {
  const most = Math.max(...seconds.flatMap(([, ...values]) => values), 1e-9);
  const bars = (values) =>
    values.map((value, run) => {
      const made = element("i", { class: `amount ${"ab"[run]}` });
      made.style.width = `${(value / most) * 100}%`;
      return made;
    });
  const parts = seconds.map(([what, ...values]) => [
    what,
    element("div", { class: "amounts" }, bars(values)),
    ...values.map((value) => milliseconds(value * 1e3)),
    signed((values[1] - values[0]) * 1e3),
  ]);
  const counts =
    `${grouped(both)} requests succeeded in both runs: ` +
    `${grouped(slower)} were slower in B, ${grouped(faster)} faster.` +
    (only.some(Boolean) ? ` Only in A: ${grouped(only[0])}; only in B: ${grouped(only[1])}.` : "");
  const rows = delayed.map(([id, ttft, queue, e2e, why]) => [requestLink(id), ...[e2e, queue, ttft].map(signed), why]);
  const list = table(["request", "latency", "queue", "TTFT", "why"], rows, [0, 4]);
  const rest = slower > delayed.length ? muted(`The ${delayed.length} largest changes are listed.`) : null;
  return [
    box("Time by state", "all requests together", null, table(["", "", badge(0), badge(1), "change"], parts, [0, 1])),
    box("Requests that were slower in B", "", null, muted(counts), rows.length ? scrolled("Slower", list) : null, rest),
  ];
}
