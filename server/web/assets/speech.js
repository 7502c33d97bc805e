// Speech: transcribe a recording or a file by /v1/audio/transcriptions, with the times of segments.

import { chooseModel, clock, element, find, showOnSubmit } from "./dom.js";
import { ask } from "./exchange.js";
import { FileField } from "./files.js";

export function startSpeech(section, ready, models) {
  const model = chooseModel(section, models);
  const { language } = find("form", section).elements;
  const field = new FileField(find(".file", section), "audio");
  showOnSubmit(section, () => {
    const { file } = field;
    if (!file) throw new Error("record something or choose an audio file first");
    const form = { model: model()?.id ?? ready.transcription_model, response_format: "verbose_json" };
    if (language.value.trim()) form.language = language.value.trim();
    return ask({ path: "v1/audio/transcriptions", form, file }, transcript, about);
  });
  field.onFile = () => language.form.requestSubmit();
}

function transcript({ text, segments = [] }) {
  if (segments.length < 2) return [element("p", { class: "transcript" }, text || "No speech was found.")];
  return [element("ol", { class: "segments" }, segments.map(segment => element("li", {},
    element("time", {}, clock(segment.start)), element("span", {}, segment.text.trim()))))];
}

function about({ language, duration }) {
  return [language, duration && `${Number(duration).toFixed(1)} s of audio`];
}
