// Speech: transcribe a recording or a file by /v1/audio/transcriptions, with the times of segments.

import { call } from "./api.js";
import { chooseModel, clock, element, find, showOnSubmit } from "./dom.js";
import { exchange } from "./exchange.js";
import { FileField } from "./files.js";

const PATH = "v1/audio/transcriptions";

export function startSpeech(section, ready, models) {
  const model = chooseModel(section, models);
  const form = find("form", section);
  const field = new FileField(find(".file", form), "audio");
  showOnSubmit(section, () => transcribe(section, field.file, model()?.id ?? ready.transcription_model));
  field.onFile = () => form.requestSubmit();
}

async function transcribe(section, file, model) {
  const language = find("[name=language]", section).value.trim();
  if (!file) throw new Error("record something or choose an audio file first");
  const form = { model, response_format: "verbose_json", ...(language && { language }) };
  const body = new FormData();
  for (const [name, value] of Object.entries(form)) body.append(name, value);
  body.append("file", file, file.name);
  const document = await (await call(PATH, { body })).json();
  return [...transcript(document), exchange({ path: PATH, form, file }, () => document)];
}

function transcript({ text, segments = [], language, duration }) {
  const about = [language, duration && `${Number(duration).toFixed(1)} s of audio`].filter(Boolean);
  const rows = segments.map(({ start, text: segment }) => element("li", {},
    element("time", {}, clock(start)), element("span", {}, segment.trim())));
  return [
    rows.length > 1 ? element("ol", { class: "segments" }, ...rows) : element("p", { class: "transcript" }, text || "No speech was found."),
    element("p", { class: "note" }, about.join(" · ")),
  ];
}
