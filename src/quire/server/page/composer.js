// The box in which a question is written, with the files that go along. Each conversation has its own
// draft, so that a question that failed meanwhile is found in its place.

const MAX_FILE_CHARS = 400_000;
const MAX_FILES = 10;

const drafts = new WeakMap(); // conversation -> {text, files, failure}
let attached = []; // {name, text}

function showDraft(conversation) {
  const { text = "", files = [], failure = "" } = drafts.get(conversation) ?? {};
  byId("prompt").value = text;
  attached = files;
  showAttached();
  showFailure(failure);
}

function keepDraft(conversation) {
  drafts.set(conversation, { text: byId("prompt").value, files: attached, failure: byId("failure").textContent });
}

// Brings a question back to the box, before what has been written there since.
function returnToBox(conversation, { content, files = [] }, failure) {
  if (conversation === current) keepDraft(conversation);
  const draft = drafts.get(conversation) ?? { text: "", files: [] };
  const text = [content, draft.text].filter((part) => part.trim()).join("\n\n");
  drafts.set(conversation, { text, files: [...files, ...draft.files], failure });
  if (conversation === current) showDraft(conversation);
}

function showFailure(text) {
  byId("failure").textContent = text;
  byId("failure").hidden = !text;
}

function showAttached() {
  byId("attached").replaceChildren(...attached.map((file) => {
    const remove = button("×");
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => {
      attached = attached.filter((other) => other !== file);
      showAttached();
      byId("prompt").focus();
    });
    return make("li", "", [make("span", "", [file.name]), remove]);
  }));
}

async function attach(files) {
  const refused = [];
  for (const file of files) {
    const text = file.size > 4 * MAX_FILE_CHARS ? null : await textIn(file);
    if (text === null || text.length > MAX_FILE_CHARS || attached.length >= MAX_FILES) {
      const reason = text === null && file.size <= 4 * MAX_FILE_CHARS ? "is not a text file (UTF-8)"
        : attached.length >= MAX_FILES ? `is one more than ${MAX_FILES}` : `has more than ${MAX_FILE_CHARS} characters`;
      refused.push(`“${file.name}” ${reason}.`);
    } else {
      attached = [...attached, { name: file.name, text }];
    }
  }
  showAttached();
  showFailure(refused.join(" "));
}

async function textIn(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", async () => {
  await attach([...byId("files").files]);
  byId("files").value = "";
  byId("prompt").focus();
});
const talk = document.querySelector(".talk");
talk.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
talk.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
byId("prompt").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});
