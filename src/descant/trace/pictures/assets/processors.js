// What each processor kept and cut at one choice, as bars before and after it.
(() => {
  const { el, word, plain, prob, counted, tokens: T } = descant;
  const BARS = 8; // of the panels that have no stage
  const BEHIND = 14; // tokens before a choice that are shown
  const LISTED = 2000; // choices of one step
  const many = (count) => count.toLocaleString("en");

  function mount(host, app) {
    const [run, request] = [app.runData, app.requestData];
    const picker = el("select", { id: "place" });
    const pick = el("label", { class: "choose" }, el("span", {}, "Choice"), picker);
    const context = el("p", { class: "context" });
    const panels = el("div", { class: "panels" });
    const notes = el("div", { class: "key" });
    let places = [];
    let step = 0; // whose choices are shown: the page's, or the last before it that chose
    host.append(el("div", { class: "where" }, context, pick), panels, notes);
    picker.addEventListener("change", () => draw(places[Number(picker.value)]));

    function enter() {
      step = app.step;
      while (step > 0 && !placesOf(request, step).length) step--;
      places = placesOf(request, step);
      const at = wantedPlace(request, app, step, places);
      const behind = (place) => place.before.slice(-5).map((id) => plain(run, id)).join("");
      picker.replaceChildren(...places.map((place, index) => el("option", { value: index }, `${place.name}: …${behind(place)}`)));
      picker.value = String(at);
      pick.hidden = places.length < 2;
      draw(places[at]);
    }

    function draw(place) {
      context.replaceChildren();
      panels.replaceChildren();
      notes.replaceChildren();
      if (step !== app.step || !place) notes.append(el("p", {}, missing(request, app.step, place ? step : null)));
      if (!place) return;
      const look = request.looks[place.look];
      const taken = takenAt(request, app.sequence, place.look);
      context.append(...sentence(run, place, taken));
      panels.append(...drawn(run, look, { ...taken, guess: place.guess }));
      notes.append(...remarks(request, look, taken));
      if (places.length === LISTED) notes.append(el("p", {}, `Of this step the first ${counted(LISTED, "choice")} are listed.`));
    }

    enter();
    return {
      update() {
        enter();
      },
    };
  }

  // The choices of a step: one for each row, and for each guess of it that was judged.
  function placesOf(request, index) {
    const step = request.steps[index];
    if (!step) return [];
    const rows = [...step.rows].sort((one, other) => one.slot - other.slot);
    return rows.flatMap((row) => {
      const path = pathTo(request, row.at);
      return row.looks.slice(0, LISTED).map((look, at) => ({
        look,
        name: `Row ${row.slot}${at ? `, after ${counted(at, "guess", "guesses")}` : ""}`,
        before: [...path, ...row.drafts.slice(Math.max(0, at - BEHIND), at)],
        // The first guess that did not stand was judged at the last look.
        guess: at < row.drafts.length && at >= row.accepted ? row.drafts[at] : null,
      }));
    }).slice(0, LISTED);
  }

  function pathTo(request, node) {
    const { parent, token } = request.nodes;
    const found = [];
    for (let at = node; parent[at] >= 0 && found.length < BEHIND; at = parent[at]) found.push(token[at]);
    const lacks = BEHIND - found.length;
    return [...(lacks > 0 ? request.prompt.slice(-lacks) : []), ...found.reverse()];
  }

  // That of the chosen node if it was taken in this step, else that of the sequence, else the first.
  function wantedPlace(request, app, step, places) {
    if (!places.length) return 0;
    const { look, born } = request.nodes;
    const now = request.steps[step].step;
    const at = new Map(places.map((one, place) => [one.look, place]).reverse()); // the first of equal ones
    const index = (node) => (born[node] === now ? at.get(look[node]) ?? -1 : -1);
    const said = request.said[app.sequence] || { nodes: [] };
    for (const node of [...(app.node === null ? [] : [app.node]), ...said.nodes]) {
      const found = index(node);
      if (found >= 0) return found;
    }
    return 0;
  }

  // The tokens that were taken there: all of them, and the one that the sequence goes on with.
  function takenAt(request, sequence, look) {
    const { look: looks, token } = request.nodes;
    const here = request.said[sequence] ? request.said[sequence].nodes.find((node) => looks[node] === look) : undefined;
    const own = here === undefined ? null : token[here];
    const taken = new Set(own === null ? [] : [own]);
    looks.forEach((one, node) => one === look && taken.add(token[node]));
    return { own, taken };
  }

  function sentence(run, place, { own, taken }) {
    const words = place.before.slice(-BEHIND).map((id) => word(run, id));
    const chosen = [...taken].flatMap((id) => [el("b", { class: own === null || id === own ? "taken" : "also" }, word(run, id, true)), " "]);
    return [el("span", { class: "lead" }, "… ", ...words), " ", ...(chosen.length ? chosen : [el("i", {}, "dropped")])];
  }

  // ------------------------------------------------------------------ panels
  function drawn(run, look, marks) {
    const raw = [...look.top].sort((one, other) => T.chance(other[1]) - T.chance(one[1]));
    const left = [...look.top].sort((one, other) => T.chance(other[2]) - T.chance(one[2]));
    const shares = [...look.top.flatMap(([, before, after]) => [before, after]),
      ...look.stages.flatMap((stage) => stage.moved.flatMap(([, before, after]) => [before, after]))];
    const scale = { ...marks, most: Math.max(1e-9, ...shares.map(T.chance)) };
    const changed = look.stages.length > 0;
    const own = panel(run, { kind: "raw", name: "The model", note: `entropy ${T.fixed(look.entropy)} nats` },
      raw.slice(0, BARS).map(([token, before]) => [token, before, before]), scale);
    if (!changed) return [own];
    return [
      own,
      ...look.stages.map((stage, index) => panel(run, { kind: "stage", name: stage.name, place: index + 1, stage }, stage.moved, scale)),
      panel(run, { kind: "left", name: "What was left", note: `${many(look.stages.at(-1).kept)} left, entropy ${T.fixed(look.left)} nats` },
        left.filter(([token, , after]) => after !== null || marks.taken.has(token)).slice(0, BARS), scale),
    ];
  }

  function panel(run, what, moved, scale) {
    const { kind, name, place, stage, note } = what;
    const cut = stage && stage.cut
      ? [el("b", {}, many(stage.cut)), " cut with ", el("b", {}, share(stage.mass)), " of the probability"]
      : ["none cut"];
    return el("figure", {
      class: `panel ${kind}`, "data-panel": kind, "data-stage": stage ? stage.name : null,
      "data-kept": stage ? stage.kept : null, "data-cut": stage ? stage.cut : null, "data-mass": stage ? stage.mass : null,
    },
    el("figcaption", {},
      el("h3", {}, place ? el("span", { class: "place" }, String(place)) : null, name),
      el("p", {}, stage ? [el("b", {}, many(stage.kept)), " kept, ", ...cut] : note),
      mass(stage ? stage.mass : 0)),
    el("ol", { class: "bars" }, ...moved.filter(([, before, after]) => before !== null || after !== null).map((one) => bar(run, one, scale, kind))));
  }

  // The whole probability before a stage, and the part of it that it cut.
  function mass(lost) {
    const gone = el("span", { class: "gone" });
    gone.style.width = `${(100 * lost).toFixed(2)}%`;
    return el("span", { class: "mass", "aria-hidden": "true" }, lost > 0 ? gone : null);
  }

  const share = (part) => (part <= 0 ? "0 %" : prob(Math.log(part)));

  // Wide and pale: before. Narrow and dark: after. Hatched and struck: cut.
  function bar(run, [token, before, after], scale, kind) {
    const cut = after === null && before !== null;
    const taken = scale.taken.has(token);
    const also = taken && scale.own !== null && scale.own !== token;
    const [from, to] = [T.chance(before), T.chance(after)];
    const track = el("span", { class: "track", "aria-hidden": "true" });
    if (kind !== "raw") track.append(length("before", from, scale.most));
    if (!cut) track.append(length("after", to, scale.most));
    const change = kind === "raw" ? null : difference(from, to, cut);
    return el("li", {
      class: `bar${cut ? " cut" : ""}${taken ? " taken" : ""}`, "data-token": token,
      "data-before": before === null ? "" : before, "data-after": after === null ? "" : after,
    },
    el("span", { class: "tick", "aria-hidden": "true" }, also ? "▹" : taken ? "▸" : ""),
    el("span", { class: "name" }, word(run, token, true),
      token === scale.guess ? el("span", { class: "tag" }, "guess") : null),
    track,
    el("span", { class: "value" }, cut ? el("span", { class: "was" }, prob(before)) : prob(after), change),
    taken ? el("span", { class: "hidden" }, also ? "taken elsewhere" : "taken") : null);
  }

  function length(kind, value, most) {
    const found = el("span", { class: kind });
    found.style.width = `${((100 * value) / most).toFixed(2)}%`;
    return found;
  }

  // In points of a percent, as the bars differ.
  function difference(from, to, cut) {
    if (cut) return el("span", { class: "change down" }, "cut");
    const points = 100 * (to - from);
    if (Math.abs(points) < 0.05) return el("span", { class: "change" });
    return el("span", { class: `change ${points > 0 ? "up" : "down"}` }, `${points > 0 ? "+" : "−"}${Math.abs(points).toFixed(1)}`);
  }

  // ------------------------------------------------------------------ remarks
  function missing(request, wanted, shown) {
    const taken = request.steps[wanted] && request.nodes.born.includes(request.steps[wanted].step);
    const why = taken ? "What this step chose from was not kept." : "This step chose nothing.";
    return shown === null ? why : `${why} Above is step ${shown + 1}.`;
  }

  function remarks(request, look, { taken }) {
    const found = [];
    if (!look.stages.length) {
      found.push(el("p", { "data-none": "" }, request.stages.length
        ? `No processor changed anything here (${request.stages.join(", ")}): the model’s own distribution was used.`
        : "There is no processor: the model’s own distribution was used."));
      return found;
    }
    const swatch = (kind) => el("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
    found.push(el("p", {}, swatch("before"), "before ", swatch("after"), "after ", swatch("cut"),
      "cut. All panels have one scale; changes are in percentage points. ",
      taken.size > 1 ? "▸ is where this sequence went on, ▹ where others did." : "▸ was taken."));
    const idle = request.stages.filter((name) => !look.stages.some((stage) => stage.name === name));
    if (idle.length) found.push(el("p", {}, `Changed nothing here: ${idle.join(", ")}.`));
    return found;
  }

  descant.view({
    name: "processors", title: "Processors", uses: ["sequence", "step"],
    wanted: (run, request) => request.looks.length > 0, mount,
  });
})();
