// The conversations: {id, title, changed, messages: [{role, content, reasoning?, note?, isFailed?, isPlain?}]}.
// localStorage keeps each under a key of its own, so that two tabs do not overwrite each other's.

const STORAGE_PREFIX = "quire-conversation-1-";
const MAX_CONVERSATIONS = 100;
const MAX_STORED_CHARS = 2_000_000; // browsers give a site about five million
const MAX_TITLE_CHARS = 60;

const conversations = new Map(); // by id

// null where the browser keeps nothing for this site: the conversations then live as long as the page.
const storage = (() => {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
})();

function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", changed: Date.now(), messages: [] };
}

function newestFirst() {
  return [...conversations.values()].sort((a, b) => b.changed - a.changed);
}

function titleFrom(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS - 1)}…` : line;
}

function loadConversations() {
  conversations.clear();
  for (const name of Object.keys(storage ?? {})) {
    if (name.startsWith(STORAGE_PREFIX)) takeStored(name, storage.getItem(name));
  }
}

// What another tab or an earlier visit has stored; what cannot be read is dropped.
function takeStored(name, text) {
  const conversation = parseConversation(text);
  if (conversation?.id === name.slice(STORAGE_PREFIX.length)) conversations.set(conversation.id, conversation);
  else if (text !== null) storage.removeItem(name);
}

function parseConversation(text) {
  try {
    const { id, title, changed, messages } = JSON.parse(text);
    const isMessage = (m) => ["user", "assistant"].includes(m.role) && typeof m.content === "string";
    const isWhole = typeof id === "string" && typeof title === "string" && Number.isFinite(changed);
    return isWhole && messages.length && messages.every(isMessage) ? { id, title, changed, messages } : null;
  } catch {
    return null;
  }
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

// As files.

function asMarkdown({ title, messages }) {
  const names = { user: "You", assistant: "Model" };
  return `# ${title}\n\n${messages.map((m) => `## ${names[m.role]}\n\n${m.content}\n`).join("\n")}`;
}

function asJson({ title, messages }) {
  return `${JSON.stringify({ title, messages }, null, 2)}\n`;
}
