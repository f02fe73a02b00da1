// `openai` for Node.

import assert from "node:assert/strict";
import OpenAI from "openai";
import {
  MESSAGES, PERSON, PROMPT, TOO_LONG, WEATHER_PARAMETERS, WEATHER_RESULT,
  checkPerson, checkWeatherArguments, waitUntilIdle,
} from "./scenarios.mjs";

const WEATHER = {
  type: "function",
  function: { name: "get_weather", description: "The weather.", parameters: WEATHER_PARAMETERS },
};

const clientOf = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chatOf = (url, model, fields) =>
  clientOf(url).chat.completions.create({ model, messages: MESSAGES, max_tokens: 24, ...fields });

async function models(url, model) {
  const found = [];
  for await (const served of clientOf(url).models.list()) found.push(served.id);
  assert.ok(found.includes(model));
}

async function chat(url, model) {
  const answer = await chatOf(url, model, { n: 2, seed: 3, temperature: 0.8 });
  assert.equal(answer.choices.length, 2);
  assert.ok(answer.choices[0].message.content);
}

async function chat_stream(url, model) {
  let text = "";
  let usage = null;
  const fields = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await chatOf(url, model, fields)) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.ok(text);
  assert.ok(usage.completion_tokens > 0 && usage.completion_tokens <= 24);
}

async function chat_stopped_stream(url, model) {
  const stream = await chatOf(url, model, { stream: true, max_tokens: 4000, ignore_eos: true });
  for await (const chunk of stream) {
    assert.ok(chunk.choices);
    break; // ends the iterator, which aborts the request
  }
  await waitUntilIdle(url);
}

async function chat_stream_helper(url, model) {
  const stream = clientOf(url).chat.completions.stream({
    model, messages: MESSAGES, max_tokens: 24,
  });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const completion = await stream.finalChatCompletion();
  assert.equal(completion.choices[0].message.content, text);
}

async function json_schema(url, model) {
  const format = {
    type: "json_schema",
    json_schema: { name: "person", schema: PERSON, strict: true },
  };
  const answer = await clientOf(url).chat.completions.parse({
    model, messages: MESSAGES, max_tokens: 200, response_format: format,
  });
  checkPerson(JSON.parse(answer.choices[0].message.content));
}

async function tools_auto(url, model) {
  const answer = await chatOf(url, model, { tools: [WEATHER] });
  assert.ok(answer.choices[0].message.content || answer.choices[0].message.tool_calls);
}

async function tools_result_sent_back(url, model) {
  const fields = { tools: [WEATHER], tool_choice: "required", max_tokens: 200 };
  const spoken = (await chatOf(url, model, fields)).choices[0].message;
  checkWeatherArguments(JSON.parse(spoken.tool_calls[0].function.arguments));
  const results = spoken.tool_calls.map((call) => ({
    role: "tool", tool_call_id: call.id, content: WEATHER_RESULT,
  }));
  const messages = [...MESSAGES, spoken, ...results];
  const answer = await chatOf(url, model, { messages, tools: [WEATHER] });
  assert.ok(answer.choices[0].message.content || answer.choices[0].message.tool_calls);
}

async function tools_streamed(url, model) {
  const fields = { tools: [WEATHER], tool_choice: "required", max_tokens: 200 };
  const stream = clientOf(url).chat.completions.stream({ model, messages: MESSAGES, ...fields });
  const completion = await stream.finalChatCompletion();
  const [call] = completion.choices[0].message.tool_calls;
  checkWeatherArguments(JSON.parse(call.function.arguments));
}

async function run_tools(url, model) {
  // The loop of this client; its functions are called with the parsed arguments.
  const called = [];
  const runner = clientOf(url).chat.completions.runTools(
    {
      model, messages: MESSAGES, max_tokens: 60,
      tools: [{
        type: "function",
        function: {
          ...WEATHER.function, parse: JSON.parse,
          function: (given) => { called.push(given); return WEATHER_RESULT; },
        },
      }],
    },
    { maxChatCompletions: 2 },
  );
  try {
    await runner.done();
  } catch (error) {
    // An answer that its limit cuts is an error for this loop, and no fault of the server.
    assert.match(error.message, /length limit/);
  }
  assert.ok(runner.messages.length > MESSAGES.length || called.length === 0);
}

async function overflow(url, model) {
  await assert.rejects(
    chatOf(url, model, { messages: [{ role: "user", content: TOO_LONG }] }),
    (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
  );
}

async function embeddings_are_refused(url, model) {
  // This client asks for base64 by itself.
  await assert.rejects(
    clientOf(url).embeddings.create({ model, input: "text" }),
    (error) => error instanceof OpenAI.APIError && [400, 404, 501].includes(error.status),
  );
}

async function responses(url, model) {
  const answer = await clientOf(url).responses.create({
    model, input: PROMPT, max_output_tokens: 24,
  });
  assert.ok(answer.output_text);
}

async function responses_stream(url, model) {
  const stream = await clientOf(url).responses.create({
    model, input: PROMPT, max_output_tokens: 24, stream: true,
  });
  let text = "";
  let last = null;
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.ok(text);
  assert.ok(["response.completed", "response.incomplete"].includes(last.type), last.type);
}

async function responses_tools(url, model) {
  const tool = { type: "function", strict: true, ...WEATHER.function };
  const client = clientOf(url);
  const first = await client.responses.create({
    model, input: PROMPT, tools: [tool], tool_choice: "required", max_output_tokens: 200,
  });
  const call = first.output.find((item) => item.type === "function_call");
  checkWeatherArguments(JSON.parse(call.arguments));
  const second = await client.responses.create({
    model, previous_response_id: first.id, tools: [tool], max_output_tokens: 24,
    input: [{ type: "function_call_output", call_id: call.call_id, output: WEATHER_RESULT }],
  });
  assert.ok(second.output.length);
}

async function completions(url, model) {
  const answer = await clientOf(url).completions.create({
    model, prompt: PROMPT, max_tokens: 8, logprobs: 1,
  });
  assert.ok(answer.choices[0].text);
}

export const modes = [
  models, chat, chat_stream, chat_stopped_stream, chat_stream_helper, json_schema, tools_auto,
  tools_result_sent_back, tools_streamed, run_tools, overflow, embeddings_are_refused, responses,
  responses_stream, responses_tools, completions,
];
