// The conversation: sending, streaming, and how likely each token was.

const NUM_ALTERNATIVES = 5;

const settings = byId("settings");
const conversation = []; // {role, content}
let running = null; // the AbortController of the answer that is being written

function setting(name) {
  return settings.elements[name].value;
}

function samplingFields() {
  const fields = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"]) {
    const text = setting(name).trim();
    if (text !== "") fields[name] = Number(text);
  }
  return fields;
}

function chatRequest() {
  const system = setting("system").trim();
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const request = { ...samplingFields(), messages };
  if (settings.elements.probabilities.checked) Object.assign(request, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return request;
}

function completionRequest() {
  const request = { ...samplingFields(), prompt: conversation.at(-1).content };
  if (settings.elements.probabilities.checked) request.logprobs = NUM_ALTERNATIVES;
  return request;
}

// What a chunk brings: {text, reasoning, tokens: [{text, logprob, top: [[text, logprob]]}], usage}
function readChat(event) {
  const choice = event.choices[0];
  const tokens = (choice?.logprobs?.content ?? []).map((t) => ({
    text: t.token,
    logprob: t.logprob,
    top: t.top_logprobs.map((other) => [other.token, other.logprob]),
  }));
  return {
    text: choice?.delta?.content ?? "",
    reasoning: choice?.delta?.reasoning ?? choice?.delta?.reasoning_content ?? "",
    tokens,
    usage: event.usage,
  };
}

function readCompletion(event) {
  const choice = event.choices[0];
  const odds = choice?.logprobs;
  const tokens = (odds?.tokens ?? []).map((text, i) => ({
    text,
    logprob: odds.token_logprobs[i],
    top: Object.entries(odds.top_logprobs?.[i] ?? {}),
  }));
  return { text: choice?.text ?? "", reasoning: "", tokens, usage: event.usage };
}

class Bubble {
  constructor(role, label) {
    this.item = document.createElement("li");
    this.item.className = role;
    const who = document.createElement("span");
    who.className = "who";
    who.textContent = label;
    this.text = document.createElement("p");
    this.text.className = "text";
    this.item.append(who, this.text);
    byId("messages").append(this.item);
    byId("empty").hidden = true;
    this.content = "";
  }

  add(piece) {
    if (piece.reasoning) this.think(piece.reasoning);
    if (!piece.text) return;
    this.content += piece.text;
    this.text.append(...spansOf(piece));
    this.item.scrollIntoView({ block: "nearest" });
  }

  think(text) {
    if (!this.thoughts) {
      this.thoughts = document.createElement("details");
      const title = document.createElement("summary");
      title.textContent = "Reasoning";
      this.thoughts.append(title);
      this.text.before(this.thoughts);
    }
    this.thoughts.append(text);
  }

  fail(reason) {
    const note = document.createElement("p");
    note.className = "failed";
    note.textContent = reason;
    this.item.append(note);
  }
}

// One span for each token, or one for all where the tokens do not spell the text (parts of a character).
function spansOf({ text, tokens }) {
  if (!tokens.length) return [text];
  if (tokens.map((t) => t.text).join("") !== text) return [spanOf(text, tokens)];
  return tokens.map((token) => spanOf(token.text, [token]));
}

function spanOf(text, tokens) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  span.tokens = tokens;
  const least = Math.min(...tokens.map((t) => t.logprob));
  span.style.setProperty("--doubt-share", (1 - Math.exp(least)).toFixed(3));
  return span;
}

async function answer() {
  const isChat = setting("mode") === "chat";
  const bubble = new Bubble(isChat ? "assistant" : "assistant complete", isChat ? "Model" : "Continuation");
  running = new AbortController();
  setBusy(true);
  const start = performance.now();
  let first = 0;
  let count = 0;
  try {
    const [path, request, read] = isChat
      ? ["v1/chat/completions", chatRequest(), readChat]
      : ["v1/completions", completionRequest(), readCompletion];
    for await (const event of events(path, request, running.signal)) {
      const piece = read(event);
      if (piece.text || piece.reasoning) first ||= performance.now();
      if (piece.usage) count = piece.usage.completion_tokens;
      bubble.add(piece);
    }
    byId("speed").value = speedOf(count, first - start, performance.now() - first);
  } catch (error) {
    if (error.name !== "AbortError") bubble.fail(error instanceof Refused ? error.message : "The connection was lost.");
  }
  conversation.push({ role: "assistant", content: bubble.content });
  running = null;
  setBusy(false);
}

function speedOf(count, firstMs, restMs) {
  const told = `${count} token${count === 1 ? "" : "s"}`;
  if (count < 2) return told;
  const rate = (1000 * (count - 1)) / restMs;
  return `${told}, first after ${Math.round(firstMs)} ms, then ${rate.toFixed(1)} a second`;
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").hidden = !isBusy;
  byId("again").disabled = isBusy || conversation.length < 2;
  byId("clear").disabled = isBusy;
  byId("messages").setAttribute("aria-busy", isBusy);
}

function submit() {
  const text = byId("prompt").value;
  if (!text.trim() || running) return;
  byId("prompt").value = "";
  conversation.push({ role: "user", content: text });
  new Bubble(setting("mode") === "chat" ? "user" : "user complete", "You").add({ text, tokens: [] });
  answer();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("again").addEventListener("click", () => {
  conversation.pop();
  byId("messages").lastElementChild.remove();
  answer();
});
byId("clear").addEventListener("click", () => {
  conversation.length = 0;
  byId("messages").replaceChildren();
  byId("empty").hidden = false;
  byId("speed").value = "";
  setBusy(false);
  byId("prompt").focus();
});

// The odds of a token: by pointer, or with the arrow keys in an answer that has the focus.

const odds = byId("odds");

function showOdds(span) {
  hideOdds();
  span.classList.add("current");
  const table = document.createElement("table");
  for (const token of span.tokens) {
    const others = token.top.filter(([text]) => text !== token.text);
    for (const [text, logprob, isChosen] of [[token.text, token.logprob, true], ...others]) {
      const row = table.insertRow();
      row.className = isChosen ? "chosen" : "";
      row.insertCell().textContent = JSON.stringify(text).slice(1, -1);
      row.insertCell().textContent = `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    }
  }
  odds.replaceChildren(table);
  odds.hidden = false;
  const at = span.getBoundingClientRect();
  odds.style.left = `${Math.max(8, Math.min(at.left, innerWidth - odds.offsetWidth - 8))}px`;
  const below = at.bottom + 6;
  odds.style.top = `${below + odds.offsetHeight > innerHeight ? at.top - odds.offsetHeight - 6 : below}px`;
}

function hideOdds() {
  odds.hidden = true;
  for (const span of document.querySelectorAll(".token.current")) span.classList.remove("current");
}

byId("messages").addEventListener("pointerover", (event) => {
  const span = event.target.closest(".token");
  if (span) showOdds(span);
  else hideOdds();
});
byId("messages").addEventListener("pointerleave", hideOdds);
byId("messages").tabIndex = 0;
byId("messages").addEventListener("keydown", (event) => {
  if (event.key === "Escape") return hideOdds();
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const spans = [...document.querySelectorAll(".token")];
  if (!step || !spans.length) return;
  event.preventDefault();
  const now = spans.findIndex((span) => span.classList.contains("current"));
  const next = spans[now < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.min(Math.max(now + step, 0), spans.length - 1)];
  next.scrollIntoView({ block: "nearest" });
  showOdds(next);
});
byId("messages").addEventListener("blur", hideOdds);
