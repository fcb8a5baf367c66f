// Markdown as elements. Whatever is no mark becomes a text node, so a model's HTML has no effect.
import { copier, element } from "./dom.js";

const DEPTH = 6; // nested marks; what is deeper stays text
const REACH = 1000; // characters between two ends of a mark: keeps the work linear in the text
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(\S.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(\S.*)$/;
const ADDRESS = /https?:\/\/[^\s<>"'`|\\^{}]{1,2000}/y; // more is no link, for the same reason
const CLOSING = ".,;:!?)*_~]"; // what ends a sentence around an address
const LINK =
  /^\[([^[\]]*)\]\(<?([^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\)/;
const BLOCKS = [fence, heading, rule, quote, list, table, paragraph];

/** The elements of a text. */
export function markdown(text) {
  return blocks(text.split(/\r?\n/), 0);
}

function blocks(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kinds = depth < DEPTH ? BLOCKS : [paragraph];
    let found = null;
    for (let i = 0; !found; i++) found = kinds[i](lines, at, depth);
    made.push(found[0]);
    at = found[1];
  }
  return made;
}

// Each of these returns its element and the next line's index, or null where it does not begin.

function fence(lines, at) {
  const begun = FENCE.exec(lines[at]);
  if (!begun) return null;
  const [, sign] = begun;
  const ends = (line) => line.trim().startsWith(sign) && !line.trim().replaceAll(sign[0], "");
  let end = at + 1;
  while (end < lines.length && !ends(lines[end])) end += 1;
  return [code(lines.slice(at + 1, end).join("\n"), begun[2].trim()), end + 1];
}

function code(text, language) {
  const head = element("div", "code-head", language || "code", copier("Copy the code", () => text));
  const pre = element("pre", "", element("code", "", text));
  pre.tabIndex = 0; // so that arrow keys scroll it
  return element("div", "code", head, pre);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const level = Math.min(6, found[1].length + 3); // below the page's own headings
  const text = found[2].trimEnd().replace(/ #+$/, "");
  return [element(`h${level}`, "", ...inline(text)), at + 1];
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? [element("hr"), at + 1] : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [element("blockquote", "", ...blocks(inner, depth + 1)), end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const numbered = (found) => /\d/.test(found[2]);
  const made = element(numbered(first) ? "ol" : "ul");
  if (numbered(first)) made.start = parseInt(first[2], 10);
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || numbered(found) !== numbered(first)) break;
    const [inner, next] = item(lines, at, found);
    made.append(element("li", "", ...blocks(inner, depth + 1)));
    at = next;
  }
  return [made, at];
}

/** An item's own lines, and the index behind it and the blank lines before a next item. */
function item(lines, at, [, margin, mark, begun]) {
  const inner = [begun];
  const deeper = (line) => line.search(/\S/) >= margin.length + 2;
  let next = at + 1;
  for (; next < lines.length; next++) {
    let peek = next;
    while (peek < lines.length && !lines[peek].trim()) peek += 1;
    const line = lines[peek] ?? "";
    if (!deeper(line) && (peek > next || starts(line))) {
      return [inner, ITEM.test(line) ? peek : next];
    }
    while (next < peek) inner.push(lines[next++]);
    const indent = Math.min(line.search(/\S/), margin.length + mark.length + 1);
    inner.push(line.slice(indent));
  }
  return [inner, next];
}

function table(lines, at) {
  const under = lines[at + 1] ?? "";
  const ruled = /^[ :|-]+$/.test(under) && under.includes("-") && under.includes("|");
  if (!ruled || !lines[at].includes("|")) return null;
  const head = element("tr", "", ...cells(lines[at]).map((text) => heads(text)));
  const body = element("tbody");
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) {
    const row = cells(lines[end]).map((text) => element("td", "", ...inline(text)));
    body.append(element("tr", "", ...row));
  }
  const box = element("div", "wide-table", element("table", "", element("thead", "", head), body));
  box.tabIndex = 0;
  return [box, end];
}

function heads(text) {
  const made = element("th", "", ...inline(text));
  made.scope = "col";
  return made;
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** Whether a line begins a block that ends a paragraph before it. */
function starts(line) {
  return !line.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !starts(lines[end])) end += 1;
  return [element("p", "", ...inline(lines.slice(at, end).join("\n"))), end];
}

/** Marks within a line. links: false within a link's own text. */
function inline(text, depth = 0, links = true) {
  if (depth >= DEPTH) return [text];
  const made = [];
  let plain = 0; // where the text since the last mark begins
  for (let at = 0; at < text.length; ) {
    const found = mark(text, at, depth, links);
    if (!found) {
      at += 1;
      continue;
    }
    if (plain < at) made.push(text.slice(plain, at));
    made.push(found[0]);
    plain = at = found[1];
  }
  if (plain < text.length) made.push(text.slice(plain));
  return made;
}

/** The mark at this place: what becomes of it, and where it ends. Null: none. */
function mark(text, at, depth, links) {
  switch (text[at]) {
    case "\\":
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null;
    case "`":
      return codeSpan(text, at);
    case "*":
    case "_":
    case "~":
      return emphasis(text, at, depth, links);
    case "!":
      return links && text[at + 1] === "[" ? link(text, at + 1, depth) : null;
    case "[":
      return links ? link(text, at, depth) : null;
    case "h":
      return links ? address(text, at) : null;
    default:
      return null;
  }
}

function codeSpan(text, at) {
  let ticks = 1;
  while (text[at + ticks] === "`") ticks += 1;
  const begin = at + ticks;
  const end = text.slice(begin, begin + REACH).indexOf("`".repeat(ticks));
  if (end < 0) return ["`".repeat(ticks), begin];
  const inner = text.slice(begin, begin + end);
  const padded = /^ .*\S.* $/s.test(inner);
  return [element("code", "", padded ? inner.slice(1, -1) : inner), begin + end + ticks];
}

const MARKS = [
  ["***", "strong"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"],
];

function emphasis(text, at, depth, links) {
  for (const [sign, name] of MARKS) {
    if (!text.startsWith(sign, at)) continue;
    const begin = at + sign.length;
    const end = closing(text, sign, at, begin);
    if (end < 0) continue;
    const inner = inline(text.slice(begin, end), depth + 1, links);
    return [element(name, "", ...inner), end + sign.length];
  }
  return null;
}

/** Where an emphasis ends, or -1. An underscore within a word (snake_case) is none. */
function closing(text, sign, at, begin) {
  const word = /[\p{L}\p{N}_]/u;
  const within = (index) => sign[0] === "_" && word.test(text[index] ?? "");
  if (!/\S/.test(text[begin] ?? "") || text[begin] === sign[0] || within(at - 1)) return -1;
  const near = text.slice(begin, begin + REACH);
  for (let end = near.indexOf(sign, 1); end > 0; end = near.indexOf(sign, end + 1)) {
    const behind = begin + end + sign.length;
    if (sign.length === 1 && near[end + 1] === sign) end += 1; // a stronger mark of the same sign
    else if (/\S/.test(near[end - 1]) && !within(behind)) return begin + end;
  }
  return -1;
}

/** [text](address). A picture becomes a link too: the page loads nothing from other hosts. */
function link(text, at, depth) {
  const found = LINK.exec(text.slice(at, at + REACH));
  if (!found) return null;
  const [whole, label, href] = found;
  const made = anchor(href, inline(label || href, depth + 1, false));
  return made && [made, at + whole.length];
}

function address(text, at) {
  ADDRESS.lastIndex = at;
  const [found] = ADDRESS.exec(text) ?? [];
  if (!found) return null;
  if (found.length > 2000) return null;
  let end = found.length;
  while (CLOSING.includes(found[end - 1])) end -= 1;
  const href = found.slice(0, end);
  const made = anchor(href, [href]);
  return made && [made, at + href.length];
}

/** A link to another place of the web, or null for addresses of any other kind. */
function anchor(href, children) {
  if (!URL.canParse(href)) return null;
  const url = new URL(href);
  if (!["http:", "https:"].includes(url.protocol)) return null;
  const made = element("a", "", ...children);
  made.href = made.title = url.href;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  return made;
}
