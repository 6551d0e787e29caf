// OpenAI's client for Node against the server whose address is the argument; prints its answers as JSON.
import { createRequire } from "node:module";

// Its packages are in the folder of the environment, not beside this file.
const require = createRequire(`${process.env.CLIENTS_NODE}/`);
const { OpenAI } = require("openai");
const { zodResponseFormat, zodFunction } = require("openai/helpers/zod");
const { z } = require("zod");

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "smol-draft";
const messages = [{ role: "user", content: "Say hello." }];
const Person = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(99) });
const found = {};

const whole = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
found.chat = whole.choices[0].message.content;

found.stream = "";
const options = { stream: true, stream_options: { include_usage: true } };
const parts = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, ...options });
for await (const part of parts) {
  found.stream += part.choices[0]?.delta?.content ?? "";
  found.tokens = part.usage?.total_tokens;
}

const long = await client.chat.completions.create({ model, messages, max_tokens: 4000, min_new_tokens: 4000, stream: true });
found.before = 0;
for await (const part of long) {
  found.before += 1;
  if (found.before === 3) long.controller.abort();
}

const tools = [zodFunction({ name: "register", parameters: Person })];
const limits = { max_tokens: 80, temperature: 0 };
const called = await client.chat.completions.parse({ model, messages, tools, tool_choice: "required", ...limits });
found.call = called.choices[0].message.tool_calls[0].function.parsed_arguments;
const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", ...limits });
found.streamedCall = JSON.parse((await runner.finalMessage()).tool_calls[0].function.arguments);

const response_format = zodResponseFormat(Person, "person");
const parsed = await client.chat.completions.parse({ model, messages, response_format, ...limits });
found.parsed = Person.parse(parsed.choices[0].message.parsed);

try {
  await client.chat.completions.create({ model: "another", messages });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.code];
}
console.log(JSON.stringify(found));
