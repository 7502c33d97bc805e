// Speech: a recording or a file to /v1/audio/transcriptions, and its words by their times.

import { call } from "./api.js";
import { element, find, showing } from "./dom.js";
import { exchange } from "./exchange.js";
import { FileField } from "./files.js";

const PATH = "v1/audio/transcriptions";

export function startSpeech(section, ready, models) {
  const model = models.find(each => each.serves === "transcription")?.id ?? ready.transcription_model;
  const form = find("form", section);
  const field = new FileField(find(".file", form), "audio");
  form.onsubmit = event => {
    event.preventDefault();
    showing(section, () => transcribe(section, field.file, model));
  };
  field.onFile = () => form.requestSubmit();
}

async function transcribe(section, file, model) {
  const language = find("[name=language]", section).value.trim();
  if (!file) throw new Error("record something or choose a sound file first");
  const form = { model, response_format: "verbose_json", ...(language && { language }) };
  const body = new FormData();
  for (const [name, value] of Object.entries(form)) body.append(name, value);
  body.append("file", file, file.name);
  const answer = await (await call(PATH, { body })).json();
  return [...transcript(answer), exchange({ path: PATH, form, file }, () => answer)];
}

function transcript({ text, segments = [], language, duration }) {
  const about = [language, duration && `${Number(duration).toFixed(1)} s of sound`].filter(Boolean);
  const rows = segments.map(({ start, text: said }) => element("li", {},
    element("time", {}, clock(start)), element("span", {}, said.trim())));
  return [
    rows.length > 1 ? element("ol", { class: "segments" }, ...rows) : element("p", { class: "said" }, text || "Nothing was heard."),
    element("p", { class: "note" }, about.join(" · ")),
  ];
}

function clock(at) {
  return `${Math.floor(at / 60)}:${String(Math.floor(at % 60)).padStart(2, "0")}`;
}
