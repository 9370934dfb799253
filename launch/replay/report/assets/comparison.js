// The second run against the first: where the time went, and who got less of it than before.

function signed(value) {
  return `${value < 0 ? "\u2212" : "+"}${milliseconds(Math.abs(value))}`;
}

/** Bars of both runs' seconds under each other, on one scale. */
function secondsBox({ seconds }) {
  const most = Math.max(...seconds.flatMap(([, ...both]) => both), 1e-9);
  const bar = (value, run) => {
    const made = element("i", { class: `amount ${LETTERS[run]}` });
    made.style.width = `${Math.max((value / most) * 100, value > 0 ? 0.5 : 0)}%`;
    return made;
  };
  const rows = seconds.map(([what, ...both]) => [
    what,
    element("div", { class: "amounts" }, both.map(bar)),
    ...both.map((value) => milliseconds(value * 1e3)),
    signed((both[1] - both[0]) * 1e3),
  ]);
  return element(
    "div",
    { class: "box" },
    element("h3", {}, "Where the time went ", element("span", { class: "unit" }, "all requests together")),
    table(["", "", badge(0), badge(1), "change"], rows, { textColumns: [1] }),
  );
}

function delayedBox({ delayed, slower, faster, both, only }) {
  const counts = `${grouped(both)} ended well in both: ${grouped(slower)} took longer in B, ${grouped(faster)} less long.`;
  const others = only.some((count) => count) ? ` Only in A: ${grouped(only[0])}; only in B: ${grouped(only[1])}.` : "";
  const rows = delayed.map(([id, ttft, queue, e2e, why]) => [
    requestLink(id),
    signed(e2e),
    signed(queue),
    signed(ttft),
    why,
  ]);
  return element(
    "div",
    { class: "box" },
    element("h3", {}, "Who took longer, and why"),
    element("p", { class: "muted" }, counts + others),
    rows.length
      ? element(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Requests that took longer" },
          table(["request", "end to end", "queue", "TTFT", "why"], rows, { textColumns: [4] }),
        )
      : null,
    slower > delayed.length ? element("p", { class: "muted" }, `The ${delayed.length} that lost most.`) : null,
  );
}

function comparisonBoxes() {
  return element("div", { class: "grid uneven" }, secondsBox(data.comparison), delayedBox(data.comparison));
}
