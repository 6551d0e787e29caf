// The head of the page: what was run, how, what it cost, and what of it is not shown.
descant.masthead = (() => {
  const { app, el, bytes, seconds, counted } = descant;

  function masthead() {
    const [scene, run, request] = [app.scene, app.runData, app.requestData];
    const time = request.steps.reduce((sum, step) => sum + step.seconds, 0);
    const cache = request.steps.reduce((most, step) => Math.max(most, step.cache ?? 0), 0);
    const said = request.said.reduce((sum, one) => sum + one.nodes.length, 0);
    const facts = [
      scene.title.includes(run.model) ? null : ["Model", run.model],
      ["Prompt", counted(request.prompt.length + (request.unshown || 0), "token")],
      ["Written", counted(said, "token")],
      ["Steps", request.steps.length.toLocaleString("en")],
      ["Time", seconds(time)],
      cache ? ["Cache, at most", bytes(cache)] : null,
      request.drafter ? ["Drafts by", request.drafter] : null,
    ].filter(Boolean);
    return el("header", { class: "masthead" },
      el("div", { class: "heading" },
        el("div", { class: "named" }, el("h1", {}, scene.title), el("p", { class: "method" }, request.method)),
        el("div", { class: "choices" },
          scene.runs.length > 1 && chooser("run", "Run", scene.runs.map((_, at) => `${"AB"[at]}: ${scene.runs[at].requests[0]?.method ?? ""}`)),
          run.requests.length > 1 && chooser("request", "Request", run.requests.map((one) => `${one.request}: ${beginning(one)}`))),
        el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))),
      notices(),
      prompt(request),
      chips(request));
  }

  function chooser(name, label, options) {
    const select = el("select", { id: `choose-${name}`, onchange: () => app.set({ [name]: Number(select.value) }) },
      options.map((text, at) => el("option", { value: at }, text)));
    select.value = String(app[name]);
    return el("label", { class: "choose" }, el("span", {}, label), select);
  }

  const spelt = (pieces) => pieces.map(([text, mark]) => (mark ? el("span", { class: "mark" }, text) : text));
  const beginning = (request) => shorter(request.phrase.map((piece) => piece[0]).join(""), 40);

  // What a model brings along is behind a button: few have chosen it.
  const BROUGHT = new Set(["bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "return_dict_in_generate", "trace", "use_cache"]);

  function chips(request) {
    const shown = ([name, value]) =>
      el("li", { class: "chip" }, el("span", { class: "key" }, name), " ",
        el("span", { class: "value" }, shorter(typeof value === "string" ? value : JSON.stringify(value), 60)));
    const entries = Object.entries(request.config);
    if (!entries.length) return null;
    const [brought, chosen] = [true, false].map((one) => entries.filter(([name]) => BROUGHT.has(name) === one));
    const more = el("li", {}, el("button", { type: "button", class: "quiet", onclick: () => more.replaceWith(...brought.map(shown)) },
      chosen.length ? `and ${brought.length} more` : counted(brought.length, "setting")));
    return el("ul", { class: "chips", "aria-label": "Settings" }, chosen.map(shown), brought.length ? more : null);
  }

  function shorter(text, most) {
    const letters = [...text];
    return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
  }

  function prompt(request) {
    if (!request.prompt.length) return null;
    const text = el("p", { class: "prompt", tabindex: 0, role: "region", "aria-label": "Prompt", dir: "ltr" }, spelt(request.phrase));
    const before = request.unshown ? el("p", { class: "hint" }, `${counted(request.unshown, "token")} before these are not on this page.`) : null;
    return el("figure", { class: "prompting" }, el("figcaption", {}, "Prompt"), el("div", {}, before, text));
  }

  function notices() {
    const [scene, run, request] = [app.scene, app.runData, app.requestData];
    const what = new Map([["details", "alternatives and processors are not kept"], ["steps", "no steps are kept"]]);
    // As people count them, from one, and as the scrubber does.
    const place = (step) => request.steps.filter((one) => one.step < step).length + 1;
    const list = [
      request.error ? ["bad", `The run ended with an error: ${request.error}`] : null,
      ...run.cuts.map((cut) => ["warn", `The trace reached its size limit: from step ${place(cut.step)} on ${what.get(cut.what) ?? `${cut.what} are not kept`}.`]),
      request.said.some((one) => one.nodes.length > descant.tokens.DRAWN)
        ? ["warn", `Of a long text the last ${counted(descant.tokens.DRAWN, "token")} are drawn, and counted below it.`] : null,
      ...(scene.notes || []).map((text) => ["warn", text]),
    ].filter(Boolean);
    return list.map(([kind, text]) => el("p", { class: `notice ${kind}`, role: "note" }, text));
  }

  return masthead;
})();
