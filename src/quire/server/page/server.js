// Speaking with the server. Paths are relative, so that the page works behind a prefix.

const byId = (id) => document.getElementById(id);

class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

class Cut extends Error {} // a stream that ended before its end was told

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
  for (;;) {
    const given = key.get();
    const headers = given ? { Authorization: `Bearer ${given}` } : {};
    const request = { headers, signal };
    if (body !== undefined) {
      request.method = "POST";
      request.body = JSON.stringify(body);
      headers["Content-Type"] = "application/json";
    }
    const response = await fetch(path, request);
    if (response.ok) return response;
    if (response.status !== 401) throw new Refused(await reasonOf(response), response.status);
    if (key.get() === given) await askForKey(given !== ""); // else somebody has given one meanwhile
  }
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

let keyIsAwaited = null; // one dialog for everybody who waits
let keyIsDeclined = false; // until something is done that needs it

function askForKey(wasRefused) {
  if (keyIsDeclined) return Promise.reject(new Refused("This server needs an API key.", 401));
  const text = wasRefused ? "The server refused this key. Check it and try again." : "";
  byId("key-note").textContent = text;
  keyIsAwaited ??= new Promise((resolve, reject) => {
    const dialog = byId("key-dialog");
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      const given = byId("key").value.trim();
      byId("key").value = "";
      keyIsAwaited = null;
      keyIsDeclined = dialog.returnValue !== "yes" || !given;
      if (keyIsDeclined) return reject(new Refused(text || "This server needs an API key.", 401));
      key.set(given);
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
    const { value, done } = await reader.read().catch((error) => {
      throw signal.aborted ? error : new Cut();
    });
    if (done) throw new Cut();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message, event.error.code);
      yield event;
    }
  }
}

// What stands in the way, in a sentence.
function reasonIn(error) {
  if (error instanceof Cut) return "The stream was cut: this answer is not complete.";
  return error instanceof Refused ? error.message : "The server cannot be reached.";
}

// null where the browser keeps nothing for this site: what is kept then lives as long as the page.
const storage = (() => {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
})();

function keepSetting(name, value) {
  try {
    storage?.setItem(`quire-${name}`, JSON.stringify(value));
  } catch {
    // the storage is full
  }
}

function keptSetting(name) {
  try {
    return JSON.parse(storage?.getItem(`quire-${name}`) ?? "null");
  } catch {
    return null;
  }
}

