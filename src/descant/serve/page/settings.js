// The form of the method and its fields, what it adds to a request, and errors at the fields they name.

import { el } from "./display.js";
import { ALIASES, METHODS, SECTIONS, valueOf } from "./fields.js";

const STORED = "descant-page";

export class FieldError extends Error {
  constructor(name, message) {
    super(message);
    this.param = name;
  }
}

function control(field, id) {
  const common = {
    id, name: id, class: "control", "data-field": field.name, spellcheck: "false", autocapitalize: "off",
    "aria-describedby": `${id}-error`, "aria-label": field.isBare ? field.text : null, placeholder: field.placeholder,
  };
  if (field.kind === "select") {
    return el("select", common, ...field.options.map(([value, text]) => el("option", { value }, text)));
  }
  if (["text", "lines", "object", "grammar"].includes(field.kind)) {
    return el("textarea", { ...common, rows: field.kind === "lines" ? 2 : 3 });
  }
  return el("input", { ...common, type: "text", inputmode: field.kind === "number" ? "decimal" : "text" });
}

function fieldRow(field, id) {
  const hint = field.hint ? el("span", { class: "hint" }, field.hint) : null;
  return el("div", { class: field.isWide ? "field wide" : "field" },
    field.isBare ? null : el("label", { for: id }, field.text, hint),
    control(field, id),
    el("p", { id: `${id}-error`, class: "field-error", role: "alert", hidden: true }));
}

