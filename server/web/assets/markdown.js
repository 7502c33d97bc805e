// Markdown as elements, as far as models write it: paragraphs, headings, nested lists, quotes, code,
// tables, rules, bold, italic, links. Text never becomes markup.

import { element } from "./dom.js";

const FENCE = /^\s*(```|~~~)\s*([\w+-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const COLUMNS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)+\|? *$|^ *\| *:?-+:? *\| *$/; // below a table's header
// The leftmost match is used: `code`, **bold**, *italic*, [text](https://…).
const INLINE = /`([^`\n]+)`|\*\*(?=\S)([^\n]+?)\*\*|\*(?=\S)([^*\n]+?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

export function markdown(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const elements = [];
  while (lines.length) elements.push(takeBlock(lines));
  return elements.filter(block => block !== null);
}

// Removes the lines of the first block; returns its element.
function takeBlock(lines) {
  const startsTable = isTable(lines[0], 0, lines);
  const line = lines.shift();
  if (!line.trim()) return null;
  const fence = FENCE.exec(line);
  if (fence) {
    const end = lines.findIndex(next => next.trim() === fence[1]);
    const code = lines.splice(0, end < 0 ? lines.length : end + 1);
    if (end >= 0) code.pop();
    return element("pre", { tabindex: "0" }, element("code", {}, code.join("\n")));
  }
  const heading = HEADING.exec(line);
  if (heading) return element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  if (RULE.test(line)) return element("hr");
  if (ITEM.test(line)) return takeList(line, lines);
  if (QUOTE.test(line)) {
    const quoted = [line, ...takeWhile(lines, next => QUOTE.test(next))];
    return element("blockquote", {}, ...inline(quoted.map(next => QUOTE.exec(next)[1]).join("\n")));
  }
  if (startsTable) return takeTable(line, lines);
  return element("p", {}, ...inline([line, ...takeWhile(lines, continues)].join("\n")));
}

function takeWhile(lines, matches) {
  const end = lines.findIndex((...args) => !matches(...args));
  return lines.splice(0, end < 0 ? lines.length : end);
}

// Returns whether a line continues the paragraph before it.
function continues(line, n, lines) {
  const startsBlock = [FENCE, HEADING, RULE, ITEM, QUOTE].some(kind => kind.test(line));
  return line.trim() && !startsBlock && !isTable(line, n, lines);
}

// Lines indented deeper than an item's marker belong to the item.
function takeList(line, lines) {
  const first = ITEM.exec(line)[2];
  const items = [];
  for (;;) {
    const [, indent, , text] = ITEM.exec(line);
    const inside = takeWhile(lines, next => !next.trim() || indentOf(next) > indent.length);
    const minIndent = Math.min(...inside.filter(next => next.trim()).map(indentOf));
    const content = inside.map(next => next.slice(minIndent));
    const paragraph = [text, ...takeWhile(content, continues)].join(" ");
    items.push(element("li", {}, ...inline(paragraph), ...blocks(content)));
    const next = ITEM.exec(lines[0] ?? "");
    if (!next || RULE.test(lines[0]) || (next[2] === undefined) !== (first === undefined)) break;
    line = lines.shift();
  }
  return first === undefined ? element("ul", {}, ...items) : element("ol", { start: first }, ...items);
}

const indentOf = line => line.length - line.trimStart().length;

const isTable = (line, n, lines) => line.includes("|") && COLUMNS.test(lines[n + 1] ?? "");

function takeTable(header, lines) {
  const width = cells(header).length;
  lines.shift(); // the line below the header
  const rows = takeWhile(lines, next => next.includes("|")).map(cells);
  const row = (tag, texts) => element("tr", {},
    ...Array.from({ length: width }, (_, n) => element(tag, {}, ...inline(texts[n] ?? ""))));
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {},
    element("thead", {}, row("th", cells(header))),
    element("tbody", {}, ...rows.map(texts => row("td", texts)))));
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map(text => text.trim().replaceAll("\\|", "|"));
}

function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    nodes.push(text.slice(0, match.index), inlineElement(match));
  }
  return [...nodes, text].filter(node => node !== "");
}

function inlineElement([, code, bold, italic, label, link]) {
  if (code !== undefined) return element("code", {}, code);
  if (bold !== undefined) return element("strong", {}, ...inline(bold));
  if (italic !== undefined) return element("em", {}, ...inline(italic));
  return element("a", { href: link, target: "_blank", rel: "noopener noreferrer" }, label);
}
