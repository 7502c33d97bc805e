// The little of Markdown that models write, as elements: paragraphs, headings, lists, quotes, code,
// bold, italic, links. The text itself only ever becomes text.

import { element } from "./dom.js";

const FENCE = /^\s*(```|~~~)\s*([\w+-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
// The first that begins soonest: `code`, **bold**, *italic*, [text](https://…).
const INLINE = /`([^`\n]+)`|\*\*(?=\S)([^\n]+?)\*\*|\*(?=\S)([^*\n]+?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  while (lines.length) blocks.push(takeBlock(lines));
  return blocks.filter(block => block !== null);
}

// Takes the lines of one block from the front.
function takeBlock(lines) {
  const line = lines.shift();
  if (!line.trim()) return null;
  const fence = FENCE.exec(line);
  if (fence) {
    const end = lines.findIndex(each => each.trim() === fence[1]);
    const code = lines.splice(0, end < 0 ? lines.length : end + 1);
    if (end >= 0) code.pop();
    return element("pre", { tabindex: "0" }, element("code", {}, code.join("\n")));
  }
  const heading = HEADING.exec(line);
  if (heading) return element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  if (ITEM.test(line)) return list([line, ...takeWhile(lines, each => ITEM.test(each))]);
  if (QUOTE.test(line)) {
    const quoted = [line, ...takeWhile(lines, each => QUOTE.test(each))];
    return element("blockquote", {}, ...inline(quoted.map(each => QUOTE.exec(each)[1]).join("\n")));
  }
  const rest = takeWhile(lines, each => each.trim() && ![FENCE, HEADING, ITEM, QUOTE].some(kind => kind.test(each)));
  return element("p", {}, ...inline([line, ...rest].join("\n")));
}

function takeWhile(lines, fits) {
  const end = lines.findIndex(line => !fits(line));
  return lines.splice(0, end < 0 ? lines.length : end);
}

function list(lines) {
  const first = ITEM.exec(lines[0])[1];
  const items = lines.map(line => element("li", {}, ...inline(ITEM.exec(line)[2])));
  return first === undefined ? element("ul", {}, ...items) : element("ol", { start: first }, ...items);
}

function inline(text) {
  const made = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    made.push(text.slice(0, found.index), inlineElement(found));
  }
  return [...made, text].filter(each => each !== "");
}

function inlineElement([, code, bold, italic, label, link]) {
  if (code !== undefined) return element("code", {}, code);
  if (bold !== undefined) return element("strong", {}, ...inline(bold));
  if (italic !== undefined) return element("em", {}, ...inline(italic));
  return element("a", { href: link, target: "_blank", rel: "noopener noreferrer" }, label);
}
