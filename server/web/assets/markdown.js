// Markdown as elements, as far as models write it: paragraphs, headings, nested lists, quotes, code,
// tables, rules, emphasis, strike, links. Formulas stay as written. Text never becomes markup, an image becomes
// a link, and a link leads to http, https or mailto. The work is linear in the text: spans and nesting are bounded.

import { copyButton, element } from "./dom.js";

const MAX_DEPTH = 8; // of nested lists and quotes, and of emphasis; deeper ones are text

const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?: *\1){2,}\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const START = /[\\`$![<*_~]|\bhttps?:/gi; // of a span
const LABEL = /!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\]){0,1000})\]/;
const TARGET = /\(\s*<?((?:https?:\/\/|mailto:)[^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/;
// Spans in the order in which they are tried, with what they become; spans within emphasis are read, too. A price is
// no formula: a `$` after a space or before a digit ends nothing.
const SPANS = [
  [/\$\$.{1,1000}?\$\$|\\\(.{1,1000}?\\\)|\\\[.{1,1000}?\\\]/ys, formula],
  [/(?<![\p{L}\p{N}$])\$(?=\S).{1,1000}?(?<![\s\\])\$(?![\d$])/yus, formula],
  [/\\([!-/:-@[-`{-~])/y, ([, character]) => [character]],
  [/(?<!`)(`{1,8})(?!`)(.{1,1000}?)(?<!`)\1(?!`)/ys, ([, , code]) =>
    [element("code", {}, visible(code.trim() ? code.replace(/^ (.*) $/s, "$1") : code))]],
  [new RegExp(LABEL.source + TARGET.source, "iys"), ([, label, url], depth, inLink) => !inLink && link(url, inline(label, depth, true))],
  [/<((?:https?:\/\/|mailto:)[^\s<>]*)>/iy, ([, url], depth, inLink) => !inLink && link(url, [url])],
  [/\bhttps?:\/\/[^\s<>[\]`|]*[^\s<>[\]`|.,:;!?'")*_~]/iy, ([url], depth, inLink) => !inLink && link(url, [url])],
  [emphasis(/\*\*(?=\*?[^\s*])/, /(?<=[^\s\\])\*\*(?!\*)/), "strong"],
  [emphasis(/\*(?=[^\s*])/, /(?<=[^\s*\\]|\*\*)\*(?!\*)/), "em"],
  [emphasis(/(?<![\p{L}\p{N}_])__(?=_?[^\s_])/u, /(?<=[^\s\\])__(?![\p{L}\p{N}_])/u), "strong"],
  [emphasis(/(?<![\p{L}\p{N}_])_(?=[^\s_])/u, /(?<=[^\s_\\]|__)_(?![\p{L}\p{N}_])/u), "em"],
  [emphasis(/(?<!~)~~(?=[^\s~])/, /(?<=[^\s\\])~~(?!~)/), "del"],
];

// Code within emphasis may contain its delimiters. No two alternatives read the same text.
function emphasis(start, end) {
  return new RegExp(`${start.source}((?:\`[^\`]{1,300}\`|[^\`]|\`(?![^\`]{1,300}\`)){1,1000}?)${end.source}`, "yus");
}

export function markdown(text) {
  return [...blocks(text.split("\n"))].map(({ node }) => node);
}

// Draws a growing text: the last block is drawn again, the ones before it stay.
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.start = 0; // of the last block in the text
    this.last = null;
  }

  // Returns the elements of the blocks that have ended since.
  draw(text) {
    const lines = text.slice(this.start).split("\n");
    const drawn = [...blocks(lines)];
    this.last?.remove();
    for (const { node } of drawn) this.parent.append(node);
    const last = drawn.pop();
    this.last = last?.node;
    if (last) this.start += lines.slice(0, last.line).reduce((total, line) => total + line.length + 1, 0);
    return drawn.map(({ node }) => node);
  }
}

// ── blocks ──

