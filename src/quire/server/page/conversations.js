// The conversations: {id, title, changed, system, leaf, messages: [{id, parent, role, content, ...}]}.
// The messages are a tree, since answers are regenerated and questions edited; what is shown is the
// path to `leaf`. localStorage keeps each conversation under a key of its own, so that two tabs do not
// overwrite each other's.

const STORAGE_PREFIX = "quire-conversation-1-";
const MAX_CONVERSATIONS = 100;
const MAX_STORED_CHARS = 2_000_000; // browsers give a site about five million
const MAX_TITLE_CHARS = 60;

const conversations = new Map(); // by id

function randomId() {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

function newConversation() {
  return { id: randomId(), title: "", changed: Date.now(), system: "", leaf: null, messages: [] };
}

function newestFirst() {
  return [...conversations.values()].sort((a, b) => b.changed - a.changed);
}

function titleFrom(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS - 1)}…` : line;
}

// The tree.

function messageById({ messages }, id) {
  return messages.find((message) => message.id === id);
}

// The messages from the first to `leaf`.
function pathTo(conversation, leaf = conversation.leaf) {
  const parents = new Map(conversation.messages.map((message) => [message.id, message]));
  const path = [];
  for (let at = parents.get(leaf); at; at = parents.get(at.parent)) path.unshift(at);
  return path;
}

function siblingsOf(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent);
}

function addTo(conversation, parent, facts) {
  const message = { id: randomId(), parent, ...facts };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  return message;
}

// Shows the branch of a message, to its newest end.
function chooseBranch(conversation, message) {
  let leaf = message;
  for (let next = leaf; next; next = conversation.messages.findLast((other) => other.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

// Removes a message and all that follows it; another branch is shown instead, if there is one.
function removeBranch(conversation, message) {
  const gone = new Set([message.id]);
  for (const other of conversation.messages) if (gone.has(other.parent)) gone.add(other.id);
  conversation.messages = conversation.messages.filter((other) => !gone.has(other.id));
  if (!gone.has(conversation.leaf)) return;
  const beside = conversation.messages.findLast((other) => other.parent === message.parent);
  if (beside) chooseBranch(conversation, beside);
  else conversation.leaf = message.parent;
}

// Reading what is stored or imported: nothing of it is trusted.

const OPTIONAL_FIELDS = {
  reasoning: (value) => typeof value === "string",
  note: (value) => typeof value === "string",
  isFailed: (value) => typeof value === "boolean",
  isPlain: (value) => typeof value === "boolean",
  usage: (value) => [value?.prompt, value?.completion].every(Number.isFinite),
  files: (value) => Array.isArray(value) && value.every(isFile),
};
const PICTURE_URL = /^data:image\/(png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/=]+$/;

function isFile(file) {
  const has = (name) => typeof file?.[name] === "string";
  return has("name") && (has("picture") ? PICTURE_URL.test(file.picture) : has("text"));
}

// A conversation from a JSON value: one of ours, or a list of messages as the API takes them. Returns
// null for another value.
function readConversation(given) {
  const list = Array.isArray(given) ? given : given?.messages;
  if (!Array.isArray(list)) return null;
  const made = { ...newConversation(), title: titleFrom(String(given.title ?? "")) };
  if (typeof given.system === "string") made.system = given.system;
  if (Number.isFinite(given.changed)) made.changed = given.changed;
  const seen = new Set();
  let before = null;
  for (const item of list) {
    const content = textOf(item?.content);
    if (content === null || !["system", "user", "assistant"].includes(item.role)) return null;
    if (item.role === "system") {
      made.system ||= content;
      continue;
    }
    const { id = randomId(), parent = before } = item;
    if (typeof id !== "string" || seen.has(id) || (parent !== null && !seen.has(parent))) return null;
    const message = { id, parent, role: item.role, content };
    const pictures = picturesOf(item.content);
    if (pictures.length) message.files = pictures;
    for (const [name, isValid] of Object.entries(OPTIONAL_FIELDS)) if (isValid(item[name])) message[name] = item[name];
    made.messages.push(message);
    seen.add(before = id);
  }
  if (!made.messages.length) return null;
  made.leaf = seen.has(given.leaf) ? given.leaf : before;
  made.title ||= titleFrom(made.messages[0].content);
  return made;
}

function textOf(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return null;
  const texts = content.filter((part) => !isFile(fileOf(part)));
  if (!texts.every((part) => typeof part?.text === "string")) return null;
  return texts.map((part) => part.text).join("\n");
}

// The pictures of a message as the API takes them.
function picturesOf(content) {
  return Array.isArray(content) ? content.map(fileOf).filter(isFile) : [];
}

function fileOf(part) {
  return { name: "Picture", picture: part?.image_url?.url ?? part?.image_url ?? null };
}

// Storage.

function loadConversations() {
  conversations.clear();
  for (const name of Object.keys(storage ?? {})) {
    if (name.startsWith(STORAGE_PREFIX)) takeStored(name, storage.getItem(name));
  }
}

// What another tab or an earlier visit has stored; what cannot be read is dropped.
function takeStored(name, text) {
  let given = null;
  try {
    given = JSON.parse(text);
  } catch {
    // half of a value
  }
  const read = given?.id === name.slice(STORAGE_PREFIX.length) ? readConversation(given) : null;
  if (read) conversations.set(given.id, { ...read, id: given.id });
  else if (text !== null) storage.removeItem(name);
}

// Returns what stands in the way, or "".
function saveConversation(conversation) {
  conversation.changed = Date.now();
  conversations.set(conversation.id, conversation);
  if (!storage) return "This browser keeps no history for this page.";
  const text = JSON.stringify(conversation);
  if (text.length > MAX_STORED_CHARS) return "This conversation is too long to be kept after a reload.";
  const others = newestFirst().filter((other) => other !== conversation);
  let room = MAX_STORED_CHARS - text.length;
  const numKept = others.findIndex((other, i) => (room -= storedChars(other)) < 0 || i + 1 >= MAX_CONVERSATIONS);
  if (numKept >= 0) others.splice(numKept).forEach(deleteConversation);
  // Others may fill what the browser gives: then the oldest make room, but no more of them than is needed.
  for (let freed = 0; ; ) {
    try {
      storage.setItem(STORAGE_PREFIX + conversation.id, text);
      return "";
    } catch {
      if (!others.length || freed > text.length) return "The browser's storage is full: this will not survive a reload.";
      freed += storedChars(others.at(-1));
      deleteConversation(others.pop());
    }
  }
}

function storedChars(conversation) {
  return storage.getItem(STORAGE_PREFIX + conversation.id)?.length ?? 0;
}

function deleteConversation(conversation) {
  conversations.delete(conversation.id);
  storage?.removeItem(STORAGE_PREFIX + conversation.id);
}

// What is sent of a message: its files come first, in fences that none of their lines can close.
function contentOf({ content, files = [] }) {
  const parts = files.filter((file) => !file.picture).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((ticks) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${JSON.stringify(name)}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

// The same with its pictures, for a conversation.
function partsOf(message) {
  const pictures = (message.files ?? []).filter((file) => file.picture);
  const text = contentOf(message);
  if (!pictures.length) return text;
  const parts = pictures.map(({ picture }) => ({ type: "image_url", image_url: { url: picture } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// As files.

function asMarkdown(conversation) {
  const names = { user: "You", assistant: "Model" };
  const { title, system } = conversation;
  const shown = (m) => [...(m.files ?? []).filter((file) => file.picture).map(({ name }) => `(Picture “${name}”)`), contentOf(m)];
  const parts = pathTo(conversation).map((m) => `## ${names[m.role]}\n\n${shown(m).join("\n\n")}\n`);
  if (system) parts.unshift(`## System\n\n${system}\n`);
  return `# ${title}\n\n${parts.join("\n")}`;
}

function asJson(value) {
  return `${JSON.stringify(value, null, 2)}\n`;
}

// The conversations in a file that has been saved here, or a list of messages. Throws an Error that says
// why there are none.
function importFrom(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch {
    throw new Error("It is not JSON.");
  }
  const list = Array.isArray(given?.conversations) ? given.conversations : [given];
  const read = list.map(readConversation);
  if (!read.length || read.includes(null)) throw new Error("It has no messages with a role and a content.");
  return read;
}
