// The methods, and the fields of a request that the page offers. Whether a value is allowed is the server's to say:
// a field sends what was written, as a number where it is one, and nothing where it is empty.

const field = (name, text, more = {}) => ({ name, text, kind: "number", ...more });

const beams = (value) => field("num_beams", "Beams", { value });
const sequences = (value) => field("n", "Sequences", { value });

export const METHODS = [
  {
    name: "greedy", text: "Greedy", note: "The likeliest token each time.",
    fixed: { do_sample: false }, fields: [],
  },
  {
    name: "sampling", text: "Sampling", note: "Draws from the distribution.",
    fixed: { do_sample: true },
    fields: [
      field("temperature", "Temperature", { value: "0.8" }),
      field("top_p", "Top p", { value: "0.95" }),
      field("top_k", "Top k", { value: "50" }),
      field("min_p", "Min p"),
      field("seed", "Seed"),
      sequences("1"),
    ],
  },
  {
    name: "beams", text: "Beam search", note: "Keeps the best beginnings. Turn on the trace to watch its tree.",
    fixed: { do_sample: false },
    fields: [beams("4"), sequences("1"), field("length_penalty", "Length penalty", { value: "1.0" })],
  },
  {
    name: "diverse", text: "Diverse beams", note: "Groups of beams that avoid each other's tokens.",
    fixed: { do_sample: false },
    fields: [
      beams("6"),
      field("num_beam_groups", "Groups", { value: "3" }),
      field("diversity_penalty", "Diversity penalty", { value: "1.0" }),
      sequences("3"),
    ],
  },
  {
    name: "contrastive", text: "Contrastive", note: "Avoids tokens like those before.",
    fixed: { do_sample: false },
    fields: [field("penalty_alpha", "Alpha", { value: "0.6" }), field("top_k", "Top k", { value: "4" })],
  },
  {
    name: "dola", text: "DoLa", note: "The last layer against earlier ones.",
    fixed: { do_sample: false },
    fields: [
      field("dola_layers", "Layers", { value: "high", kind: "value", hint: "low, high or [2, 4]" }),
      field("repetition_penalty", "Repetition penalty", { value: "1.2" }),
    ],
  },
];

const GRAMMARS = [
  ["", "Any text"], ["json_schema", "JSON schema"], ["regex", "Regular expression"], ["choice", "One of these lines"],
];
const EXAMPLES = {
  json_schema: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
  regex: "[A-Z][a-z]+ [0-9]{4}",
  choice: "yes\nno",
};

export const SECTIONS = [
  {
    name: "length", text: "Length and stop", isOpen: true,
    fields: [
      field("max_tokens", "Most new tokens", { value: "128" }),
      field("stop", "Stop at", { kind: "lines", isWide: true, hint: "one text per line" }),
    ],
  },
  {
    name: "system", text: "System message", mode: "chat",
    fields: [field("system", "System message", { kind: "text", isWide: true, isPrompt: true, isBare: true })],
  },
  {
    name: "grammar", text: "Form of the output",
    fields: [
      field("grammar_kind", "Must be", { kind: "select", options: GRAMMARS, isWide: true }),
      field("grammar", "Grammar", { kind: "grammar", isWide: true, isBare: true, examples: EXAMPLES }),
    ],
  },
  {
    name: "guidance", text: "Guidance",
    fields: [
      field("guidance_scale", "Scale"),
      field("negative_prompt", "Negative prompt", { kind: "text", isWide: true, isPrompt: true }),
    ],
  },
  {
    name: "speculation", text: "Prompt lookup",
    fields: [field("prompt_lookup_num_tokens", "Draft tokens", { hint: "from the prompt" })],
  },
  {
    name: "others", text: "Other fields",
    fields: [
      field("others", "JSON object", {
        kind: "object", isWide: true, hint: "any field of GenerationConfig",
        placeholder: '{"repetition_penalty": 1.1,\n "no_repeat_ngram_size": 3}',
      }),
    ],
  },
];

// Names of the server's errors that a field of the page has under another name.
export const ALIASES = {
  num_return_sequences: "n", max_new_tokens: "max_tokens", max_completion_tokens: "max_tokens", max_length: "max_tokens",
  stop_strings: "stop", negative_prompt_ids: "negative_prompt", messages: "input", prompt: "input",
};

const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// What a field adds to a request; undefined: nothing. Raises where the text cannot be sent at all.
export function valueOf(field, text, values) {
  if (!text.trim()) return undefined;
  if (field.kind === "number") return number(text.trim());
  if (field.kind === "value") return json(text.trim());
  if (field.kind === "lines") return lines(text);
  if (field.kind === "object") return parsed(text, "object");
  if (field.kind === "grammar") return grammar(values.grammar_kind, text);
  return text;
}

const lines = (text) => text.split("\n").filter((line) => line !== "");

function grammar(kind, text) {
  if (kind === "json_schema") return { json_schema: parsed(text, "schema") };
  if (kind === "choice") return { choice: lines(text) };
  return kind ? { regex: text } : undefined;
}

function parsed(text, what) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`must be JSON: ${error.message}`);
  }
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error(`must be a JSON object as the ${what}`);
  return value;
}
