// The figures of the last seconds, read from /metrics while the page is visible.

const POLL_MS = 2000;
const WINDOW_S = 10;
const TIMES = [
  ["queue", "request_queue_time_seconds"],
  ["prefill", "request_prefill_time_seconds"],
  ["decode", "request_decode_time_seconds"],
  ["first token", "time_to_first_token_seconds"],
  ["between tokens", "inter_token_latency_seconds"],
  ["whole request", "e2e_request_latency_seconds"],
];
const STEPS = ["schedule", "worker", "update", "reply"];
const NONE = "\u2013";

const byId = (id) => document.getElementById(id);

/** Return a new element, "tag" or "tag.class", with text or children. Text is only ever text, never HTML. */
function element(kind, ...children) {
  const [tag, ...classes] = kind.split("."), made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  made.append(...children);
  return made;
}

const number = (value) =>
  value === null ? NONE : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (value) => (value === null ? NONE : `${Math.round(100 * value)} %`);
const digits = (value) => (value === null ? NONE : value.toFixed(value < 1 ? 4 : 2));
const listed = (reasons) => reasons.map(([reason, count]) => `${reason} ${number(count)}`).join(", ") || NONE;

const meter = (share, ariaLabel) => Object.assign(element("meter"), { max: 1, value: share || 0, ariaLabel });

function numbers(shown) {
  const rate = (name) => number(shown.rate(name));
  const perSecond = (name) => (shown.rate(name) === null ? NONE : `${rate(name)}/s`);
  const usable = shown.value("num_usable_blocks"), free = shown.value("num_free_blocks");
  const use = usable && free !== null ? 1 - free / usable : shown.value("kv_cache_usage_perc");
  const hits = shown.share("prefix_cache_hits_total", "prefix_cache_queries_total");
  const drafts = shown.share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total");
  const rows = [
    ["Requests", `${number(shown.value("num_requests_running"))} running, ` +
      `${number(shown.value("num_requests_waiting"))} waiting, ended ${perSecond("request_success_total")}, ` +
      `refused ${perSecond("admission_rejections_total")}`],
    ["Waiting for", listed(shown.reasons("num_requests_waiting_by_reason"))],
    ["Tokens/s", `${rate("generation_tokens_total")} generated, ${rate("prompt_tokens_total")} of prompts, ` +
      `${rate("prompt_tokens_cached_total")} of these cached`],
    ["KV blocks", meter(use, "KV blocks in use"), `${percent(use)} of ${number(shown.value("num_usable_blocks"))}, ` +
      `${number(shown.value("num_cached_blocks"))} cached, evicted ${perSecond("num_evicted_blocks_total")}`],
    ["Prefix cache", meter(hits, "Prompt tokens found in the prefix cache"), `${percent(hits)} of prompt tokens found`],
    ["Preemptions", `${perSecond("num_preemptions_total")}, since the start: ` +
      `${listed(shown.reasons("num_preemptions_by_reason_total"))}`],
  ];
  if (drafts !== null) rows.push(["Draft tokens", meter(drafts, "Draft tokens accepted"), `${percent(drafts)} accepted`]);
  rows.push(["Restarts", ["worker", "scheduler", "front_end"]
    .map((kind) => `${kind.replace("_", " ")} ${number(shown.value(`num_${kind}_restarts_total`))}`).join(", ")]);
  byId("numbers").replaceChildren(
    ...rows.flatMap(([name, ...values]) => [element("dt", name), element("dd", ...values)]));
}

function row(name, ...cells) {
  const head = Object.assign(element("th", name), { scope: "row" });
  return element("tr", head, ...cells.map((cell) => element("td", cell)));
}

function tables(shown) {
  byId("times").replaceChildren(...TIMES.map(([name, metric]) => {
    const found = shown.distribution(metric);
    if (!found) return row(name, NONE, NONE, NONE, NONE);
    return row(name, digits(found.mean), digits(found.p50), digits(found.p99), number(found.count));
  }));
  const parts = STEPS.map((part) => [part, shown.distribution(`step_${part}_time_seconds`)]);
  const total = parts.reduce((sum, [, found]) => sum + (found ? found.total : 0), 0);
  const ms = (value) => (value === null ? NONE : (1000 * value).toFixed(2));
  byId("steps").replaceChildren(...parts.map(([part, found]) => found
    ? row(part, ms(found.mean), ms(found.p50), ms(found.p99), percent(found.total / total))
    : row(part, NONE, NONE, NONE, NONE)));
}

function showState(state) {
  byId("state").textContent = state;
  byId("state").className = `pill ${/^[a-z]+$/.test(state) ? state : ""}`;
}

const scrapes = [];

async function poll() {
  const [metrics, health] = await Promise.all([fetch("metrics"), fetch("health")]);
  const now = parseMetrics(await metrics.text(), performance.now() / 1000);
  while (scrapes.length > 1 && scrapes[1].time <= now.time - WINDOW_S) scrapes.shift();
  scrapes.push(now);
  const shown = new Interval(now, scrapes.length > 1 ? scrapes[0] : null);
  numbers(shown);
  tables(shown);
  byId("window").textContent = shown.seconds ? `last ${shown.seconds.toFixed(0)} s` : "since the start";
  showState(String((await health.json()).status));
}

/** Poll while the page is visible. Figures of a server that does not answer stay, with its state. */
async function follow() {
  try {
    if (!document.hidden) await Promise.all([poll(), pollState()]);
  } catch {
    showState("unreachable");
  }
  setTimeout(follow, POLL_MS);
}
