// Every request's life as a bar: queued, prefill, decode, preempted. Only those alive in the view are shown.

const selection = { id: null, listeners: [] };

function select(id) {
  selection.id = id;
  for (const listener of selection.listeners) listener(id);
  drawLater();
}

/** Which requests are shown, beside the view. ``text`` is looked for in ids and conversations. */
const filter = { text: "", kind: "all" };

const KINDS = {
  all: { label: "all requests", keep: () => true },
  preempted: { label: "preempted", keep: (run, i) => run.requests.preemptions[i] > 0 },
  hit: { label: "with a cache hit", keep: (run, i) => run.requests.cached[i] > 0 },
  unsuccessful: {
    label: "rejected, failed, aborted",
    keep: (run, i) => ["rejected", "error", "abort", ""].includes(finishOf(run, i)),
  },
};

function finishOf(run, i) {
  const word = run.requests.finish[i];
  return word < 0 ? "" : run.words[word];
}

function matches(run, i) {
  if (!KINDS[filter.kind].keep(run, i)) return false;
  if (!filter.text) return true;
  const conversation = run.requests.conversation[i];
  const name = conversation < 0 ? "" : run.words[conversation];
  return run.requests.id[i].toLowerCase().includes(filter.text) || name.toLowerCase().includes(filter.text);
}

function endOf(run, i) {
  let end = run.requests.arrival[i];
  const flat = run.requests.stretches[i];
  for (let j = 1; j < flat.length; j += 2) end += flat[j];
  return end;
}

/** Owns one run's drawing: which rows there are, how high, and from where. */
class Waterfall {
  constructor(index) {
    this.index = index;
    this.run = data.runs[index];
    this.ends = this.run.requests.id.map((_, i) => endOf(this.run, i));
    this.magnified = 1;
    this.offset = 0;
    this.drag = null;
    this.plot = new Plot({
      label: "Requests over time: wheel zooms, dragging moves, a click selects",
      height: 440,
      left: 62,
      paint: () => this.paint(),
    });
    this.filtered();
    timePlots.push(this.plot);
    this.listen();
    this.note = element("p", { class: "muted" });
    this.node = element(
      "div",
      { class: "box" },
      element(
        "h3",
        {},
        badge(index),
        "Request waterfall ",
        element("span", { class: "unit" }, "one row per request, by arrival"),
      ),
      element(
        "div",
        { class: "legend" },
        data.states.map((state) => element("span", {}, swatch(state), state)),
        element("span", {}, swatch("bad"), "rejected"),
      ),
      this.plot.node,
      this.note,
    );
  }

  filtered() {
    this.matching = this.run.requests.id.map((_, i) => i).filter((i) => matches(this.run, i));
    this.offset = 0;
  }

  /** The requests that live in the view. */
  alive() {
    const { arrival } = this.run.requests;
    return this.matching.filter((i) => arrival[i] <= view.end && this.ends[i] >= view.begin);
  }

  paint() {
    const { plot } = this;
    const { top, bottom } = plot.box;
    this.rows = this.alive();
    this.rowHeight = Math.min(((bottom - top) / Math.max(this.rows.length, 1)) * this.magnified, 20);
    this.offset = Math.min(Math.max(this.offset, 0), Math.max(0, this.rows.length * this.rowHeight - (bottom - top)));
    plot.clipped(() => this.paintRows());
    this.paintLabels();
    plot.timeAxis();
    const all = this.run.requests.id.length;
    this.note.textContent =
      `${grouped(this.rows.length)} of ${grouped(all)} requests are shown.` + leftOut(this.run.left_out);
  }

  paintRows() {
    const { plot, rowHeight } = this;
    const { top, bottom } = plot.box;
    const first = Math.max(0, Math.floor(this.offset / rowHeight));
    const last = Math.min(this.rows.length, Math.ceil((this.offset + bottom - top) / rowHeight) + 1);
    const gap = rowHeight >= 6 ? Math.min(3, rowHeight * 0.2) : 0;
    const height = Math.max(rowHeight - gap, 1);
    const each = (paint) => {
      for (let row = first; row < last; row++) paint(this.rows[row], top + row * rowHeight - this.offset);
    };
    each((i, y) => {
      if (this.run.requests.id[i] === selection.id) this.paintSelected(y);
      this.paintLife(i, y + gap / 2, height);
    });
    // On top, and never too small to be seen: what should not have happened.
    each((i, y) => this.paintMarks(i, y + gap / 2, Math.max(height, 1.5)));
  }

  paintSelected(y) {
    const { left, right } = this.plot.box;
    const pen = this.plot.context;
    pen.fillStyle = colour("focus");
    pen.globalAlpha = 0.25;
    const height = Math.max(this.rowHeight, 3);
    pen.fillRect(left, y + (this.rowHeight - height) / 2, right - left, height);
    pen.globalAlpha = 1;
    pen.fillRect(left, y + (this.rowHeight - height) / 2, 3, height);
  }

  paintLife(i, y, height) {
    const { plot, run } = this;
    const pen = plot.context;
    const flat = run.requests.stretches[i];
    let at = run.requests.arrival[i];
    for (let j = 0; j < flat.length; j += 2) {
      const end = at + flat[j + 1];
      const x = plot.xOf(at);
      pen.fillStyle = colour(data.states[flat[j]]);
      pen.fillRect(x, y, Math.max(plot.xOf(end) - x, 0.6), height);
      at = end;
    }
  }

