// Speaking with the server. Paths are relative, so that the page works behind a prefix.

const byId = (id) => document.getElementById(id);

class Refused extends Error {}

// Survives a reload of this tab, where the browser keeps anything for this site.
const key = {
  value: "",
  get() {
    try {
      return sessionStorage.getItem("quire-key") ?? this.value;
    } catch {
      return this.value;
    }
  },
  set(value) {
    this.value = value;
    try {
      sessionStorage.setItem("quire-key", value);
    } catch {
      // it lives as long as the page
    }
  },
};

async function ask(path, { body, signal } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  const request = { headers, signal };
  if (body !== undefined) {
    request.method = "POST";
    request.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, request);
  if (response.status === 401) {
    await askForKey();
    return ask(path, { body, signal });
  }
  if (!response.ok) throw new Refused(await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

let keyIsAwaited = null; // one dialog for everybody who waits

function askForKey() {
  keyIsAwaited ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    dialog.addEventListener("close", () => {
      key.set(byId("key").value.trim());
      byId("key").value = "";
      keyIsAwaited = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return keyIsAwaited;
}

// The JSON values of a stream of server-sent events, up to [DONE].
async function* events(path, body, signal) {
  const response = await ask(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
}
