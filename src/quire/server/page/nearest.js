// The nearest of a few texts, by vectors or by a model that reads pairs.

let comparison = null; // the request that is running

function showNearest(results) {
  byId("nearest").replaceChildren(...results.map(({ document: { text }, relevance_score: score }) => {
    const bar = make("meter");
    bar.min = Math.min(0, ...results.map((result) => result.relevance_score));
    bar.max = Math.max(1, ...results.map((result) => result.relevance_score));
    bar.value = score;
    bar.setAttribute("aria-label", "Score");
    return make("li", "", [make("span", "score", [score.toFixed(3)]), bar, make("span", "text", [text])]);
  }));
}

byId("compare").addEventListener("submit", async (event) => {
  event.preventDefault();
  comparison?.abort();
  const own = comparison = new AbortController();
  const query = byId("near-query").value;
  const documents = byId("near-texts").value.split("\n").filter((line) => line.trim());
  const note = byId("near-note");
  note.textContent = "Comparing …";
  try {
    const response = await ask("rerank", { body: { query, documents }, signal: own.signal });
    const { results, usage } = await response.json();
    showNearest(results);
    note.textContent = `${results.length} texts, ${usage.prompt_tokens} tokens`;
  } catch (error) {
    if (own.signal.aborted) return;
    note.textContent = reasonIn(error);
  }
});
