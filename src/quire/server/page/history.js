// The list of conversations, and what can be done with the one that is shown.

let shownEntries = ""; // the list is not made again while they stay the same, since it may have the focus

function showHistory() {
  const hash = current.messages.length ? `#${current.id}` : "";
  if (location.hash !== hash) history.replaceState(null, "", location.pathname + location.search + hash);
  for (const id of ["rename", "delete", "export-markdown", "export-json"]) byId(id).disabled = !hash;
  const wanted = byId("search").value.trim().toLowerCase();
  const found = newestFirst().filter((conversation) => !wanted || isAbout(conversation, wanted));
  const entries = found.map((conversation) => [conversation, conversation.title || "Untitled"]);
  byId("search-note").textContent = wanted && !found.length ? "Nothing found." : "";
  const shown = JSON.stringify([current.id, entries.map(([{ id }, title]) => [id, title])]);
  if (shown === shownEntries) return;
  shownEntries = shown;
  const list = byId("conversations");
  const hadFocus = list.contains(document.activeElement);
  list.replaceChildren(...entries.map(([conversation, title]) => {
    const entry = button(title);
    if (conversation === current) entry.setAttribute("aria-current", "true");
    entry.addEventListener("click", () => choose(conversation));
    return make("li", "", [entry]);
  }));
  if (hadFocus) list.querySelector("[aria-current]")?.focus();
}

function isAbout({ title, messages }, wanted) {
  return [title, ...messages.map((message) => message.content)].some((text) => text.toLowerCase().includes(wanted));
}

byId("search").addEventListener("input", showHistory);

function choose(conversation) {
  show(conversation);
  if (isNarrow.matches) byId("history").open = false;
}

byId("new").addEventListener("click", () => {
  choose(newConversation());
  byId("prompt").focus();
});

// Opens a dialog; `use` is called if it is closed with its main button.
function askFirst(dialog, use) {
  dialog.returnValue = "";
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "yes") use();
  }, { once: true });
  dialog.showModal();
}

byId("rename").addEventListener("click", () => {
  byId("title").value = current.title;
  askFirst(byId("rename-dialog"), () => {
    current.title = titleFrom(byId("title").value) || current.title;
    keep(current);
  });
});
function askToDelete(title, text, use) {
  byId("delete-title").textContent = title;
  byId("delete-text").textContent = text;
  askFirst(byId("delete-dialog"), use);
}

byId("delete").addEventListener("click", () => {
  askToDelete("Delete the conversation?", `“${current.title}” cannot be brought back.`, () => {
    stop();
    deleteConversation(current);
    show(newestFirst()[0] ?? newConversation());
    byId("prompt").focus();
  });
});

function download(text, ending, type, name = current.title) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation"}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

byId("export-markdown").addEventListener("click", () => download(asMarkdown(current), "md", "text/markdown"));
byId("export-json").addEventListener("click", () => download(asJson(current), "json", "application/json"));
byId("export-all").addEventListener("click", () => {
  download(asJson({ conversations: newestFirst() }), "json", "application/json", "conversations");
});

byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async () => {
  const notes = [];
  for (const file of byId("import-file").files) {
    try {
      const read = importFrom(await file.text());
      for (const conversation of read) notes.push(saveConversation(conversation));
      show(read.at(-1));
    } catch (error) {
      notes.push(`“${file.name}” cannot be imported. ${error.message}`);
    }
  }
  byId("import-file").value = "";
  byId("storage-note").textContent = notes.filter(Boolean).join(" ");
});

// What another tab does. A conversation that is being answered here stays as it is here.
addEventListener("storage", ({ key: name, newValue }) => {
  if (name !== null && !name.startsWith(STORAGE_PREFIX)) return;
  const running = [...runs.keys()];
  if (name === null) loadConversations();
  else if (newValue === null) conversations.delete(name.slice(STORAGE_PREFIX.length));
  else takeStored(name, newValue);
  for (const conversation of running) conversations.set(conversation.id, conversation);
  const stored = conversations.get(current.id);
  if (!stored && current.messages.length) return show(newConversation());
  if (stored && stored !== current) return show(stored, { keepsDraft: true });
  showState();
  showHistory();
});
