// The box in which a question is written, with the files that go along. Each conversation has its own
// draft, so that a question that failed meanwhile is found in its place.

const MAX_FILE_CHARS = 400_000;
const MAX_FILES = 10;
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_PICTURE_CHARS = 20_000_000; // of all that go along; a server takes bodies of 32 MiB

const drafts = new WeakMap(); // conversation -> {text, files, failure}
let attached = []; // {name, text}, or {name, picture} with a data: URL

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
    return make("li", "", [...(file.picture ? [pictureOf(file)] : []), make("span", "", [file.name]), remove]);
  }));
}

// What stands in the way of a picture, or "".
function refusalOf(file) {
  if (!facts?.takes_pictures) return "is a picture, and this model takes text alone";
  if (setting("mode") === "complete") return "is a picture: switch to “Chat” to send it";
  if (!PICTURES.includes(file.type)) return "is a picture of another kind than PNG, JPEG, WebP, GIF and BMP";
  if (attached.length >= MAX_FILES) return `is one more than ${MAX_FILES}`;
  const chars = attached.reduce((sum, { picture = "" }) => sum + picture.length, 0);
  return chars + (4 * file.size) / 3 > MAX_PICTURE_CHARS ? "makes the pictures larger than 15 MB together" : "";
}

function isPicture({ type }) {
  return type.startsWith("image/") && type !== "image/svg+xml"; // that one is a text
}

async function attach(files) {
  const refused = [];
  for (const file of files) {
    if (isPicture(file)) {
      const reason = refusalOf(file);
      if (reason) refused.push(`“${file.name}” ${reason}.`);
      else attached = [...attached, { name: file.name, picture: await dataUrlOf(file) }];
      continue;
    }
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

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
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
