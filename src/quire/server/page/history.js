// The list of conversations, and what can be done with the one that is shown.

let shownEntries = ""; // the list is not made again while they stay the same, since it may have the focus

function showHistory() {
  const hash = current.messages.length ? `#${current.id}` : "";
  if (location.hash !== hash) history.replaceState(null, "", location.pathname + location.search + hash);
  for (const id of ["rename", "delete", "export-markdown", "export-json"]) byId(id).disabled = !hash;
  const entries = newestFirst().map((conversation) => [conversation, conversation.title || "Untitled"]);
  const shown = JSON.stringify([current.id, entries.map(([{ id }, title]) => [id, title])]);
  if (shown === shownEntries) return;
  shownEntries = shown;
  const list = byId("conversations");
  const hadFocus = list.contains(document.activeElement);
  list.replaceChildren(...entries.map(([conversation, title]) => {
    const button = make("button", "plain", [title]);
    button.type = "button";
    if (conversation === current) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => choose(conversation));
    return make("li", "", [button]);
  }));
  if (hadFocus) list.querySelector("[aria-current]")?.focus();
}

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
byId("delete").addEventListener("click", () => {
  byId("delete-name").textContent = current.title;
  askFirst(byId("delete-dialog"), () => {
    stop();
    deleteConversation(current);
    show(newestFirst()[0] ?? newConversation());
    byId("prompt").focus();
  });
});

function download(text, ending, type) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${current.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation"}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

byId("export-markdown").addEventListener("click", () => download(asMarkdown(current), "md", "text/markdown"));
byId("export-json").addEventListener("click", () => download(asJson(current), "json", "application/json"));

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
  if (stored && stored !== current) showMessages((current = stored).messages);
  showState();
  showHistory();
});
