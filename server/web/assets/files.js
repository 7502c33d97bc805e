// Pictures and sounds on their way in: chosen, dropped, pasted or recorded.

import { element, failure } from "./dom.js";
import { record } from "./record.js";

const names = new Map(); // of files by their data: URLs, for lines to type

export async function dataUrl(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
  names.set(url, file.name);
  return url;
}

export function fileNameOf(url) {
  return names.get(url) ?? "picture.png";
}

// A place to drop a file, with a button to choose one and, for sound, one to record it.
// `file` is what is there now; `onFile` hears of each new one.
export class FileField {
  file = null;
  onFile = () => {};

  constructor(place, kind) {
    this.kind = kind;
    this.place = place;
    const chooser = element("input", {
      type: "file", class: "unseen", accept: kind === "audio" ? "audio/*,video/webm" : "image/*",
      onchange: event => this.take(event.target.files[0]),
    });
    const noun = kind === "audio" ? "sound file" : "picture";
    this.shown = element("div", { class: "shown" });
    place.classList.add("dropzone");
    place.append(this.shown, element("div", { class: "ways" },
      element("label", { class: "button quiet" }, `Choose a ${noun}`, chooser),
      kind === "audio" ? recorderButton(this) : null,
      element("span", { class: "hint" }, `or drop one here${kind === "image" ? ", or paste it" : ""}`)));
    this.listen(place);
  }

  listen(place) {
    place.ondragover = event => {
      event.preventDefault();
      place.classList.add("over");
    };
    place.ondragleave = () => place.classList.remove("over");
    place.ondrop = event => {
      event.preventDefault();
      place.classList.remove("over");
      this.take(event.dataTransfer.files[0]);
    };
    document.addEventListener("paste", event => {
      if (place.checkVisibility() && event.clipboardData.files.length) {
        this.take(event.clipboardData.files[0]);
      }
    });
  }

  take(file) {
    if (!file) return;
    if (this.url) URL.revokeObjectURL(this.url);
    this.file = file;
    this.url = URL.createObjectURL(file);
    const played = this.kind === "audio";
    this.shown.replaceChildren(
      played ? element("audio", { controls: true, src: this.url, "aria-label": file.name })
        : element("img", { src: this.url, alt: file.name }),
      element("span", { class: "note" }, `${file.name} · ${Math.ceil(file.size / 1000).toLocaleString("en")} kB`));
    this.onFile(file);
  }
}

function recorderButton(field) {
  let recording = null;
  const label = element("span", {}, "Record");
  const button = element("button", { type: "button", class: "quiet record", "aria-pressed": "false" },
    element("span", { class: "dot" }), label);
  button.onclick = async () => {
    button.disabled = true;
    try {
      if (recording) {
        field.take(await recording.stop());
        recording = null;
      } else {
        recording = await record(time => { label.textContent = `Stop · ${time}`; });
      }
    } catch (error) {
      recording = null;
      field.shown.replaceChildren(failure(error));
    }
    if (!recording) label.textContent = "Record";
    button.setAttribute("aria-pressed", recording !== null);
    button.disabled = false;
  };
  return button;
}
