// Elements, number formats and colours for all other files.

const data = JSON.parse(document.getElementById("data").textContent);
const two = data.runs.length === 2;

// On white and on black; where a colour must differ, uPlot asks for it at each drawing.
const COLOURS = {
  queued: "#9aa6b866", prefill: "#e59d2e", decode: "#3c7cd4", preempted: "#d83a56", rejected: "#8a5cc7",
  running: "#3c7cd4", waiting: "#d9682b", held: "#3c7cd4", cached: "#5fae9f", free: "#8a96a833", largest: "#8a96a866",
  rate: "#84c7bb", total: "#1a8f80", budget: "#7a869a",
};
const RUN_COLOURS = ["#3c7cd4", "#c4571b"];

/** Create an element. A string becomes a text node, never markup: ids come from clients. Null children are skipped. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null));
  return made;
}

/** The letter of a run on a page of two runs, else null. */
function badge(run) {
  return two && run !== null ? element("span", { class: `badge ${"ab"[run]}` }, "AB"[run]) : null;
}

function box(heading, unit, run, ...content) {
  const title = element("h3", {}, badge(run), heading, " ", element("span", { class: "muted" }, unit));
  return element("div", { class: "box" }, title, content);
}

function muted(text) {
  return element("p", { class: "muted" }, text);
}

/** A table of strings or elements. Columns are numbers, aligned right, unless `text` lists them. */
function table(heads, rows, text = [0]) {
  const row = (tag, cells) =>
    element("tr", {}, cells.map((cell, i) => element(tag, { class: text.includes(i) ? "text" : "number" }, cell)));
  const body = rows.map((cells) => row("td", cells));
  return element("table", {}, element("thead", {}, row("th", heads)), element("tbody", {}, body));
}

function scrolled(label, content) {
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, content);
}

const threeFigures = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const compactFigures = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

function grouped(value) {
  return Math.round(value).toLocaleString("en");
}

function compact(value) {
  return compactFigures.format(value);
}

function percent(share, digits = 1) {
  return `${(share * 100).toFixed(digits)}\u00a0%`;
}

function milliseconds(value) {
  if (value === null) return "\u2013";
  const size = Math.abs(value);
  const [unit, name] = size < 1e3 ? [1, "ms"] : size < 6e5 ? [1e3, "s"] : size < 36e6 ? [6e4, "min"] : [36e5, "h"];
  return `${threeFigures.format(value / unit)}\u00a0${name}`;
}

function microseconds(value) {
  return milliseconds(value < 0 ? null : value / 1000);
}

function signed(value) {
  return `${value < 0 ? "\u2212" : "+"}${milliseconds(Math.abs(value))}`;
}

/** Format a point in time, in seconds. */
function clock(seconds, digits = 3) {
  return `${seconds.toFixed(digits)}\u00a0s`;
}

function largest(values) {
  return values.reduce((most, value) => Math.max(most, value), 0);
}
