// Markdown as DOM nodes. A model's answer is untrusted: no text of it is ever parsed as HTML, no image
// is loaded, and an address becomes a link only with a scheme that cannot run code. Scans are linear.

const MAX_DEPTH = 12; // of lists and quotes in each other; what is deeper is plain text
const MAX_INLINE_CHARS = 20_000; // of a paragraph whose emphasis and links are looked for

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+([^]*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3}(?:([-*+])|(\d{1,9})([.)])))(?:[ \t]+|$)/;

// Draws a text that grows. Blocks that later text cannot change are not drawn again, so that what a
// reader has selected in them stays selected.
class Markdown {
  constructor(parent) {
    this.parent = parent;
    this.start = 0; // in the text, of the first block that may still change
    this.live = []; // the blocks from there on, as they were drawn
  }

  draw(text) {
    const lines = text.slice(this.start).split("\n");
    const blocks = blocksOf(lines);
    blocks.forEach((block, i) => this.place(block, this.live[i]));
    for (const old of this.live.slice(blocks.length)) old.node.remove();
    // The last line may be half a line, which its other half makes a part of the block before it.
    const numDone = Math.max(0, blocks.length - 2);
    if (numDone) this.start += lines.slice(0, blocks[numDone].from).join("\n").length + 1;
    this.live = blocks.slice(numDone);
  }

  place(block, old) {
    if (old?.kind === block.kind && old.lines.join("\n") === block.lines.join("\n")) {
      block.node = old.node;
    } else if (old?.kind === "fence" && block.kind === "fence" && old.language === block.language) {
      block.node = old.node; // so that its button keeps the focus
      block.node.querySelector("code").textContent = codeOf(block);
    } else {
      block.node = DRAWN[block.kind](block, 0);
      if (old) old.node.replaceWith(block.node);
      else this.parent.append(block.node);
    }
  }
}

// Blocks: each has a kind, its lines, and what the kind needs.

function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = { from: at, ...blockAt(lines, at) };
    block.lines = lines.slice(at, block.to);
    blocks.push(block);
    at = block.to;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fenceAt(lines, at);
  if (HEADING.test(line)) return { kind: "heading", to: at + 1 };
  if (RULE.test(line)) return { kind: "rule", to: at + 1 };
  if (QUOTE.test(line)) return { kind: "quote", to: endOf(lines, at, (next) => QUOTE.test(next)) };
  if (ITEM.test(line)) return listAt(lines, at);
  if (isTableAt(lines, at)) return { kind: "table", to: endOf(lines, at + 1, (next) => next.includes("|")) };
  const isText = (next, i) => next.trim() && !startsBlock(next) && !isTableAt(lines, i);
  return { kind: "paragraph", to: endOf(lines, at, isText) };
}

function endOf(lines, from, goesOn) {
  let to = from + 1;
  while (to < lines.length && goesOn(lines[to], to)) to++;
  return to;
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

// A fence that is not closed yet reaches to the end.
function fenceAt(lines, at) {
  const [, mark, info] = FENCE.exec(lines[at]);
  const isEnd = (line) => {
    const text = line.trim();
    return text.length >= mark.length && text === mark[0].repeat(text.length) && indentOf(line) < 4;
  };
  const end = endOf(lines, at, (line) => !isEnd(line));
  const isClosed = end < lines.length;
  return { kind: "fence", to: isClosed ? end + 1 : end, isClosed, language: info.trim().split(/\s/)[0] };
}

function codeOf({ lines, isClosed }) {
  const indent = indentOf(lines[0]);
  const code = lines.slice(1, isClosed ? -1 : undefined);
  return code.map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function listAt(lines, at) {
  const signOf = (match) => match[2] ?? match[4];
  const first = ITEM.exec(lines[at]);
  const items = [];
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || signOf(match) !== signOf(first) || RULE.test(lines[at])) break;
    const to = itemEnd(lines, at);
    const [head, ...rest] = lines.slice(at, to);
    const width = Math.min(match[0].length, match[1].length + 4);
    items.push([head.slice(match[0].length), ...rest.map((line) => line.slice(Math.min(width, indentOf(line))))]);
    const next = endOf(lines, to - 1, (line) => !line.trim());
    at = next < lines.length && ITEM.test(lines[next]) ? next : to; // items may have blank lines between them
  }
  return { kind: "list", to: at, number: first[3], items };
}

// An item continues in indented lines, and in text without a blank line before it.
function itemEnd(lines, at) {
  const indent = indentOf(lines[at]);
  let to = at + 1;
  for (let i = to; i < lines.length; i++) {
    if (!lines[i].trim()) continue;
    const isInside = indentOf(lines[i]) >= indent + 2 || lines[i][0] === "\t";
    const isText = lines[i - 1].trim() && !startsBlock(lines[i]);
    if (!isInside && !isText) break;
    to = i + 1;
  }
  return to;
}

function isTableAt(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const rule = cellsOf(lines[at + 1]);
  return rule.length === cellsOf(lines[at]).length && rule.every((cell) => /^:?-+:?$/.test(cell));
}

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// Their nodes.

function make(tag, className = "", children = []) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const child of children) node.append(child);
  return node;
}

