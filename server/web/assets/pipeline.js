// POST /: whatever task is loaded. Its input is text, a picture, a sound or JSON, as /ready says;
// what comes back is shown by its shape (results.js).

import { call, timings } from "./api.js";
import { element, find, growing, seconds, sendingOnEnter, showing, unfolding } from "./dom.js";
import { exchange, json } from "./exchange.js";
import { dataUrl, FileField } from "./files.js";
import { results } from "./results.js";

const FILE = "$FILE"; // in an example: the dropped picture

export async function startPipeline(section, ready) {
  const examples = await (await fetch("assets/examples.json")).json();
  const { task, takes } = ready;
  const form = find("form", section);
  const object = examples.objects[task];
  const parts = {
    text: takes === "text",
    file: takes === "image" || takes === "audio" || JSON.stringify(object ?? "").includes(FILE),
    labels: task.startsWith("zero-shot-") && takes !== "json",
    objects: takes === "json",
  };
  for (const [name, needed] of Object.entries(parts)) find(`.${name}`, form).hidden = !needed;
  find("h2", section).textContent = title(task);
  const text = find("#pipeline-text", section);
  text.value = (examples.texts[task] ?? examples.texts.other).replace("[MASK]", ready.mask_token ?? "[MASK]");
  form.elements.objects.value = json(object ?? {});
  form.elements.labels.value = examples.labels.join(", ");
  find(".hint", form).textContent = parts.text ? "Enter runs · Shift+Enter for a new line" : "";

  const field = parts.file ? new FileField(find(".file", form), takes === "audio" ? "audio" : "image") : null;
  if (field && !parts.objects && !parts.labels) field.onFile = () => form.requestSubmit();
  const run = () => showing(section, () => send(() => read(form, parts, takes, field), field));
  form.onsubmit = event => {
    event.preventDefault();
    run();
  };
  sendingOnEnter(text, form);
  unfolding(form);
  section.addEventListener("shown", growing(text));
}

function title(task) {
  const words = task.replaceAll("-", " ");
  return words[0].toUpperCase() + words.slice(1);
}

// The request that the form asks for: raw where it can be, otherwise JSON.
async function read(form, parts, takes, field) {
  const { parameters, labels, objects } = form.elements;
  const chosen = parameters.value.trim() ? parsed(parameters.value, "parameters") : {};
  if (parts.labels) {
    chosen.candidate_labels = labels.value.split(",").map(each => each.trim()).filter(Boolean);
  }
  const file = field?.file;
  if (field && !file && (!parts.objects || objects.value.includes(FILE))) {
    throw new Error(`choose a ${takes === "audio" ? "sound file" : "picture"} first`);
  }
  const plain = !Object.keys(chosen).length;
  if (takes === "image" || takes === "audio") {
    if (plain) return { path: "./", file: typed(file, takes) };
    return { path: "./", body: { inputs: await dataUrl(file), parameters: chosen } };
  }
  let inputs = find("#pipeline-text", form).value;
  if (parts.objects) {
    inputs = parsed(objects.value, "input");
    if (file) inputs = withFile(inputs, await dataUrl(file));
  }
  return { path: "./", body: plain ? { inputs } : { inputs, parameters: chosen } };
}

// A file whose media type the server takes: browsers don't know all of them.
function typed(file, takes) {
  const known = file.type.startsWith(`${takes}/`) || file.type === "video/webm";
  return known ? file : new File([file], file.name, { type: "application/octet-stream" });
}

function withFile(value, url) {
  if (value === FILE) return url;
  if (Array.isArray(value)) return value.map(each => withFile(each, url));
  if (!value || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, withFile(each, url)]));
}

async function send(read, field) {
  const request = await read();
  const response = await call(request.path, { body: request.body ?? request.file });
  const answer = await response.json();
  const given = { picture: field?.kind === "image" ? field.url : null, text: request.body?.inputs };
  return [...await results(answer, given), element("p", { class: "note" }, figures(response)),
    exchange(request, () => answer)];
}

export function figures(response) {
  const { queue, batch, model } = timings(response);
  const size = response.headers.get("x-batch-size");
  const made = [
    model !== undefined && `${seconds(model)} in the model`,
    queue !== undefined && `${seconds(queue + (batch ?? 0))} of waiting`,
    size && `batch of ${size}`,
  ];
  return made.filter(Boolean).join(" · ");
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the ${what} is not valid JSON: ${error.message}`);
  }
}
