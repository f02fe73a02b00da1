// `node modes.mjs MODULE URL MODEL [MODE ...]`: runs the functions that a module exports, in the
// order of their names in `modes`, and prints a line of JSON for each.

const TIME_LIMIT_MS = 120_000;

const [module, url, model, ...chosen] = process.argv.slice(2);
const { modes } = await import(`./${module}.mjs`);

for (const mode of modes) {
  if (chosen.length && !chosen.includes(mode.name)) continue;
  const start = performance.now();
  let result = "ok";
  let detail = "";
  let timer;
  const limit = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("no end in time")), TIME_LIMIT_MS);
  });
  try {
    await Promise.race([mode(url, model), limit]);
  } catch (error) {
    result = "failed";
    const line = /(\w+\.mjs:\d+)/.exec(error?.stack ?? "")?.[1] ?? "";
    detail = `${line} ${error?.name}: ${error?.message}`.slice(0, 1500);
  }
  clearTimeout(timer);
  const seconds = Math.round((performance.now() - start) / 10) / 100;
  console.log(`OUTCOME ${JSON.stringify({ mode: mode.name, result, detail, seconds })}`);
}
process.exit(0);
