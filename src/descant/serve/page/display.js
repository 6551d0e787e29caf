// Elements, and texts that are shown exactly as they are. Nothing here turns a text into markup.

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((one) => one !== null && one !== undefined));
  return node;
}

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// How a character that nobody would see is written: U+202E, or the byte that is no UTF-8 as 0xE4.
function escaped(character) {
  const code = character.charCodeAt(0);
  const isByte = code >= 0xdc80 && code < 0xdd00;
  return isByte ? `\\x${(code - 0xdc00).toString(16).toUpperCase()}` : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// The parts of a text: [what is shown, whether it stands for a character that is not].
export function parts(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) found.push([text.slice(end, match.index), false]);
    found.push([escaped(match[0]), true]);
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push([text.slice(end), false]);
  return found;
}

// The nodes of a running text.
export const textNodes = (text) =>
  parts(text).map(([shown, isMark]) => (isMark ? el("span", { class: "mark" }, shown) : document.createTextNode(shown)));

// A token by itself on one line: spaces and line ends are seen.
export function label(text, most = 24) {
  if (text === "") return "∅";
  const shown = parts(text).map(([part]) => part).join("");
  const whole = shown
    .replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length))
    .replace(/\n/g, "↵").replace(/\t/g, "⇥");
  const letters = [...whole];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : whole;
}

export const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95) return value > 99.9995 ? "100 %" : `${value.toFixed(2)} %`;
  if (value >= 1) return `${value.toFixed(1)} %`;
  return value >= 0.001 ? `${Number(value.toPrecision(2))} %` : "< 0.001 %";
};

// A score, with a minus sign that is as wide as a digit.
export const score = (value) => value.toFixed(2).replace("-", "−");

const SHADES = [0.9, 0.5, 0.2, 0.05, 0];
export const shade = (logprob) => SHADES.findIndex((least) => Math.exp(logprob) >= least);

export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  // Over plain HTTP from another machine a browser has only this.
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("the browser does not allow copying");
  return undefined;
}
