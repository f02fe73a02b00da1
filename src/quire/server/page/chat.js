// Asking: what is sent, the answer as it streams, stopping, regenerating and continuing it.

const NUM_ALTERNATIVES = 5;
const SAVE_EVERY_MS = 2000; // while an answer streams
const MAX_ANNOUNCED_CHARS = 300; // a longer answer is not read out as a whole

const runs = new Map(); // conversation -> the AbortController of its answer
let current = newConversation(); // the one that is shown

function requestFields() {
  const fields = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...givenNumbers() };
  return chosenModel() ? { ...fields, model: chosenModel() } : fields;
}

// `path`: the messages; the last is the assistant's where its turn is to be continued.
function chatRequest(path, system) {
  const messages = path.filter((m) => m.content || m.files).map((m) => ({ role: m.role, content: partsOf(m) }));
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const request = { ...requestFields(), messages };
  if (path.at(-1).role === "assistant") Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  return isTinted() ? { ...request, logprobs: true, top_logprobs: NUM_ALTERNATIVES } : request;
}

function completionRequest(path) {
  const asked = path.slice(path.findLastIndex((m) => m.role === "user"));
  const request = { ...requestFields(), prompt: asked.map(contentOf).join("") };
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

// Has the last message of the conversation's path answered. `before`: what was shown before the question
// was asked, and `question`, which returns to the box if there is no answer.
async function answer(conversation, { before = conversation.leaf, question = null } = {}) {
  const asked = pathTo(conversation);
  const { isPlain } = asked.at(-1);
  const message = addTo(conversation, asked.at(-1).id, { role: "assistant", content: "", ...(isPlain && { isPlain }) });
  if (isTinted()) oddsOf.set(message, []);
  const failure = await run(conversation, message, asked);
  if (message.content || message.reasoning) return;
  removeBranch(conversation, message);
  if (question) {
    removeBranch(conversation, question);
    returnToBox(conversation, question, failure);
  } else {
    showFailure(failure);
  }
  if (messageById(conversation, before)) conversation.leaf = before;
  if (conversation.messages.length) keep(conversation);
  else deleteConversation(conversation);
  if (conversation === current) show(conversation, { keepsDraft: true });
}

async function continueAnswer(conversation) {
  const asked = pathTo(conversation);
  const message = asked.at(-1);
  oddsOf.delete(message);
  const before = message.content;
  const failure = await run(conversation, message, asked);
  if (failure && message.content === before && conversation === current) showFailure(failure);
}

// Streams into `message`; returns what went wrong, or "".
async function run(conversation, message, asked) {
  const controller = new AbortController();
  runs.set(conversation, controller);
  keyIsDeclined = false;
  delete message.isFailed;
  message.note = "Not finished.";
  keep(conversation);
  if (conversation === current) {
    if (!views.has(message)) show(conversation, { keepsDraft: true });
    showFailure("");
  }
  showState();
  follow();
  byId("speed").value = "";
  announce("The model is answering.");
  const [failure, speed] = await written(message, conversation, asked, controller.signal);
  runs.delete(conversation);
  if (conversations.has(conversation.id)) keep(conversation); // it may have been deleted
  showWhole(message);
  showState();
  if (conversation !== current) return failure;
  byId("speed").value = speed;
  const isShort = message.content.length <= MAX_ANNOUNCED_CHARS;
  announce(`${message.note ?? ""} ${isShort ? message.content : `The answer is complete. ${speed}`}`);
  return failure;
}

// Writes the answer into `message`; returns what went wrong, and how fast it came.
async function written(message, conversation, asked, signal) {
  const [path, request, read] = message.isPlain
    ? ["v1/completions", completionRequest(asked), readCompletion]
    : ["v1/chat/completions", chatRequest(asked, conversation.system), readChat];
  const times = { start: performance.now(), first: 0, saved: performance.now() };
  let reason = null;
  let failure = "";
  let usage = null;
  try {
    for await (const event of events(path, request, signal)) {
      const piece = read(event);
      if (piece.usage) usage = { prompt: piece.usage.prompt_tokens, completion: piece.usage.completion_tokens };
      reason = piece.reason ?? reason;
      if (!piece.text && !piece.reasoning) continue;
      times.first ||= performance.now();
      message.content += piece.text;
      if (piece.reasoning) message.reasoning = (message.reasoning ?? "") + piece.reasoning;
      if (piece.text) oddsOf.get(message)?.push(piece);
      if (usage) message.usage = usage;
      showGrowth(message);
      if (conversation === current) showUsage(speedOf(usage?.completion, times));
      if (performance.now() - times.saved < SAVE_EVERY_MS) continue;
      keep(conversation);
      times.saved = performance.now();
    }
    message.note = ENDINGS[reason];
  } catch (error) {
    const isStopped = error.name === "AbortError";
    failure = isStopped ? "" : reasonIn(error);
    if (!isStopped) message.isFailed = true;
    message.note = isStopped ? "Stopped." : failure;
  }
  if (usage) message.usage = usage;
  return [failure, speedOf(usage?.completion, times)];
}

// Counted from the request: a user waits for the first token, too.
function speedOf(count, { start, first }) {
  if (!count || !first) return "";
  const seconds = (performance.now() - start) / 1000;
  const total = `${count} token${count === 1 ? "" : "s"}`;
  return `${total} in ${seconds.toFixed(1)} s (${(count / seconds).toFixed(1)} a second), first after ${Math.round(first - start)} ms`;
}

function showUsage(speed) {
  if (speed !== undefined) byId("speed").value = speed;
  const used = pathTo(current).findLast((message) => message.usage)?.usage;
  const limit = models.find((card) => card.id === chosenModel())?.max_model_len ?? facts?.max_model_len;
  byId("context").hidden = !used || !limit;
  if (!used || !limit) return;
  const count = used.prompt + used.completion;
  byId("context-meter").value = count / limit;
  byId("context-text").textContent = `${count.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens`;
}

function keep(conversation) {
  byId("storage-note").textContent = saveConversation(conversation);
  showHistory();
}

let keeping = 0;

function keepSoon(conversation) {
  clearTimeout(keeping);
  keeping = setTimeout(() => keep(conversation), 300);
}

function showState() {
  const isBusy = runs.has(current);
  const focused = document.activeElement;
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("empty").hidden = current.messages.length > 0;
  messageList.setAttribute("aria-busy", isBusy);
  const path = pathTo(current);
  for (const [message, view] of views) view.offer(siblingsOf(current, message), message === path.at(-1), isBusy);
  showUsage();
  if (focused?.hidden || !focused?.isConnected || document.activeElement === document.body) byId("prompt").focus();
}

function show(conversation, { keepsDraft = false } = {}) {
  if (conversation !== current) keepDraft(current);
  current = conversation;
  byId("speed").value = "";
  settings.elements.system.value = conversation.system;
  if (!keepsDraft) showDraft(conversation);
  showMessages(pathTo(conversation));
  showState();
  showHistory();
  follow();
}

function askAnew(parent, facts) {
  const before = current.leaf;
  current.title ||= titleFrom(facts.content || facts.files?.[0]?.name || "");
  const question = addTo(current, parent, { role: "user", ...facts });
  show(current, { keepsDraft: true });
  answer(current, { before, question });
}

function submit() {
  const content = byId("prompt").value;
  if ((!content.trim() && !attached.length) || runs.has(current)) return;
  const isPlain = setting("mode") === "complete";
  if (isPlain && attached.some((file) => file.picture)) {
    return showFailure("A text that is continued has no pictures: remove them, or switch to “Chat”.");
  }
  const asked = { content, ...(attached.length && { files: attached }), ...(isPlain && { isPlain }) };
  byId("prompt").value = "";
  attached = [];
  showAttached();
  askAnew(current.leaf, asked);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !byId("prompt").value) {
    const last = pathTo(current).findLast((message) => message.role === "user");
    if (last && !runs.has(current)) editMessage(last);
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

// A question is asked again in its new words, as another branch, or changed where it stands.
function editMessage(message) {
  const kinds = message.role === "user" ? ["Send", "Save"] : ["Save"];
  views.get(message).edit(kinds, (content, kind) => {
    if (runs.has(current)) return;
    const { files, isPlain } = message;
    if (kind === "Send") return askAnew(message.parent, { content, ...(files && { files }), ...(isPlain && { isPlain }) });
    message.content = content;
    oddsOf.delete(message);
    keep(current);
    show(current, { keepsDraft: true });
  });
}

function deleteMessage(message) {
  const after = pathTo(current).length - pathTo(current, message.id).length;
  const what = after ? `This message and the ${after} after it` : "This message";
  askToDelete("Delete the message?", `${what} cannot be brought back.`, () => {
    removeBranch(current, message);
    if (current.messages.length) keep(current);
    else deleteConversation(current);
    show(current, { keepsDraft: true });
    byId("prompt").focus();
  });
}

function turnTo(message, step) {
  const siblings = siblingsOf(current, message);
  chooseBranch(current, siblings[siblings.indexOf(message) + step]);
  keep(current);
  show(current, { keepsDraft: true });
}

const ACTIONS = {
  copy: (message, target) => copyFrom(target, message.content),
  edit: editMessage,
  delete: deleteMessage,
  back: (message) => turnTo(message, -1),
  on: (message) => turnTo(message, 1),
  continue: () => continueAnswer(current),
  answer: () => answer(current),
  regenerate: (message) => {
    const before = current.leaf;
    byId("prompt").focus(); // the button goes
    current.leaf = message.parent;
    answer(current, { before });
  },
};

messageList.addEventListener("click", ({ target }) => {
  const { action } = target.dataset;
  if (!action || (runs.has(current) && action !== "copy")) return;
  ACTIONS[action](viewAt(target).message, target);
});
settings.elements.probabilities.addEventListener("change", () => {
  for (const view of views.values()) view.draw();
});
addEventListener("pagehide", () => {
  for (const conversation of runs.keys()) saveConversation(conversation);
});
