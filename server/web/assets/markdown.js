// Markdown as elements, as far as models write it: paragraphs, headings, nested lists, quotes, code,
// tables, rules, emphasis, strike, links. Formulas stay as written. Text never becomes markup, an image becomes
// a link, and a link leads to http, https or mailto. The work is linear in the text: no expression backtracks over what
// another one has read, and nesting is bounded.

import { copyButton, element } from "./dom.js";

const MAX_DEPTH = 8; // of nested lists and quotes; deeper ones are paragraphs
const MAX_OPEN = 16; // delimiters that wait for their end
const MAX_RUN = 3; // delimiters in a row; longer runs are text
const MAX_BACKTICKS = 8;

const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?: *\1){2,}\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const TOKEN = new RegExp([
  /\\[!-/:-@[-`{-~]/, // an escaped character
  /`+|\*+|_+|~+|\$\$?|!?\[|\]/,
  /<(?:https?:\/\/|mailto:)[^\s<>]*>/,
  /\bhttps?:\/\/[^\s<>[\]`|]*[^\s<>[\]`|.,:;!?'")*_~]/,
].map(({ source }) => source).join("|"), "gi");
const TARGET = /\(\s*<?((?:https?:\/\/|mailto:)[^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/iy;
const PROTOCOLS = ["http:", "https:", "mailto:"];
const EMPHASIS = { 1: "em", 2: "strong" };
// The end of a formula by its start. A price is none: a `$` after a space or before a digit ends nothing.
const FORMULA_ENDS = { "$": /(?<![\s\\])\$(?![\d$])/g, "$$": /\$\$/g, "\\(": /\\\)/g, "\\[": /\\\]/g };

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

// Returns strings and elements. `open` are delimiters in `nodes`, at index `at`, that may still get an end:
// what follows one becomes the content of an element then.
function inline(text) {
  const nodes = [];
  let open = [];
  const unclosed = new Set(); // numbers of backticks, starts of formulas
  let end = 0;
  const start = (mark, string, count) => {
    open.push({ mark, count, at: nodes.push(string) - 1 });
    if (open.length > MAX_OPEN) open.shift();
  };

  const code = ticks => {
    const closing = new RegExp(`(?<!\`)${ticks}(?!\`)`, "g");
    closing.lastIndex = end;
    const last = ticks.length <= MAX_BACKTICKS && !unclosed.has(ticks.length) && closing.exec(text);
    if (!last) return unclosed.add(ticks.length) && nodes.push(ticks);
    const inner = text.slice(end, last.index);
    nodes.push(element("code", {}, visible(inner.trim() ? inner.replace(/^ (.*) $/s, "$1") : inner)));
    end = closing.lastIndex;
  };

  // Takes a formula as it is written; returns whether the token starts one.
  const formula = (token, before, after) => {
    const ending = FORMULA_ENDS[token];
    const isPrice = token === "$" && (/[\p{L}\p{N}]/u.test(before) || !/\S/.test(after));
    if (!ending || isPrice || unclosed.has(token)) return false;
    ending.lastIndex = end;
    if (!ending.test(text)) return !unclosed.add(token);
    nodes.push(element("code", { class: "formula" }, visible(token + text.slice(end, ending.lastIndex))));
    end = ending.lastIndex;
    return true;
  };

  const emphasis = (run, before, after) => {
    const mark = run[0];
    let count = run.length;
    const fits = other => other.mark === mark && (mark !== "~" || other.count === count);
    const usable = mark === "~" ? count === 2 : count <= MAX_RUN;
    const inWord = character => mark === "_" && /[\p{L}\p{N}]/u.test(character);
    while (usable && count > 0 && /\S/.test(before) && !inWord(after)) {
      const n = open.findLastIndex(fits);
      if (n < 0) break;
      const { at, count: opening } = open[n];
      const used = Math.min(2, count, opening);
      const node = element(mark === "~" ? "del" : EMPHASIS[used], {}, nodes.splice(at + 1));
      nodes[at] = mark.repeat(opening - used);
      open[n].count -= used;
      open.length = opening > used ? n + 1 : n;
      nodes.push(node);
      count -= used;
    }
    const rest = mark.repeat(count);
    if (usable && count && /\S/.test(after) && !inWord(before)) start(mark, rest, count);
    else nodes.push(rest);
  };

  const closeLink = () => {
    const n = open.findLastIndex(({ mark }) => mark === "[");
    TARGET.lastIndex = end;
    const target = n >= 0 && TARGET.exec(text);
    const url = target && parseUrl(target[1]);
    if (!url) {
      if (n >= 0) open.splice(n, 1);
      return nodes.push("]");
    }
    const [, ...label] = nodes.splice(open[n].at);
    open = open.slice(0, n).filter(({ mark }) => mark !== "["); // no link in a link
    nodes.push(...link(url, label, target[1]));
    end = TARGET.lastIndex;
  };

  const address = token => {
    const written = token.replace(/^<|>$/g, "");
    const url = open.some(({ mark }) => mark === "[") ? null : parseUrl(written);
    nodes.push(...(url ? link(url, [written], written) : [token]));
  };

  TOKEN.lastIndex = 0;
  for (let match; (match = TOKEN.exec(text)); TOKEN.lastIndex = end) {
    const [token] = match;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    end = TOKEN.lastIndex;
    const [before, after] = [text[match.index - 1] ?? " ", text[end] ?? " "];
    if (formula(token, before, after)) continue;
    if (token[0] === "\\") nodes.push(token[1]);
    else if (token[0] === "`") code(token);
    else if ("*_~".includes(token[0])) emphasis(token, before, after);
    else if (token === "[" || token === "![") start("[", token);
    else if (token === "]") closeLink();
    else if (token[0] === "$") nodes.push(token);
    else address(token);
  }
  nodes.push(text.slice(end));
  return nodes.filter(node => node !== "");
}

function parseUrl(text) {
  const url = URL.canParse(text) ? new URL(text) : null;
  return PROTOCOLS.includes(url?.protocol) ? url : null;
}

// Returns the link, and where it leads if its label looks like another address.
function link(url, label, written) {
  const text = label.map(node => node.textContent ?? node).join("");
  const same = text === written && /^[!-~]*$/.test(text) && !url.username;
  const node = element("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" },
    label.length ? label : url.host || url.pathname);
  const leadsTo = element("span", { class: "note" }, ` (${url.host || url.pathname})`);
  return /\S\.\S/.test(text) && !same ? [node, leadsTo] : [node];
}

// Shows characters that reorder text: code must read as it runs.
function visible(code) {
  return code.replace(/[\u202a-\u202e\u2066-\u2069]/g, character => `\\u${character.charCodeAt().toString(16)}`);
}
