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

// Drawing changes heights, and the browser moves what is in view along: only a reader's own move counts.
let readerMovedAt = -Infinity;
let mayReturn = true; // a wheel that was turned up does not bring a reader to the end
for (const kind of ["wheel", "touchmove", "keydown", "pointerdown", "pointermove"]) {
  transcript.addEventListener(kind, (event) => {
    if (kind === "pointermove" && !event.buttons) return; // also sent when text moves below a pointer
    readerMovedAt = performance.now();
    mayReturn = kind !== "wheel" || event.deltaY > 0;
    if (event.deltaY < 0 && transcript.scrollTop > 0) isFollowing = false;
  }, { passive: true });
}

transcript.addEventListener("scroll", () => {
  if (performance.now() - readerMovedAt < 1000) {
    if (transcript.scrollTop < lastTop) isFollowing = false;
    else if (mayReturn && transcript.scrollTop > lastTop && distanceToEnd() < 4) isFollowing = true;
  }
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

function pictureOf({ name, picture }) {
  const made = make("img", "picture");
  made.src = picture;
  made.alt = name;
  return made;
}

// One message: draws what has been added to it since the last time.
class MessageView {
  constructor(message) {
    this.message = message;
    this.text = make("div", "text");
    this.note = make("p", "note");
    this.files = make("ul", "files");
    this.actions = make("div", "actions");
    const who = make("h2", "who", [message.isPlain && message.role === "assistant" ? "Continuation" : NAMES[message.role]]);
    this.item = make("li", `${message.role}${message.isPlain ? " plain-text" : ""}`, [who, this.files, this.text, this.note, this.actions]);
    for (const file of message.files ?? []) {
      const shown = file.picture ? pictureOf(file)
        : make("details", "", [make("summary", "", [file.name]), make("pre", "", [file.text])]);
      this.files.append(make("li", "", [shown]));
    }
    this.draw();
  }

  draw(isWhole = true) {
    const { message } = this;
    const form = this.form();
    if (form !== this.drawnForm || (form !== "prose" && !message.content.startsWith(this.drawnText ?? ""))) {
      this.text.replaceChildren();
      this.text.className = `text ${form}`;
      this.answer = form === "prose" ? new DrawnAnswer(this.text) : null;
      Object.assign(this, { drawnForm: form, numDrawn: 0 });
    }
    this[form](isWhole);
    this.drawnText = message.content;
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

  prose(isWhole) {
    this.answer.show(this.message.content, isWhole);
  }

  think(text) {
    if (!this.thoughts) {
      this.thoughts = make("p");
      this.text.before(make("details", "thoughts", [make("summary", "", ["Reasoning"]), this.thoughts]));
    }
    this.thoughts.textContent = text;
  }

  // What can be done with the message. `isBusy`: an answer is being written in this conversation.
  offer(siblings, isLast, isBusy) {
    const { message } = this;
    const isGrowing = isBusy && isLast;
    this.note.hidden = isGrowing;
    const wanted = isGrowing ? [] : [["Copy", "copy", message.content !== ""]];
    if (!isBusy) {
      wanted.push(["Edit", "edit", true]);
      if (message.role === "assistant") {
        wanted.push(["Regenerate", "regenerate", true]);
        wanted.push(["Continue", "continue", isLast && message.content !== ""]);
      } else {
        wanted.push(["Answer", "answer", isLast]);
      }
      wanted.push(["Delete", "delete", true]);
    }
    const shown = wanted.filter(([, , isOffered]) => isOffered).map(([label, action]) => {
      const made = button(label);
      made.dataset.action = action;
      return made;
    });
    if (siblings.length > 1 && !isBusy) shown.push(this.branches(siblings));
    const focused = document.activeElement?.dataset?.action;
    const hadFocus = this.actions.contains(document.activeElement);
    this.actions.replaceChildren(...shown);
    if (hadFocus) this.actions.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  branches(siblings) {
    const at = siblings.indexOf(this.message);
    const [back, on] = [["‹", "Previous version", at - 1], ["›", "Next version", at + 1]].map(([sign, label, to]) => {
      const made = button(sign);
      made.setAttribute("aria-label", label);
      made.dataset.action = to < at ? "back" : "on";
      made.disabled = !siblings[to];
      return made;
    });
    const group = make("span", "branches", [back, make("span", "", [`${at + 1} / ${siblings.length}`]), on]);
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", "Versions");
    return group;
  }

  // Has the text edited in its place; `use(text, kind)` gets it, with the name of the button.
  edit(kinds, use) {
    if (this.editor) return;
    const area = make("textarea");
    area.value = this.message.content;
    area.setAttribute("aria-label", "Text of the message");
    const close = () => {
      this.editor.remove();
      this.editor = null;
      this.item.classList.remove("is-edited");
    };
    const finish = (kind) => {
      const text = area.value;
      close();
      use(text, kind);
    };
    const buttons = kinds.map((kind, i) => {
      const made = button(kind, i ? "plain" : "");
      made.addEventListener("click", () => finish(kind));
      return made;
    });
    const cancel = button("Cancel");
    cancel.addEventListener("click", () => {
      close();
      this.actions.querySelector("[data-action=edit]")?.focus();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel.click();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        finish(kinds[0]);
      }
    });
    this.editor = make("div", "editor", [area, make("div", "row", [...buttons, cancel])]);
    this.item.classList.add("is-edited");
    this.text.after(this.editor);
    area.focus();
  }
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

function viewAt(node) {
  const item = node.closest("#messages > li");
  return [...views.values()].find((view) => view.item === item);
}

// Many pieces make one drawing: at most one a frame, and drawing takes a fifth of the time at most.
const changed = new Set();
let isDrawing = false;

function showGrowth(message) {
  changed.add(message);
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    const start = performance.now();
    for (const grown of changed) views.get(grown)?.draw(false);
    changed.clear();
    setTimeout(() => {
      isDrawing = false;
      for (const grown of changed) showGrowth(grown);
    }, 4 * (performance.now() - start));
  });
}

// A message that does not grow any more: no frame that is still due takes it for one that does.
function showWhole(message) {
  changed.delete(message);
  views.get(message)?.draw();
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

async function copyFrom(target, text) {
  await copyText(text);
  target.focus();
  target.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (target.textContent = "Copy"), 1500);
}

messageList.addEventListener("click", ({ target }) => {
  if (target.dataset.copies) copyFrom(target, target.closest(".code").querySelector("pre").textContent);
});

// To screen readers: the end of an answer rather than each of its tokens.
function announce(text) {
  byId("news").textContent = text;
}
