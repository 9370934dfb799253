// openai for node: chat completions and Responses, with and without streams, and the SDK's own loop over tools.

import assert from "node:assert/strict";
import fs from "node:fs";
import OpenAI from "openai";

const words = JSON.parse(process.env.CONVERSATIONS);
const client = new OpenAI({ baseURL: `${process.env.QUIRE_SERVER}/v1`, apiKey: "unused", maxRetries: 0 });
const model = "script";
const tools = [{ type: "function", function: words.FUNCTION }];
const responsesTools = [{ type: "function", strict: true, ...words.FUNCTION }];
const cities = Object.keys(words.DEGREES);
const called = [];

function temperature({ city }) {
  called.push(city);
  return `It is ${words.DEGREES[city]} degrees in ${city}.`;
}

const user = (content) => ({ role: "user", content });

async function chat_second_turn() {
  const messages = [user(words.GREETING)];
  const first = (await client.chat.completions.create({ model, messages })).choices[0].message;
  messages.push(first, user(words.NEXT));
  const second = (await client.chat.completions.create({ model, messages })).choices[0].message;
  assert.deepEqual([first.content, second.content], [words.HELLO, words.GOODBYE]);
}

async function chat_tool_loop() {
  const messages = [user(words.QUESTION)];
  let answer;
  do {
    answer = (await client.chat.completions.create({ model, messages, tools })).choices[0].message;
    messages.push(answer);
    for (const call of answer.tool_calls ?? []) {
      const content = temperature(JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  } while (answer.tool_calls);
  assert.deepEqual(called, cities);
  messages.push(user(words.THANKS));
  const second = (await client.chat.completions.create({ model, messages, tools })).choices[0].message;
  assert.deepEqual([answer.content, second.content], [words.FINAL, words.WELCOME]);
}

async function chat_stream() {
  const runnable = { ...words.FUNCTION, function: temperature, parse: JSON.parse };
  const runner = client.chat.completions.runTools({
    model,
    messages: [user(words.QUESTION)],
    tools: [{ type: "function", function: runnable }],
    stream: true,
  });
  assert.equal(await runner.finalContent(), words.FINAL);
  assert.deepEqual(called, cities);
}

async function chat_structured() {
  const response_format = { type: "json_schema", json_schema: { name: "w", schema: words.WEATHER, strict: true } };
  const answer = await client.chat.completions.parse({ model, messages: [user(words.AS_JSON)], response_format });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), words.OBJECT);
}

async function responses_second_turn() {
  const first = await client.responses.create({ model, input: words.GREETING });
  const second = await client.responses.create({ model, input: words.NEXT, previous_response_id: first.id });
  const input = [user(words.GREETING), ...first.output, user(words.NEXT)];
  const third = await client.responses.create({ model, input, store: false });
  const texts = [first, second, third].map((response) => response.output_text);
  assert.deepEqual(texts, [words.HELLO, words.GOODBYE, words.GOODBYE]);
}

async function responses_tool_loop() {
  const input = [user(words.QUESTION)];
  let response, calls;
  do {
    response = await client.responses.create({ model, input, tools: responsesTools, store: false });
    calls = response.output.filter((item) => item.type === "function_call");
    input.push(...response.output, ...calls.map(output));
  } while (calls.length);
  assert.equal(response.output_text, words.FINAL);
  assert.deepEqual(called, cities);
}

async function responses_stream() {
  let input = [user(words.QUESTION)];
  let previous, response;
  do {
    const fields = { model, input, tools: responsesTools, previous_response_id: previous };
    response = await client.responses.stream(fields).finalResponse();
    previous = response.id;
    input = response.output.filter((item) => item.type === "function_call").map(output);
  } while (input.length);
  assert.equal(response.output_text, words.FINAL);
  assert.deepEqual(called, cities);
}

async function responses_structured() {
  const format = { type: "json_schema", name: "w", schema: words.WEATHER, strict: true };
  const response = await client.responses.parse({ model, input: words.AS_JSON, text: { format } });
  assert.deepEqual(response.output_parsed, words.OBJECT);
}

function output(call) {
  return { type: "function_call_output", call_id: call.call_id, output: temperature(JSON.parse(call.arguments)) };
}

const results = {};
const checks = [
  ...[chat_second_turn, chat_tool_loop, chat_stream, chat_structured],
  ...[responses_second_turn, responses_tool_loop, responses_stream, responses_structured],
];
for (const check of checks) {
  called.length = 0;
  try {
    await check();
    results[check.name] = "";
  } catch (error) {
    results[check.name] = String(error.stack ?? error);
  }
}
const { version } = JSON.parse(fs.readFileSync("node_modules/openai/package.json"));
console.log(JSON.stringify({ versions: { "openai (node)": version }, results }));
