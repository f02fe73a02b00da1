// LangChain for JavaScript: ChatOpenAI over chat and responses, ChatAnthropic.

import assert from "node:assert/strict";
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, SystemMessage, ToolMessage } from "@langchain/core/messages";
import { ChatOpenAI } from "@langchain/openai";
import {
  PERSON, PROMPT, WEATHER_PARAMETERS, WEATHER_RESULT, checkPerson, checkWeatherArguments,
} from "./scenarios.mjs";

const TURNS = [new SystemMessage("You are terse."), new HumanMessage(PROMPT)];
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather", description: "The weather in a city.", parameters: WEATHER_PARAMETERS,
  },
};
const chatModel = (url, model, more = {}) =>
  new ChatOpenAI({
    model, apiKey: "none", maxRetries: 0, maxTokens: 60, ...more,
    configuration: { baseURL: `${url}/v1` },
  });
const anthropic = (url, model, more = {}) =>
  new ChatAnthropic({
    model, apiKey: "none", anthropicApiUrl: url, maxRetries: 0, maxTokens: 60, ...more,
  });

async function text(made) {
  const answer = await made.invoke(TURNS);
  assert.ok(answer.text);
  assert.ok(answer.usage_metadata.output_tokens <= 60);
}

async function stream(made) {
  let joined;
  for await (const piece of await made.stream(TURNS)) joined = joined ? joined.concat(piece) : piece;
  assert.ok(joined.text);
  assert.ok(joined.usage_metadata.output_tokens);
}

async function call(made, choice) {
  const bound = made.bindTools([WEATHER], { tool_choice: choice });
  const answer = await bound.invoke(TURNS);
  const [found] = answer.tool_calls;
  checkWeatherArguments(found.args);
  const result = new ToolMessage({ content: WEATHER_RESULT, tool_call_id: found.id });
  const end = await made.bindTools([WEATHER]).invoke([...TURNS, answer, result]);
  assert.equal(end.getType(), "ai");
}

const chat = (url, model) => text(chatModel(url, model));
const chat_stream = (url, model) => stream(chatModel(url, model));
const responses = (url, model) => text(chatModel(url, model, { useResponsesApi: true }));
const responses_stream = (url, model) =>
  stream(chatModel(url, model, { useResponsesApi: true }));
const messages = (url, model) => text(anthropic(url, model));
const messages_stream = (url, model) => stream(anthropic(url, model));

async function chat_json_schema(url, model) {
  const made = chatModel(url, model, { maxTokens: 200 });
  checkPerson(await made.withStructuredOutput(PERSON, { method: "jsonSchema" }).invoke(TURNS));
}

const chat_call = (url, model) => call(chatModel(url, model, { maxTokens: 300 }), "required");
const responses_call = (url, model) =>
  call(chatModel(url, model, { maxTokens: 300, useResponsesApi: true }), "get_weather");
const messages_call = (url, model) =>
  call(anthropic(url, model, { maxTokens: 300 }), "any");

export const modes = [
  chat, chat_stream, chat_json_schema, chat_call, responses, responses_stream, responses_call,
  messages, messages_stream, messages_call,
];