// Yields {node, line} of each block; `line` is the index of its first one. The first paragraph of a
// list item is an array of nodes.
function* blocks(lines, depth = 0, inItem = false) {
  let at = 0;
  const takeWhile = matches => {
    const first = at;
    while (at < lines.length && matches(lines[at])) at++;
    return lines.slice(first, at);
  };
  const inside = (lines, inItem) => [...blocks(lines, depth + 1, inItem)].flatMap(({ node }) => node);
  const startsTable = (header, below = "") =>
    header.includes("|") && below.includes("|") && cells(below).every(cell => /^:?-+:?$/.test(cell));
  const continues = line =>
    line.trim() && ![FENCE, HEADING, RULE, ITEM, QUOTE].some(kind => kind.test(line)) && !formulaEnd(line) && !startsTable(line, lines[at + 1]);

  const takeList = line => {
    const start = ITEM.exec(line)[2];
    const items = [];
    for (;;) { // lines indented deeper than an item's marker belong to the item
      const [, indent, , text] = ITEM.exec(line);
      const rest = takeWhile(next => !next.trim() || indentOf(next) > indent.length);
      const least = rest.reduce((least, next) => (next.trim() ? Math.min(least, indentOf(next)) : least), Infinity);
      items.push(element("li", {}, inside([text, ...rest.map(next => next.slice(least))], true)));
      line = lines[at] ?? "";
      const next = ITEM.exec(line);
      if (!next || RULE.test(line) || (next[2] === undefined) !== (start === undefined)) break;
      at++;
    }
    return start === undefined ? element("ul", {}, items) : element("ol", { start }, items);
  };

  const takeTable = header => {
    const sides = cells(lines[at++]).map(cell => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right"));
    const row = (tag, line) => element("tr", {},
      cells(line).map((text, n) => element(tag, sides[n] ? { class: sides[n] } : {}, inline(text))));
    const rows = takeWhile(next => next.includes("|")).map(line => row("td", line));
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
      element("table", {}, element("thead", {}, row("th", header)), element("tbody", {}, rows)));
  };

  const takeFormula = (line, end) => {
    const isWhole = line.indexOf(end, line.search(/\S/) + 2) > 0;
    const rest = isWhole ? [] : takeWhile(next => next.trim() && !next.includes(end));
    if (!isWhole && lines[at]?.trim()) rest.push(lines[at++]); // with the end
    return codeBlock([line, ...rest].join("\n"), "formula", "Copy formula");
  };

  const take = line => {
    const [fence, heading, formula] = [FENCE.exec(line), HEADING.exec(line), formulaEnd(line)];
    if (fence) {
      const code = takeWhile(next => !endsCode(next, fence[1])).join("\n");
      at++;
      return codeBlock(code, fence[2].trim().split(/\s/)[0]);
    }
    if (formula) return takeFormula(line, formula);
    if (heading) {
      const level = Math.min(6, heading[1].length + 2); // the page has an h1 and an h2
      return element(`h${level}`, {}, inline(heading[2].trim().replace(/(?<=\s)#+$/, "").trim()));
    }
    if (RULE.test(line)) return element("hr");
    if (depth < MAX_DEPTH && ITEM.test(line)) return takeList(line);
    if (depth < MAX_DEPTH && QUOTE.test(line)) {
      const quoted = [line, ...takeWhile(next => QUOTE.test(next))];
      return element("blockquote", {}, inside(quoted.map(next => next.replace(QUOTE, ""))));
    }
    if (startsTable(line, lines[at])) return takeTable(line);
    const isFirst = at === 1;
    const nodes = inline([line, ...takeWhile(continues)].join("\n").trim());
    return inItem && isFirst ? nodes : element("p", {}, nodes);
  };

  while (at < lines.length) {
    const line = at++;
    if (lines[line].trim()) yield { node: take(lines[line]), line };
  }
}

const indentOf = line => line.length - line.trimStart().length;
const endsCode = (line, fence) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");

// Returns what ends the formula that a line begins; null if it begins none, or a text follows it on the line.
function formulaEnd(line) {
  const text = line.trim();
  const end = { "$$": "$$", "\\[": "\\]" }[text.slice(0, 2)];
  const at = end ? text.indexOf(end, 2) : 0;
  return end && (at < 0 || at === text.length - 2) ? end : null;
}

function codeBlock(code, language, copyLabel = "Copy code") {
  const shown = visible(code);
  return element("div", { class: "code" },
    element("div", { class: "head" }, element("span", { class: "note" }, language), copyButton(() => shown, copyLabel)),
    element("pre", { tabindex: "0" }, element("code", {}, shown)));
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map(text => text.trim().replaceAll("\\|", "|"));
}

// ── inside a block ──

// Returns strings and elements. No link is in a link.
function inline(text, depth = 0, inLink = false) {
  const nodes = [];
  let [from, at] = [0, 0]; // of the text that is not in `nodes`, and of what is read
  for (;;) {
    START.lastIndex = at;
    const start = START.exec(text);
    if (!start) break;
    const span = spanAt(text, start.index, depth, inLink);
    at = span ? span.end : start.index + 1;
    if (!span) continue;
    nodes.push(text.slice(from, start.index), ...span.nodes);
    from = at;
  }
  nodes.push(text.slice(from));
  return nodes.filter(node => node !== "");
}

function spanAt(text, at, depth, inLink) {
  for (const [expression, read] of SPANS) {
    expression.lastIndex = at;
    const match = expression.exec(text);
    if (!match) continue;
    const end = expression.lastIndex; // before other texts are read
    const nodes = typeof read === "function" ? read(match, depth, inLink)
      : depth < MAX_DEPTH && [element(read, {}, inline(match[1], depth + 1, inLink))];
    if (nodes) return { nodes, end };
  }
  return null;
}

function formula([written]) {
  return [element("code", { class: "formula" }, visible(written))];
}

// Returns the link, and where it leads if its label looks like another address; null for an invalid one.
function link(address, label) {
  if (!URL.canParse(address)) return null;
  const url = new URL(address);
  const text = label.map(node => node.textContent ?? node).join("");
  const same = text === address && /^[!-~]*$/.test(text) && !url.username;
  const node = element("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" },
    label.length ? label : url.host || url.pathname);
  const leadsTo = element("span", { class: "note" }, ` (${url.host || url.pathname})`);
  return /\S\.\S/.test(text) && !same ? [node, leadsTo] : [node];
}

// Shows characters that reorder text: code must read as it runs.
function visible(code) {
  return code.replace(/[\u202a-\u202e\u2066-\u2069]/g, character => `\\u${character.charCodeAt().toString(16)}`);
}
