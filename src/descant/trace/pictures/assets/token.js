// What the views of a text share: its tokens, how likely each was, and what that comes to.
descant.tokens = (() => {
  const { el, word, prob } = descant;

  // From which probability on a token is of a shade; the last is all the rest.
  const SHADES = [
    { from: 0.9, label: "90 % and more" },
    { from: 0.5, label: "50 to 90 %" },
    { from: 0.2, label: "20 to 50 %" },
    { from: 0.05, label: "5 to 20 %" },
    { from: 0, label: "less than 5 %" },
  ];

  const DRAWN = 10000; // tokens of a text that are drawn, its last; a browser takes long over more

  const chance = (log) => (log === null || log === undefined ? 0 : Math.exp(log));

  function shade(log) {
    const share = chance(log);
    return SHADES.findIndex((one) => share >= one.from);
  }

  // The tokens of one returned sequence, in order, with what was seen where each was chosen.
  function sequence(request, index) {
    const said = request.said[index] || request.said[0];
    if (!said) return [];
    const { number, token, raw, processed, look, born, guessed } = request.nodes;
    const nodes = said.nodes.slice(-DRAWN);
    return nodes.map((node, place) => ({
      node,
      place,
      next: token[nodes[place + 1]], // undefined: it is the last
      number: number[node],
      token: token[node],
      look: look[node] < 0 ? null : request.looks[look[node]],
      raw: raw[node],
      processed: processed[node],
      born: born[node],
      guessed: Boolean(guessed[node]),
      // Without its look nothing is known of a token, and null is no probability of zero.
      known: look[node] >= 0 && (raw[node] !== null || processed[node] !== null),
    }));
  }

  function figures(tokens) {
    const known = tokens.filter((one) => one.known && one.raw !== null);
    const looks = tokens.filter((one) => one.look);
    const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
    const logs = mean(known.map((one) => one.raw));
    return {
      tokens: tokens.length,
      known: known.length,
      perplexity: logs === null ? null : Math.exp(-logs),
      entropy: mean(looks.map((one) => one.look.entropy)),
      left: mean(looks.map((one) => one.look.left)),
    };
  }

  const fixed = (value, places = 2) => (value === null || value === undefined ? "–" : value.toFixed(places));

  // A row of figures: [name, value, label, note?], as a list of terms.
  function figureList(entries) {
    return el(
      "dl",
      { class: "sums" },
      ...entries
        .filter((one) => one && one[1] !== null && one[1] !== undefined)
        .map(([name, value, label, note]) =>
          el(
            "div",
            {},
            el("dt", {}, label),
            el("dd", { "data-figure": name }, String(value)),
            note ? el("dd", { class: "note" }, note) : null,
          ),
        ),
    );
  }

  const shadeOf = (one, by) => (one.known ? shade(one[by]) : "none");

  const newline = (piece) => Boolean(piece && piece[1] && piece[0].startsWith("↵"));

  // A line ends where a mark says so, and only after the last of several: they say how many there are.
  function broken(run, one, found, inner) {
    for (const mark of inner.querySelectorAll(".mark")) {
      if (!mark.textContent.endsWith("↵")) continue;
      if (mark.nextSibling) mark.after("\n");
      else if (!newline((run.texts[one.next] || [])[0])) found.append("\n");
    }
  }

  // A word and the space before it. That is no part of what is shaded or struck, so that a line can break there.
  function apart(run, id) {
    const inner = word(run, id);
    inner.classList.add("ink");
    const first = inner.firstChild;
    const spaced = first instanceof Text && first.data.length > 1 && first.data.startsWith(" ");
    if (spaced) first.data = first.data.slice(1);
    return [spaced ? " " : "", inner];
  }

  // A token in a running text; `by` says which of its two probabilities shades it.
  function span(run, one, by) {
    const [space, inner] = apart(run, one.token);
    const found = el("span", {
      class: "tok", role: "option", "aria-selected": "false", tabindex: -1, "data-node": one.number, "data-token": one.token,
    }, one.place || !space ? space : el("span", { class: "hidden" }, space), inner);
    found.dataset.raw = one.raw === null ? "" : one.raw;
    found.dataset.processed = one.processed === null ? "" : one.processed;
    found.dataset.shade = shadeOf(one, by);
    if (!found.textContent.trim()) found.setAttribute("aria-label", descant.counted(found.textContent.length, "space"));
    broken(run, one, found, inner);
    return found;
  }

  const kept = (look, by) => [...look.top].sort((one, other) => chance(other[by]) - chance(one[by]));

  function meter(value, kind) {
    const bar = el("span", { class: `meter ${kind}` });
    bar.style.setProperty("--w", `${(100 * value).toFixed(2)}%`);
    return bar;
  }

  // What could have been taken where a token was: a table for a tip.
  function alternatives(run, one) {
    const head = el("p", { class: "tip-head" }, el("b", {}, word(run, one.token, true)), " ", el("span", { class: "id" }, `#${one.token}`));
    if (!one.look) return el("div", { class: "seen" }, head, el("p", {}, "What else was possible here was not kept."));
    const moved = one.look.top.some(([, raw, processed]) => raw !== processed);
    const rows = kept(one.look, moved ? 2 : 1).map(([token, raw, processed]) =>
      el(
        "tr",
        { class: token === one.token ? "taken" : null, "data-token": token },
        el("th", { scope: "row" }, token === one.token ? el("span", { class: "tick", "aria-label": "taken" }, "▸") : null, word(run, token, true)),
        el("td", {}, meter(chance(raw), "raw"), el("span", {}, prob(raw))),
        moved
          ? el("td", { class: processed === null ? "gone" : null }, meter(chance(processed), "left"), el("span", {}, processed === null ? "cut" : prob(processed)))
          : null,
      ),
    );
    return el(
      "div",
      { class: "seen" },
      head,
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el("tr", {}, el("th", { scope: "col" }, "Token"), el("th", { scope: "col" }, "Model"), moved ? el("th", { scope: "col" }, "Left") : null),
        ),
        el("tbody", {}, ...rows),
      ),
      el(
        "p",
        { class: "note" },
        `Entropy ${fixed(one.look.entropy)} nats`,
        moved ? `, ${fixed(one.look.left)} left` : "",
        one.guessed ? ". Guessed ahead, and it stood." : "",
      ),
    );
  }

  // Select a node, and the step that took it: nodes know it by number, the page by its place.
  function choose(app, request, node) {
    const step = request.steps.findIndex((one) => one.step === request.nodes.born[node]);
    app.set(step < 0 ? { node } : { node, step });
  }

  // The token of the line below, or above, that is nearest.
  function beyond(list, at, down) {
    const boxOf = (one) => one.querySelector(".ink").getClientRects()[0]; // its space may hang on the line before
    const from = boxOf(list[at]);
    const middle = from.left + from.width / 2;
    const order = down ? list.slice(at + 1) : list.slice(0, at).reverse();
    let line = null;
    let best = null;
    let least = Infinity;
    for (const one of order) {
      const box = boxOf(one);
      if (Math.abs(box.top - from.top) < 4) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) >= 4) break;
      const away = Math.abs(box.left + box.width / 2 - middle);
      if (away < least) [best, least] = [one, away];
    }
    return best;
  }

  // Left, right, Home, End, up and down over tokens, of which one can be tabbed to.
  function rove(host, selector, chosen) {
    const enter = (target) => {
      const before = host.querySelector(`${selector}[tabindex="0"]`);
      if (before && before !== target) before.tabIndex = -1;
      target.tabIndex = 0;
    };
    host.addEventListener("focusin", (event) => {
      const target = event.target.closest(selector);
      if (target) enter(target);
    });
    host.addEventListener("click", (event) => {
      const target = event.target.closest(selector);
      if (!target) return;
      target.focus({ preventScroll: true });
      chosen(target);
    });
    host.addEventListener("keydown", (event) => {
      const target = event.target.closest(selector);
      if (!target || event.ctrlKey || event.metaKey || event.altKey) return;
      const list = [...host.querySelectorAll(selector)];
      const at = list.indexOf(target);
      const next = {
        ArrowRight: () => list[at + 1],
        ArrowLeft: () => list[at - 1],
        ArrowDown: () => beyond(list, at, true),
        ArrowUp: () => beyond(list, at, false),
        Home: () => list[0],
        End: () => list[list.length - 1],
      }[event.key];
      if (next) {
        const found = next();
        if (found) found.focus();
      } else if (event.key === "Enter" || event.key === " ") {
        chosen(target);
      } else return;
      event.preventDefault();
    });
  }

  // The shades with their lines, so that neither needs the other.
  function legend() {
    return el(
      "ul",
      { class: "legend", "aria-label": "Shades" },
      ...SHADES.map((one, index) => {
        const swatch = el("span", { class: "tok", "aria-hidden": "true" }, el("span", { class: "ink" }, "token"));
        swatch.dataset.shade = index;
        return el("li", {}, swatch, one.label);
      }),
    );
  }

  return { DRAWN, chance, shadeOf, sequence, figures, figureList, fixed, apart, span, alternatives, legend, choose, rove };
})();
