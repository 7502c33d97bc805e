// Live metrics: a card per figure with a line of the last minute, and a table of the endpoints.
//
//   poll /metrics every second while visible → Metrics → figures → draw

import { element, find, seconds } from "./dom.js";

const POLL_MS = 1000;
const MAX_FIGURES = 61; // a minute
const WINDOW = 30; // samples of a rate or percentile
const SERIES = /^onequeue_(\w+)(?:\{(.*)\})? (\S+)$/gm;
const INTERNAL = /endpoint="\/(metrics|ready|health|assets\/\{name\})"/;

// `figure` and `more` get the Metrics of the last samples, and `more` those since the server's start. A card is
// shown if one of the models that it `needs` is served, which are fields of /ready.
const CARDS = [
  {
    title: "Queue", unit: whole, per: " queued",
    figure: now => now.sum("queue_depth"),
    more: now => now.values("running_sequences").length > 0
      && `${now.sum("running_sequences")} running · ${now.sum("waiting_sequences")} waiting`,
  },
  {
    title: "Responses/s", unit: rounded, per: "/s",
    figure: now => now.rate("requests_total"),
    more: now => `${rounded(now.rate("errors_total"))} errors/s`,
  },
  percentiles("Latency", "request_seconds"),
  percentiles("Queue wait", "queue_wait_seconds"),
  {
    title: "Batch size", unit: rounded, per: " per batch", needs: ["task", "embedding_model", "rerank_model"],
    figure: now => now.mean("batch_size"),
    more: (now, all) => `${rounded(all.mean("batch_size"))} since the start`,
  },
  {
    title: "Tokens/s", unit: rounded, per: "/s", needs: ["chat_model"],
    figure: now => now.rate("tokens_total", 'kind="output"'),
    more: now => `${rounded(now.rate("tokens_total", 'kind="prompt"'))} prompt tokens/s`,
  },
  percentiles("First token", "time_to_first_token_seconds", ["chat_model"]),
  {
    title: "Cache in use", unit: value => `${whole(100 * value)} %`, max: 1, needs: ["chat_model"],
    figure: now => now.sum("kv_blocks_used") / now.sum("kv_blocks"),
    more: now => `${whole(now.sum("kv_blocks_used"))} of ${whole(now.sum("kv_blocks"))} blocks`,
  },
];

function percentiles(title, histogram, needs) {
  return {
    title: `${title} p95`, unit: seconds, needs,
    figure: now => now.percentile(histogram, 0.95),
    more: now => `p50 ${seconds(now.percentile(histogram, 0.5))}`,
  };
}

// The series in a text of /metrics: [{name, labels, value}], of requests to the API only. `labels` is a text.
function parse(text) {
  return [...text.matchAll(SERIES)].map(([, name, labels = "", value]) => ({ name, labels, value: Number(value) }))
    .filter(({ labels }) => !INTERNAL.test(labels));
}

// A sample, and its changes since an earlier one, or since the server's start. Series are chosen by their name
// and by parts of their labels, such as kind="output".
class Metrics {
  constructor(now, then = { series: [], at: NaN }) {
    Object.assign(this, { now, then });
  }

  sum(name, parts = [], { series } = this.now) {
    const chosen = series.filter(one => one.name === name && parts.every(part => one.labels.includes(part)));
    return chosen.reduce((total, { value }) => total + value, 0);
  }

  // Returns the values of a label, in order.
  values(name, label = "") {
    const pattern = new RegExp(`\\b${label}="([^"]*)"`);
    return [...new Set(this.now.series.filter(one => one.name === name).map(({ labels }) => pattern.exec(labels)?.[1]))];
  }

  since(name, ...parts) {
    return this.sum(name, parts) - this.sum(name, parts, this.then);
  }

  rate(counter, ...parts) {
    return this.since(counter, ...parts) / (this.now.at - this.then.at || NaN);
  }

  mean(histogram) {
    return this.since(`${histogram}_sum`) / this.since(`${histogram}_count`);
  }

