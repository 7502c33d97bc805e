// Image and audio files as input: chosen, dropped, pasted or recorded.

import { button, element, failure } from "./dom.js";
import { record } from "./record.js";

const names = new Map(); // of files, by data: URL, for the commands

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
  return names.get(url) ?? { "data:audio/": "recording", "data:video/": "video" }[url.slice(0, 11)] ?? "image.png";
}

const receivers = []; // [element, take]

// Calls `take` with files that are dropped anywhere on the page, or pasted, while `target` is visible.
export function receiveFiles(target, take) {
  receivers.push([target, take]);
}

// Without this, the browser would leave the page for a dropped file.
function onFiles(event) {
  const transfer = event.dataTransfer ?? event.clipboardData;
  if (!transfer?.types.includes("Files")) return;
  event.preventDefault();
  const [target, take] = receivers.find(([element]) => element.checkVisibility()) ?? [];
  target?.classList.toggle("over", event.type === "dragover");
  if (event.type !== "dragover") take?.([...transfer.files]);
}

for (const type of ["dragover", "drop", "paste"]) document.addEventListener(type, onFiles);
document.addEventListener("dragleave", () => receivers.forEach(([target]) => target.classList.remove("over")));

// A drop zone for a file, with a button to choose one and, for audio, one to record it.
// `file` is the current one; `onFile` is called with each new one.
export class FileField {
  file = null;
  onFile = () => {};

  constructor(zone, kind) {
    this.kind = kind;
    const chooser = element("input", {
      type: "file", class: "visually-hidden", accept: kind === "audio" ? "audio/*,video/webm" : "image/*",
      onchange: event => this.take(event.target.files[0]),
    });
    const noun = kind === "audio" ? "audio file" : "image";
    this.preview = element("div", { class: "preview" });
    zone.classList.add("dropzone");
    zone.append(this.preview, element("div", { class: "sources" },
      element("label", { class: "button quiet" }, `Choose an ${noun}`, chooser),
      kind === "audio" ? recorderButton(this) : null,
      element("span", { class: "hint" }, "or drop or paste one")));
    receiveFiles(zone, ([file]) => this.take(file));
  }

  take(file) {
    if (!file) return;
    if (this.url) URL.revokeObjectURL(this.url);
    this.file = file;
    this.url = URL.createObjectURL(file);
    const isAudio = this.kind === "audio";
    this.preview.replaceChildren(
      isAudio ? element("audio", { controls: true, src: this.url, "aria-label": file.name })
        : element("img", { src: this.url, alt: file.name }),
      element("span", { class: "note" }, `${file.name} · ${Math.ceil(file.size / 1000).toLocaleString("en")} kB`));
    this.onFile(file);
  }
}

function recorderButton(field) {
  let recording = null;
  const label = element("span", {}, "Record");
  const toggle = button([element("span", { class: "dot" }), label], async () => {
    toggle.disabled = true;
    try {
      if (recording) {
        field.take(await recording.stop());
        recording = null;
      } else {
        recording = await record(time => { label.textContent = `Stop · ${time}`; });
      }
    } catch (error) {
      recording = null;
      field.preview.replaceChildren(failure(error));
    }
    if (!recording) label.textContent = "Record";
    toggle.setAttribute("aria-pressed", recording !== null);
    toggle.disabled = false;
  }, { class: "quiet record", "aria-pressed": "false" });
  return toggle;
}
