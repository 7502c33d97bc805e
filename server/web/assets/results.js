// Show a pipeline's result by its shape: bars, boxes over the image, highlighted words, masks, an
// image, audio, text; any other shape as JSON.

import { element } from "./dom.js";
import { json } from "./exchange.js";
import { wav } from "./record.js";

const HUES = [165, 25, 250, 320, 90, 210, 55, 285]; // of labels, in order of appearance
const MAX_WIDTH = 760; // pixels of the column, as in page.css

// The first shape that matches draws. `input` is {image: its URL or null, text}.
const SHAPES = [
  { matches: list => list.length === 0, draw: () => [element("p", {}, "Nothing was found.")] },
  { matches: all(item => item.box), draw: boxes },
  { matches: all(item => typeof item.mask === "string"), draw: masks },
  { matches: all(item => "start" in item && ("entity" in item || "entity_group" in item)), draw: words },
  { matches: all(item => typeof item.score === "number"), draw: list => bars(list) },
  {
    matches: all(all(item => typeof item.score === "number")),
    draw: lists => lists.flatMap((list, n) => [element("h3", {}, `${n + 1}`), ...bars(list)]),
  },
  { matches: all(item => typeof item.generated_text === "string"), draw: list => list.map(item => transcript(item.generated_text)) },
];

export async function results(result, input) {
  const list = asList(result);
  const shape = list && SHAPES.find(({ matches }) => matches(list));
  if (shape) return shape.draw(list, input);
  if (typeof result.text === "string") return [transcript(result.text)];
  if (typeof result.depth === "string") return [element("figure", {}, await loadImage(pngUrl(result.depth), "Depth"))];
  if (result.audio && result.sampling_rate) return [audioPlayer(result)];
  return [element("pre", { tabindex: "0" }, json(result))];
}

function all(matches) {
  return list => Array.isArray(list) && list.length > 0 && list.every(item => item && matches(item));
}

// The result of zero-shot-classification has two parallel lists.
function asList(result) {
  if (Array.isArray(result)) return result;
  const { labels, scores } = result;
  return labels && scores ? labels.map((label, n) => ({ label, score: scores[n] })) : null;
}

export function bars(scores, { hueOf = null, figure = percent } = {}) {
  const rows = scores.map(({ label, token_str: token, answer, sequence, score }) => element("li",
    hueOf ? { "--accent": `hsl(${hueOf(label)} 85% 45%)` } : {},
    element("span", { class: "label", title: sequence ?? "" }, String(label ?? token ?? answer)),
    element("span", { class: "bar", "--share": Math.max(0, Math.min(1, score)) }),
    element("span", { class: "figure" }, figure(score))));
  return [element("ol", { class: "bars" }, ...rows)];
}

const transcript = text => element("p", { class: "transcript" }, text);
const percent = score => `${(100 * score).toFixed(score < 0.1 ? 2 : 1)} %`;

// ── over an image ──

async function boxes(objects, { image: url }) {
  if (!url) return bars(objects);
  const image = await loadImage(url);
  const { naturalWidth: width, naturalHeight: height } = image;
  const hueOf = hues(objects.map(({ label }) => label));
  const unit = width / Math.min(width, document.body.clientWidth, MAX_WIDTH); // image pixels per screen pixel
  const groups = objects.map(({ label, score, box: { xmin, ymin, xmax, ymax } }) => element("g", { "--hue": hueOf(label) },
    element("rect", { x: xmin, y: ymin, width: xmax - xmin, height: ymax - ymin, "stroke-width": 2 * unit }),
    element("text", { x: xmin + 4 * unit, y: ymin + 14 * unit, "font-size": 13 * unit },
      `${label} ${percent(score)}`)));
  const over = element("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...groups);
  image.alt = `The image, with ${objects.length} boxes`;
  return [element("figure", { class: "overlaid" }, image, over), ...bars(objects, { hueOf })];
}

async function masks(segments, { image: url }) {
  const hueOf = hues(segments.map(({ label }) => label));
  const layers = segments.map(({ mask, label }) =>
    element("div", { class: "mask", "--mask": `url(${pngUrl(mask)})`, "--hue": hueOf(label) }));
  const legend = segments.map(({ label, score }) => element("li", { "--hue": hueOf(label) },
    typeof score === "number" ? `${label} ${percent(score)}` : label));
  return [element("figure", { class: "overlaid" }, await loadImage(url), layers), element("ul", { class: "legend" }, legend)];
}

const pngUrl = base64 => `data:image/png;base64,${base64}`;

async function loadImage(url, name = "The image") {
  const image = element("img", { src: url, alt: name });
  await image.decode();
  return image;
}

// ── in a text ──

// Highlights each entity in the colour of its label.
function words(entities, { text }) {
  const letters = Array.from(String(text)); // the server counts characters, not UTF-16 units
  const spans = mergeTokens(entities.toSorted((one, other) => one.start - other.start));
  const hueOf = hues(spans.map(({ name }) => name));
  const parts = [];
  let at = 0;
  for (const { name, start, end, score } of spans) {
    if (start < at) continue;
    parts.push(letters.slice(at, start).join(""), element("mark", { "--hue": hueOf(name), title: percent(score) },
      letters.slice(start, end).join(""), element("small", {}, name)));
    at = end;
  }
  return [element("p", { class: "marked" }, ...parts, letters.slice(at).join(""))];
}

// Merges tokens of a word, and words that continue an entity (I-); the score is the lowest one.
function mergeTokens(tokens) {
  const spans = [];
  for (const { entity, entity_group: group, start, end, score } of tokens) {
    const name = (group ?? entity).replace(/^[BI]-/, "");
    const last = spans.at(-1);
    const continues = last?.name === name && (start === last.end || (entity?.startsWith("I-") && start === last.end + 1));
    if (continues) Object.assign(last, { end, score: Math.min(last.score, score) });
    else spans.push({ name, start, end, score });
  }
  return spans;
}

function hues(labels) {
  const unique = [...new Set(labels)];
  return label => HUES[unique.indexOf(label) % HUES.length];
}

function audioPlayer({ audio, sampling_rate: rate }) {
  const samples = Array.isArray(audio[0]) ? audio[0] : audio;
  return element("audio", { controls: true, src: URL.createObjectURL(wav(samples, rate)) });
}
