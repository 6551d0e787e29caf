// The tokens of a growing text, and which part of the text each of them is.
//
// The text is the server's and always shown whole. A token is matched with the text at its place. Tokens that are
// parts of one character form one group. A special token, which the text leaves out, is a group without text.

const REPLACEMENT = "\ufffd";
const FAR = 32; // characters to look ahead for a token that is not where it should be

// A token of either endpoint: its text, or null while its bytes are part of a character.
function entry(text, logprob, bytes, alternatives) {
  return { text, logprob, bytes, alternatives };
}

export const chatEntries = (logprobs) =>
  (logprobs?.content ?? []).map((one) =>
    entry(one.token, one.logprob, one.bytes, one.top_logprobs.map((other) => entry(other.token, other.logprob, other.bytes))));

export const completionEntries = (logprobs) =>
  (logprobs?.tokens ?? []).map((token, at) =>
    entry(token, logprobs.token_logprobs[at], null,
      Object.entries(logprobs.top_logprobs[at] ?? {})
        .map(([other, logprob]) => entry(other, logprob, null))
        .sort((one, other) => other.logprob - one.logprob)));

// Whether bytes of UTF-8 end inside of a character.
function isOpen(bytes) {
  for (let back = 1; back <= Math.min(4, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if (byte < 0x80) return false;
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2);
  }
  return false;
}

export class TokenText {
  constructor() {
    this.text = "";
    this.end = 0; // of the text that groups stand for
    this.numTokens = 0;
    this.waiting = []; // tokens without a place so far
  }

  // The groups that can be placed now: [{ text, tokens }]; `tokens` is empty where none is known for a piece.
  add(text, entries, isLast = false) {
    this.text += text;
    this.numTokens += entries.length;
    this.waiting.push(...entries);
    const groups = [];
    while (this.waiting.length) {
      const size = this.sizeOfGroup(isLast);
      if (!size || !this.place(this.waiting.slice(0, size), groups, isLast)) break;
      this.waiting.splice(0, size);
    }
    if (isLast && this.end < this.text.length) this.push(groups, this.text.length, []);
    return groups;
  }

  get rest() {
    return this.text.slice(this.end);
  }

  // The number of waiting tokens that belong together; 0: the next one must be known first.
  sizeOfGroup(isLast) {
    const all = this.waiting;
    const parts = (one) => one.text.includes(REPLACEMENT);
    let size = 1;
    if (all[0].bytes) {
      const bytes = [...all[0].bytes];
      while (isOpen(bytes)) {
        if (size === all.length) return isLast ? size : 0;
        bytes.push(...all[size++].bytes);
      }
    } else if (parts(all[0])) {
      while (size < all.length && parts(all[size])) size++;
      if (size === all.length && !isLast) return 0;
    }
    return size;
  }

  // Add a group at its place; false: the text of it has not come yet.
  place(tokens, groups, isLast) {
    const shown = this.shownText(tokens);
    if (shown === null) { // only what follows tells where its text ends
      const next = this.waiting[tokens.length];
      const found = next ? this.text.indexOf(next.text, this.end) : this.text.length;
      if (found < 0 && !isLast) return false;
      this.push(groups, found < 0 ? this.end : found, tokens);
      return true;
    }
    for (const one of shown.startsWith(" ") && !this.end ? [shown, shown.slice(1)] : [shown]) {
      if (one && this.text.startsWith(one, this.end)) {
        this.push(groups, this.end + one.length, tokens);
        return true;
      }
    }
    if (!isLast && shown.startsWith(this.rest)) return false;
    const found = shown.trim() ? this.text.indexOf(shown, this.end) : -1;
    if (found >= 0 && found - this.end <= FAR) {
      this.push(groups, found, []);
      this.push(groups, found + shown.length, tokens);
    } else {
      groups.push({ text: "", tokens });
    }
    return true;
  }

  shownText(tokens) {
    if (tokens[0].bytes) return new TextDecoder().decode(new Uint8Array(tokens.flatMap((one) => one.bytes)));
    return tokens.some((one) => one.text.includes(REPLACEMENT)) ? null : tokens[0].text;
  }

  push(groups, end, tokens) {
    if (end > this.end || tokens.length) groups.push({ text: this.text.slice(this.end, end), tokens });
    this.end = end;
  }
}
