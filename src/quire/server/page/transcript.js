// The messages of the conversation that is shown, the newest line of them in view while they grow.

const transcript = byId("transcript"); // what scrolls
const messageList = byId("messages");

// A reader who scrolls up is left where he is, until he comes back to the end.
let isFollowing = true;
let lastTop = 0;

function distanceToEnd() {
  return transcript.scrollHeight - transcript.clientHeight - transcript.scrollTop;
}

function follow() {
  isFollowing = true;
  keepPlace();
}

function keepPlace() {
  if (isFollowing) transcript.scrollTop = transcript.scrollHeight;
  lastTop = transcript.scrollTop;
  byId("latest").hidden = isFollowing || distanceToEnd() < 4;
}

transcript.addEventListener("scroll", () => {
  if (distanceToEnd() < 4) isFollowing = true;
  else if (transcript.scrollTop < lastTop) isFollowing = false;
  keepPlace();
});
// After each layout and before it is painted, whatever has changed the height.
const heights = new ResizeObserver(keepPlace);
heights.observe(transcript);
heights.observe(messageList);

byId("latest").addEventListener("click", () => {
  transcript.focus(); // the button goes
  follow();
});

const NAMES = { user: "You", assistant: "Model" };
const oddsOf = new WeakMap(); // message -> its pieces {text, tokens}, if it was asked for with them

function isTinted() {
  return byId("settings").elements.probabilities.checked;
}

// One message: draws what has been added to it since the last time.
class MessageView {
  constructor(message) {
    this.message = message;
    this.text = make("div", "text");
    this.note = make("p", message.isFailed ? "note failed" : "note");
    this.copy = actionButton("Copy", "copies", "message");
    this.again = actionButton("Regenerate", "regenerates", "");
    const actions = make("div", "actions", [this.copy, this.again]);
    const who = make("h2", "who", [message.isPlain && message.role === "assistant" ? "Continuation" : NAMES[message.role]]);
    this.item = make("li", `${message.role}${message.isPlain ? " plain-text" : ""}`, [who, this.text, this.note, actions]);
    this.draw();
  }

  draw() {
    const { message } = this;
    const form = this.form();
    if (form !== this.drawnForm) {
      this.text.replaceChildren();
      this.text.className = `text ${form}`;
      this.markdown = new Markdown(this.text);
      Object.assign(this, { drawnForm: form, numDrawn: 0 });
    }
    this[form]();
    if (message.reasoning) this.think(message.reasoning);
    this.note.textContent = message.note ?? "";
    this.note.classList.toggle("failed", Boolean(message.isFailed));
  }

  form() {
    if (isTinted() && oddsOf.has(this.message)) return "tokens";
    return this.message.isPlain || this.message.role === "user" ? "plain" : "prose";
  }

  tokens() {
    const pieces = oddsOf.get(this.message);
    for (; this.numDrawn < pieces.length; this.numDrawn++) this.text.append(...spansOf(pieces[this.numDrawn]));
  }

  plain() {
    this.text.append(this.message.content.slice(this.numDrawn));
    this.numDrawn = this.message.content.length;
  }

  prose() {
    this.markdown.draw(this.message.content);
  }

  think(text) {
    if (!this.thoughts) {
      this.thoughts = make("p");
      this.text.before(make("details", "", [make("summary", "", ["Reasoning"]), this.thoughts]));
    }
    this.thoughts.textContent = text;
  }

  // What the end of a message brings: its note, and what can be done with it.
  offer(isEnded, canRegenerate) {
    this.note.hidden = !isEnded;
    this.copy.hidden = !isEnded || !this.message.content;
    this.again.hidden = !canRegenerate;
  }
}

function actionButton(label, name, value) {
  const button = make("button", "plain", [label]);
  button.type = "button";
  button.dataset[name] = value;
  return button;
}

const views = new Map(); // message -> its view, of the conversation that is shown

function showMessages(messages) {
  const top = transcript.scrollTop;
  views.clear();
  messageList.replaceChildren();
  hideOdds();
  for (const message of messages) addMessage(message);
  transcript.scrollTop = top;
  keepPlace();
}

function addMessage(message) {
  const view = new MessageView(message);
  views.set(message, view);
  messageList.append(view.item);
}

function removeMessage(message) {
  views.get(message)?.item.remove();
  views.delete(message);
}

// Many pieces make one drawing: at most one a frame, and drawing takes a fifth of the time at most.
const changed = new Set();
let isDrawing = false;

function drawSoon(message) {
  changed.add(message);
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    const start = performance.now();
    drawChanged();
    setTimeout(() => {
      isDrawing = false;
      if (changed.size) drawSoon(message);
    }, 4 * (performance.now() - start));
  });
}

function drawChanged() {
  for (const message of changed) views.get(message)?.draw();
  changed.clear();
}

// Copying, also where a page without TLS has no clipboard of its own.

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", "hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

messageList.addEventListener("click", async ({ target }) => {
  const kind = target.dataset.copies;
  if (!kind) return;
  const item = target.closest("#messages > li");
  const whole = [...views.values()].find((view) => view.item === item).message.content;
  await copyText(kind === "code" ? target.closest(".code").querySelector("code").textContent : whole);
  target.focus();
  target.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (target.textContent = "Copy"), 1500);
});

// To screen readers: the end of an answer rather than each of its tokens.
function announce(text) {
  byId("news").textContent = text;
}
