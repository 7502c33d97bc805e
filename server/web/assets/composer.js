// The message being written: its text and images, as the content of an API message.

import { button, element, find, setUpText } from "./dom.js";
import { dataUrl, fileNameOf, receiveFiles } from "./files.js";

const MAX_IMAGES = 20; // of a request, as on the server
const MAX_IMAGE_BYTES = 20e6;

export class Composer {
  constructor(form) {
    this.form = form;
    this.images = []; // data: URLs
    this.text = find("textarea", form);
    this.chooser = find("input[type=file]", form);
    this.fit = setUpText(this.text);
    this.chooser.onchange = () => {
      this.attach([...this.chooser.files]);
      this.chooser.value = "";
    };
    receiveFiles(form, files => this.attach(files));
    this.takeImages(false);
  }

  takeImages(takesImages) {
    this.takesImages = takesImages;
    this.chooser.parentElement.hidden = !takesImages;
  }

  async attach(files) {
    const fit = files.filter(({ type, size }) => type.startsWith("image/") && size <= MAX_IMAGE_BYTES)
      .slice(0, this.takesImages ? MAX_IMAGES - this.images.length : 0);
    const reason = this.takesImages ? `Only images can be attached, ${MAX_IMAGES} of at most 20 MB each.` : "This model takes no images.";
    find(".notice", this.form).textContent = fit.length < files.length ? reason : "";
    this.images.push(...await Promise.all(fit.map(dataUrl)));
    this.showImages();
    this.text.focus();
  }

  showImages() {
    find(".attached", this.form).replaceChildren(...this.images.map((url, n) => button([element("img", { src: url, alt: "" }), "×"], () => {
      this.images.splice(n, 1);
      this.showImages();
      this.text.focus();
    }, { "aria-label": `Remove ${fileNameOf(url)}` })));
  }

  // Returns the content; an empty string if there is none.
  read() {
    const text = this.text.value.trim();
    if (!this.images.length) return text;
    const parts = this.images.map(url => ({ type: "image_url", image_url: { url } }));
    return text ? [...parts, { type: "text", text }] : parts;
  }

  write(content) {
    this.images = [];
    this.text.value = "";
    find(".notice", this.form).textContent = "";
    this.putBack(content);
  }

  // Puts a content before what has been written since.
  putBack(content) {
    this.images.unshift(...imagesOf(content));
    this.text.value = [textOf(content), this.text.value].filter(Boolean).join("\n");
    this.showImages();
    this.fit();
  }
}

export function textOf(content) {
  return typeof content === "string" ? content : content?.find(({ type }) => type === "text")?.text ?? "";
}

export function imagesOf(content) {
  return Array.isArray(content) ? content.flatMap(part => part.image_url?.url ?? []) : [];
}
