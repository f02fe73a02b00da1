// Asking: what is sent, the answer as it streams, stopping and regenerating it.

const NUM_ALTERNATIVES = 5;
const SAVE_EVERY_MS = 2000; // while an answer streams
const MAX_ANNOUNCED_CHARS = 300; // a longer answer is not read out as a whole

const settings = byId("settings");
const runs = new Map(); // conversation -> the AbortController of its answer
let current = newConversation(); // the one that is shown

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

function chatRequest(messages) {
  const system = setting("system").trim();
  const all = messages.map(({ role, content }) => ({ role, content }));
  const request = { ...samplingFields(), messages: system ? [{ role: "system", content: system }, ...all] : all };
  return isTinted() ? { ...request, logprobs: true, top_logprobs: NUM_ALTERNATIVES } : request;
}

function completionRequest(messages) {
  const request = { ...samplingFields(), prompt: messages.at(-1).content };
  return isTinted() ? { ...request, logprobs: NUM_ALTERNATIVES } : request;
}

// What an event brings: {text, reasoning, tokens: [{text, logprob, top: [[text, logprob]]}], usage, reason}
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
    reason: choice?.finish_reason,
  };
}

function readCompletion(event) {
  const choice = event.choices[0];
  const logprobs = choice?.logprobs;
  const tokens = (logprobs?.tokens ?? []).map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}),
  }));
  return { text: choice?.text ?? "", reasoning: "", tokens, usage: event.usage, reason: choice?.finish_reason };
}

const ENDINGS = {
  length: "Ended by the limit of tokens.",
  abort: "Ended by the server.",
};

// Has the conversation's last message answered.
async function answer(conversation) {
  const asked = [...conversation.messages];
  const { isPlain } = asked.at(-1);
  const message = { role: "assistant", content: "", note: "Not finished.", ...(isPlain && { isPlain }) };
  const run = new AbortController();
  runs.set(conversation, run);
  conversation.messages.push(message);
  keep(conversation);
  if (conversation === current) addMessage(message);
  showState();
  follow();
  byId("speed").value = "";
  announce("The model is answering.");
  const speed = await written(message, conversation, asked, run.signal);
  runs.delete(conversation);
  if (conversations.has(conversation.id)) keep(conversation); // it may have been deleted
  changed.add(message);
  drawChanged();
  showState();
  if (conversation !== current) return;
  byId("speed").value = speed;
  const isShort = message.content.length <= MAX_ANNOUNCED_CHARS;
  announce(`${message.note ?? ""} ${isShort ? message.content : `The answer is complete. ${speed}`}`);
}

// Writes the answer into `message`, and returns how fast it came.
async function written(message, conversation, asked, signal) {
  const [path, request, read] = message.isPlain
    ? ["v1/completions", completionRequest(asked), readCompletion]
    : ["v1/chat/completions", chatRequest(asked), readChat];
  const times = { start: performance.now(), first: 0, saved: performance.now() };
  let count = 0;
  let reason = null;
  if (isTinted()) oddsOf.set(message, []);
  try {
    for await (const event of events(path, request, signal)) {
      const piece = read(event);
      count = piece.usage?.completion_tokens ?? count;
      reason = piece.reason ?? reason;
      if (!piece.text && !piece.reasoning) continue;
      times.first ||= performance.now();
      message.content += piece.text;
      if (piece.reasoning) message.reasoning = (message.reasoning ?? "") + piece.reasoning;
      if (piece.text) oddsOf.get(message)?.push(piece);
      drawSoon(message);
      if (performance.now() - times.saved < SAVE_EVERY_MS) continue;
      keep(conversation);
      times.saved = performance.now();
    }
    message.note = ENDINGS[reason];
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (!isStopped) message.isFailed = true;
    message.note = isStopped ? "Stopped." : error instanceof Refused ? error.message : "The connection was lost.";
  }
  return count ? speedOf(count, times.first - times.start, performance.now() - times.first) : "";
}

function speedOf(count, firstMs, restMs) {
  const total = `${count} token${count === 1 ? "" : "s"}`;
  if (count < 2) return total;
  const rate = (1000 * (count - 1)) / restMs;
  return `${total}, first after ${Math.round(firstMs)} ms, then ${rate.toFixed(1)} a second`;
}

function keep(conversation) {
  byId("storage-note").textContent = saveConversation(conversation);
  showHistory();
}

function showState() {
  const isBusy = runs.has(current);
  const focused = document.activeElement;
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("empty").hidden = current.messages.length > 0;
  messageList.setAttribute("aria-busy", isBusy);
  for (const [message, view] of views) {
    const isLast = message === current.messages.at(-1);
    view.offer(!isLast || !isBusy, isLast && !isBusy);
  }
  if (focused.hidden) byId("prompt").focus();
}

function show(conversation) {
  current = conversation;
  byId("speed").value = "";
  showMessages(conversation.messages);
  showState();
  showHistory();
  follow();
}

function submit() {
  const text = byId("prompt").value;
  if (!text.trim() || runs.has(current)) return;
  byId("prompt").value = "";
  const isPlain = setting("mode") === "complete";
  const message = { role: "user", content: text, ...(isPlain && { isPlain }) };
  current.title ||= titleFrom(text);
  current.messages.push(message);
  addMessage(message);
  answer(current);
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

function stop() {
  runs.get(current)?.abort();
}

byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (odds.hidden) stop();
  else hideOdds();
});
messageList.addEventListener("click", (event) => {
  if (event.target.dataset.regenerates === undefined || runs.has(current)) return;
  byId("prompt").focus(); // the button goes
  if (current.messages.at(-1).role === "assistant") removeMessage(current.messages.pop());
  answer(current);
});
settings.elements.probabilities.addEventListener("change", () => {
  for (const view of views.values()) view.draw();
});
addEventListener("pagehide", () => {
  for (const conversation of runs.keys()) saveConversation(conversation);
});
