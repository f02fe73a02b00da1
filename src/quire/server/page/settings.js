// What requests carry besides the conversation. A field that is empty is not sent: the server's own
// default applies, which the field shows. All of it survives a reload; the system message belongs to
// its conversation.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

const settings = byId("settings");
let facts = null; // of the server: its defaults and limits
let models = []; // the cards of /v1/models

function setting(name) {
  return settings.elements[name].value;
}

function givenNumbers() {
  const given = NUMBERS.map((name) => [name, setting(name).trim()]);
  return Object.fromEntries(given.filter(([, text]) => text !== "").map(([name, text]) => [name, Number(text)]));
}

function chosenModel() {
  return byId("model").value;
}

function keepSettings() {
  const kept = { mode: setting("mode"), probabilities: isTinted(), model: chosenModel() };
  for (const name of NUMBERS) kept[name] = setting(name);
  keepSetting("settings-1", kept);
}

function restoreSettings() {
  const kept = keptSetting("settings-1") ?? {};
  for (const name of NUMBERS) if (typeof kept[name] === "string") settings.elements[name].value = kept[name];
  if (["chat", "complete"].includes(kept.mode)) settings.elements.mode.value = kept.mode;
  settings.elements.probabilities.checked = kept.probabilities === true;
  showDefaults();
}

function showDefaults() {
  if (!facts) return;
  for (const [name, value] of Object.entries(facts.sampling)) {
    if (settings.elements[name]) settings.elements[name].placeholder = value;
  }
  const isChat = setting("mode") === "chat";
  settings.elements.max_tokens.placeholder = isChat ? facts.max_tokens ?? "what fits" : facts.max_tokens_of_completion;
}

async function loadFacts() {
  try {
    facts = await (await ask("page/facts")).json();
  } catch {
    return; // the fields say "default"
  }
  const missing = facts.missing_packages;
  drawing.isOffered = !missing.length;
  byId("missing").hidden = !missing.length;
  byId("missing").textContent = missing.length
    ? `Answers are shown as plain text: ${missing.join(", ")} ${missing.length > 1 ? "are" : "is"} not installed on the server (pip install 'quire[page]').`
    : "";
  showDefaults();
  // The process that draws starts with its first task: now, rather than with the first answer.
  if (drawing.isOffered && can.includes("generate")) ask("page/drawing", { body: { text: "", is_whole: true } }).catch(() => {});
}

async function loadModels() {
  try {
    models = (await (await ask("v1/models")).json()).data;
  } catch {
    return; // requests without a name go to the model
  }
  const groups = [["Model", models.filter((card) => !card.parent)], ["Adapters", models.filter((card) => card.parent)]];
  const options = ([label, cards]) => {
    const group = make("optgroup", "", cards.map(({ id }) => new Option(id, id)));
    group.label = label;
    return group;
  };
  const select = byId("model");
  select.replaceChildren(...groups.filter(([, cards]) => cards.length).map(options));
  const kept = keptSetting("settings-1")?.model;
  select.value = models.some((card) => card.id === kept) ? kept : models[0].id;
}

settings.addEventListener("input", (event) => {
  if (event.target.name === "system") {
    current.system = event.target.value;
    if (current.messages.length) keepSoon(current);
    return;
  }
  keepSettings();
  showDefaults();
});
settings.addEventListener("submit", (event) => event.preventDefault());
byId("model").addEventListener("change", keepSettings);
byId("defaults").addEventListener("click", () => {
  for (const name of NUMBERS) settings.elements[name].value = "";
  keepSettings();
});
