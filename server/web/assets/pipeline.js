// POST /: a pipeline and its kind of input: text, image, audio or JSON. results.js shows the result by its
// shape.

import { chooseModel, find, setUpSettings, setUpText, showOnSubmit } from "./dom.js";
import { ask, json, parseJson } from "./exchange.js";
import { dataUrl, FileField } from "./files.js";
import { results } from "./results.js";
import { speak, TASK } from "./speak.js";

const FILE = "$FILE"; // placeholder in an example: the dropped image

// `ready` describes the first of the pipelines.
export async function startPipeline(section, ready, [first, ...others]) {
  const examples = await (await fetch("assets/examples.json")).json();
  const pipelines = [{ ...first, ...ready, path: "./" }, ...others.map(({ id, tasks: [task], ...other }) => ({
    id, task, mask_token: other.mask_token, path: `./?model=${encodeURIComponent(id)}`,
    takes: task in examples.objects ? "json" : other.input_modalities[0],
  }))];
  const blank = section.cloneNode(true);
  const show = chosen => {
    section.replaceChildren(...blank.cloneNode(true).childNodes);
    setUp(section, pipelines[chosen], examples);
    chooseModel(section, pipelines, show, chosen);
  };
  show(0);
}

function setUp(section, pipeline, examples) {
  const { task, takes } = pipeline;
  const form = find("form", section);
  const object = examples.objects[task];
  const parts = {
    text: takes === "text",
    file: takes === "image" || takes === "audio" || JSON.stringify(object ?? "").includes(FILE),
    labels: task.startsWith("zero-shot-") && takes !== "json",
    objects: takes === "json",
  };
  for (const [name, shown] of Object.entries(parts)) find(`.${name}`, form).hidden = !shown;
  find("h2", section).textContent = title(task);
  const text = find(".text", form);
  text.value = (examples.texts[task] ?? examples.texts.other).replace("[MASK]", pipeline.mask_token ?? "[MASK]");
  form.elements.objects.value = json(object ?? {});
  form.elements.labels.value = examples.labels.join(", ");
  find(".hint", form).textContent = parts.text ? "Enter runs · Shift+Enter for a new line" : "";

  const field = parts.file ? new FileField(find(".file", form), takes === "audio" ? "audio" : "image") : null;
  if (field && !parts.objects && !parts.labels) field.onFile = () => form.requestSubmit();
  showOnSubmit(section, async () => {
    const request = await readForm(form, parts, pipeline, field);
    if (task === TASK) return speak(pipeline.id, request.body.inputs, request.body.parameters);
    const input = { image: field?.kind === "image" ? field.url : null, text: request.body?.inputs };
    return ask(request, result => results(result, input));
  });
  setUpText(text);
  setUpSettings(form);
}

function title(task) {
  const words = task.replaceAll("-", " ");
  return words[0].toUpperCase() + words.slice(1);
}

// Returns the form's request: raw input where possible, otherwise JSON.
async function readForm(form, parts, { takes, path }, field) {
  const { parameters, labels, objects } = form.elements;
  const values = parameters.value.trim() ? parseJson(parameters.value, "parameters:") : {};
  if (parts.labels) {
    values.candidate_labels = labels.value.split(",").map(label => label.trim()).filter(Boolean);
  }
  const file = field?.file;
  if (field && !file && (!parts.objects || objects.value.includes(FILE))) {
    throw new Error(`choose an ${takes === "audio" ? "audio file" : "image"} first`);
  }
  const hasParameters = Object.keys(values).length > 0;
  if (takes === "image" || takes === "audio") {
    if (!hasParameters) return { path, file: withMediaType(file, takes) };
    return { path, body: { inputs: await dataUrl(file), parameters: values } };
  }
  let inputs = find(".text", form).value;
  if (parts.objects) {
    const url = file ? await dataUrl(file) : FILE;
    inputs = parseJson(objects.value, "input:", (key, value) => (value === FILE ? url : value));
  }
  return { path, body: hasParameters ? { inputs, parameters: values } : { inputs } };
}

// Returns a file with a media type that the server takes: browsers do not know all types.
function withMediaType(file, takes) {
  const known = file.type.startsWith(`${takes}/`) || file.type === "video/webm";
  return known ? file : new File([file], file.name, { type: "application/octet-stream" });
}
