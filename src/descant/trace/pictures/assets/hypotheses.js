// Beside the tree: what is selected, with its alternatives, and the hypotheses that stand or have ended, in order.
{
  const { el, word, prob, number, counted } = descant;
  const WORDS = new Map([["eos", "an end token"], ["length", "its length"], ["time", "the time limit"], ["stop", "a stop text"]]);
  const SHOWN = 24; // tokens of a hypothesis in the list, its last
  const LISTED = 32; // hypotheses in a list

  descant.Hypotheses = class {
    constructor(app, plan) {
      this.app = app;
      this.plan = plan;
      [this.run, this.request] = [app.runData, app.requestData];
      this.nodes = this.request.nodes;
      this.made = new Map(); // entries of the list
      this.choice = el("div", { class: "choice" });
      this.list = el("div", { class: "standings" });
      this.host = el("aside", { class: "side", "aria-label": "Selected hypothesis" }, this.choice, this.list);
    }

    update(change, view) {
      if (change.step || change.node) this.list.replaceChildren(...this.standings(view));
      if (change.node || !this.choice.firstChild) this.choice.replaceChildren(...this.chosen());
    }

    path(at) {
      const found = [];
      for (let one = at; one > 0; one = this.nodes.parent[one]) found.push(one);
      return found.reverse();
    }

    // ---------------------------------------------------------------- in words
    fate(at) {
      const { nodes } = this;
      const end = nodes.reason[at] === null ? "" : `ended by ${WORDS.get(nodes.reason[at]) ?? nodes.reason[at]}`;
      if (nodes.rank[at] !== null) return `${end || "returned"}, rank ${nodes.rank[at] + 1}`;
      return {
        best: "on the path of the winner", returned: "on the path of a returned sequence",
        ended: `${end}, not returned`, alive: "still standing",
        dropped: nodes.left[at] === null ? "dropped" : `dropped in step ${this.place(nodes.left[at])}`,
      }[nodes.state[at]];
    }

    // A step as people count it, from one.
    place(step) {
      this.places ||= new Map(this.request.steps.map((one, at) => [one.step, at + 1]));
      return this.places.get(step) ?? step;
    }

    spoken(at) {
      const { nodes } = this;
      if (!at) return "prompt";
      const parts = [descant.plain(this.run, nodes.token[at])];
      if (nodes.look[at] >= 0) parts.push(prob(nodes.processed[at]));
      if (nodes.score[at] !== null) parts.push(`score ${number(nodes.score[at])}`);
      if (this.request.groups > 1) parts.push(`group ${descant.letterOf(nodes.group[at])}`);
      if (nodes.met[at] !== null) parts.push(`${nodes.met[at]} of ${this.request.demands} constraint tokens met`);
      return [...parts, this.fate(at)].join(", ");
    }

    leader(view) {
      const first = this.ranked(view)[0];
      if (!first) return "";
      return `Leading: ${this.path(first).slice(-SHOWN).map((one) => descant.plain(this.run, this.nodes.token[one])).join("")}`;
    }

    // The tooltip of a node.
    short(at) {
      const { nodes } = this;
      if (!at) return el("div", {}, `Prompt of ${counted(this.request.prompt.length + this.request.unshown, "token")}`);
      return el("div", { class: "short" },
        el("p", { class: "said" }, this.path(at).slice(-SHOWN).map((one) => word(this.run, nodes.token[one]))),
        el("p", { class: "why" }, [
          nodes.look[at] >= 0 ? prob(nodes.processed[at]) : null,
          nodes.score[at] === null ? null : `score ${number(nodes.score[at])}`, this.fate(at),
        ].filter(Boolean).join(" · ")));
    }

    // ---------------------------------------------------------------- the selected node
    chosen() {
      const at = this.app.node;
      if (at === null) return [el("p", { class: "hint" }, "Select a token of the tree to see its path and what else could have come there.")];
      if (!at) return [el("h2", {}, "The prompt"), el("p", { class: "hint" }, counted(this.request.prompt.length + this.request.unshown, "token"))];
      const { nodes } = this;
      const path = this.path(at);
      const facts = [
        nodes.look[at] >= 0 ? ["Probability", this.chance(at)] : null,
        nodes.score[at] === null ? null : [nodes.reason[at] === null ? "Sum of logs" : "Final score", number(nodes.score[at], 4)],
        ["Place", `token ${nodes.depth[at]}, step ${this.place(nodes.born[at])}`],
        this.request.beams > 1 ? ["Beam", `${nodes.slot[at] + 1}${this.request.groups > 1 ? `, group ${descant.letterOf(nodes.group[at])}` : ""}`] : null,
        nodes.met[at] === null ? null : ["Constraints", `${nodes.met[at]} of ${this.request.demands} tokens met`],
        nodes.guessed[at] ? ["Drafted", "guessed ahead and accepted"] : null,
        ["Fate", this.fate(at)],
      ].filter(Boolean);
      return [
        el("h2", { class: "which" }, word(this.run, nodes.token[at], true), el("span", { class: "id" }, `id ${nodes.token[at]}`)),
        el("p", { class: "path", id: "path" }, path.map((one) =>
          one === at ? el("strong", {}, word(this.run, nodes.token[one])) : word(this.run, nodes.token[one]))),
        el("dl", { class: "numbers" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
        this.alternatives(at),
      ];
    }

    chance(at) {
      const [raw, processed] = [prob(this.nodes.raw[at]), prob(this.nodes.processed[at])];
      return raw === processed ? `${processed} (log ${number(this.nodes.processed[at])})` : `${raw} by the model, ${processed} after processors`;
    }

    alternatives(at) {
      const { nodes } = this;
      const look = this.request.looks[nodes.look[at]];
      if (!look) return el("p", { class: "hint" }, "The alternatives at this place were not kept.");
      const siblings = new Map(this.plan.children[nodes.parent[at]].filter((one) => nodes.look[one] === nodes.look[at]).map((one) => [nodes.token[one], one]));
      const changed = look.top.some(([, raw, processed]) => raw !== processed);
      const row = ([token, raw, processed]) => {
        const taken = siblings.get(token);
        const name = word(this.run, token, true);
        const cell = taken === undefined || taken === at ? name
          : el("button", { type: "button", class: "quiet", onclick: () => this.app.set({ node: taken }) }, name);
        const bar = el("span", { class: "amount", style: `width:${Math.max(0.5, 100 * Math.exp(processed ?? -99)).toFixed(1)}%` });
        return el("tr", { class: taken === at ? "this" : taken === undefined ? null : "taken", "data-token": token },
          el("th", { scope: "row" }, cell, taken === at ? el("span", { class: "badge" }, "this") : taken === undefined ? null : el("span", { class: "badge" }, "taken too")),
          changed ? el("td", {}, prob(raw)) : null,
          el("td", { class: "after" }, prob(processed), bar));
      };
      return el("table", { class: "alternatives" },
        el("caption", {}, "What could have come here"),
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Token"), changed ? el("th", { scope: "col" }, "Model") : null,
          el("th", { scope: "col" }, changed ? "Processed" : "Probability"))),
        el("tbody", {}, look.top.map(row)));
    }

    // ---------------------------------------------------------------- the standings
    // What stands now, best first, or in the end what was returned.
    ranked(view) {
      const { nodes } = this;
      const by = (one, other) => (nodes.score[other] ?? 0) - (nodes.score[one] ?? 0) || nodes.slot[one] - nodes.slot[other];
      if (view.last && this.request.said.length) return this.request.said.map((said) => said.nodes.at(-1)).filter((one) => one !== undefined);
      return [...view.standing].sort(by);
    }

    standings(view) {
      const { nodes } = this;
      const main = this.ranked(view);
      const told = new Set(main);
      const ended = nodes.reason.flatMap((reason, at) => (reason !== null && nodes.born[at] <= view.now && !told.has(at) ? [at] : []))
        .sort((one, other) => (nodes.score[other] ?? 0) - (nodes.score[one] ?? 0));
      const title = view.last && this.request.said.length && nodes.state.some((state) => state === "best") ? "Returned" : "Standing now";
      const first = main[0] ?? ended[0];
      return [this.entries(title, main, first), this.entries(view.last ? "Ended, not returned" : "Ended so far", ended, first)].flat();
    }

    entries(title, leaves, first) {
      if (!leaves.length) return [];
      const leader = new Set(this.path(first));
      const more = leaves.length - LISTED;
      return [
        el("h3", { class: "titled" }, title),
        el("ol", {}, leaves.slice(0, LISTED).map((at) => this.entry(at, at === first ? null : leader))),
        more > 0 ? el("p", { class: "hint" }, `and ${more.toLocaleString("en")} more`) : null,
      ].filter(Boolean);
    }

    // Of one that shares its beginning with the leader only what is its own, and two tokens before. What does not
    // change from step to step is made once.
    entry(at, leader) {
      const path = this.path(at);
      let shared = 0;
      while (leader && shared < path.length && leader.has(path[shared])) shared++;
      const key = `${at} ${shared}`;
      if (!this.made.has(key)) this.made.set(key, this.item(at, path, shared));
      const item = this.made.get(key);
      item.firstChild.setAttribute("aria-pressed", String(at === this.app.node));
      return item;
    }

    item(at, path, shared) {
      const { nodes } = this;
      const start = Math.max(0, path.length - SHOWN, shared - 2);
      const text = (from, to) => path.slice(from, to).flatMap((one) => descant.pieces(this.run, nodes.token[one]))
        .map(([said, mark]) => (mark ? el("span", { class: "mark" }, said) : said));
      const middle = Math.max(start, shared);
      const figures = [nodes.score[at] === null ? null : number(nodes.score[at]), nodes.reason[at],
        nodes.met[at] === null ? null : `${nodes.met[at]} of ${this.request.demands} met`].filter(Boolean);
      return el("li", {}, el("button", { type: "button", class: "hypothesis", onclick: () => this.app.set({ node: at }) },
        el("span", { class: "said", dir: "ltr" }, start ? "… " : null,
          middle > start ? el("span", { class: "shared" }, text(start, middle)) : null, text(middle)),
        figures.length ? el("span", { class: "under" }, figures.join(" · ")) : null));
    }
  };
}
