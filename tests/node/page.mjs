// Runs modules of the page without a browser. argv: the folder with a copy of the page's files. Reads a
// JSON list of [name of a function below, argument] from standard input, prints the results as JSON.

import { pathToFileURL } from "node:url";
import { readFileSync } from "node:fs";

let created = 0;

class FakeElement {
  constructor(tag) {
    created++;
    Object.assign(this, { tag, attributes: {}, children: [], parent: null });
  }

  append(child) {
    this.children.push(child);
    if (child instanceof FakeElement) child.parent = this;
  }

  remove() {
    this.parent.children.splice(this.parent.children.lastIndexOf(this), 1);
  }

  setAttribute(name, value) {
    this.attributes[name] = value;
  }

  get textContent() {
    return this.children.map(child => child.textContent ?? child).join("");
  }
}

globalThis.document = { createElement: tag => new FakeElement(tag), addEventListener() {}, baseURI: "http://a.example/" };
const load = name => import(pathToFileURL(`${process.argv[2]}/${name}`));
const { markdown, MarkdownView } = await load("markdown.js");
const { surplus } = await load("store.js");
const { asPython } = await load("exchange.js");

const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const markup = node => {
  if (typeof node === "string") return escaped(node);
  const attributes = Object.entries(node.attributes).map(([name, value]) => ` ${name}=${value}`);
  return `<${node.tag}${attributes.join("")}>${node.children.map(markup).join("")}</${node.tag}>`;
};

function depth(root) {
  let [deepest, level] = [0, [root]];
  for (; level.length; deepest++) level = level.flatMap(node => node.children ?? []);
  return deepest;
}

const functions = {
  markup: text => markdown(text).map(markup).join(""),
  // The number of elements, and the depth of the deepest one; the text is a unit, repeated.
  size({ unit, times }) {
    created = 0;
    const children = markdown(unit.repeat(times));
    return { created, depth: depth({ children }) };
  },
  // The elements created while a text of equal parts is drawn after each part, and whether the result is
  // that of the whole text.
  stream({ parts }) {
    const parent = new FakeElement("div");
    const view = new MarkdownView(parent);
    created = 0;
    let text = "";
    for (const part of parts) view.draw(text += part);
    const streamed = created;
    const shown = parent.children.map(markup).join("");
    return { created: streamed, same: shown === markdown(text).map(markup).join("") };
  },
  // The Python code of a request with a file of so many characters.
  python: ({ content, chars }) => asPython({ path: "", body: { content, url: `data:image/png;base64,${"A".repeat(chars)}` } }),
  surplus: ([summaries, count, bytes]) => surplus(summaries, count, bytes).map(({ id }) => id),
};

const calls = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(calls.map(([name, argument]) => functions[name](argument))));
