// One scrape of /metrics, and differences between two. The same rules as those of `quire top`.

/** Return the samples by name without their prefix: sums over all labels, values by reason, histogram buckets. */
function parseMetrics(text, time) {
  const scrape = { time, values: new Map(), reasons: new Map(), buckets: new Map(), labels: new Map() };
  const add = (map, key, value) => map.set(key, (map.get(key) || 0) + value);
  const within = (map, key) => map.get(key) || map.set(key, new Map()).get(key);
  for (const line of text.split("\n")) {
    const found = /^[A-Za-z_]\w*:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = new Map();
    for (const [, key, value] of (found[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels.set(key, value);
    const name = found[1], value = Number(found[3]);
    if (name.endsWith("_bucket")) {
      const bound = labels.get("le") === "+Inf" ? Infinity : Number(labels.get("le"));
      add(within(scrape.buckets, name.slice(0, -"_bucket".length)), bound, value);
      continue;
    }
    add(scrape.values, name, value);
    scrape.labels.set(name, labels);
    if (labels.has("reason")) add(within(scrape.reasons, name), labels.get("reason"), value);
  }
  return scrape;
}

/** A counter that fell began at 0 in between. */
const growth = (now, before) => (now >= before ? now - before : now);

/** The figures between two scrapes; `before` is null for those since the start of the server. */
class Interval {
  constructor(now, before) {
    this.now = now;
    this.before = before || { time: now.time, values: new Map(), buckets: new Map() };
    this.seconds = before ? now.time - before.time : 0;
  }

  value(name) {
    return this.now.values.get(name) ?? null;
  }

  since(name) {
    const now = this.value(name);
    return now === null ? null : growth(now, this.before.values.get(name) || 0);
  }

  rate(name) {
    const grown = this.since(name);
    return grown === null || !this.seconds ? null : grown / this.seconds;
  }

  share(part, whole) {
    const grown = this.since(part), of = this.since(whole);
    return of && grown !== null ? grown / of : null;
  }

  reasons(name) {
    const found = [...(this.now.reasons.get(name) || [])].filter(([, count]) => count > 0);
    return found.sort((one, other) => other[1] - one[1]);
  }

  /** Return the values that a histogram counted in the interval, or null if it counted none. */
  distribution(name) {
    const count = this.since(name + "_count"), total = this.since(name + "_sum");
    if (!count || total === null) return null;
    const before = this.before.buckets.get(name) || new Map();
    const counts = [...(this.now.buckets.get(name) || [])].sort((one, other) => one[0] - other[0])
      .map(([bound, value]) => [bound, growth(value, before.get(bound) || 0)]);
    const [p50, p99] = [0.5, 0.99].map((share) => quantile(counts, share * count, count, total));
    return { count, total, mean: total / count, p50, p99 };
  }
}

/**
 * Return the value below which `wanted` values lie, interpolated in its bucket. `counts` are cumulative.
 * It is at most what a value has reached, even if all values of the buckets below are at their upper bounds.
 */
function quantile(counts, wanted, count, total) {
  let [low, below, found] = [0, 0, null];
  for (const [high, upTo] of counts) {
    if (found === null && upTo >= wanted) {
      found = upTo === below ? low : low + (high - low) * (wanted - below) / (upTo - below);
    }
    if (found !== null && upTo >= count) return Math.min(found, Math.max(low, total / (upTo - below)));
    total -= high * (upTo - below);
    [low, below] = [high, upTo];
  }
  return null;
}
