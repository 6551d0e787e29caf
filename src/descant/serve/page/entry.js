// One request and what came of it: the prompt, the answers, the tree of the search, figures and errors.

import { Answer } from "./answer.js";
import { address } from "./connection.js";
import { copy, counted, el, textNodes } from "./display.js";
import { TreeView } from "./tree_view.js";

let numEntries = 0;

const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(milliseconds < 995 ? 2 : 1)} s`;

function button(text, action) {
  const found = el("button", { type: "button", class: "plain" }, text);
  found.addEventListener("click", () => action(found));
  return found;
}

export class Entry {
  constructor(mode, prompt, method) {
    this.mode = mode;
    this.prompt = prompt;
    this.number = numEntries++;
    this.answers = [];
    this.chosen = 0;
    this.isFailed = false;
    this.began = performance.now();
    this.tree = null;
    this.facts = el("span", { class: "facts" }, "Waiting");
    this.actions = el("span", { class: "actions" });
    this.list = el("div", { class: "answers" });
    this.notice = el("p", { class: "notice", role: "alert", hidden: true });
    const asked = el("div", { class: "asked", dir: "auto" }, ...textNodes(prompt));
    this.element = el("section", { class: `entry ${mode} busy`, "aria-label": `Request: ${method}` },
      el("p", { class: "used" }, method), asked, this.list, this.notice,
      el("p", { class: "foot" }, this.facts, this.actions));
    this.answer(0);
  }

  answer(index) {
    while (this.answers.length <= index) {
      const one = new Answer(this.answers.length);
      this.answers.push(one);
      this.list.append(one.element);
      if (this.answers.length > 1) this.showChoices();
    }
    return this.answers[index];
  }

  // ------------------------------------------------------------------ growth
  add(index, text, entries, finishReason) {
    if (text || entries.length) this.firstAt ??= performance.now();
    this.answer(index).add(text, entries, finishReason);
    if (this.answers.length > 1 && finishReason) this.showChoices();
    this.facts.textContent = counted(this.numTokens, "token");
  }

  addTrace(records) {
    this.tree ??= new TreeView();
    this.tree.add(records);
    if (this.tree.isBranching && !this.tree.element.isConnected) this.list.after(this.tree.element);
    this.firstAt ??= performance.now();
    if (!this.numTokens) this.facts.textContent = "Searching";
  }

  get numTokens() {
    return this.answers.reduce((sum, one) => sum + one.tokens.numTokens, 0);
  }

  get isEmpty() {
    return this.answers.every((one) => !one.text);
  }

  get text() {
    return this.answers[this.chosen]?.text ?? "";
  }

  // ------------------------------------------------------------------ the end
  // `end` has usage, trace, whether it was stopped, and the error where it failed.
  finish({ usage = null, traceId = null, isStopped = false, error = null } = {}) {
    this.element.classList.remove("busy");
    for (const one of this.answers) one.end(null);
    this.tree?.end();
    this.isFailed = error !== null;
    if (error) this.fail(error);
    this.showFacts(usage, isStopped);
    const texts = () => this.answers.map((one) => one.text).join("\n\n");
    if (texts()) this.actions.append(button("Copy", async (one) => {
      await copy(this.answers.length > 1 ? texts() : this.text);
      one.textContent = "Copied";
      setTimeout(() => { one.textContent = "Copy"; }, 1500);
    }));
    if (traceId) {
      this.actions.append(el("a", {
        class: "plain", href: address(`traces/${encodeURIComponent(traceId)}`), target: "_blank", rel: "noopener",
      }, "Open the trace"));
    }
  }

  showFacts(usage, isStopped) {
    const now = performance.now();
    const count = usage?.completion_tokens ?? this.numTokens;
    const parts = [`${counted(count, "token")} in ${seconds(now - this.began)}`];
    if (this.firstAt) {
      parts.push(`first after ${seconds(this.firstAt - this.began)}`);
      if (count > 1 && now > this.firstAt) parts.push(`${((1000 * count) / (now - this.began)).toFixed(1)} per second`);
    }
    if (usage) parts.push(`prompt of ${usage.prompt_tokens}`);
    if (isStopped) parts.push("stopped");
    else if (this.answers.length === 1 && this.answers[0].ending) parts.push(this.answers[0].ending);
    this.facts.textContent = this.isFailed && !this.numTokens ? "" : parts.join(" · ");
  }

  fail(error) {
    const isRefused = error.status >= 400 && error.status < 500;
    this.notice.replaceChildren(el("strong", {}, isRefused ? "Refused. " : "Failed. "), ...textNodes(error.message));
    this.notice.hidden = false;
    if (this.isEmpty) this.list.hidden = true;
  }

  offerAgain(again) {
    this.again?.remove();
    this.again = button("Again", again);
    this.actions.append(this.again);
  }

  withdrawAgain() {
    this.again?.remove();
  }

  showChoices() {
    this.list.classList.add("several");
    const take = (index) => { this.chosen = index; };
    const choose = { group: this.number, take: this.mode === "chat" ? take : null };
    for (const one of this.answers) one.showChoice(one.index === this.chosen, choose);
  }
}
