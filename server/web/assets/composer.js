// The message being written: its text and files, as the content of an API message.

import { button, element, find, setUpText } from "./dom.js";
import { dataUrl, fileNameOf, receiveFiles } from "./files.js";

const MAX_FILES = 20; // of a request, as on the server
const MAX_FILE_BYTES = 20e6;
const PLURALS = { image: "images", audio: "recordings", video: "videos" };

export class Composer {
  constructor(form) {
    this.form = form;
    this.files = []; // data: URLs
    this.text = find("textarea", form);
    this.chooser = find("input[type=file]", form);
    this.fit = setUpText(this.text);
    this.chooser.onchange = () => {
      this.attach([...this.chooser.files]);
      this.chooser.value = "";
    };
    receiveFiles(form, files => this.attach(files));
    this.take([]);
  }

  // Takes files of the model's modalities, as far as it has such kinds.
  take(modalities) {
    this.kinds = modalities.filter(kind => kind in PLURALS);
    this.chooser.accept = this.kinds.map(kind => `${kind}/*`).join();
    this.chooser.parentElement.hidden = !this.kinds.length;
  }

  async attach(files) {
    const fit = files.filter(({ type, size }) => this.kinds.includes(type.split("/")[0]) && size <= MAX_FILE_BYTES)
      .slice(0, MAX_FILES - this.files.length);
    const plurals = this.kinds.map(kind => PLURALS[kind]).join(", ");
    const reason = plurals ? `Only ${plurals} can be attached, ${MAX_FILES} of at most 20 MB each.` : "This model takes no files.";
    find(".notice", this.form).textContent = fit.length < files.length ? reason : "";
    this.files.push(...await Promise.all(fit.map(dataUrl)));
    this.showFiles();
    this.text.focus();
  }

  showFiles() {
    find(".attached", this.form).replaceChildren(...this.files.map((url, n) => button([kindOf(url) === "image" ? element("img", { src: url, alt: "" }) : fileNameOf(url), "×"], () => {
      this.files.splice(n, 1);
      this.showFiles();
      this.text.focus();
    }, { "aria-label": `Remove ${fileNameOf(url)}` })));
  }

  // Returns the content; an empty string if there is none.
  read() {
    const text = this.text.value.trim();
    if (!this.files.length) return text;
    const parts = this.files.map(url => ({ type: `${kindOf(url)}_url`, [`${kindOf(url)}_url`]: { url } }));
    return text ? [...parts, { type: "text", text }] : parts;
  }

  write(content) {
    this.files = [];
    this.text.value = "";
    find(".notice", this.form).textContent = "";
    this.putBack(content);
  }

  // Puts a content before what has been written since.
  putBack(content) {
    this.files.unshift(...filesOf(content));
    this.text.value = [textOf(content), this.text.value].filter(Boolean).join("\n");
    this.showFiles();
    this.fit();
  }
}

export function textOf(content) {
  return typeof content === "string" ? content : content?.find(({ type }) => type === "text")?.text ?? "";
}

export function filesOf(content) {
  return Array.isArray(content) ? content.flatMap(part => (part.image_url ?? part.audio_url ?? part.video_url)?.url ?? []) : [];
}

export function kindOf(url) {
  return url.match(/^data:(audio|video)\//)?.[1] ?? "image";
}
