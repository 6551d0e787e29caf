// The alternatives of a token: shown where the pointer is, where the arrow keys move, and where one taps.

import { el, label, percent, shade, textNodes } from "./display.js";

const popover = document.getElementById("alternatives");
const said = document.getElementById("said");
const groupOf = new WeakMap(); // element -> group of tokens
let shown = null;

const hex = (bytes) => bytes.map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");

function name(entry) {
  if (entry.text.includes("\ufffd") && entry.bytes?.length) return hex(entry.bytes);
  return label(entry.text);
}

function row(entry, isChosen, logprob) {
  const bar = el("span", { class: "amount" });
  bar.style.width = `${Math.max(1, 100 * Math.exp(logprob))}%`;
  return el("tr", { class: isChosen ? "chosen" : null },
    el("th", { scope: "row" }, el("bdi", {}, name(entry))),
    el("td", { class: "share" }, percent(logprob)),
    el("td", { class: "gauge", "aria-hidden": "true" }, bar));
}

function table(token) {
  const isSame = (one) => one.text === token.text && String(one.bytes) === String(token.bytes);
  const rows = token.alternatives.map((one) => row(one, isSame(one), one.logprob));
  if (!token.alternatives.some(isSame)) rows.push(row(token, true, token.logprob));
  return el("table", {}, el("caption", {}, "Next token, by the model"), el("tbody", {}, ...rows));
}

// A group of tokens as an element of the text.
export function tokenElement(group) {
  if (!group.tokens.length) return el("span", { class: "tok" }, ...textNodes(group.text));
  const least = Math.min(...group.tokens.map((one) => one.logprob ?? 0));
  const node = el("span", { class: "tok", "data-shade": shade(least) });
  // The space before a word is not shaded, so that lines begin and end at words.
  const space = /^ (?=\S)/.test(group.text) ? " " : "";
  if (group.text) node.append(space, el("span", { class: "ink" }, ...textNodes(group.text.slice(space.length))));
  else node.append(el("span", { class: "ink mark" }, group.tokens.map((one) => label(one.text)).join("")));
  if (!group.text) node.classList.add("left-out");
  groupOf.set(node, group);
  return node;
}

function place(node) {
  const edge = 8;
  const rects = (node.querySelector(".ink") ?? node).getClientRects();
  const rect = rects[rects.length - 1] ?? node.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = popover;
  const left = Math.min(Math.max(edge, rect.left), document.documentElement.clientWidth - width - edge);
  const below = rect.bottom + 6;
  const top = below + height + edge < window.innerHeight ? below : Math.max(edge, rect.top - height - 6);
  popover.style.left = `${Math.max(edge, left)}px`;
  popover.style.top = `${top}px`;
}

export function show(node) {
  const group = groupOf.get(node);
  if (!group) return;
  hide();
  shown = node;
  node.classList.add("shown");
  const several = group.tokens.length > 1
    ? el("p", { class: "several" }, `${group.tokens.length} tokens make this character.`) : null;
  popover.replaceChildren(...[several, ...group.tokens.map(table)].filter(Boolean));
  popover.hidden = false;
  place(node);
}

export function hide() {
  shown?.classList.remove("shown");
  shown = null;
  popover.hidden = true;
}

function speak(group) {
  said.textContent = group.tokens
    .map((one) => `${name(one)} ${percent(one.logprob)}; ${one.alternatives.slice(0, 5).map((other) => `${name(other)} ${percent(other.logprob)}`).join(", ")}`)
    .join(". ");
}

// Arrow keys move through the tokens of a text that has the focus.
function move(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  const all = [...event.currentTarget.querySelectorAll(".tok")].filter((one) => groupOf.has(one));
  if (!step || !all.length) return;
  event.preventDefault();
  const at = all.indexOf(shown);
  const next = at < 0 && step > 0 && step < Infinity ? 0 : at < 0 && step === -1 ? all.length - 1 : at + step;
  const node = all[Math.min(Math.max(next, 0), all.length - 1)];
  node.scrollIntoView({ block: "nearest" });
  show(node);
  speak(groupOf.get(node));
}

// Let a text show the alternatives of its tokens.
export function attach(flow) {
  flow.tabIndex = 0;
  flow.addEventListener("keydown", move);
  flow.addEventListener("blur", hide);
  flow.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && !event.buttons) show(event.target.closest(".tok"));
  });
  flow.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  flow.addEventListener("click", (event) => {
    const node = event.target.closest(".tok");
    if (!node || !window.getSelection().isCollapsed) return;
    if (node === shown && event.pointerType !== "mouse") hide();
    else show(node);
  });
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
document.addEventListener("pointerdown", (event) => event.target.closest(".tok, .popover") || hide());
window.addEventListener("resize", hide);
document.addEventListener("scroll", (event) => {
  if (!shown || popover.contains(event.target)) return;
  const rect = shown.getBoundingClientRect();
  if (rect.bottom < 0 || rect.top > window.innerHeight) hide();
  else place(shown);
}, true);
