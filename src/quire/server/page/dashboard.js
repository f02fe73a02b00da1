// The dashboard: /metrics, read every two seconds while it is looked at.

const PERIOD_MS = 2000;
const FIRST_PERIOD_MS = 400; // a rate takes two samples, and the first is not waited for long
const STALE_MS = 3 * PERIOD_MS; // older samples are of another time than the one that is looked at
const SHOWN_MS = 300_000; // five minutes, by a curve

const TILES = [
  ["Running", (m) => m.gauge("num_requests_running"), whole],
  ["Waiting", (m) => m.gauge("num_requests_waiting"), whole],
  ["KV cache in use", (m) => m.gauge("kv_cache_usage_perc"), share],
  ["Prefix cache hits", (m) => m.ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), share],
  ["Generated tokens/s", (m) => m.rate("generation_tokens_total"), whole],
  ["Prompt tokens/s", (m) => m.rate("prompt_tokens_total"), whole],
];

const HISTOGRAMS = [
  ["Time to first token", "time_to_first_token_seconds"],
  ["Time between tokens", "inter_token_latency_seconds"],
];

function whole(value) {
  return value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function share(value) {
  return value === null ? "–" : `${(100 * value).toFixed(1)} %`;
}

function duration(seconds) {
  if (seconds === Infinity) return "more";
  return seconds < 1 ? `${+(seconds * 1000).toPrecision(2)} ms` : `${+seconds.toPrecision(2)} s`;
}

// Sums over all labels but `le`, by name without prefix.
function parseMetrics(text) {
  const sums = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    const match = /^(?:\w+:)?(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const [, name, labels, number] = match;
    const value = Number(number.replace("+Inf", "Infinity"));
    const le = /(?:^|,)le="([^"]+)"/.exec(labels ?? "");
    if (!le) {
      sums.set(name, (sums.get(name) ?? 0) + value);
      continue;
    }
    const base = name.replace(/_bucket$/, "");
    const bounds = buckets.get(base) ?? new Map();
    const bound = le[1] === "+Inf" ? Infinity : Number(le[1]);
    bounds.set(bound, (bounds.get(bound) ?? 0) + value);
    buckets.set(base, bounds);
  }
  return { sums, buckets, at: performance.now() };
}

// Two samples: what is, and what changed.
class Measures {
  constructor(now, before) {
    this.now = now;
    this.before = before;
  }

  gauge(name) {
    return this.now.sums.get(name) ?? null;
  }

  change(name) {
    const now = this.now.sums.get(name);
    const before = this.before?.sums.get(name);
    return now === undefined || before === undefined || now < before ? null : now - before;
  }

  rate(name) {
    const change = this.change(name);
    return change === null ? null : change / ((this.now.at - this.before.at) / 1000);
  }

  ratio(part, all) {
    const whole = this.gauge(all);
    return whole ? this.gauge(part) / whole : null;
  }
}

class Tile {
  constructor([title, read, format]) {
    Object.assign(this, { title, read, format, history: [] });
    [this.box, this.value] = box(title, byId("tiles"));
    this.curve = drawing(this.box, title, "curve", "polyline");
  }

  show(measures) {
    const value = this.read(measures);
    this.value.textContent = this.format(value);
    if (value === null) return;
    const { at: now } = measures.now;
    this.history.push({ at: now, value });
    while (this.history[0].at < now - SHOWN_MS) this.history.shift();
    const top = Math.max(...this.history.map((sample) => sample.value)) || 1;
    const x = (at) => 100 - (100 * (now - at)) / SHOWN_MS;
    this.curve.setAttribute("points", this.history.map((s) => `${x(s.at)},${29 - (28 * s.value) / top}`).join(" "));
    this.curve.parentNode.setAttribute("aria-label", `${this.title}: now ${this.format(value)}, at most ${this.format(top)} in the last five minutes`);
  }
}

class Histogram {
  constructor([title, name]) {
    Object.assign(this, { title, name });
    [this.box, this.value] = box(title, byId("charts"));
    this.box.classList.add("wide-chart");
    this.bars = drawing(this.box, title, "bars", "g");
    this.axis = document.createElement("div");
    this.axis.className = "axis";
    this.box.append(this.axis);
  }

  show(measures) {
    const bounds = [...(measures.now.buckets.get(this.name) ?? [])].sort(([a], [b]) => a - b);
    const counts = bounds.map(([, upTo], i) => upTo - (i ? bounds[i - 1][1] : 0));
    const total = counts.reduce((a, b) => a + b, 0);
    if (!total) return void (this.value.textContent = "no requests yet");
    const from = counts.findIndex((n) => n > 0);
    const to = counts.findLastIndex((n) => n > 0);
    const shown = counts.slice(from, to + 1);
    const top = Math.max(...shown);
    this.bars.replaceChildren(...shown.map((count, i) => {
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const width = 100 / shown.length;
      const height = (29 * count) / top;
      const facts = { x: i * width + width * 0.08, width: width * 0.84, y: 30 - height, height, class: "bar" };
      for (const [name, value] of Object.entries(facts)) bar.setAttribute(name, value);
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = `up to ${duration(bounds[from + i][0])}: ${count}`;
      bar.append(title);
      return bar;
    }));
    const percentile = (share) => duration(bounds.find(([, upTo]) => upTo >= share * total)[0]);
    const summary = `half within ${percentile(0.5)}, 95 % within ${percentile(0.95)}`;
    this.value.textContent = summary;
    this.bars.parentNode.setAttribute("aria-label", `${this.title} of ${total}: ${summary}`);
    const left = from ? duration(bounds[from - 1][0]) : "0";
    this.axis.replaceChildren(left, document.createElement("span"), duration(bounds[to][0]));
  }
}

function box(title, parent) {
  const section = document.createElement("section");
  section.className = "tile";
  const heading = document.createElement("h2");
  heading.textContent = title;
  const value = document.createElement("div");
  value.className = "value";
  value.textContent = "–";
  section.append(heading, value);
  parent.append(section);
  return [section, value];
}

function drawing(parent, title, name, kind) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}: nothing yet`);
  const part = document.createElementNS("http://www.w3.org/2000/svg", kind);
  part.setAttribute("class", name);
  svg.append(part);
  parent.append(svg);
  return part;
}

const parts = [...TILES.map((facts) => new Tile(facts)), ...HISTOGRAMS.map((facts) => new Histogram(facts))];
let sampleBefore = null;
let timer = null;

async function refresh() {
  try {
    const now = parseMetrics(await (await ask("metrics")).text());
    const isFresh = sampleBefore && now.at - sampleBefore.at < STALE_MS;
    const measures = new Measures(now, isFresh ? sampleBefore : null);
    sampleBefore = now;
    for (const part of parts) part.show(measures);
    byId("live-note").textContent = "";
    return isFresh ? PERIOD_MS : FIRST_PERIOD_MS;
  } catch (error) {
    byId("live-note").textContent = error instanceof Refused ? error.message : "The server does not answer.";
    return PERIOD_MS;
  }
}

async function watch() {
  clearTimeout(timer);
  if (byId("live").hidden || document.hidden) return;
  const periodMs = await refresh();
  clearTimeout(timer); // it may have been opened again meanwhile
  timer = setTimeout(watch, periodMs);
}

document.addEventListener("visibilitychange", watch);
