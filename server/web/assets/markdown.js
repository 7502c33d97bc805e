// The little of Markdown that models write, as elements: paragraphs, headings, lists within lists,
// quotes, code, tables, rules, bold, italic, links. The text itself only ever becomes text.

import { element } from "./dom.js";

const FENCE = /^\s*(```|~~~)\s*([\w+-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const COLUMNS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)+\|? *$|^ *\| *:?-+:? *\| *$/; // below a table's head
// The first that begins soonest: `code`, **bold**, *italic*, [text](https://…).
const INLINE = /`([^`\n]+)`|\*\*(?=\S)([^\n]+?)\*\*|\*(?=\S)([^*\n]+?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

export function markdown(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const made = [];
  while (lines.length) made.push(takeBlock(lines));
  return made.filter(block => block !== null);
}

// Takes the lines of one block from the front.
function takeBlock(lines) {
  const beginsTable = isTable(lines[0], 0, lines);
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
  if (RULE.test(line)) return element("hr");
  if (ITEM.test(line)) return takeList(line, lines);
  if (QUOTE.test(line)) {
    const quoted = [line, ...takeWhile(lines, each => QUOTE.test(each))];
    return element("blockquote", {}, ...inline(quoted.map(each => QUOTE.exec(each)[1]).join("\n")));
  }
  if (beginsTable) return takeTable(line, lines);
  return element("p", {}, ...inline([line, ...takeWhile(lines, goesOn)].join("\n")));
}

function takeWhile(lines, fits) {
  const end = lines.findIndex((...at) => !fits(...at));
  return lines.splice(0, end < 0 ? lines.length : end);
}

// Whether a line belongs to the paragraph before it.
function goesOn(line, n, lines) {
  const begins = [FENCE, HEADING, RULE, ITEM, QUOTE].some(kind => kind.test(line));
  return line.trim() && !begins && !isTable(line, n, lines);
}

// What stands deeper than an item's mark is the item's.
function takeList(line, lines) {
  const first = ITEM.exec(line)[2];
  const items = [];
  for (;;) {
    const [, indent, , text] = ITEM.exec(line);
    const inside = takeWhile(lines, each => !each.trim() || indentOf(each) > indent.length);
    const least = Math.min(...inside.filter(each => each.trim()).map(indentOf));
    const own = inside.map(each => each.slice(least));
    const words = [text, ...takeWhile(own, goesOn)].join(" ");
    items.push(element("li", {}, ...inline(words), ...blocks(own)));
    const next = ITEM.exec(lines[0] ?? "");
    if (!next || RULE.test(lines[0]) || (next[2] === undefined) !== (first === undefined)) break;
    line = lines.shift();
  }
  return first === undefined ? element("ul", {}, ...items) : element("ol", { start: first }, ...items);
}

const indentOf = line => line.length - line.trimStart().length;

const isTable = (line, n, lines) => line.includes("|") && COLUMNS.test(lines[n + 1] ?? "");

function takeTable(head, lines) {
  const width = cells(head).length;
  lines.shift(); // the line below the head
  const rows = takeWhile(lines, each => each.includes("|")).map(cells);
  const row = (tag, words) => element("tr", {},
    ...Array.from({ length: width }, (_, n) => element(tag, {}, ...inline(words[n] ?? ""))));
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {},
    element("thead", {}, row("th", cells(head))),
    element("tbody", {}, ...rows.map(words => row("td", words)))));
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map(each => each.trim().replaceAll("\\|", "|"));
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