export class Settings {
  constructor(form, { hasTraces, changed }) {
    this.form = form;
    this.changed = changed;
    this.hasTraces = hasTraces;
    this.mode = "chat";
    this.build();
    this.restore();
    this.show();
    form.addEventListener("input", (event) => this.onInput(event));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  build() {
    const choices = METHODS.map((one) =>
      el("label", { class: "method" }, el("input", { type: "radio", name: "method", value: one.name }), el("span", {}, one.text)));
    const knobs = METHODS.map((one) =>
      el("div", { class: "knobs", "data-method": one.name, hidden: true },
        el("p", { class: "note" }, one.note), ...one.fields.map((field) => fieldRow(field, `${one.name}-${field.name}`))));
    const sections = SECTIONS.map((one) =>
      el("details", { class: "section", "data-section": one.name, open: one.isOpen },
        el("summary", {}, el("span", {}, one.text), el("span", { class: "set", "aria-hidden": "true" })),
        el("div", { class: "knobs" }, ...one.fields.map((field) => fieldRow(field, `field-${field.name}`)))));
    const trace = el("label", { class: "switch" },
      el("input", { type: "checkbox", id: "trace", name: "trace", "aria-describedby": "trace-note" }), el("span", {}, "Record a trace"));
    this.form.append(
      el("fieldset", { class: "methods" }, el("legend", {}, "Method"), ...choices), ...knobs,
      el("div", { class: "trace" }, trace,
        el("p", { id: "trace-note", class: "note" }, "Shows the search as it grows; the finished trace can be opened."),
        el("p", { id: "trace-error", class: "field-error", role: "alert", hidden: true })),
      ...sections,
      el("button", { type: "button", id: "reset", class: "plain" }, "Reset settings"));
    this.form.querySelector("#reset").addEventListener("click", () => this.reset());
    this.setDefaults();
  }

  // ------------------------------------------------------------------ values
  *fields() {
    for (const method of METHODS) for (const field of method.fields) yield [field, `${method.name}-${field.name}`];
    for (const section of SECTIONS) for (const field of section.fields) yield [field, `field-${field.name}`];
  }

  control(id) {
    return this.form.elements.namedItem(id);
  }

  get method() {
    return METHODS.find((one) => one.name === this.form.elements.method.value) ?? METHODS[0];
  }

  get isTraced() {
    return this.hasTraces && this.control("trace").checked;
  }

  get system() {
    return this.control("field-system").value;
  }

  // The fields of the method and the sections that hold now, with the ids of their controls.
  active() {
    const sections = SECTIONS.filter((one) => !one.mode || one.mode === this.mode);
    return [
      ...this.method.fields.map((field) => [field, `${this.method.name}-${field.name}`]),
      ...sections.flatMap((one) => one.fields.map((field) => [field, `field-${field.name}`])),
    ];
  }

  // What the settings add to a request.
  body() {
    this.clearErrors();
    const values = { grammar_kind: this.control("field-grammar_kind").value };
    const body = { ...this.method.fixed };
    for (const [field, id] of this.active()) {
      if (["grammar_kind", "system"].includes(field.name)) continue;
      let value;
      try {
        value = valueOf(field, this.control(id).value, values);
      } catch (error) {
        throw new FieldError(field.name, `\`${field.text}\` ${error.message}`);
      }
      if (value === undefined) continue;
      if (field.name === "others") Object.assign(body, value);
      else body[field.name] = value;
    }
    if (this.isTraced) body.trace = true;
    return body;
  }

  get summary() {
    const shown = this.method.fields.slice(0, 3)
      .map((field) => [field, this.control(`${this.method.name}-${field.name}`).value.trim()])
      .filter(([, value]) => value)
      .map(([field, value]) => `${field.text.toLowerCase()} ${value}`);
    return [this.method.text, ...shown].join(", ");
  }

  // ------------------------------------------------------------------ errors
  clearErrors() {
    for (const one of this.form.querySelectorAll(".field-error")) one.hidden = true;
    for (const one of this.form.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
  }

  // Show an error at the field that it names; false: no field of the form has the name.
  showError(param, message) {
    const path = String(param).split(".")[0];
    const name = ALIASES[path] ?? path;
    let found = this.active().find(([field]) => field.name === name)?.[1];
    if (!found && name === "trace") found = "trace";
    if (!found && this.control("field-others").value.includes(`"${path}"`)) found = "field-others";
    if (!found) return false;
    const note = document.getElementById(`${found}-error`);
    note.textContent = message;
    note.hidden = false;
    const input = this.control(found);
    input.setAttribute("aria-invalid", "true");
    const section = input.closest("details");
    if (section) section.open = true;
    input.scrollIntoView({ block: "nearest" });
    return true;
  }

  refuseTraces(message) {
    this.hasTraces = false;
    this.control("trace").checked = false;
    this.show();
    document.getElementById("trace-note").textContent = message;
  }

  // ------------------------------------------------------------------ changes
  onInput(event) {
    const input = event.target;
    input.removeAttribute("aria-invalid");
    const note = document.getElementById(`${input.id}-error`);
    if (note) note.hidden = true;
    if (input.name === "field-grammar_kind") this.control("field-grammar").value = "";
    this.show();
    this.store();
  }

  setMode(mode) {
    this.mode = mode;
    this.show();
  }

  show() {
    for (const one of this.form.querySelectorAll("[data-method]")) one.hidden = one.dataset.method !== this.method.name;
    for (const section of SECTIONS) {
      const node = this.form.querySelector(`[data-section="${section.name}"]`);
      node.hidden = Boolean(section.mode) && section.mode !== this.mode;
      const isSet = section.fields.some((field) => field.kind !== "select" && this.control(`field-${field.name}`).value.trim() !== "");
      node.classList.toggle("is-set", isSet);
    }
    const kind = this.control("field-grammar_kind").value;
    const grammar = this.control("field-grammar");
    grammar.closest(".field").hidden = !kind;
    const { examples } = SECTIONS.find((one) => one.name === "grammar").fields[1];
    grammar.placeholder = examples[kind] ?? "";
    this.control("trace").disabled = !this.hasTraces;
    if (!this.hasTraces) {
      document.getElementById("trace-note").textContent = "This server records no traces: start it with --traces.";
    }
    this.changed(this);
  }

  // ------------------------------------------------------------------ storage: settings only, no prompt and no key
  setDefaults() {
    for (const [field, id] of this.fields()) this.control(id).value = field.value ?? "";
    this.form.elements.method.value = "sampling";
    this.control("trace").checked = false;
  }

  reset() {
    this.clearErrors();
    this.setDefaults();
    this.show();
    this.store();
  }

  store() {
    const values = {};
    for (const [field, id] of this.fields()) {
      if (!field.isPrompt) values[id] = this.control(id).value;
    }
    const stored = { method: this.method.name, isTraced: this.control("trace").checked, values };
    try {
      localStorage.setItem(STORED, JSON.stringify({ ...readStored(), ...stored }));
    } catch {
      // A browser may allow no storage; then settings last as long as the page.
    }
  }

  restore() {
    const stored = readStored();
    for (const [field, id] of this.fields()) {
      const value = stored.values?.[id];
      if (!field.isPrompt && typeof value === "string") this.control(id).value = value;
    }
    if (METHODS.some((one) => one.name === stored.method)) this.form.elements.method.value = stored.method;
    this.control("trace").checked = Boolean(stored.isTraced) && this.hasTraces;
  }
}

export function readStored() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    return stored !== null && typeof stored === "object" ? stored : {};
  } catch {
    return {};
  }
}

export function storeValue(name, value) {
  try {
    localStorage.setItem(STORED, JSON.stringify({ ...readStored(), [name]: value }));
  } catch {
    // As above.
  }
}
