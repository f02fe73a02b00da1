// The dashboard: what the server has kept of the last hour, asked for every few seconds while it is
// looked at.

const FIRST_PERIOD_MS = 1000; // until there are two samples

const TILES = [
  ["Running", [["", "running"]], whole],
  ["Waiting", [["", "waiting"]], whole],
  ["Generated tokens/s", [["", "generated_rate"]], whole],
  ["Prompt tokens/s", [["", "prompt_rate"]], whole],
  ["Ended requests/s", [["", "request_rate"]], whole],
  ["KV cache in use", [["", "kv_cache"]], share],
  ["Prefix cache hits", [["", "prefix_hits"]], share],
  ["Process memory", [["", "process_bytes"]], bytes],
  ["GPU memory (first)", [["", "gpu_bytes"]], bytes],
];
const CHARTS = [
  ["Time to first token", [["half within", "first_token_p50"], ["95 % within", "first_token_p95"]], duration],
  ["Time between tokens", [["half within", "token_gap_p50"], ["95 % within", "token_gap_p95"]], duration],
  ["Time of a whole request", [["half within", "latency_p50"], ["95 % within", "latency_p95"]], duration],
  ["Time in the queue", [["mean", "queue_mean"]], duration],
];
const OPTIONAL = new Set(["gpu_bytes"]);

function whole(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function share(value) {
  return `${(100 * value).toFixed(1)} %`;
}

function bytes(value) {
  return value < 2 ** 30 ? `${Math.round(value / 2 ** 20)} MiB` : `${(value / 2 ** 30).toFixed(1)} GiB`;
}

function duration(seconds) {
  return seconds < 1 ? `${+(seconds * 1000).toPrecision(2)} ms` : `${+seconds.toPrecision(2)} s`;
}

function svgPart(kind, facts) {
  const part = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(facts)) part.setAttribute(name, value);
  return part;
}

const course = { times: [], series: {}, periodS: 5, keptS: 3600 };

function takeCourse({ times, series, period_s: periodS, kept_s: keptS }) {
  const names = new Set([...Object.keys(course.series), ...Object.keys(series)]);
  const before = course.times.length;
  for (const name of names) {
    const old = course.series[name] ?? Array(before).fill(null);
    course.series[name] = [...old, ...(series[name] ?? Array(times.length).fill(null))];
  }
  course.times.push(...times);
  Object.assign(course, { periodS, keptS });
  const numOld = course.times.findIndex((at) => at > course.times.at(-1) - keptS);
  if (numOld > 0) for (const values of [course.times, ...Object.values(course.series)]) values.splice(0, numOld);
}

// One value or several over time; the pointer reads an earlier one.
class Curves {
  constructor([title, lines, format], parent) {
    Object.assign(this, { title, lines, format, at: null });
    this.value = make("div", "value", ["–"]);
    this.svg = svgPart("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": title });
    this.paths = lines.map((_, i) => svgPart("path", { class: `curve curve-${i}` }));
    this.mark = svgPart("line", { class: "mark", y1: 0, y2: 30 });
    this.svg.append(...this.paths, this.mark);
    this.peak = make("span");
    this.age = make("span");
    this.box = make("section", "tile", [make("h2", "", [title]), this.value, this.svg, make("div", "axis", [this.age, this.peak])]);
    this.svg.addEventListener("pointermove", (event) => this.read(event));
    this.svg.addEventListener("pointerleave", () => this.show((this.at = null)));
    parent.append(this.box);
  }

  read({ clientX }) {
    const { left, width } = this.svg.getBoundingClientRect();
    const { from, to } = range();
    const wanted = from + ((clientX - left) / width) * (to - from);
    const distances = course.times.map((at) => Math.abs(at - wanted));
    this.at = distances.indexOf(Math.min(...distances));
    this.show();
  }

  show() {
    const series = this.lines.map(([, name]) => course.series[name] ?? []);
    this.box.hidden = this.lines.every(([, name]) => OPTIONAL.has(name)) && !series.some((values) => values.length);
    const { from, to, first } = range();
    const shown = series.flatMap((values) => values.slice(first).filter((value) => value !== null));
    const top = Math.max(0, ...shown) || 1;
    series.forEach((values, i) => this.paths[i].setAttribute("d", pathOf(values, first, (at) => (100 * (at - from)) / (to - from), top)));
    const texts = series.map((values, i) => this.textOf(values, this.lines[i][0], first)).filter(Boolean);
    this.value.textContent = texts.join(", ") || "–";
    this.peak.textContent = shown.length ? `at most ${this.format(Math.max(...shown))}` : "nothing yet";
    this.age.textContent = this.at === null ? "" : `${Math.round(to - course.times[this.at])} s ago`;
    const x = this.at === null ? -1 : (100 * (course.times[this.at] - from)) / (to - from);
    this.mark.setAttribute("x1", x);
    this.mark.setAttribute("x2", x);
    this.svg.setAttribute("aria-label", `${this.title}: ${this.value.textContent}, ${this.peak.textContent}`);
  }

  // The newest value, or that at the pointer.
  textOf(values, label, first) {
    const value = this.at === null ? values.slice(first).findLast((each) => each !== null) : values[this.at];
    return value === undefined || value === null ? "" : `${label} ${this.format(value)}`.trim();
  }
}

// Lines between neighbours, and a short one where a value stands alone.
function pathOf(values, first, x, top) {
  let path = "";
  for (let i = first; i < values.length; i++) {
    if (values[i] === null) continue;
    const point = `${x(course.times[i]).toFixed(2)},${(29 - (28 * values[i]) / top).toFixed(2)}`;
    const goesOn = i > first && values[i - 1] !== null && course.times[i] - course.times[i - 1] < 3 * course.periodS;
    path += goesOn ? `L${point}` : `M${point}h0.3`;
  }
  return path;
}

function range() {
  const to = course.times.at(-1) ?? 0;
  const from = to - Number(byId("range").value);
  const first = course.times.findIndex((at) => at >= from);
  return { from, to, first: Math.max(0, first) };
}

const curves = [
  ...TILES.map((given) => new Curves(given, byId("tiles"))),
  ...CHARTS.map((given) => new Curves(given, byId("charts"))),
];
for (const { box } of curves.slice(TILES.length)) box.classList.add("wide-chart");
let timer = null;

function showCourse() {
  for (const each of curves) each.show();
}

byId("range").addEventListener("change", showCourse);

async function refresh() {
  try {
    takeCourse(await (await ask(`page/history?since=${course.times.at(-1) ?? 0}`)).json());
    showCourse();
    byId("live-note").textContent = "";
  } catch (error) {
    byId("live-note").textContent = error instanceof Refused ? error.message : "The server does not answer.";
  }
  return course.times.length < 2 ? FIRST_PERIOD_MS : 1000 * course.periodS;
}

async function watch() {
  clearTimeout(timer);
  if (byId("live").hidden || document.hidden) return;
  const periodMs = await refresh();
  clearTimeout(timer); // it may have been opened again meanwhile
  timer = setTimeout(watch, periodMs);
}

document.addEventListener("visibilitychange", watch);
