// Vercel's AI SDK with three providers: openai-compatible, openai (responses) and anthropic.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError, Output, ToolLoopAgent, embed, generateText, isStepCount, jsonSchema, streamText,
  tool,
} from "ai";
import {
  MESSAGES, PERSON, PROMPT, TOO_LONG, WEATHER_PARAMETERS, WEATHER_RESULT,
  checkPerson, checkWeatherArguments, waitUntilIdle,
} from "./scenarios.mjs";

const compatible = (url) =>
  createOpenAICompatible({
    name: "quire", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true,
  });
const openai = (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });

const COMMON = { maxOutputTokens: 24, maxRetries: 0, prompt: PROMPT };
const weather = (execute) =>
  tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema(WEATHER_PARAMETERS),
    ...(execute && { execute: async () => WEATHER_RESULT }),
  });

async function text(model) {
  const answer = await generateText({ ...COMMON, model, system: "Be terse.", prompt: PROMPT });
  assert.ok(answer.text);
  assert.equal(answer.usage.outputTokens, 24);
  assert.equal(answer.finishReason, "length");
}

async function stream(model) {
  let failed = null;
  const answer = streamText({ ...COMMON, model, onError: ({ error }) => (failed = error) });
  let text = "";
  for await (const delta of answer.textStream) text += delta;
  if (failed) throw failed;
  assert.ok(text);
  assert.equal((await answer.usage).outputTokens, 24);
}

async function form(model) {
  const output = Output.object({ schema: jsonSchema(PERSON) });
  const answer = await generateText({ ...COMMON, maxOutputTokens: 200, model, output });
  checkPerson(answer.output);
}

async function toolCall(model, toolChoice) {
  const answer = await generateText({
    ...COMMON, maxOutputTokens: 200, model, tools: { get_weather: weather(false) }, toolChoice,
  });
  checkWeatherArguments(answer.toolCalls[0].input);
}

async function streamedCall(model) {
  let failed = null;
  const answer = streamText({
    ...COMMON, maxOutputTokens: 200, model, tools: { get_weather: weather(false) },
    toolChoice: "required", onError: ({ error }) => (failed = error),
  });
  const kinds = [];
  for await (const part of answer.fullStream) kinds.push(part.type);
  if (failed) throw failed;
  assert.ok(kinds.includes("tool-input-start") && kinds.includes("tool-call"), kinds.join(" "));
  checkWeatherArguments((await answer.toolCalls)[0].input);
}

async function loop(model) {
  // A forced call, executed by the SDK, whose result goes back in a second step.
  const answer = await generateText({
    ...COMMON, maxOutputTokens: 200, model, tools: { get_weather: weather(true) },
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  });
  assert.equal(answer.steps.length, 2);
  assert.equal(answer.steps[0].toolResults[0].output, WEATHER_RESULT);
}

async function tooLong(model, phrase) {
  await assert.rejects(generateText({ ...COMMON, model, prompt: TOO_LONG }), (error) => {
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, phrase);
    return true;
  });
}

// The public modes: one function for each provider and scenario.

