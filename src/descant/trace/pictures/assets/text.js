// The text with each token shaded by its probability, and the entropy of each choice below it.
(() => {
  const { el, svg, number, counted, tokens: T } = descant;
  const LEAST = 2; // nats that the tallest bar stands for at least, so that a calm text looks calm
  const STRUCK = 500; // tokens taken back at one place that are shown
  const STRIP = 120; // tokens from which on a strip shows the whole length

  function mount(host, app) {
    const [run, request] = [app.runData, app.requestData];
    const head = el("div", {});
    const flow = el("div", {
      class: "flow entropic", role: "listbox", "aria-orientation": "horizontal",
      "aria-label": "The text, token by token",
    });
    const key = el("div", { class: "key" });
    const strip = el("div", {});
    const by = shadeBy((name) => {
      state.by = name;
      for (const one of state.list) state.spans[one.place].dataset.shade = T.shadeOf(one, name);
    });
    const state = { by: "raw", list: [], spans: [], places: new Map() };
    const of = (span) => state.list[Number(span.dataset.place)];
    host.append(head, el("div", { class: "legends" }, T.legend(), by), flow, key, strip);

    // The tip comes last: choosing closes one that is open.
    T.rove(flow, ".tok", (span) => T.choose(app, request, of(span).node));
    descant.tip(flow, (span) => T.alternatives(run, of(span)), ".tok");

    function draw() {
      state.list = T.sequence(request, app.sequence);
      state.places = new Map(state.list.map((one) => [one.node, one.place]));
      const most = Math.max(LEAST, ...state.list.map((one) => (one.look ? one.look.entropy : 0)));
      state.spans = state.list.map((one) => token(run, one, state.by, most));
      const again = takenBack(run, request, state.list);
      flow.replaceChildren(...state.spans.flatMap((span, place) => (again.has(place) ? [again.get(place), span] : [span])));
      if (state.spans.length) state.spans[0].tabIndex = 0;
      head.replaceChildren(figures(request, app.sequence, state.list));
      const moved = state.list.some((one) => one.raw !== one.processed || (one.look && one.look.left !== one.look.entropy));
      by.hidden = !moved;
      flow.classList.toggle("moved", moved);
      key.replaceChildren(...keys(state.list, most, { moved, back: again.size }));
      strip.replaceChildren(...(state.list.length >= STRIP ? [overview(state, most, moved, jump)] : []));
      mark();
    }

    function jump(place) {
      T.choose(app, request, state.list[place].node);
      state.spans[place].focus();
      state.spans[place].scrollIntoView({ block: "center", behavior: descant.still.matches ? "auto" : "smooth" });
    }

    function mark() {
      const before = flow.querySelector('[aria-selected="true"]');
      if (before) before.setAttribute("aria-selected", "false");
      const place = state.places.get(app.node);
      if (place === undefined) return;
      state.spans[place].setAttribute("aria-selected", "true");
      const cursor = strip.querySelector(".cursor");
      if (cursor) cursor.setAttribute("x", place);
    }

    draw();
    return {
      update(change) {
        if (change.sequence) draw();
        else if (change.node) mark();
      },
    };
  }

  function token(run, one, by, most) {
    const span = T.span(run, one, by);
    span.dataset.place = one.place;
    if (one.look) {
      span.style.setProperty("--raw", (one.look.entropy / most).toFixed(3));
      span.style.setProperty("--left", (one.look.left / most).toFixed(3));
    }
    return span;
  }

  // What a request with one row at a time took and took back again, struck, by the place it stood at.
  function takenBack(run, request, list) {
    const found = new Map();
    if (request.beams > 1 || request.sequences > 1) return found;
    const { parent, token: ids, state } = request.nodes;
    const places = new Map(list.map((one) => [parent[one.node], one.place]));
    const children = new Map();
    for (let node = 1; node < parent.length; node++) {
      if (state[node] !== "dropped") continue;
      if (!children.has(parent[node])) children.set(parent[node], []);
      children.get(parent[node]).push(node);
    }
    // Not by calls of itself: a chain may be longer than calls can be deep.
    const below = (nodes) => {
      const [waiting, found] = [nodes.slice().reverse(), []];
      while (waiting.length && found.length < STRUCK) {
        const node = waiting.pop();
        found.push(ids[node]);
        for (const child of (children.get(node) || []).slice().reverse()) waiting.push(child);
      }
      return found;
    };
    for (const [above, nodes] of children) {
      if (!places.has(above)) continue;
      const [first, ...rest] = below(nodes);
      const [space, inner] = T.apart(run, first);
      found.set(places.get(above), el("span", {}, space, el("del", { class: "back" }, inner, ...rest.map((id) => descant.word(run, id)))));
    }
    return found;
  }

  function figures(request, sequence, list) {
    const sum = T.figures(list);
    const said = request.said[sequence];
    const some = sum.known < sum.tokens ? `of ${counted(sum.known, "token")}` : null;
    return T.figureList([
      ["tokens", sum.tokens, "Tokens", said && said.reason ? `ended by ${said.reason}` : null],
      ["perplexity", T.fixed(sum.perplexity), "Perplexity", some],
      ["entropy", T.fixed(sum.entropy), "Mean entropy", "nats, the model"],
      sum.left !== null && Math.abs(sum.left - sum.entropy) > 1e-9 ? ["left", T.fixed(sum.left), "Entropy left", "nats, to choose from"] : null,
      said && said.score !== null ? ["score", number(said.score), "Score"] : null,
    ]);
  }

  function shadeBy(chosen) {
    const option = (value, label, checked) =>
      el("label", {}, el("input", { type: "radio", name: "shade", value, checked }), el("span", {}, label));
    const group = el("div", { class: "segments", role: "radiogroup", "aria-label": "Shade by" },
      option("raw", "The model’s own", true), option("processed", "As processed", false));
    group.addEventListener("change", (event) => chosen(event.target.value));
    return group;
  }

  function keys(list, most, { moved, back }) {
    if (!list.some((one) => one.look)) return [el("p", {}, "The entropy of its choices was not kept.")];
    const swatch = (kind) => el("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
    return [
      el("p", {}, swatch(moved ? "raw" : "only"), "Below each token: the entropy of what the model said. ",
        moved ? [swatch("left"), "And of what the processors left. "] : "", `A full bar is ${most.toFixed(1)} nats.`),
      el("p", {}, "Choose a token, and the other pictures show the step that took it."),
      back ? el("p", {}, el("del", { class: "back" }, "Struck"), " tokens were taken, and taken back.") : null,
    ].filter(Boolean);
  }

  // Entropy over the whole length, one unit of width a token; a press goes to the token there.
  function overview(state, most, moved, jump) {
    const [count, tall] = [state.list.length, 48];
    const area = (name) => {
      const tops = state.list.map((one, place) => {
        const y = (tall * (1 - (one.look ? one.look[name] : 0) / most)).toFixed(1);
        return `L${place} ${y}H${place + 1}`;
      });
      return `M0 ${tall}${tops.join("")}V${tall}Z`;
    };
    const picture = svg("svg", {
      viewBox: `0 0 ${count} ${tall}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `Entropy over ${counted(count, "token")}, at most ${most.toFixed(1)} nats`,
    },
    svg("path", { class: "raw", d: area("entropy") }),
    moved ? svg("path", { class: "left", d: area("left") }) : null,
    svg("rect", { class: "cursor", x: -9, y: 0, width: Math.max(1, count / 300), height: tall }));
    picture.addEventListener("click", (event) => {
      const { left, width } = picture.getBoundingClientRect();
      jump(Math.max(0, Math.min(count - 1, Math.floor(((event.clientX - left) / width) * count))));
    });
    return el("figure", { class: "strip" }, el("figcaption", {}, "Entropy over the whole text"), picture,
      el("div", { class: "ends", "aria-hidden": "true" }, el("span", {}, "1"), el("span", {}, String(count))));
  }

  descant.view({ name: "text", title: "Text", uses: ["sequence"], wanted: (run, request) => request.said.length > 0, mount });
})();
