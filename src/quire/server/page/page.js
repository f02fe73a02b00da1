// Tabs, panels, theme, whether the server is well, and what a reload finds again.

const can = document.body.dataset.can.split(" ");
byId("tab-chat").hidden = !can.includes("generate");
byId("tab-near").hidden = !can.includes("score");
const tabs = [...document.querySelectorAll("[role=tab]:not([hidden])")];

function openTab(tab) {
  for (const other of tabs) {
    const isOpen = other === tab;
    other.setAttribute("aria-selected", isOpen);
    other.tabIndex = isOpen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isOpen;
  }
  if (tab.id === "tab-live") {
    keyIsDeclined = false;
    watch();
  }
}

for (const tab of tabs) {
  tab.addEventListener("click", () => openTab(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    openTab(next);
    next.focus();
  });
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = getComputedStyle(root).colorScheme === "dark"
    || (root.dataset.theme === undefined && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = isDark ? "light" : "dark";
  keepSetting("theme-1", root.dataset.theme);
});

async function checkHealth() {
  const dot = byId("health");
  const isWell = await fetch("health").then((response) => response.ok, () => false);
  dot.className = isWell ? "dot good" : "dot bad";
  dot.setAttribute("aria-label", isWell ? "The engine is well" : "The engine does not answer");
}

// On a narrow page the panels are closed until one is asked for, and close when something else is.
const isNarrow = matchMedia("(max-width: 60rem)");
const panels = [...document.querySelectorAll("details.panel")];

function placePanels() {
  for (const panel of panels) panel.open = !isNarrow.matches;
}

placePanels();
isNarrow.addEventListener("change", placePanels);
document.addEventListener("pointerdown", ({ target }) => {
  if (!isNarrow.matches || target.closest("dialog")) return;
  for (const panel of panels) if (!panel.contains(target)) panel.open = false;
});

checkHealth();
setInterval(checkHealth, 10_000);
const theme = keptSetting("theme-1");
if (["light", "dark"].includes(theme)) document.documentElement.dataset.theme = theme;
restoreSettings();
loadModels().then(() => showUsage());
loadFacts().then(() => showUsage());
if (can.includes("generate")) {
  loadConversations();
  show(conversations.get(location.hash.slice(1)) ?? newConversation());
  byId("prompt").focus();
} else {
  byId("chat").hidden = true;
  byId("tab-chat").setAttribute("aria-selected", false);
  openTab(tabs[0]);
  if (can.includes("score")) byId("near-query").focus();
}
