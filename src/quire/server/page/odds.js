// How likely each token of an answer was: its tint, and a table of the likeliest tokens in its place,
// by pointer or with the arrow keys in a conversation that has the focus.

const odds = byId("odds");

// One span for each token, or one for all where the tokens do not spell the text (parts of a character).
function spansOf({ text, tokens }) {
  if (!tokens.length) return [text];
  if (tokens.map((t) => t.text).join("") !== text) return [spanOf(text, tokens)];
  return tokens.map((token) => spanOf(token.text, [token]));
}

function spanOf(text, tokens) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  span.tokens = tokens;
  const least = Math.min(...tokens.map((t) => t.logprob));
  span.style.setProperty("--doubt-share", (1 - Math.exp(least)).toFixed(3));
  return span;
}

function showOdds(span) {
  hideOdds();
  span.classList.add("current");
  const table = document.createElement("table");
  for (const token of span.tokens) {
    const others = token.top.filter(([text]) => text !== token.text);
    for (const [text, logprob, isChosen] of [[token.text, token.logprob, true], ...others]) {
      const row = table.insertRow();
      row.className = isChosen ? "chosen" : "";
      row.insertCell().textContent = JSON.stringify(text).slice(1, -1);
      row.insertCell().textContent = `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    }
  }
  odds.replaceChildren(table);
  odds.hidden = false;
  const at = span.getBoundingClientRect();
  odds.style.left = `${Math.max(8, Math.min(at.left, innerWidth - odds.offsetWidth - 8))}px`;
  const below = at.bottom + 6;
  odds.style.top = `${below + odds.offsetHeight > innerHeight ? at.top - odds.offsetHeight - 6 : below}px`;
}

function hideOdds() {
  odds.hidden = true;
  for (const span of document.querySelectorAll(".token.current")) span.classList.remove("current");
}

byId("transcript").addEventListener("pointerover", (event) => {
  const span = event.target.closest(".token");
  if (span) showOdds(span);
  else hideOdds();
});
byId("transcript").addEventListener("pointerleave", hideOdds);
byId("transcript").addEventListener("blur", hideOdds);
byId("transcript").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const spans = [...document.querySelectorAll(".token")];
  if (!step || !spans.length || event.target !== event.currentTarget) return;
  event.preventDefault();
  const now = spans.findIndex((span) => span.classList.contains("current"));
  const next = spans[now < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.min(Math.max(now + step, 0), spans.length - 1)];
  next.scrollIntoView({ block: "nearest" });
  showOdds(next);
});