const DRAWN = {
  paragraph: ({ lines }) => make("p", "", inline(lines.map((line) => line.trimStart()).join("\n"))),
  heading: ({ lines }) => {
    const [, marks, text = ""] = HEADING.exec(lines[0]);
    const title = text.replace(/(?:^|[ \t])#+[ \t]*$/, "").trim();
    return make(`h${Math.min(marks.length + 2, 6)}`, "", inline(title)); // below the page's own headings
  },
  rule: () => make("hr"),
  quote: ({ lines }, depth) => make("blockquote", "", nodesOf(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
  fence: (block) => {
    const copy = make("button", "plain", ["Copy"]);
    copy.type = "button";
    copy.dataset.copies = "code";
    const code = make("pre", "", [make("code", "", [codeOf(block)])]);
    code.tabIndex = 0; // wide code is scrolled by keyboard, too
    return make("div", "code", [make("div", "code-head", [make("span", "", [block.language || "text"]), copy]), code]);
  },
  list: ({ number, items }, depth) => {
    const list = make(number ? "ol" : "ul", "", items.map((lines) => make("li", "", itemNodes(lines, depth + 1))));
    if (number) list.start = Number(number);
    return list;
  },
  table: ({ lines }) => {
    const [head, rule, ...rows] = lines.map(cellsOf);
    const sides = rule.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
    const row = (cells, tag) => make("tr", "", sides.map((side, i) => make(tag, side, inline(cells[i] ?? ""))));
    const body = make("tbody", "", rows.map((cells) => row(cells, "td")));
    const frame = make("div", "table", [make("table", "", [make("thead", "", [row(head, "th")]), body])]);
    frame.tabIndex = 0;
    return frame;
  },
};

function nodesOf(lines, depth) {
  if (depth > MAX_DEPTH) return [make("p", "", [lines.join("\n")])];
  return blocksOf(lines).map((block) => DRAWN[block.kind](block, depth));
}

// A first paragraph stands in the item's own line.
function itemNodes(lines, depth) {
  const nodes = nodesOf(lines, depth);
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

// What is in a line: escapes, code, links and emphasis, tried wherever a sign may begin one.

const SIGN = /[\\`*_~![<]|\bhttps?:\/\//g;
const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const TICKS = /`+/y;
const TARGET = /\s{0,9}<?([^\s()<>]{0,2000}(?:\([^\s()<>]{0,2000}\)[^\s()<>]{0,2000})?)>?/;
const TITLE = /(?:\s{1,9}(?:"[^"]{0,500}"|'[^']{0,500}'))?\s{0,9}/;
const LINK = new RegExp(`!?\\[([^[\\]]*)\\]\\(${TARGET.source}${TITLE.source}\\)`, "y");
const ADDRESS = /<?(https?:\/\/[^\s<>"`]*[^\s<>"`.,;:!?'*_)\]])>?/y;
const EMPHASIS = /\*{1,3}|_{1,3}|~~/y;
const TAGS = { "*": ["em"], "**": ["strong"], "***": ["em", "strong"], "_": ["em"], "__": ["strong"], "___": ["em", "strong"], "~~": ["del"] };

function inline(text, isInLink = false) {
  if (text.length > MAX_INLINE_CHARS) return [text];
  const open = [{ nodes: [] }]; // emphasis that has begun, each mark at most once, in the text itself
  const put = (node) => open.at(-1).nodes.push(node);
  let at = 0;
  for (;;) {
    SIGN.lastIndex = at;
    const next = SIGN.exec(text)?.index ?? text.length;
    if (next > at) put(text.slice(at, next));
    if (next === text.length) break;
    at = next;
    let found;
    if ((found = matchAt(ESCAPE, text, at))) put(found[1]);
    else if ((found = codeAt(text, at))) put(make("code", "", [found[1]]));
    else if (!isInLink && (found = matchAt(LINK, text, at))) put(linkTo(found[2], inline(found[1] || found[2], true)));
    else if (!isInLink && (found = matchAt(ADDRESS, text, at))) put(linkTo(found[1], [found[1]]));
    else if ((found = matchAt(EMPHASIS, text, at))) emphasise(open, found[0], text[at - 1] ?? " ", text[at + found[0].length] ?? " ");
    else put((found = matchAt(TICKS, text, at) ?? [text[at]])[0]);
    at += found[0].length;
  }
  closeDownTo(open, 0);
  return open[0].nodes;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function codeAt(text, at) {
  const ticks = matchAt(TICKS, text, at)?.[0];
  if (!ticks) return null;
  const from = at + ticks.length;
  for (let end = text.indexOf(ticks, from); end >= 0; ) {
    const { length } = matchAt(TICKS, text, end)[0];
    if (length === ticks.length) {
      const code = text.slice(from, end);
      const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
      return [text.slice(at, end + length), isPadded ? code.slice(1, -1) : code];
    }
    end = text.indexOf(ticks, end + length);
  }
  return null;
}

function linkTo(address, children) {
  if (!/^(?:https?:|mailto:)/i.test(address)) return make("span", "", children);
  const link = make("a", "", children);
  link.href = address;
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  return link;
}

// Begins or ends what the mark stands for, or leaves the mark as text.
function emphasise(open, mark, before, after) {
  const isWord = (sign) => mark[0] === "_" && /[\p{L}\p{N}_]/u.test(sign);
  const canEnd = /\S/.test(before) && !isWord(after);
  const place = open.findIndex((frame) => frame.mark === mark);
  if (place > 0 && canEnd) {
    closeDownTo(open, place);
    const { nodes } = open.pop();
    open.at(-1).nodes.push(...TAGS[mark].reduce((inner, tag) => [make(tag, "", inner)], nodes));
  } else if (canEnd && mark.length === 3 && open.slice(-2).map((frame) => frame.mark).join("") === mark) {
    emphasise(open, open.at(-1).mark, before, after); // two that end at once
    emphasise(open, open.at(-1).mark, before, after);
  } else if (place < 0 && /\S/.test(after) && !isWord(before)) {
    open.push({ mark, nodes: [] });
  } else {
    open.at(-1).nodes.push(mark);
  }
}

// Emphasis above `place` has not been ended: its marks are text.
function closeDownTo(open, place) {
  while (open.length > place + 1) {
    const { mark, nodes } = open.pop();
    open.at(-1).nodes.push(mark, ...nodes);
  }
}
