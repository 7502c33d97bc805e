// What a pipeline answers, shown by its shape: bars, boxes over the picture, highlighted words,
// masks, a picture, a sound, text; anything else as JSON.

import { drawing, element } from "./dom.js";
import { json } from "./exchange.js";
import { wav } from "./record.js";

const HUES = [165, 25, 250, 320, 90, 210, 55, 285]; // of labels, in the order in which they come

const WIDEST = 760; // pixels of the column, as in page.css

// The first that fits draws. `given` is {picture: its address or null, text: what was asked}.
const SHAPES = [
  { fits: each => each.length === 0, draw: () => [element("p", {}, "Nothing was found.")] },
  { fits: all(each => each.box), draw: boxes },
  { fits: all(each => typeof each.mask === "string"), draw: masks },
  { fits: all(each => "start" in each && ("entity" in each || "entity_group" in each)), draw: words },
  { fits: all(each => typeof each.score === "number"), draw: list => bars(list) },
  { fits: all(all(each => typeof each.score === "number")), draw: several },
  { fits: all(each => typeof each.generated_text === "string"), draw: texts },
];

export async function results(answer, given) {
  const list = listed(answer);
  const shape = list && SHAPES.find(each => each.fits(list));
  if (shape) return shape.draw(list, given);
  if (typeof answer.text === "string") return [element("p", { class: "said" }, answer.text)];
  if (typeof answer.depth === "string") return [picture(answer.depth, "Depth")];
  if (answer.audio && answer.sampling_rate) return [sound(answer)];
  return [element("pre", { tabindex: "0" }, json(answer))];
}

function all(fits) {
  return list => Array.isArray(list) && list.length > 0 && list.every(each => each && fits(each));
}

// zero-shot-classification answers with two lists side by side.
function listed(answer) {
  if (Array.isArray(answer)) return answer;
  const { labels, scores } = answer;
  return labels && scores ? labels.map((label, n) => ({ label, score: scores[n] })) : null;
}

function bars(scores, hueOf = null) {
  const rows = scores.map(({ label, token_str: token, answer, sequence, score }) => element("li",
    hueOf ? { "--accent": `hsl(${hueOf(label)} 85% 45%)` } : {},
    element("span", { class: "label", title: sequence ?? "" }, String(label ?? token ?? answer)),
    element("span", { class: "bar", "--share": Math.max(0, Math.min(1, score)) }),
    element("span", { class: "figure" }, percent(score))));
  return [element("ol", { class: "bars" }, ...rows)];
}

function several(lists) {
  return lists.flatMap((list, n) => [element("h3", {}, `${n + 1}`), ...bars(list)]);
}

function texts(list) {
  return list.map(each => element("p", { class: "said" }, each.generated_text));
}

const percent = score => `${(100 * score).toFixed(score < 0.1 ? 2 : 1)} %`;

// ── in a picture ──

async function boxes(found, { picture: address }) {
  if (!address) return bars(found);
  const image = await loaded(address);
  const { naturalWidth: width, naturalHeight: height } = image;
  const hueOf = hues(found.map(each => each.label));
  const unit = width / Math.min(width, document.body.clientWidth, WIDEST); // a pixel of the screen
  const drawn = found.map(({ label, score, box: { xmin, ymin, xmax, ymax } }) => drawing("g", { "--hue": hueOf(label) },
    drawing("rect", { x: xmin, y: ymin, width: xmax - xmin, height: ymax - ymin, "stroke-width": 2 * unit }),
    drawing("text", { x: xmin + 4 * unit, y: ymin + 14 * unit, "font-size": 13 * unit },
      `${label} ${percent(score)}`)));
  const over = drawing("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...drawn);
  image.alt = `The picture, with ${found.length} boxes`;
  return [element("figure", { class: "overlaid" }, image, over), ...bars(found, hueOf)];
}

async function masks(found, { picture: address }) {
  const hueOf = hues(found.map(each => each.label));
  const layers = await Promise.all(found.map(each => layer(each.mask, hueOf(each.label))));
  const legend = element("ul", { class: "legend" }, ...found.map(({ label, score }) => element("li", { "--hue": hueOf(label) },
    score === null || score === undefined ? label : `${label} ${percent(score)}`)));
  const below = address ? [await loaded(address)] : [];
  return [element("figure", { class: "overlaid" }, ...below, ...layers), legend];
}

// A mask's white as a see-through colour.
async function layer(mask, hue) {
  const image = await loaded(`data:image/png;base64,${mask}`);
  const canvas = element("canvas", { width: image.naturalWidth, height: image.naturalHeight, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let n = 0; n < pixels.data.length; n += 4) pixels.data[n + 3] = pixels.data[n] * 0.55;
  context.putImageData(pixels, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = `hsl(${hue} 80% 45%)`;
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

async function loaded(address) {
  const image = element("img", { src: address, alt: "The picture" });
  await image.decode();
  return image;
}

function picture(base64, name) {
  return element("figure", {}, element("img", { src: `data:image/png;base64,${base64}`, alt: name }));
}

// ── in a text ──

// Each found word in the colour of its label; what lies between as it is.
function words(found, { text }) {
  const letters = Array.from(String(text)); // the server counts characters, not UTF-16's halves
  const spans = joined(found.toSorted((one, other) => one.start - other.start));
  const hueOf = hues(spans.map(each => each.name));
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

// Pieces of a word, and words that go on with an entity (I-), as one: the least sure score is its own.
function joined(pieces) {
  const spans = [];
  for (const { entity, entity_group: group, start, end, score } of pieces) {
    const name = (group ?? entity).replace(/^[BI]-/, "");
    const last = spans.at(-1);
    const goesOn = last?.name === name && (start === last.end || (entity?.startsWith("I-") && start === last.end + 1));
    if (goesOn) Object.assign(last, { end, score: Math.min(last.score, score) });
    else spans.push({ name, start, end, score });
  }
  return spans;
}

function hues(labels) {
  const known = [...new Set(labels)];
  return label => HUES[known.indexOf(label) % HUES.length];
}

function sound({ audio, sampling_rate: rate }) {
  const samples = Array.isArray(audio[0]) ? audio[0] : audio;
  return element("audio", { controls: true, src: URL.createObjectURL(wav(samples, rate)) });
}
