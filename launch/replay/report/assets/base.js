// What everything else uses: elements, numbers for people, ticks, colours, the read-out, and the shared view of time.

const data = JSON.parse(document.getElementById("data").textContent);
const LETTERS = ["a", "b"];
const two = data.runs.length === 2;

/** An element. Text is always set as text: ids come from clients and may look like anything. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null) made.append(child);
  return made;
}

function swatch(colour, thin = false) {
  const made = element("i", { class: thin ? "swatch thin" : "swatch" });
  made.style.background = `var(--${colour})`;
  return made;
}

/** Which of two runs something is of; nothing where there is one, or where it is of both (null). */
function badge(run) {
  return two && run !== null ? element("span", { class: `badge ${LETTERS[run]}` }, LETTERS[run].toUpperCase()) : null;
}

// ---- numbers

function grouped(value) {
  return Math.round(value)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** Three or four figures that matter, and no more. */
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trimmed(value / 1e9, 2)}\u00a0G`;
  if (size >= 1e6) return `${trimmed(value / 1e6, 2)}\u00a0M`;
  if (size >= 1e4) return `${trimmed(value / 1e3, 1)}\u00a0k`;
  if (size >= 1000) return grouped(value);
  if (size >= 100) return trimmed(value, 0);
  return trimmed(value, size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

function trimmed(value, digits) {
  const text = value.toFixed(digits);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function percent(share, digits = 1) {
  return `${(share * 100).toFixed(digits)}\u00a0%`;
}

/** Milliseconds in the unit that reads best. */
function milliseconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value >= 36e6) return `${trimmed(value / 36e5, 1)}\u00a0h`;
  if (value >= 600e3) return `${trimmed(value / 60e3, 1)}\u00a0min`;
  if (value >= 1000) return `${trimmed(value / 1000, value >= 1e5 ? 0 : value >= 1e4 ? 1 : 2)}\u00a0s`;
  return `${trimmed(value, value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3)}\u00a0ms`;
}

function microseconds(value) {
  return value < 0 ? "\u2013" : milliseconds(value / 1000);
}

/** A point in time, in seconds, as fine as ``span`` microseconds on the screen ask for. */
function clock(time, span) {
  const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(Math.max(span, 10) / 1e6))));
  return `${(time / 1e6).toFixed(digits)}\u00a0s`;
}

// ---- scales

/** Round values between ``low`` and ``high``, about ``count`` of them. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough * 0.999) * power;
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + 1e-12; i++) made.push(i * step);
  return made;
}

/** 1, 2, 5, 10, 20, ... between; only powers of ten where that is many. */
function logTicks(low, high, most) {
  const powers = Math.log10(high / low);
  const factors = powers * 3 <= most ? [1, 2, 5] : [1];
  const made = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) made.push(value);
    }
  }
  return made;
}

/** Index of the last of ``sorted`` that is at most ``value``; -1: none. */
function lastAtMost(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function largest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

// ---- colours: canvases cannot use CSS variables, so they ask what these are just now

const probe = element("span", { hidden: true });
document.body.append(probe);
let colours = {};

function colour(name) {
  if (!(name in colours)) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  return colours[name];
}

// ---- drawing: at most once per frame, whatever changed

const drawings = new Set();
let frame = 0;

function drawLater() {
  if (!frame) {
    frame = requestAnimationFrame(() => {
      frame = 0;
      drawAll();
    });
  }
}

function drawAll() {
  for (const draw of drawings) draw();
}

function recolour() {
  colours = {};
  drawAll();
}

// ---- the read-out that follows the pointer

const tip = element("div", { id: "tip", hidden: true, role: "status" });
document.body.append(tip);

/** ``rows``: [colour or null, label, value]. */
function showTip(event, heading, rows) {
  tip.replaceChildren(
    element("strong", {}, heading),
    element(
      "table",
      {},
      rows.map(([name, label, value]) =>
        element("tr", {}, element("td", {}, name ? swatch(name) : null, label), element("td", {}, value)),
      ),
    ),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
}

function hideTip() {
  tip.hidden = true;
}

// ---- the view: which time all charts and waterfalls show, in microseconds

const SHORTEST_VIEW = 100;

const view = {
  begin: data.begin,
  end: Math.max(data.end, data.begin + SHORTEST_VIEW),
  listeners: [],

  get span() {
    return this.end - this.begin;
  },

  get isWhole() {
    return this.begin <= data.begin && this.end >= data.end;
  },

  set(begin, end) {
    const whole = Math.max(data.end - data.begin, SHORTEST_VIEW);
    const span = Math.min(Math.max(end - begin, SHORTEST_VIEW), whole);
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(middle - span / 2, data.begin), data.begin + whole - span);
    this.end = this.begin + span;
    for (const listener of this.listeners) listener();
    drawLater();
  },

  /** ``factor`` below 1 shows less; the time ``at`` stays where it is. */
  zoom(factor, at = (this.begin + this.end) / 2) {
    this.set(at - (at - this.begin) * factor, at + (this.end - at) * factor);
  },

  pan(time) {
    this.set(this.begin + time, this.end + time);
  },

  reset() {
    this.set(data.begin, data.end);
  },
};

/** Keys of every drawing that shows the view. Returns whether it was one. */
function viewKey(event) {
  const step = view.span * 0.1;
  const actions = {
    ArrowLeft: () => view.pan(-step),
    ArrowRight: () => view.pan(step),
    "+": () => view.zoom(0.7),
    "=": () => view.zoom(0.7),
    "-": () => view.zoom(1 / 0.7),
    0: () => view.reset(),
    Home: () => view.reset(),
  };
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return false;
  actions[event.key]();
  event.preventDefault();
  return true;
}
