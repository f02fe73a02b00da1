// Answers as they grow. What is new is plain text; the server draws the blocks that are finished, once
// each, and they take the place of their text. It does so for one answer at a time, the newest first.

const DRAW_EVERY_MS = 200;
const RETRY_MS = 2000;
const MAX_DRAWN_CHARS = 2 ** 18; // of a request

const drawing = { isOffered: true, waiting: [], isBusy: false };

class DrawnAnswer {
  constructor(parent) {
    this.parent = parent;
    this.reset();
  }

  reset() {
    this.tail = make("div", "tail");
    this.parent.replaceChildren(this.tail);
    Object.assign(this, { text: "", numDrawn: 0, numShown: 0, numAsked: 0, isPlain: false, isDone: false, notBefore: 0 });
    this.parent.classList.remove("is-code");
  }

  show(text, isWhole) {
    const whole = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    if (!whole.startsWith(this.text)) this.reset();
    if (this.isDone && whole !== this.text) this.isDone = false; // it is continued
    this.text = whole;
    this.isWhole = isWhole;
    this.tail.append(whole.slice(this.numShown));
    this.numShown = whole.length;
    this.drawSoon();
  }

  needsDrawing() {
    if (!drawing.isOffered || !this.text || this.isPlain || this.isDone) return false;
    if (this.isWhole) return true;
    const isCode = this.parent.classList.contains("is-code");
    if (isCode && this.text.length < 1.5 * this.numAsked) return false;
    return this.text.indexOf("\n", Math.max(this.numAsked, this.numDrawn)) >= 0;
  }

  drawSoon() {
    if (!this.needsDrawing() || drawing.waiting.includes(this)) return;
    drawing.waiting.push(this);
    drawNext();
  }

  async draw() {
    const from = this.numDrawn;
    const rest = this.text.slice(from);
    const piece = rest.length > MAX_DRAWN_CHARS ? rest.slice(0, rest.lastIndexOf("\n", MAX_DRAWN_CHARS - 1) + 1) : rest;
    if (!piece && rest) return void (this.isPlain = true);
    const isWhole = this.isWhole && piece === rest;
    this.numAsked = from + piece.length;
    const start = performance.now();
    const drawn = await this.ask(piece, isWhole);
    this.notBefore = performance.now() + Math.min(RETRY_MS, Math.max(DRAW_EVERY_MS, 4 * (performance.now() - start)));
    if (!drawn || this.numDrawn !== from || !this.text.startsWith(rest, from)) return;
    if (drawn.is_code && !from) this.parent.classList.add("is-code");
    else this.place(drawn, piece, isWhole);
    this.isDone = isWhole && this.isWhole && this.text.length === from + piece.length;
    if (!drawn.num_lines && !isWhole && piece.length < rest.length) this.isPlain = true;
  }

  async ask(text, isWhole) {
    try {
      return await (await ask("page/drawing", { body: { text, is_whole: isWhole } })).json();
    } catch (error) {
      if (error instanceof Refused && error.status < 500) this.isPlain = true; // it takes too long
      else this.notBefore = performance.now() + RETRY_MS;
      this.numAsked = this.numDrawn;
      return null;
    }
  }

  place(drawn, piece, isWhole) {
    this.parent.classList.remove("is-code");
    if (isWhole && drawn.has_references && this.numDrawn && this.text.length <= MAX_DRAWN_CHARS) {
      const { text } = this; // links of earlier blocks have their targets now
      this.reset();
      this.show(text, true);
      return;
    }
    this.tail.before(...drawn.nodes.map(nodeOf));
    this.numDrawn += isWhole ? piece.length : lengthOfLines(piece, drawn.num_lines);
    this.tail.replaceChildren(this.text.slice(this.numDrawn));
  }
}

function lengthOfLines(text, count) {
  let at = 0;
  for (let i = 0; i < count; i++) at = text.indexOf("\n", at) + 1;
  return at;
}

async function drawNext() {
  if (drawing.isBusy) return;
  drawing.isBusy = true;
  while (drawing.waiting.length) {
    const now = performance.now();
    const ready = drawing.waiting.findLastIndex((answer) => answer.notBefore <= now);
    if (ready < 0) {
      const first = Math.min(...drawing.waiting.map((answer) => answer.notBefore));
      await new Promise((resolve) => setTimeout(resolve, first - now));
      continue;
    }
    const [answer] = drawing.waiting.splice(ready, 1);
    if (answer.needsDrawing()) await answer.draw();
    if (answer.needsDrawing()) drawing.waiting.push(answer);
  }
  drawing.isBusy = false;
}
