// The page: what is typed becomes a request, and what the server streams becomes an entry.

import { hide } from "./alternatives.js";
import { RequestError, models, stream } from "./connection.js";
import { Entry } from "./entry.js";
import { ALIASES } from "./fields.js";
import { FieldError, Settings, readStored, storeValue } from "./settings.js";
import { chatEntries, completionEntries } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const page = {
  transcript: byId("transcript"), composer: byId("composer"), input: byId("input"), send: byId("send"), stop: byId("stop"),
  inputError: byId("input-error"), shading: byId("shading"), fold: byId("fold"), summary: byId("summary"), said: byId("said"),
};
const ALTERNATIVES = 5;
const HINTS = {
  chat: ["Message", "Write a message. Enter sends it, Shift+Enter adds a line.", "Send"],
  completion: ["Prompt", "Write the beginning of a text. Ctrl+Enter continues it.", "Continue"],
};

const hasKeyboard = matchMedia("(pointer: fine)").matches;

let model = null;
let mode = "chat";
let entries = [];
let running = null; // the AbortController of the request under way

const settings = new Settings(byId("settings"), {
  hasTraces: document.documentElement.dataset.hasTraces === "true",
  changed: (one) => { page.summary.textContent = one.summary; },
});

// ------------------------------------------------------------------ requests
function chatBody() {
  const messages = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const one of entries) {
    if (one.mode !== "chat" || (one.isFailed && one.isEmpty)) continue;
    messages.push({ role: "user", content: one.prompt });
    if (one.text) messages.push({ role: "assistant", content: one.text });
  }
  // The tokens of a thought are those of the text, which shows them all.
  return { messages, logprobs: true, top_logprobs: ALTERNATIVES, separate_reasoning: false };
}

function makeRequest(text) {
  const common = { model, ...settings.body(), stream: true, stream_options: { include_usage: true } };
  if (mode === "completion") return ["v1/completions", { prompt: text, logprobs: ALTERNATIVES, ...common }];
  const { messages, ...rest } = chatBody();
  return ["v1/chat/completions", { messages: [...messages, { role: "user", content: text }], ...rest, ...common }];
}

async function submit(text) {
  clearInputError();
  let path;
  let body;
  try {
    [path, body] = makeRequest(text);
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    showRefusal(error);
    return;
  }
  for (const one of entries.filter((other) => other.isFailed && other.isEmpty)) remove(one);
  const entry = new Entry(mode, text, settings.summary);
  entries.at(-1)?.withdrawAgain();
  entries.push(entry);
  page.transcript.append(entry.element);
  if (mode === "chat") setInput("");
  stickToEnd(true);
  await run(entry, path, body);
  if (entry.isFailed && entry.isEmpty && entry.mode === "chat" && !page.input.value) setInput(text);
  if (entries.at(-1) === entry) entry.offerAgain(() => again(entry));
  stickToEnd();
}

async function run(entry, path, body) {
  running = new AbortController();
  showRunning(true);
  const end = {};
  try {
    for await (const chunk of stream(path, body, running.signal)) {
      const isNearEnd = isAtEnd();
      read(entry, chunk, end);
      if (isNearEnd) stickToEnd(true);
    }
  } catch (error) {
    if (error.name === "AbortError") end.isStopped = true;
    else if (error instanceof RequestError) end.error = error;
    else throw error;
  } finally {
    running = null;
    showRunning(false);
    entry.finish(end);
    page.said.textContent = end.error ? "" : `${end.isStopped ? "Stopped" : "Done"}: ${entry.text.slice(0, 500)}`;
  }
  if (end.error) showRefusal(end.error);
}

function read(entry, chunk, end) {
  if (chunk.trace) entry.addTrace(chunk.trace);
  if (chunk.usage) end.usage = chunk.usage;
  if (chunk.trace_id) end.traceId = chunk.trace_id;
  for (const choice of chunk.choices) {
    const isChat = choice.delta !== undefined;
    const text = isChat ? choice.delta.content ?? "" : choice.text ?? "";
    const tokens = (isChat ? chatEntries : completionEntries)(choice.logprobs);
    entry.add(choice.index, text, tokens, choice.finish_reason);
  }
}

