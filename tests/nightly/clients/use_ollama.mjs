// ollama for node: chat with and without streams, generate, vectors and lists.

import assert from "node:assert/strict";
import fs from "node:fs";
import { Ollama } from "ollama";

const words = JSON.parse(process.env.CONVERSATIONS);
const client = new Ollama({ host: process.env.QUIRE_SERVER });
const model = "script";
const tools = [{ type: "function", function: words.FUNCTION }];
const cities = Object.keys(words.DEGREES);
const called = [];

function temperature({ city }) {
  called.push(city);
  return `It is ${words.DEGREES[city]} degrees in ${city}.`;
}

const user = (content) => ({ role: "user", content });

async function loop(chat) {
  const messages = [user(words.QUESTION)];
  let answer;
  do {
    answer = await chat(messages);
    messages.push(answer);
    for (const call of answer.tool_calls ?? []) {
      const content = temperature(call.function.arguments);
      messages.push({ role: "tool", tool_name: call.function.name, content });
    }
  } while (answer.tool_calls);
  assert.deepEqual(called, cities);
  assert.equal(answer.content, words.FINAL);
}

async function ollama_second_turn() {
  const messages = [user(words.GREETING)];
  const first = (await client.chat({ model, messages })).message;
  const second = (await client.chat({ model, messages: [...messages, first, user(words.NEXT)] })).message;
  assert.deepEqual([first.content, second.content], [words.HELLO, words.GOODBYE]);
}

async function ollama_tool_loop() {
  await loop(async (messages) => (await client.chat({ model, messages, tools })).message);
}

async function ollama_stream() {
  await loop(async (messages) => {
    const answer = { role: "assistant", content: "" };
    for await (const { message } of await client.chat({ model, messages, tools, stream: true })) {
      answer.content += message.content;
      if (message.tool_calls) answer.tool_calls = message.tool_calls;
    }
    return answer;
  });
}

async function ollama_structured() {
  const answer = await client.chat({ model, messages: [user(words.AS_JSON)], format: words.WEATHER, think: false });
  assert.deepEqual(JSON.parse(answer.message.content), words.OBJECT);
}

async function generate() {
  let text = "";
  for await (const part of await client.generate({ model, prompt: words.GREETING, stream: true })) text += part.response;
  assert.deepEqual([text, (await client.generate({ model, prompt: words.GREETING })).response], [words.HELLO, words.HELLO]);
}

async function vectors() {
  const { embeddings } = await client.embed({ model, input: ["one", "two"] });
  assert.deepEqual((await client.embeddings({ model, prompt: "two" })).embedding, embeddings[1]);
}

async function lists() {
  const names = [await client.list(), await client.ps()].map(({ models }) => models[0].model);
  assert.deepEqual(names, [model, model]);
  assert.ok((await client.show({ model })).capabilities.includes("tools"));
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
  await assert.rejects(client.show({ model: "x" }), { status_code: 404, message: "the model 'x' does not exist" });
}

const results = {};
const checks = [ollama_second_turn, ollama_tool_loop, ollama_stream, ollama_structured, generate, vectors, lists];
for (const check of checks) {
  called.length = 0;
  try {
    await check();
    results[check.name] = "";
  } catch (error) {
    results[check.name] = String(error.stack ?? error);
  }
}
const { version } = JSON.parse(fs.readFileSync("node_modules/ollama/package.json"));
console.log(JSON.stringify({ versions: { "ollama (node)": version }, results }));
