// One answer as it grows: a text whose tokens can be looked at.

import { attach, tokenElement } from "./alternatives.js";
import { counted, el, textNodes } from "./display.js";
import { TokenText } from "./tokens.js";

const ENDS = { stop: "ended by itself", length: "ended by its length", tool_calls: "ended by a call" };

export class Answer {
  constructor(index) {
    this.index = index;
    this.tokens = new TokenText();
    this.finishReason = null;
    this.tail = el("span", { class: "tail" });
    this.flow = el("div", { class: "flow", dir: "auto", role: "group", "aria-label": `Answer ${index + 1}; arrow keys show the alternatives of each token` }, this.tail);
    attach(this.flow);
    this.heading = el("p", { class: "answer-heading", hidden: true });
    this.element = el("div", { class: "answer running", "data-index": index }, this.heading, this.flow);
  }

  get text() {
    return this.tokens.text;
  }

  add(text, entries, finishReason = null) {
    const groups = this.tokens.add(text, entries, finishReason !== null);
    this.tail.before(...groups.map(tokenElement));
    this.tail.replaceChildren(...textNodes(this.tokens.rest));
    if (finishReason !== null) this.end(finishReason);
  }

  // The last of it: a reason of the server, or null where it was stopped or has failed.
  end(finishReason) {
    if (finishReason === null && this.finishReason === null) this.tail.before(...this.tokens.add("", [], true).map(tokenElement));
    this.finishReason ??= finishReason;
    this.tail.replaceChildren();
    this.element.classList.remove("running");
  }

  get ending() {
    return ENDS[this.finishReason] ?? this.finishReason;
  }

  // Show that it is one of several, of which one goes on.
  showChoice(isChosen, choose) {
    const radio = el("input", { type: "radio", name: `choice-${choose.group}`, value: this.index });
    radio.checked = isChosen;
    radio.addEventListener("change", () => choose.take(this.index));
    const name = `${this.index + 1}`;
    this.heading.replaceChildren(choose.take ? el("label", {}, radio, el("span", {}, name)) : el("span", {}, name));
    if (this.finishReason) this.heading.append(el("span", { class: "answer-facts" }, `${counted(this.tokens.numTokens, "token")}, ${this.ending}`));
    this.heading.hidden = false;
  }
}