function again(entry) {
  if (running) return;
  remove(entry);
  submit(entry.prompt);
}

function remove(entry) {
  entries = entries.filter((one) => one !== entry);
  entry.element.remove();
}

// ------------------------------------------------------------------ errors
function showRefusal(error) {
  if (error.code === "traces_disabled") settings.refuseTraces(error.message);
  if (!error.param) return;
  const isShown = settings.showError(error.param, error.message);
  if (isShown) setFolded(false);
  else if (ALIASES[String(error.param).split(".")[0]] === "input") {
    page.inputError.textContent = error.message;
    page.inputError.hidden = false;
    page.input.setAttribute("aria-invalid", "true");
  }
}

function clearInputError() {
  page.inputError.hidden = true;
  page.input.removeAttribute("aria-invalid");
}

// ------------------------------------------------------------------ display
function showRunning(isRunning) {
  page.send.hidden = isRunning;
  page.stop.hidden = !isRunning;
  document.body.classList.toggle("is-running", isRunning);
}

const isAtEnd = () => page.transcript.scrollTop + page.transcript.clientHeight > page.transcript.scrollHeight - 60;

function stickToEnd(isForced = false) {
  if (isForced || isAtEnd()) page.transcript.scrollTop = page.transcript.scrollHeight;
}

function setInput(text) {
  page.input.value = text;
  fitInput();
}

function fitInput() {
  page.input.style.height = "auto";
  page.input.style.height = `${Math.min(page.input.scrollHeight + 2, window.innerHeight * 0.4)}px`;
}

function setMode(name) {
  mode = name;
  settings.setMode(name);
  document.body.dataset.mode = name;
  const [label, hint, action] = HINTS[name];
  byId("input-label").textContent = label;
  page.input.placeholder = hasKeyboard ? hint : label;
  page.send.textContent = action;
  for (const one of entries) one.element.hidden = one.mode !== name;
  for (const one of document.getElementsByName("mode")) one.checked = one.value === name;
  stickToEnd(true);
  clearInputError();
}

function setShading(isShaded) {
  page.shading.checked = isShaded;
  document.body.classList.toggle("is-shaded", isShaded);
}

function setFolded(isFolded) {
  page.fold.setAttribute("aria-expanded", String(!isFolded));
  document.body.classList.toggle("is-unfolded", !isFolded);
}

// ------------------------------------------------------------------ events
page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = page.input.value;
  if (!text.trim() || running || model === null) return;
  setFolded(true);
  submit(text);
});
page.input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
  if (mode === "completion" && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  page.composer.requestSubmit();
});
page.input.addEventListener("input", () => {
  fitInput();
  clearInputError();
});
page.stop.addEventListener("click", () => {
  running?.abort();
  page.input.focus();
});
page.fold.addEventListener("click", () => setFolded(page.fold.getAttribute("aria-expanded") === "true"));
page.shading.addEventListener("change", () => {
  setShading(page.shading.checked);
  storeValue("isShaded", page.shading.checked);
});
for (const one of document.getElementsByName("mode")) {
  one.addEventListener("change", () => {
    running?.abort();
    setMode(one.value);
    storeValue("mode", one.value);
  });
}
byId("clear").addEventListener("click", () => {
  running?.abort();
  hide();
  for (const one of entries.filter((other) => other.mode === mode)) remove(one);
  page.input.focus();
});

// ------------------------------------------------------------------ start
async function start() {
  const stored = readStored();
  setMode(stored.mode === "completion" ? "completion" : "chat");
  setShading(stored.isShaded !== false);
  const heading = byId("model");
  try {
    const [first] = await models();
    model = first.id;
    const length = first.max_model_len;
    heading.textContent = model;
    if (length) heading.title = `${length} tokens of context`;
    document.title = `${model} · Descant`;
  } catch (error) {
    heading.textContent = error.message;
  }
  if (hasKeyboard) page.input.focus();
}

start();