  // Interpolates within the percentile's bucket; NaN without observations.
  percentile(histogram, share, ...parts) {
    const limits = this.values(`${histogram}_bucket`, "le");
    const counts = limits.map(limit => this.since(`${histogram}_bucket`, `le="${limit}"`, ...parts));
    const rank = share * counts.at(-1);
    const n = counts.findIndex(count => count >= rank && count > 0);
    if (n < 0) return NaN;
    const [below, low] = n ? [counts[n - 1], Number(limits[n - 1])] : [0, 0];
    const high = limits[n] === "+Inf" ? low : Number(limits[n]);
    return low + (high - low) * (rank - below) / (counts[n] - below);
  }
}

function whole(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–";
}

function rounded(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 || Number.isInteger(value) ? whole(value) : value.toFixed(1);
}

// Returns the end of a scale: 1, 2 or 5 times a power of ten.
function roundedUp(value) {
  if (!value) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find(step => step * power >= value);
}

export function startLive(section, ready) {
  const cards = CARDS.filter(({ needs }) => !needs || needs.some(name => ready[name])).map(card => new Card(card));
  find(".cards", section).append(...cards.map(card => card.element));
  const samples = [];
  let polling = false;
  const poll = async () => {
    if (polling || section.hidden || document.hidden) return;
    polling = true;
    try {
      const series = parse(await (await fetch("metrics")).text());
      samples.push({ series, at: performance.now() / 1000 });
      samples.splice(0, samples.length - WINDOW - 1);
      const [now, all] = [new Metrics(samples.at(-1), samples[0]), new Metrics(samples.at(-1))];
      cards.forEach(card => card.draw(now, all));
      drawEndpoints(find("tbody", section), all);
    } catch {
      cards.forEach(card => card.element.classList.add("stale"));
    }
    polling = false;
  };
  section.addEventListener("shown", poll);
  setInterval(poll, POLL_MS);
}

// `max`: the scale's end, of figures with a fixed range; `per`: what follows a number on the scale.
class Card {
  constructor({ title, unit, figure, more, max = null, per = "" }) {
    Object.assign(this, { unit, figure, more, max, per, figures: [] });
    this.value = element("strong", {}, "–");
    this.line = element("path", { "vector-effect": "non-scaling-stroke" });
    this.area = element("path", { class: "area" });
    this.top = element("span", {});
    this.note = element("p", { class: "note" });
    this.element = element("article", { class: "card" }, element("h3", {}, title), this.value,
      element("div", { class: "chart" },
        element("svg", { viewBox: `0 0 ${MAX_FIGURES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line),
        this.top, element("span", {}, "0")),
      this.note);
  }

  // Draws the last figure at the right edge; one that is not a number is a gap.
  draw(now, all) {
    const { figures } = this;
    figures.push(this.figure(now));
    figures.splice(0, figures.length - MAX_FIGURES);
    this.element.classList.remove("stale");
    this.value.textContent = this.unit(figures.at(-1));
    this.note.textContent = this.more(now, all) || "";
    const top = this.max ?? roundedUp(Math.max(0, ...figures.filter(Number.isFinite)));
    this.top.textContent = this.unit(top) + this.per;
    let [line, area] = ["", ""];
    figures.forEach((figure, n) => {
      const before = figures[n - 1];
      if (!Number.isFinite(figure + before)) return;
      const x = MAX_FIGURES - figures.length + n;
      const slope = `${20 - 20 * before / top}L${x} ${20 - 20 * figure / top}`;
      line += `M${x - 1} ${slope}`;
      area += `M${x - 1} 20V${slope}V20Z`;
    });
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

function drawEndpoints(body, all) {
  body.replaceChildren(...all.values("requests_total", "endpoint").sort().map(endpoint => {
    const part = `endpoint="${endpoint}"`;
    const [count, ...fine] = ["", 'status="2', 'status="3'].map(status => all.sum("requests_total", [part, status]));
    const cells = [whole(count), whole(count - fine[0] - fine[1]),
      ...[0.5, 0.95, 0.99].map(share => seconds(all.percentile("request_seconds", share, part)))];
    return element("tr", {}, element("th", { scope: "row" }, endpoint), cells.map(text => element("td", {}, text)));
  }));
}
