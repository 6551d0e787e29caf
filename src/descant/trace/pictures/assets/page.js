// The shell of the page: its data, its tabs, its scrubber, its tooltip, and the port that views mount on.
//
// A view says descant.view({name, title, uses, wanted(run, request), mount(host, app)}), and its mount() gives
// {update(change)}. It is mounted again when the run or the request changes, so update() is only told of `step`,
// `sequence` and `node`, as the keys of `change`. `uses` names the controls that the shell shows above it: "step",
// "sequence". Everything that is shown goes through textContent; nothing here or in a view may parse markup.
const descant = (() => {
  const views = [];
  const spaceOfSvg = document.getElementById("blank").namespaceURI;
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // ------------------------------------------------------------------ elements
  function fill(element, attrs, children) {
    for (const [name, value] of Object.entries(attrs || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") element.style.cssText = value; // an attribute would be against the policy
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }
  const el = (tag, attrs, ...children) => fill(document.createElement(tag), attrs, children);
  const svg = (tag, attrs, ...children) => fill(document.createElementNS(spaceOfSvg, tag), attrs, children);

  // ------------------------------------------------------------------ words and numbers
  const runOf = (run) => (typeof run === "number" ? app.scene.runs[run] : run);
  const pieces = (run, id) => runOf(run).texts[id] || [[`‹${id}›`, 1]];
  const plain = (run, id) => pieces(run, id).map((piece) => piece[0]).join("");

  // The same with the space that it begins with as a dot, where it stands alone.
  function dotted(run, id) {
    const found = pieces(run, id);
    const spaces = found[0][1] ? 0 : found[0][0].length - found[0][0].trimStart().length;
    return spaces ? [["·".repeat(spaces), 1], [found[0][0].slice(spaces), 0], ...found.slice(1)] : found;
  }

  function word(run, id, alone = false) {
    const special = runOf(run).specials.has(id);
    return el(
      "span",
      { class: special ? "word special" : "word", dir: "ltr" },
      (alone ? dotted : pieces)(run, id).map(([text, mark]) => (mark ? el("span", { class: "mark" }, text) : text)),
    );
  }

  function prob(log) {
    const percent = log === null || log === undefined ? 0 : 100 * Math.exp(log);
    if (percent === 0) return "0 %";
    if (percent >= 99.95) return percent > 99.9995 ? "100 %" : `${percent.toFixed(2)} %`;
    if (percent >= 1) return `${percent.toFixed(1)} %`;
    if (percent >= 0.001) return `${Number(percent.toPrecision(2))} %`;
    return "< 0.001 %";
  }

  // A logarithm or a score; a real minus sign, which is as wide as a digit.
  const number = (value, places = 2) =>
    value === null || value === undefined ? "−∞" : value.toFixed(places).replace("-", "−");

  function bytes(count) {
    const units = ["bytes", "KB", "MB", "GB", "TB"];
    let at = 0;
    while (count >= 1000 && at < units.length - 1) [count, at] = [count / 1000, at + 1];
    return `${at && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
  }

  function seconds(count) {
    if (count >= 60) return `${Math.floor(count / 60)} min ${Math.round(count % 60)} s`;
    return count >= 1 ? `${count.toFixed(count < 10 ? 2 : 1)} s` : `${(1000 * count).toFixed(count < 0.01 ? 1 : 0)} ms`;
  }

  const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

  // ------------------------------------------------------------------ one tooltip
  const bubble = el("div", { class: "tip", role: "tooltip", id: "tip", hidden: true });
  let owner = null;
  let leaving = 0;

  function openTip(element, make) {
    clearTimeout(leaving);
    if (owner === element) return;
    closeTip();
    const content = make();
    if (!content) return;
    owner = element;
    bubble.replaceChildren(content);
    bubble.hidden = false;
    element.setAttribute("aria-describedby", "tip");
    placeTip();
  }

  function placeTip() {
    const at = [...owner.getClientRects()].at(-1); // of a word that wraps, its end
    const [width, height] = [bubble.offsetWidth, bubble.offsetHeight];
    const left = Math.max(8, Math.min(at.left + at.width / 2 - width / 2, innerWidth - width - 8));
    const below = at.bottom + 8 + height <= innerHeight || at.top < height + 8;
    bubble.style.left = `${left}px`;
    bubble.style.top = `${Math.max(8, below ? Math.min(at.bottom + 8, innerHeight - height - 8) : at.top - 8 - height)}px`;
  }

  function closeTip() {
    clearTimeout(leaving);
    if (owner) owner.removeAttribute("aria-describedby");
    owner = null;
    bubble.hidden = true;
  }

  // Leaving is slow, so that the pointer can move onto the tooltip itself.
  const closeSoon = () => {
    clearTimeout(leaving);
    leaving = setTimeout(closeTip, 200);
  };

  // Hover, focus and tap open it; Escape, leaving, or a press elsewhere close it. With a selector it is for all that
  // match it within the element, and make() is told which.
  function tip(element, make, selector) {
    const anchor = (event) => (selector ? event.target.closest(selector) : element);
    const open = (event) => {
      const at = anchor(event);
      if (at && element.contains(at)) openTip(at, () => make(at));
    };
    const leave = (event) => {
      const at = anchor(event);
      if (at && at === owner && !at.contains(event.relatedTarget)) closeSoon();
    };
    element.addEventListener("pointerover", (event) => event.pointerType !== "touch" && open(event));
    element.addEventListener("pointerout", (event) => event.pointerType !== "touch" && leave(event));
    element.addEventListener("focusin", open);
    element.addEventListener("focusout", leave);
    element.addEventListener("click", open);
    return element;
  }

  bubble.addEventListener("pointerenter", () => clearTimeout(leaving));
  bubble.addEventListener("pointerleave", closeSoon);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && owner) {
      closeTip();
      event.stopPropagation();
    }
  }, true);
  addEventListener("pointerdown", (event) => {
    if (owner && !owner.contains(event.target) && !bubble.contains(event.target)) closeTip();
  }, true);
  addEventListener("scroll", () => owner && closeTip(), true);

  // ------------------------------------------------------------------ state
  const app = {
    scene: null,
    run: 0, // an index into scene.runs
    request: 0, // into its requests
    step: 0, // into its steps; the views show what stood after it
    sequence: 0, // into what it said
    node: null, // into its nodes; null: none is selected
    view: null, // the name of the view that is shown
    get runData() {
      return this.scene.runs[this.run];
    },
    get requestData() {
      return this.runData.requests[this.request];
    },
    set(wanted) {
      const change = {};
      for (const [name, value] of Object.entries(wanted)) {
        if (this[name] === value) continue;
        this[name] = value;
        change[name] = true;
      }
      if (!Object.keys(change).length) return;
      closeTip();
      if (change.run && !wanted.request) this.request = Math.min(this.request, this.runData.requests.length - 1);
      if (change.run || change.request) enter(wanted);
      else shell.update(change);
    },
    say(text) {
      shell.live.textContent = text;
    },
  };

  function enter(wanted = {}) {
    const request = app.requestData;
    app.step = wanted.step ?? Math.max(0, request.steps.length - 1);
    app.sequence = wanted.sequence ?? 0;
    app.node = wanted.node ?? null;
    shell.build();
  }

  // ------------------------------------------------------------------ the shell
  const shell = {
    live: el("p", { class: "hidden", "aria-live": "polite", id: "live" }),
    mounted: new Map(), // name -> {section, made, stale}
    playing: 0,

    build() {
      this.stop();
      this.mounted.clear();
      const [run, request] = [app.runData, app.requestData];
      const wanted = views.filter((view) => view.wanted(run, request));
      if (!wanted.some((view) => view.name === app.view)) app.view = wanted.length ? wanted[0].name : null;
      this.wanted = wanted;
      const sections = wanted.map((view) => this.section(view));
      const main = el("main", {}, descant.masthead(), this.tabs(wanted), this.controls(), sections, footer(app));
      document.getElementById("app").replaceChildren(main, this.live, bubble);
      document.body.classList.add("ready");
      this.show(app.view, false);
    },

    section(view) {
      const section = el("section", {
        id: `view-${view.name}`, class: `view view-${view.name}`, role: "tabpanel",
        "aria-labelledby": `tab-${view.name}`, hidden: true,
      });
      this.mounted.set(view.name, { section, made: null, stale: {} });
      return section;
    },

    tabs(wanted) {
      const list = el("div", { class: "tabs", role: "tablist", "aria-label": "Pictures" });
      for (const view of wanted) {
        list.append(el("button", {
          type: "button", role: "tab", id: `tab-${view.name}`, "aria-controls": `view-${view.name}`,
          "aria-selected": "false", tabindex: "-1", onclick: () => this.show(view.name),
        }, view.title));
      }
      list.addEventListener("keydown", (event) => {
        const at = wanted.findIndex((view) => view.name === app.view);
        const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: wanted.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        const view = wanted[(to + wanted.length) % wanted.length];
        this.show(view.name);
        document.getElementById(`tab-${view.name}`).focus();
      });
      return list;
    },

    show(name, told = true) {
      if (!name) return;
      app.view = name;
      closeTip();
      for (const view of this.wanted) {
        const chosen = view.name === name;
        const tab = document.getElementById(`tab-${view.name}`);
        tab.setAttribute("aria-selected", String(chosen));
        tab.tabIndex = chosen ? 0 : -1;
        this.mounted.get(view.name).section.hidden = !chosen;
      }
      const view = this.wanted.find((one) => one.name === name);
      const uses = view.uses || [];
      const request = app.requestData;
      this.stepBar.hidden = !uses.includes("step") || request.steps.length < 2;
      this.sequenceBar.hidden = !uses.includes("sequence") || request.said.length < 2;
      this.bar.hidden = this.stepBar.hidden && this.sequenceBar.hidden;
      if (this.stepBar.hidden) this.stop();
      const one = this.mounted.get(name);
      if (!one.made) one.made = view.mount(one.section, app) || {};
      else if (Object.keys(one.stale).length && one.made.update) one.made.update(one.stale);
      one.stale = {};
      if (told) app.say(`${view.title} is shown`);
    },

    update(change) {
      if (change.step) this.tell();
      if (change.sequence) this.choose.value = String(app.sequence);
      for (const [name, one] of this.mounted) {
        if (name !== app.view) Object.assign(one.stale, change);
        else if (one.made && one.made.update) one.made.update(change);
      }
    },

    // -------------------------------------------------------------- controls
    controls() {
      const request = app.requestData;
      const last = Math.max(0, request.steps.length - 1);
      const go = (by) => () => {
        this.stop();
        app.set({ step: Math.max(0, Math.min(last, app.step + by)) });
      };
      this.range = el("input", {
        type: "range", min: 0, max: last, step: 1, id: "step", "aria-label": "Step",
        oninput: () => {
          this.stop();
          app.set({ step: Number(this.range.value) });
        },
      });
      this.range.value = String(app.step);
      this.count = el("output", { class: "count", for: "step" });
      this.play = el("button", { type: "button", class: "play", id: "play", onclick: () => this.toggle() });
      this.stepBar = el("div", { class: "scrubber", role: "group", "aria-label": "Steps" },
        el("button", { type: "button", id: "previous", "aria-label": "Previous step", onclick: go(-1) }, icon("M10 3 5 8l5 5")),
        this.play,
        el("button", { type: "button", id: "next", "aria-label": "Next step", onclick: go(1) }, icon("M6 3l5 5-5 5")),
        this.range, this.count);
      this.choose = el("select", { id: "sequence", onchange: () => app.set({ sequence: Number(this.choose.value) }) },
        request.said.map((said, at) => el("option", { value: at }, sequenceName(said, at))));
      this.choose.value = String(app.sequence);
      this.sequenceBar = el("label", { class: "choose" }, el("span", {}, "Sequence"), this.choose);
      this.bar = el("div", { class: "controls" }, this.sequenceBar, this.stepBar);
      this.face();
      this.tell(false);
      return this.bar;
    },

    tell(aloud = true) {
      const steps = app.requestData.steps;
      this.range.value = String(app.step);
      const text = steps.length ? `step ${app.step + 1} of ${steps.length}` : "no steps";
      this.count.textContent = text;
      this.range.setAttribute("aria-valuetext", text);
      if (aloud && !this.playing) app.say(`After ${text}`);
    },

    face() {
      this.play.setAttribute("aria-label", this.playing ? "Pause" : "Play");
      this.play.replaceChildren(icon(this.playing ? "M5 3v10M11 3v10" : "M5 2.5v11l9-5.5z", !this.playing));
    },

    toggle() {
      if (this.playing) return this.stop();
      const last = app.requestData.steps.length - 1;
      if (app.step >= last) app.set({ step: 0 });
      const pause = Math.max(still.matches ? 400 : 60, Math.min(400, 12000 / (last + 1)));
      const by = Math.ceil((last + 1) / 400);
      this.playing = setInterval(() => {
        app.set({ step: Math.min(last, app.step + by) });
        if (app.step >= last) this.stop();
      }, pause);
      this.face();
    },

    stop() {
      if (!this.playing) return;
      clearInterval(this.playing);
      this.playing = 0;
      this.face();
      this.tell();
    },
  };

  const icon = (path, filled) =>
    svg("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", class: filled ? "icon filled" : "icon" },
      svg("path", { d: path }));

  function sequenceName(said, at) {
    const score = said.score === null ? "" : `, score ${number(said.score)}`;
    return `${at + 1}: ${counted(said.nodes.length, "token")}${said.reason ? `, ${said.reason}` : ""}${score}`;
  }

  const footer = (app) =>
    el("footer", {}, `Drawn by Descant ${app.runData.descant} from its trace. This page is complete: it loads nothing.`);

  // ------------------------------------------------------------------ beginning
  async function inflate(text) {
    const packed = Uint8Array.from(atob(text.trim()), (one) => one.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  async function start() {
    const host = document.getElementById("app");
    try {
      app.scene = await inflate(document.getElementById("scene").textContent);
      for (const run of app.scene.runs) run.specials = new Set(run.special);
      if (!app.runData.requests.length) {
        host.replaceChildren(el("main", {}, el("h1", {}, app.scene.title), el("p", {}, "This trace has no requests.")));
        return;
      }
      enter();
    } catch (error) {
      host.replaceChildren(el("p", { class: "notice bad", role: "alert" }, `This page could not be drawn: ${error.message}`));
      throw error;
    }
  }

  const view = (one) => views.push(one);
  start(); // waits for its data, so every view of this script is there by then
  return { app, view, el, svg, word, pieces, plain, dotted, prob, number, bytes, seconds, counted, tip, icon, still };
})();
