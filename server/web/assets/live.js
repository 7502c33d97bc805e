// Live metrics: a card per figure with a line of the last minute, and a table of the endpoints.
//
//   poll /metrics every second while visible → prometheus.js → samples → figures → draw

import { element, find, seconds, svgElement } from "./dom.js";
import { parse } from "./prometheus.js";

const POLL_MS = 1000;
const MAX_SAMPLES = 61; // a minute
const WINDOW = 30; // samples of a rate or percentile
const INTERNAL = ["/metrics", "/ready", "/health", "/assets/{name}"];
const isRequest = labels => !INTERNAL.includes(labels.endpoint);

// `now` and `then` are samples, `over` the seconds between them; `figure` returns a number or NaN.
const CARDS = [
  {
    title: "Queue", unit: whole, per: " queued",
    figure: now => now.sum("queue_depth"),
    more: now => now.has("running_sequences")
      && `${now.sum("running_sequences")} running · ${now.sum("waiting_sequences")} waiting`,
  },
  {
    title: "Responses/s", unit: rounded, per: "/s",
    figure: (now, then, over) => now.since(then, "requests_total", isRequest) / over,
    more: (now, then, over) => `${rounded(now.since(then, "errors_total") / over)} errors/s`,
  },
  {
    title: "Latency p95", unit: seconds,
    figure: (now, then) => now.percentile("request_seconds", 0.95, then, isRequest),
    more: (now, then) => `p50 ${seconds(now.percentile("request_seconds", 0.5, then, isRequest))}`,
  },
  {
    title: "Queue wait p95", unit: seconds,
    figure: (now, then) => now.percentile("queue_wait_seconds", 0.95, then),
    more: (now, then) => `p50 ${seconds(now.percentile("queue_wait_seconds", 0.5, then))}`,
  },
  {
    title: "Batch size", unit: rounded, per: " per batch", serves: ["pipeline", "embedding", "rerank"],
    figure: (now, then) => now.mean("batch_size", then),
    more: now => `${rounded(now.mean("batch_size"))} since the start`,
  },
  {
    title: "Tokens/s", unit: rounded, per: "/s", serves: ["generation"],
    figure: (now, then, over) => now.since(then, "tokens_total", kind("output")) / over,
    more: (now, then, over) => `${rounded(now.since(then, "tokens_total", kind("prompt")) / over)} prompt tokens/s`,
  },
  {
    title: "First token p95", unit: seconds, serves: ["generation"],
    figure: (now, then) => now.percentile("time_to_first_token_seconds", 0.95, then),
    more: (now, then) => `p50 ${seconds(now.percentile("time_to_first_token_seconds", 0.5, then))}`,
  },
  {
    title: "Cache in use", unit: value => `${whole(100 * value)} %`, max: 1, serves: ["generation"],
    figure: now => now.sum("kv_blocks_used") / now.sum("kv_blocks"),
    more: now => `${whole(now.sum("kv_blocks_used"))} of ${whole(now.sum("kv_blocks"))} blocks`,
  },
];

function kind(name) {
  return labels => labels.kind === name;
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
  const models = { generation: ready.chat_model, pipeline: ready.task, embedding: ready.embedding_model, rerank: ready.rerank_model };
  const cards = CARDS.filter(card => !card.serves || card.serves.some(name => models[name])).map(card => new Card(card));
  find(".cards", section).append(...cards.map(card => card.element));
  const samples = [];
  let timer = 0;
  const poll = async () => {
    clearTimeout(timer);
    if (section.hidden || document.hidden) return;
    try {
      samples.push(parse(await (await fetch("metrics")).text(), performance.now() / 1000));
      samples.splice(0, samples.length - MAX_SAMPLES);
      cards.forEach(card => card.draw(samples));
      drawEndpoints(find("tbody", section), samples.at(-1));
    } catch {
      cards.forEach(card => card.setStale());
    }
    clearTimeout(timer);
    timer = setTimeout(poll, POLL_MS);
  };
  section.addEventListener("shown", poll);
  document.addEventListener("visibilitychange", poll);
}

// `max`: the scale's end, of figures with a fixed range; `per`: what follows a number on the scale.
class Card {
  constructor({ title, unit, figure, more, max = null, per = "" }) {
    Object.assign(this, { unit, figure, more, max, per });
    this.value = element("strong", {}, "–");
    this.line = svgElement("path", { "vector-effect": "non-scaling-stroke" });
    this.area = svgElement("path", { class: "area" });
    this.top = element("span", {});
    this.note = element("p", { class: "note" });
    this.element = element("article", { class: "card" }, element("h3", {}, title), this.value,
      element("div", { class: "chart" },
        svgElement("svg", { viewBox: `0 0 ${MAX_SAMPLES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line),
        this.top, element("span", {}, "0")),
      this.note);
  }

  draw(samples) {
    const figures = samples.map((now, n) => {
      const then = samples[Math.max(0, n - WINDOW)];
      return this.figure(now, then, now.at - then.at || NaN);
    });
    const [now, then] = [samples.at(-1), samples[Math.max(0, samples.length - 1 - WINDOW)]];
    this.element.classList.remove("stale");
    this.value.textContent = this.unit(figures.at(-1));
    this.note.textContent = this.more(now, then, now.at - then.at || NaN) || "";
    this.drawLine(figures);
  }

  // Draws the last sample at the right edge; a sample without a figure is a gap.
  drawLine(figures) {
    const top = this.max ?? roundedUp(Math.max(0, ...figures.filter(Number.isFinite)));
    this.top.textContent = this.unit(top) + this.per;
    let [line, area] = ["", ""];
    figures.forEach((figure, n) => {
      if (!Number.isFinite(figure)) return;
      const [x, y] = [MAX_SAMPLES - figures.length + n, 20 - 20 * figure / top];
      const continues = Number.isFinite(figures[n - 1]);
      line += `${continues ? "L" : "M"}${x} ${y}`;
      if (continues) area += `M${x - 1} 20V${20 - 20 * figures[n - 1] / top}L${x} ${y}V20Z`;
    });
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }

  setStale() {
    this.element.classList.add("stale");
  }
}

function drawEndpoints(body, now) {
  const endpoints = [...new Set(now.labels("requests_total", isRequest).map(({ endpoint }) => endpoint))].sort();
  body.replaceChildren(...endpoints.map(endpoint => {
    const ofEndpoint = labels => labels.endpoint === endpoint;
    const isError = labels => ofEndpoint(labels) && !(labels.status < 400);
    const percentiles = [0.5, 0.95, 0.99].map(share => seconds(now.percentile("request_seconds", share, null, ofEndpoint)));
    const cells = [whole(now.sum("requests_total", ofEndpoint)), whole(now.sum("requests_total", isError)), ...percentiles];
    return element("tr", {}, element("th", { scope: "row" }, endpoint), ...cells.map(text => element("td", {}, text)));
  }));
}
