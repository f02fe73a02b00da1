// Elements. A drawing of an answer comes as nodes, [name, attributes, children] or a text, and becomes
// elements of this list only: nothing is ever parsed as HTML.

const MATH_NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const MATH_ELEMENTS = new Set(
  ("math mrow mi mo mn ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover"
    + " mmultiscripts mprescripts mtable mtr mtd mstyle mpadded mphantom menclose").split(" "),
);
const ELEMENTS = new Set(
  "p br hr blockquote ul ol li pre code em strong a span table thead tbody tr th td".split(" "),
);
const RENAMED = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6", s: "del" }; // below the page's own headings
const SAFE_ADDRESS = /^(?:https?:|mailto:)/i;

function make(tag, className = "", children = []) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const child of children) node.append(child);
  return node;
}

function button(label, className = "plain") {
  const made = make("button", className, [label]);
  made.type = "button";
  return made;
}

function nodeOf(given) {
  if (typeof given === "string") return given;
  const [name, attributes, children] = given;
  const inner = children.map(nodeOf);
  if (MATH_ELEMENTS.has(name)) return formulaPart(name, attributes, inner);
  if (name === "pre") return codeFrame(attributes.lang, inner);
  if (name === "a") return linkTo(attributes.href, inner);
  if (name === "table") return framed(inner);
  const tag = RENAMED[name] ?? name;
  const node = make(RENAMED[name] || ELEMENTS.has(tag) ? tag : "span", "", inner);
  if (tag === "span" && attributes.class) node.className = attributes.class;
  if (tag === "ol" && attributes.start) node.start = Number(attributes.start);
  if (["center", "right"].includes(attributes.align)) node.className = attributes.align;
  return node;
}

function formulaPart(name, attributes, children) {
  const node = document.createElementNS(MATH_NAMESPACE, name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (!/^(?:on|href|src|style)/i.test(attribute)) node.setAttribute(attribute, value);
  }
  node.append(...children);
  return node;
}

function linkTo(address, children) {
  if (!SAFE_ADDRESS.test(address ?? "")) return make("span", "", children);
  const link = make("a", "", children);
  link.href = address;
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  return link;
}

function codeFrame(language, children) {
  const copy = button("Copy");
  copy.dataset.copies = "code";
  const code = make("pre", "", children);
  code.tabIndex = 0; // wide code is scrolled by keyboard, too
  const name = make("span", "", [language?.slice(0, 40) || "text"]);
  return make("div", "code", [make("div", "code-head", [name, copy]), code]);
}

function framed(children) {
  const frame = make("div", "table", [make("table", "", children)]);
  frame.tabIndex = 0;
  return frame;
}
