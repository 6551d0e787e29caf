// Guesses along the text: those that stood, those that did not, and how far a run of them goes.
(() => {
  const { el, word, prob, counted, tokens: T } = descant;
  const LONG = 24; // characters that have room in one line of a phone

  function mount(host, app) {
    const [run, request] = [app.runData, app.requestData];
    const head = el("div", {});
    const flow = el("div", {
      class: "flow drafted", role: "listbox", "aria-orientation": "horizontal", "aria-label": "The text and the guesses, forward by forward",
    });
    const chart = el("div", {});
    let list = [];
    host.append(head, legend(), flow, chart);

    const of = (span) => list[Number(span.dataset.place)];
    T.rove(flow, ".tok", (span) => T.choose(app, request, of(span).node));
    descant.tip(flow, (span) => explained(run, of(span)), ".tok");

    function draw() {
      list = T.sequence(request, app.sequence);
      const forwards = forwardsOf(request, list);
      const sum = summed(forwards);
      head.replaceChildren(T.figureList([
        ["forwards", sum.forwards, "Forwards"],
        ["tokens", sum.tokens, "Tokens"],
        ["per-forward", T.fixed(sum.forwards ? sum.tokens / sum.forwards : null), "Tokens a forward"],
        ["rate", sum.guessed ? `${((100 * sum.stood) / sum.guessed).toFixed(1)} %` : "–", "Guesses that stood", `${sum.stood} of ${sum.guessed}`],
      ]));
      flow.replaceChildren(...forwards.map((forward) => group(run, forward)));
      const first = flow.querySelector(".tok");
      if (first) first.tabIndex = 0;
      chart.replaceChildren(...(sum.tried.length ? [columns(sum)] : []));
      mark();
    }

    function mark() {
      for (const one of flow.querySelectorAll('[aria-selected="true"]')) one.setAttribute("aria-selected", "false");
      const place = list.findIndex((one) => one.node === app.node);
      const found = place < 0 ? null : flow.querySelector(`.tok[data-place="${place}"]`);
      if (found) found.setAttribute("aria-selected", "true");
    }

    draw();
    return {
      update(change) {
        if (change.sequence) draw();
        else if (change.node) mark();
      },
    };
  }

  // The tokens of a sequence by the forward that gave them, with the guesses that it judged.
  function forwardsOf(request, list) {
    const rows = new Map();
    for (const step of request.steps) for (const row of step.rows) rows.set(`${step.step} ${row.at}`, row);
    const found = [];
    list.forEach((one) => {
      const last = found[found.length - 1];
      if (last && last.born === one.born) return last.tokens.push(one);
      const row = rows.get(`${one.born} ${request.nodes.parent[one.node]}`);
      found.push({ born: one.born, tokens: [one], drafts: row ? row.drafts : [], accepted: 0 });
      return null;
    });
    for (const forward of found) {
      const { tokens, drafts } = forward;
      // A forward can end with a guess that stood: the last token that there was room for, or the end itself.
      while (forward.accepted < tokens.length && tokens[forward.accepted].token === drafts[forward.accepted]) forward.accepted++;
      tokens[tokens.length - 1].rejected = forward.accepted < tokens.length ? drafts.slice(forward.accepted) : [];
    }
    return found;
  }

  function summed(forwards) {
    const sum = { forwards: forwards.length, tokens: 0, guessed: 0, stood: 0, tried: [], right: [] };
    for (const { tokens, drafts, accepted } of forwards) {
      sum.tokens += tokens.length;
      sum.guessed += drafts.length;
      sum.stood += accepted;
      drafts.forEach((_, at) => {
        sum.tried[at] = (sum.tried[at] || 0) + 1;
        sum.right[at] = (sum.right[at] || 0) + (at < accepted ? 1 : 0);
      });
    }
    return sum;
  }

  // ------------------------------------------------------------------ along the text
  function group(run, { tokens, drafts, accepted }) {
    return el("span", { class: "forward", role: "presentation" }, ...tokens.map((one, at) => {
      const stood = at < accepted;
      const span = T.span(run, one, "raw");
      delete span.dataset.shade;
      span.classList.add(stood ? "stood" : "own");
      span.dataset.place = one.place;
      if (stood) [span.dataset.token, span.dataset.accepted] = [drafts[at], 1];
      if (one.rejected && one.rejected.length) above(span, rejection(run, one.rejected));
      return span;
    }));
  }

  // What stands above a word keeps it on one line, so a word that is too long for one has it before it.
  function above(span, what) {
    const inner = span.querySelector(".ink");
    if (inner.textContent.length > LONG) {
      inner.before(what);
      return;
    }
    const ruby = el("ruby", {});
    inner.replaceWith(ruby);
    ruby.append(inner, el("rt", {}, what));
  }

  // The guess that was judged and did not stand, and how many behind it were never judged.
  function rejection(run, [first, ...rest]) {
    return el("span", { class: "rejected" },
      el("del", { class: descant.plain(run, first).trim().length < 3 ? "short" : null, "data-token": first, "data-accepted": 0 }, word(run, first, true)),
      rest.length ? el("span", { class: "rest", "data-rest": rest.length }, `+${rest.length}`) : null);
  }

  function explained(run, one) {
    const found = T.alternatives(run, one);
    if (!one.rejected || !one.rejected.length) return found;
    const [first, ...rest] = one.rejected;
    const seen = one.look && one.look.top.find(([token]) => token === first);
    found.append(el("p", { class: "note" }, "Guessed instead: ", el("del", {}, word(run, first, true)),
      seen ? `, to which the model gave ${prob(seen[1])}` : "",
      rest.length ? [", and behind it ", el("del", {}, ...rest.map((id) => word(run, id)))] : "", "."));
    return found;
  }

  function legend() {
    const sample = (kind) => el("span", { class: `tok ${kind}`, "aria-hidden": "true" }, el("span", { class: "ink" }, "token"));
    return el("ul", { class: "legend" },
      el("li", {}, sample("stood"), "guessed, and it stood"),
      el("li", {}, sample("own"), "the model’s own choice, which ends a forward"),
      el("li", {}, el("span", { class: "rejected", "aria-hidden": "true" }, el("del", {}, "token"), el("span", { class: "rest" }, "+2")),
        "guessed there instead and rejected, with as many unjudged behind it"));
  }

  // ------------------------------------------------------------------ by position
  function columns({ tried, right }) {
    const most = Math.max(...tried);
    const column = (count, at) => {
      const fill = el("span", { class: "fill", "aria-hidden": "true" });
      const well = el("span", { class: "well", "aria-hidden": "true" }, fill);
      well.style.height = `${((100 * count) / most).toFixed(2)}%`;
      fill.style.height = `${((100 * right[at]) / count).toFixed(2)}%`;
      return el("li", { "data-position": at + 1, "data-tried": count, "data-stood": right[at] },
        el("span", { class: "rate" }, `${Math.round((100 * right[at]) / count)} %`),
        el("span", { class: "room" }, well),
        el("span", { class: "axis" }, String(at + 1)),
        el("span", { class: "counts" }, `${right[at]}/${count}`),
        el("span", { class: "hidden" }, `Place ${at + 1}: ${right[at]} of ${counted(count, "guess", "guesses")} stood`));
    };
    return el("figure", { class: "positions" },
      el("figcaption", {}, el("h3", {}, "Acceptance by position"), el("p", {}, "Place in a run of guesses: tried (outline) and stood (filled)")),
      el("ol", {}, ...tried.map(column)));
  }

  descant.view({
    name: "speculation", title: "Speculation", uses: ["sequence"],
    wanted: (run, request) => request.drafter !== null,
    mount,
  });
})();