  /** Preemptions and rejections. */
  paintMarks(i, y, height) {
    const { plot, run } = this;
    const { requests } = run;
    const flat = requests.stretches[i];
    const pen = plot.context;
    let at = requests.arrival[i];
    if (!flat.length) {
      pen.fillStyle = colour("bad");
      pen.fillRect(plot.xOf(at) - 1.5, y, 3, height);
    }
    if (!requests.preemptions[i]) return;
    pen.fillStyle = colour("preempted");
    for (let j = 0; j < flat.length; j += 2) {
      const x = plot.xOf(at);
      at += flat[j + 1];
      if (data.states[flat[j]] === "preempted") pen.fillRect(x, y, Math.max(plot.xOf(at) - x, 1.2), height);
    }
  }

  paintLabels() {
    const { plot, rowHeight } = this;
    const { left, top, bottom } = plot.box;
    const pen = plot.context;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = colour("muted");
    // Where rows are too low for a name each, every so many rows get one.
    const every = Math.max(1, Math.ceil(13 / rowHeight));
    const first = Math.ceil(this.offset / rowHeight / every) * every;
    for (let row = first; row < this.rows.length; row += every) {
      const y = top + (row + 0.5) * rowHeight - this.offset;
      if (y > bottom) break;
      if (every > 1 && row % (every * 2)) continue;
      pen.fillText(fitted(this.run.requests.id[this.rows[row]]), left - 6, Math.max(y, top + 5));
    }
  }

  rowAt(y) {
    const { top, bottom } = this.plot.box;
    if (y < top || y > bottom || !this.rows) return null;
    const row = Math.floor((y - top + this.offset) / this.rowHeight);
    return row < this.rows.length ? this.rows[row] : null;
  }

  listen() {
    const { canvas } = this.plot;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => (this.drag = null));
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("dblclick", () => view.reset());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  wheel(event) {
    event.preventDefault();
    const { x, y } = this.plot.pointer(event);
    const turned = event.deltaY || event.deltaX;
    const factor = Math.exp(Math.max(-1, Math.min(1, turned / 300)));
    if (event.shiftKey) this.magnify(1 / factor, y);
    else view.zoom(factor, this.plot.timeAt(Math.max(x, this.plot.box.left)));
  }

  /** Rows get higher; the one at ``y`` stays there. */
  magnify(factor, y) {
    const before = this.rowHeight;
    const row = (y - this.plot.box.top + this.offset) / before;
    const lowest = (this.plot.box.bottom - this.plot.box.top) / Math.max(this.rows.length, 1);
    this.magnified = Math.max(1, Math.min(this.magnified * factor, 20 / Math.min(lowest, 20)));
    this.offset = row * Math.min(lowest * this.magnified, 20) - (y - this.plot.box.top);
    drawLater();
  }

  press(event) {
    if (event.button !== 0) return;
    this.drag = { ...this.plot.pointer(event), begin: view.begin, end: view.end, offset: this.offset, far: false };
    this.plot.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    const { x, y } = this.plot.pointer(event);
    if (!this.drag) return this.hover(event, x, y);
    this.drag.far ||= Math.abs(x - this.drag.x) > 3 || Math.abs(y - this.drag.y) > 3;
    if (!this.drag.far) return undefined;
    hideTip();
    const { left, right } = this.plot.box;
    const time = ((this.drag.x - x) / (right - left)) * (this.drag.end - this.drag.begin);
    this.offset = this.drag.offset + this.drag.y - y;
    view.set(this.drag.begin + time, this.drag.end + time);
    return undefined;
  }

  release(event) {
    const dragged = this.drag && this.drag.far;
    this.drag = null;
    if (dragged) return;
    const i = this.rowAt(this.plot.pointer(event).y);
    if (i !== null) select(this.run.requests.id[i]);
  }

  key(event) {
    if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return void viewKey(event);
    event.preventDefault();
    this.step(event.key === "ArrowDown" ? 1 : -1);
  }

  /** Select the next or the one before among those shown. */
  step(by) {
    if (!this.rows || !this.rows.length) return;
    const at = this.rows.findIndex((i) => this.run.requests.id[i] === selection.id);
    const row = at < 0 ? 0 : Math.min(Math.max(at + by, 0), this.rows.length - 1);
    const { top, bottom } = this.plot.box;
    if (row * this.rowHeight < this.offset) this.offset = row * this.rowHeight;
    if ((row + 1) * this.rowHeight > this.offset + bottom - top)
      this.offset = (row + 1) * this.rowHeight - bottom + top;
    select(this.run.requests.id[this.rows[row]]);
  }

  hover(event, x, y) {
    const i = x >= this.plot.box.left ? this.rowAt(y) : null;
    showCursors(this.plot.timeAt(x));
    if (i === null) return hideTip();
    const { requests } = this.run;
    const spent = data.states.map((_, state) => {
      let sum = 0;
      for (let j = 0; j < requests.stretches[i].length; j += 2) {
        if (requests.stretches[i][j] === state) sum += requests.stretches[i][j + 1];
      }
      return sum;
    });
    const rows = data.states.map((state, j) => [state, state, microseconds(spent[j])]).filter((_, j) => spent[j]);
    rows.push([
      null,
      "prompt, cached, output",
      [requests.prompt, requests.cached, requests.output].map((c) => grouped(c[i])).join(", "),
    ]);
    rows.push([null, "ended", finishOf(this.run, i) || "had not"]);
    return showTip(event, `${requests.id[i]} at ${clock(this.plot.timeAt(x), view.span)}`, rows);
  }
}

/** The end of a long id, where ids differ. */
function fitted(id) {
  return id.length > 8 ? `\u2026${id.slice(-7)}` : id;
}

function leftOut({ requests, moments }) {
  const told = [];
  if (requests) told.push(` ${grouped(requests)} later requests are left out of the waterfall.`);
  if (moments) told.push(` ${grouped(moments)} moments (why a request waited, first) are left out of the details.`);
  return told.join("");
}
