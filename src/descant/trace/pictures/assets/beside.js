// Two runs side by side: where their texts part, what was set otherwise, and what came of it.
(() => {
  const { el, plain, number, seconds, bytes, tokens: T } = descant;
  const NAMES = ["A", "B"];

  function mount(host, app) {
    const sides = app.scene.runs.slice(0, 2).map((run) => ({ run, request: run.requests[Math.min(app.request, run.requests.length - 1)] }));

    function draw() {
      for (const side of sides) {
        side.sequence = Math.min(app.sequence, side.request.said.length - 1);
        side.list = side.sequence < 0 ? [] : T.sequence(side.request, side.sequence);
      }
      const shared = sharedLength(sides);
      host.replaceChildren(
        parting(sides, shared),
        T.legend(),
        el("div", { class: "halves" }, ...sides.map((side, index) => column(side, index, shared))),
        el("div", { class: "tables" },
          el("div", {}, table("differences", "Settings that differ", settings(sides)), el("p", { class: "key" }, same(sides))),
          table("results", "What came of it", results(sides))));
    }

    draw();
    return {
      update(change) {
        if (change.sequence) draw();
      },
    };
  }

  // By what they say and not by number, so that two tokenizers compare too.
  function sharedLength([one, other]) {
    const said = ({ run, list }) => list.map((token) => plain(run, token.token));
    const [mine, theirs] = [said(one), said(other)];
    const end = Math.min(mine.length, theirs.length);
    let at = 0;
    while (at < end && mine[at] === theirs[at]) at++;
    return at;
  }

  function parting(sides, shared) {
    const [one, other] = sides.map((side) => side.list.length);
    const text = shared === one && shared === other
      ? `Both say the same, token for token (${shared}).`
      : shared
        ? `The first ${descant.counted(shared, "token is", "tokens are")} the same; they part at token ${shared + 1}.`
        : "They part at the first token.";
    const [asked, otherwise] = sides.map(({ run, request }) => request.prompt.map((id) => plain(run, id)).join(""));
    return el("p", { class: "parting", "data-shared": shared }, asked === otherwise ? text : `Their prompts differ. ${text}`);
  }

  function column({ run, request, list }, index, shared) {
    const flow = el("div", { class: "flow", role: "listbox", "aria-orientation": "horizontal", "aria-label": `The text of run ${NAMES[index]}` });
    flow.append(...list.map((one, place) => {
      const span = T.span(run, one, "raw");
      span.dataset.place = place;
      if (!place) span.tabIndex = 0;
      if (place < shared) span.classList.add("shared");
      if (place === shared) span.classList.add("parts");
      return span;
    }));
    if (!list.length) flow.append(el("span", { class: "mark" }, "nothing"));
    T.rove(flow, ".tok", () => {});
    descant.tip(flow, (span) => T.alternatives(run, list[Number(span.dataset.place)]), ".tok");
    return el("article", { class: "half", "data-run": index },
      el("h3", {}, el("span", { class: "place" }, NAMES[index]), request.method),
      flow);
  }

  // ------------------------------------------------------------------ tables
  const said = (value) => (value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));

  const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

  function settings(sides) {
    const [one, other] = sides.map(({ run, request }) => ({ model: run.model, method: request.method, ...request.config }));
    const names = [...new Set([...Object.keys(one), ...Object.keys(other)])];
    return names.filter((name) => said(own(one, name)) !== said(own(other, name)))
      .map((name) => [name, said(own(one, name)), said(own(other, name))]);
  }

  function same(sides) {
    const [one, other] = sides.map((side) => side.request.config);
    const names = Object.keys(one).filter((name) => Object.hasOwn(other, name) && said(one[name]) === said(other[name]));
    return names.length ? `Set in both: ${names.map((name) => `${name} ${said(one[name])}`).join(", ")}.` : "";
  }

  function results(sides) {
    const columns = sides.map(({ request, list, sequence }) => {
      const sum = T.figures(list);
      const time = request.steps.reduce((total, step) => total + step.seconds, 0);
      const cache = Math.max(0, ...request.steps.map((step) => step.cache ?? 0));
      const one = request.said[sequence];
      return {
        Tokens: String(sum.tokens),
        "Ended by": (one && one.reason) || "–",
        Perplexity: T.fixed(sum.perplexity),
        "Mean entropy, nats": T.fixed(sum.entropy),
        "Entropy left, nats": T.fixed(sum.left),
        Score: one && one.score !== null ? number(one.score) : "–",
        Steps: String(request.steps.length),
        Time: seconds(time),
        "Cache, at most": cache ? bytes(cache) : "–",
      };
    });
    return Object.keys(columns[0])
      .map((name) => [name, columns[0][name], columns[1][name]])
      .filter(([, one, other]) => one !== "–" || other !== "–");
  }

  function table(kind, caption, rows) {
    return el("table", { class: `compared ${kind}`, "data-table": kind },
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, ""), ...NAMES.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...(rows.length
        ? rows.map(([name, one, other]) => el("tr", { "data-name": name }, el("th", { scope: "row" }, name), el("td", {}, one), el("td", {}, other)))
        : [el("tr", {}, el("td", { colspan: 3 }, "Nothing."))])));
  }

  descant.view({ name: "beside", title: "Side by side", uses: ["sequence"], wanted: () => descant.app.scene.runs.length > 1, mount });
})();