async function compatible_text(url, model) { await text(compatible(url)(model)); }
async function compatible_stream(url, model) { await stream(compatible(url)(model)); }
async function compatible_stopped_stream(url, model) {
  const controller = new AbortController();
  const answer = streamText({
    ...COMMON, maxOutputTokens: 4000, model: compatible(url)(model),
    abortSignal: controller.signal,
  });
  for await (const part of answer.fullStream) if (part.type === "text-delta") controller.abort();
  await waitUntilIdle(url);
}
async function compatible_sampling(url, model) {
  const answer = await generateText({
    ...COMMON, model: compatible(url)(model), temperature: 0.5, topP: 0.9, seed: 4,
    presencePenalty: 0.1, frequencyPenalty: 0.1, stopSequences: ["\n"],
    providerOptions: { quire: { user: "u", reasoningEffort: "low", textVerbosity: "low" } },
  });
  assert.ok(!answer.text.includes("\n"));
}
async function compatible_json_schema(url, model) { await form(compatible(url)(model)); }
async function compatible_json_object(url, model) {
  // Without supportsStructuredOutputs the provider sends {"type": "json_object"}.
  const provider = createOpenAICompatible({ name: "quire", baseURL: `${url}/v1` });
  await generateText({
    ...COMMON, model: provider(model), output: Output.json(), maxOutputTokens: 400,
  }).then((answer) => answer.output, (error) => {
    if (!/No output|parse/i.test(error.message)) throw error; // a length, which is no fault
  });
}
async function compatible_tools_auto(url, model) {
  const answer = await generateText({
    ...COMMON, model: compatible(url)(model), tools: { get_weather: weather(false) },
  });
  assert.ok(answer.text || answer.toolCalls.length);
}
async function compatible_tools_required(url, model) {
  await toolCall(compatible(url)(model), "required");
}
async function compatible_tools_named(url, model) {
  await toolCall(compatible(url)(model), { type: "tool", toolName: "get_weather" });
}
async function compatible_tools_streamed(url, model) { await streamedCall(compatible(url)(model)); }
async function compatible_tools_loop(url, model) { await loop(compatible(url)(model)); }
async function compatible_agent(url, model) {
  const agent = new ToolLoopAgent({
    model: compatible(url)(model), tools: { get_weather: weather(true) }, maxOutputTokens: 60,
    instructions: "Be terse.", maxRetries: 0,
  });
  const answer = await agent.generate({ prompt: PROMPT });
  assert.ok(answer.steps.length);
}
async function compatible_completion(url, model) {
  await text(compatible(url).completionModel(model)).catch((error) => {
    if (!/system/i.test(error.message)) throw error;
  });
}
async function compatible_overflow(url, model) {
  await tooLong(compatible(url)(model), /maximum context length/);
}
async function compatible_embeddings_are_refused(url, model) {
  await assert.rejects(
    embed({ model: compatible(url).embeddingModel(model), value: "text", maxRetries: 0 }),
    (error) => APICallError.isInstance(error) && [400, 404, 501].includes(error.statusCode),
  );
}
async function openai_chat_text(url, model) { await text(openai(url).chat(model)); }
async function openai_chat_json_schema(url, model) { await form(openai(url).chat(model)); }
async function openai_chat_tools_loop(url, model) { await loop(openai(url).chat(model)); }
async function openai_responses_text(url, model) { await text(openai(url)(model)); }
async function openai_responses_stream(url, model) { await stream(openai(url)(model)); }
async function openai_responses_json_schema(url, model) { await form(openai(url)(model)); }
async function openai_responses_tools_streamed(url, model) {
  await streamedCall(openai(url)(model));
}
async function openai_responses_tools_loop(url, model) { await loop(openai(url)(model)); }
async function anthropic_text(url, model) { await text(anthropic(url)(model)); }
async function anthropic_stream(url, model) { await stream(anthropic(url)(model)); }
async function anthropic_json_schema(url, model) { await form(anthropic(url)(model)); }
async function anthropic_tools_streamed(url, model) { await streamedCall(anthropic(url)(model)); }
async function anthropic_tools_loop(url, model) { await loop(anthropic(url)(model)); }
async function anthropic_overflow(url, model) {
  await tooLong(anthropic(url)(model), /prompt is too long/);
}

export const modes = [
  compatible_text, compatible_stream, compatible_stopped_stream, compatible_sampling,
  compatible_json_schema, compatible_json_object, compatible_tools_auto,
  compatible_tools_required, compatible_tools_named, compatible_tools_streamed,
  compatible_tools_loop, compatible_agent, compatible_completion, compatible_overflow,
  compatible_embeddings_are_refused, openai_chat_text, openai_chat_json_schema,
  openai_chat_tools_loop, openai_responses_text, openai_responses_stream,
  openai_responses_json_schema, openai_responses_tools_streamed, openai_responses_tools_loop,
  anthropic_text, anthropic_stream, anthropic_json_schema, anthropic_tools_streamed,
  anthropic_tools_loop, anthropic_overflow,
];
