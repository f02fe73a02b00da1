// What every client asks; as tests/clients/scenarios.py.

import assert from "node:assert/strict";

export const PROMPT = "def fibonacci(n):";
export const MESSAGES = [
  { role: "system", content: "You are terse." },
  { role: "user", content: PROMPT },
];
export const WEATHER_PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", enum: ["Ulm", "Bonn"] } },
  required: ["city"],
  additionalProperties: false,
};
export const WEATHER_RESULT = "Sunny, 21 degrees.";
export const PERSON = {
  type: "object",
  properties: {
    name: { type: "string", enum: ["Ada", "Alan"] },
    age: { type: "integer", enum: [36, 41] },
  },
  required: ["name", "age"],
  additionalProperties: false,
};
export const TOO_LONG = "for line in lines: print(line)\n".repeat(1500);

export function checkWeatherArguments(given) {
  assert.deepEqual(Object.keys(given), ["city"]);
  assert.ok(["Ulm", "Bonn"].includes(given.city), given.city);
}

export function checkPerson(given) {
  assert.deepEqual(Object.keys(given).sort(), ["age", "name"]);
  assert.ok(["Ada", "Alan"].includes(given.name) && [36, 41].includes(given.age));
}

export async function waitUntilIdle(url) {
  for (let tries = 0; tries < 60; tries++) {
    const load = await (await fetch(`${url}/load`)).json();
    if (load.server_load === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.fail("the request still runs");
}
