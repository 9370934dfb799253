// A canvas with axes. What is inside is drawn by whoever made it.

const MARGIN = { left: 52, right: 14, top: 8, bottom: 34 };

/** Owns a canvas, its size in device pixels and its axes; holds no data. */
class Plot {
  /** ``paint(plot)`` draws everything; ``right``: room for a second axis. */
  constructor({ label, height, paint, right = MARGIN.right, left = MARGIN.left, interactive = true }) {
    this.height = height;
    this.margin = { ...MARGIN, left, right };
    this.canvas = element("canvas", { role: "img", "aria-label": label, tabindex: interactive ? 0 : null });
    this.canvas.style.height = `${height}px`;
    this.cursor = element("div", { class: "cursor", hidden: true });
    this.cursor.style.top = `${this.margin.top}px`;
    this.cursor.style.height = `${height - this.margin.top - this.margin.bottom}px`;
    this.node = element("div", { class: "plot" }, this.canvas, this.cursor);
    this.context = this.canvas.getContext("2d");
    this.paint = paint;
    drawings.add(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  get box() {
    const { left, right, top, bottom } = this.margin;
    return { left, top, right: this.width - right, bottom: this.height - bottom };
  }

  draw() {
    this.width = this.node.clientWidth;
    if (!this.width) return;
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.context.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    this.paint(this);
  }

  /** Whatever ``inside`` draws stays between the axes. */
  clipped(inside) {
    const { left, top, right, bottom } = this.box;
    this.context.save();
    this.context.beginPath();
    this.context.rect(left, top, right - left, bottom - top);
    this.context.clip();
    inside();
    this.context.restore();
  }

  /** ``at(value)`` is the y of a value; grid lines go across. */
  yAxis(values, at, format, side = "left") {
    const { left, right } = this.box;
    const pen = this.context;
    pen.textBaseline = "middle";
    pen.textAlign = side === "left" ? "right" : "left";
    for (const value of values) {
      const y = Math.round(at(value)) + 0.5;
      if (side === "left") this.line(left, y, right, y, colour("grid"));
      pen.fillStyle = colour("muted");
      pen.fillText(format(value), side === "left" ? left - 6 : right + 6, y);
    }
  }

  xAxis(values, at, format, label) {
    const { left, right, bottom } = this.box;
    const pen = this.context;
    this.line(left, bottom + 0.5, right, bottom + 0.5, colour("line"));
    pen.textBaseline = "top";
    pen.textAlign = "center";
    let free = -Infinity;
    for (const value of values) {
      const x = at(value);
      const text = format(value);
      const half = pen.measureText(text).width / 2;
      if (x < left - 1 || x > right + 1) continue;
      this.line(Math.round(x) + 0.5, bottom, Math.round(x) + 0.5, bottom + 4, colour("line"));
      const middle = Math.min(Math.max(x, left + half - 12), this.width - half - 2);
      if (middle - half < free) continue;
      pen.fillStyle = colour("muted");
      pen.fillText(text, middle, bottom + 6);
      free = middle + half + 8;
    }
    pen.fillStyle = colour("muted");
    pen.textAlign = "right";
    pen.fillText(label, right, bottom + 20);
  }

  line(x0, y0, x1, y1, stroke, dash = []) {
    const pen = this.context;
    pen.strokeStyle = stroke;
    pen.lineWidth = 1;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.setLineDash([]);
  }

  timeAt(x) {
    const { left, right } = this.box;
    return view.begin + ((x - left) / (right - left)) * view.span;
  }

  xOf(time) {
    const { left, right } = this.box;
    return left + ((time - view.begin) / view.span) * (right - left);
  }

  timeAxis() {
    const { left, right } = this.box;
    const values = ticks(view.begin / 1e6, view.end / 1e6, (right - left) / 90);
    const step = values.length > 1 ? values[1] - values[0] : 1;
    const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
    const format = (value) => value.toFixed(digits);
    this.xAxis(values, (value) => this.xOf(value * 1e6), format, "time, s");
  }

  pointer(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  showCursor(time) {
    const { left, right } = this.box;
    const x = time === null ? -1 : this.xOf(time);
    this.cursor.hidden = !(x >= left && x <= right);
    this.cursor.style.left = `${x}px`;
  }
}

const timePlots = [];

/** The same moment on every drawing of time; null: nowhere. */
function showCursors(time) {
  for (const plot of timePlots) plot.showCursor(time);
}

/** Dragging chooses the time to show; two clicks show all; keys move. */
function makeZoomable(plot) {
  const brush = element("div", { class: "brush", hidden: true });
  plot.node.append(brush);
  timePlots.push(plot);
  let from = null;
  const clamp = (x) => Math.min(Math.max(x, plot.box.left), plot.box.right);
  plot.canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = clamp(plot.pointer(event).x);
    plot.canvas.setPointerCapture(event.pointerId);
  });
  plot.canvas.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = clamp(plot.pointer(event).x);
    brush.hidden = Math.abs(to - from) < 4;
    brush.style.left = `${Math.min(from, to)}px`;
    brush.style.width = `${Math.abs(to - from)}px`;
    brush.style.top = `${plot.box.top}px`;
    brush.style.height = `${plot.box.bottom - plot.box.top}px`;
  });
  const done = (event) => {
    if (from === null) return;
    const to = clamp(plot.pointer(event).x);
    brush.hidden = true;
    if (event.type === "pointerup" && Math.abs(to - from) >= 4) {
      view.set(plot.timeAt(Math.min(from, to)), plot.timeAt(Math.max(from, to)));
    }
    from = null;
  };
  plot.canvas.addEventListener("pointerup", done);
  plot.canvas.addEventListener("pointercancel", done);
  plot.canvas.addEventListener("dblclick", () => view.reset());
  plot.canvas.addEventListener("keydown", viewKey);
}
