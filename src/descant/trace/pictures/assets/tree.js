// The tree: every hypothesis that was ever followed, as it stood after a step. Only what is in sight is in the document.
{
  const { el, svg, number, prob, counted } = descant;
  const LANE = 52; // from one lane to the next
  const BOX = 26; // a node's height
  const TOP = 22; // above the first lane, and around it all
  const THIN = 19; // a lane from afar
  const NEAR = 0.7; // from this scale on nodes are drawn one by one; below, what they say together
  const LETTER = 6.3; // of the font from afar

  class TreeView {
    constructor(host, app) {
      this.app = app;
      [this.run, this.request] = [app.runData, app.requestData];
      this.nodes = this.request.nodes;
      this.plan = descant.layout(this.run, this.request);
      this.scale = 1;
      this.wraps = this.plan.lanes <= 3;
      this.drawn = new Map(); // key -> {group, style}
      this.build(host);
      this.fold();
      this.look();
      this.update({ step: true }, false);
      new ResizeObserver(() => this.resized()).observe(this.window);
    }

    // ---------------------------------------------------------------- the frame
    build(host) {
      const tool = (label, text, act, more = {}) =>
        el("button", { type: "button", class: "tool", "aria-label": label, title: label, onclick: act, ...more }, text);
      this.wrapper = tool("Wrap long lines", "Wrap", () => this.wrap(!this.wraps), { id: "wrap" });
      this.canvas = svg("svg", { role: "none", class: "canvas" });
      this.layers = ["lines", "phrases", "nodes"].map((name) => svg("g", { role: "none", class: name }));
      [this.lines, this.words, this.boxes] = this.layers;
      this.canvas.append(...this.layers);
      this.window = el("div", {
        class: "window", id: "tree", role: "tree", tabindex: 0, "aria-label": "Tree of hypotheses. Arrow keys move along it.",
        onscroll: () => this.soon(),
      }, this.canvas);
      this.hand = new descant.Hand(this);
      this.side = new descant.Hypotheses(this.app, this.plan);
      host.append(
        el("div", { class: "tools" }, this.legend(),
          el("div", { class: "buttons", role: "group", "aria-label": "Zoom" },
            tool("Zoom out", "−", () => this.zoom(this.scale / 1.3), { id: "zoom-out" }),
            tool("Zoom in", "+", () => this.zoom(this.scale * 1.3), { id: "zoom-in" }),
            tool("Fit the whole tree", "Fit", () => this.fit(), { id: "fit" }), this.wrapper)),
        el("div", { class: "tree" }, this.window, this.side.host));
      descant.tip(this.window, (group) => this.side.short(Number(group.dataset.index)), "[data-index]");
    }

    legend() {
      const { nodes, request } = this;
      const has = (state) => nodes.state.includes(state, 1); // the root is no token
      const entries = [
        has("best") ? ["best", this.plan.chains.length > 1 ? "winner" : "the sequence"] : null,
        has("returned") ? ["returned", "returned too"] : null,
        has("ended") ? ["ended", "ended, not returned"] : null,
        request.steps.length > 1 ? ["standing", "standing now"] : null,
        has("dropped") ? ["dropped", "dropped"] : null,
        nodes.guessed.includes(1) ? ["guessed", "drafted"] : null,
      ].filter(Boolean).map(([name, text]) => el("li", {}, el("span", { class: `sample ${name}` }), text));
      if (request.groups > 1) {
        for (let group = 0; group < request.groups; group++) {
          entries.push(el("li", {}, el("span", { class: `letter group-${group % 8}` }, letterOf(group)), `group ${letterOf(group)}`));
        }
      }
      if (request.demands !== null) entries.push(el("li", {}, el("span", { class: "progress" }, "▮▯"), "constraint tokens met"));
      return el("ul", { class: "states", "aria-label": "Legend" }, entries);
    }

    // ---------------------------------------------------------------- scale and place
    get near() {
      return this.scale >= NEAR;
    }

    // How columns are broken into lines, and how large all of it is.
    fold() {
      const { plan } = this;
      const near = this.near;
      const room = Math.max(240, this.window.clientWidth || 800);
      const under = plan.ghosts ? 14 * plan.ghosts + 8 + (plan.scored ? 0 : -14) : 0;
      this.pitch = near ? LANE + under : THIN;
      this.indent = this.wraps && near ? 44 : TOP; // a line that goes on begins with an edge
      const most = this.wraps ? (room - this.indent - TOP) / this.scale - (near ? 20 : 0) : Infinity;
      Object.assign(this, descant.layout.bands(plan, most));
      this.unit = near ? 1 : this.scale; // of x, within the layer
      this.tops = this.heights(near ? 12 : 8);
      const zoom = near ? this.scale : 1;
      const ends = this.starts.map((start, at) => plan.left[this.starts[at + 1] ?? plan.column.length] - plan.left[start]);
      this.wide = Math.max(...ends) * this.unit + this.indent;
      this.high = this.tops.at(-1);
      this.canvas.setAttribute("width", Math.ceil(this.wide * zoom));
      this.canvas.setAttribute("height", Math.ceil(this.high * zoom));
      for (const layer of this.layers) {
        layer.setAttribute("transform", `scale(${zoom})`);
        layer.replaceChildren();
      }
      this.window.style.setProperty("--content", `${Math.ceil(this.high * zoom) + 2}px`);
      this.wrapper.setAttribute("aria-pressed", String(this.wraps));
      this.drawn.clear();
    }

    // Where each line begins, and where the last one ends: a line is as high as the lanes that are used in it.
    heights(gap) {
      const used = new Int32Array(this.starts.length);
      this.plan.byDepth.forEach((level, depth) => {
        for (const at of level) used[this.of[depth]] = Math.max(used[this.of[depth]], this.plan.lane[at] + 1);
      });
      const tops = [TOP];
      for (const lanes of used) tops.push(tops.at(-1) + lanes * this.pitch + (used.length > 1 ? gap : 0));
      return tops;
    }

    x(depth) {
      return this.indent + (this.plan.left[depth] - this.plan.left[this.starts[this.of[depth]]]) * this.unit;
    }

    y(at) {
      return this.tops[this.of[this.nodes.depth[at]]] + this.plan.lane[at] * this.pitch + (this.near ? BOX / 2 : THIN / 2 - 2);
    }

    zoom(scale, pointX = this.window.clientWidth / 2) {
      const least = Math.min(1, 5 / (this.plan.left.at(-1) / this.plan.column.length)); // columns of five points
      scale = Math.max(Math.min(0.15, Math.max(least, 0.05)), Math.min(1.6, scale));
      if (Math.abs(scale - 1) < 0.06) scale = 1;
      const held = (this.window.scrollLeft + pointX) / this.scale;
      this.scale = scale;
      this.fold();
      this.window.scrollLeft = held * scale - pointX;
      this.look();
      this.draw();
    }

    fit() {
      const room = this.window.clientWidth - 2 * TOP;
      if (this.wraps) {
        this.scale = 1;
        this.fold();
        while (this.scale > 0.16 && this.high * (this.near ? this.scale : 1) > this.window.clientHeight) {
          this.scale /= 1.2;
          this.fold();
        }
        this.zoom(this.scale);
      } else this.zoom(room / this.plan.left.at(-1));
      this.window.scrollTo(0, 0);
      this.look();
      this.draw();
    }

    wrap(wanted) {
      this.wraps = wanted;
      this.fold();
      this.look();
      this.reveal(this.app.node);
      this.draw();
    }

    resized() {
      if (!this.window.clientWidth || this.window.clientWidth === this.room) return; // hidden, or only higher
      this.room = this.window.clientWidth;
      if (this.wraps) this.fold();
      this.look();
      this.draw();
    }

    // ---------------------------------------------------------------- what stood after a step
    update(change, aloud = true) {
      if (change.step) this.stand(aloud);
      if (change.node && this.app.node !== null) this.reveal(this.app.node);
      else if (change.step) this.reveal();
      this.draw();
      this.side.update(change, this);
    }

    stand(aloud) {
      const steps = this.request.steps;
      const { step } = this.app;
      this.last = step >= steps.length - 1;
      this.now = steps.length ? steps[step].step : Infinity;
      const at = this.last
        ? this.nodes.state.flatMap((state, one) => (state === "alive" && !this.plan.children[one].length ? [one] : []))
        : steps[step + 1].rows.map((row) => row.at);
      this.standing = new Set(at);
      if (!aloud) return;
      const { nodes } = this;
      const leaf = (one) => !this.plan.children[one].some((child) => nodes.born[child] <= this.now);
      const gone = nodes.left.filter((left, one) => left === this.now && nodes.reason[one] === null && leaf(one)).length;
      this.app.say(`After step ${step + 1} of ${steps.length}: ${counted(this.standing.size, "row")} standing, ${gone} dropped. ${this.side.leader(this)}`);
    }

    // What a node is as it stands now; null: it is not there yet.
    style(at) {
      const { nodes, now } = this;
      if (nodes.born[at] > now) return null;
      if (this.standing.has(at)) return "standing";
      if (this.last) return at ? nodes.state[at] : "root";
      if (nodes.reason[at] !== null) return "ended";
      if (at === 0) return "root";
      if (nodes.left[at] === null || nodes.left[at] > now) return "alive";
      return this.plan.ended[at] <= now ? "over" : "dropped";
    }

    // ---------------------------------------------------------------- drawing
    // What part is in sight, kept, since asking for it after a change would lay the document out anew.
    look() {
      const view = this.window;
      this.sight = { left: view.scrollLeft, top: view.scrollTop, wide: view.clientWidth, high: view.clientHeight };
    }

    soon() {
      if (this.waiting) return;
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        this.look();
        this.draw();
      });
    }

    draw() {
      const zoom = this.near ? this.scale : 1;
      const view = this.window;
      const [left, top] = [this.sight.left / zoom, this.sight.top / zoom];
      const [right, bottom] = [left + this.sight.wide / zoom, top + this.sight.high / zoom];
      const seen = new Set();
      const { starts, plan } = this;
      for (let band = 0; band < starts.length; band++) {
        if (this.tops[band + 1] < top || this.tops[band] > bottom) continue;
        const end = starts[band + 1] ?? plan.column.length;
        let first = starts[band];
        while (first < end && this.x(first) + (plan.column[first] + plan.GAP) * this.unit < left - 60) first++;
        let last = first;
        while (last < end && this.x(last) < right + (plan.GAP + 120) * this.unit) last++;
        this.between(first, last, top, bottom, seen);
      }
      for (const [key, one] of this.drawn) {
        if (seen.has(key)) continue;
        one.group.remove();
        this.drawn.delete(key);
      }
      if (this.drawn.has(this.app.node)) view.setAttribute("aria-activedescendant", `node-${this.app.node}`);
      else view.removeAttribute("aria-activedescendant");
    }

    between(first, last, top, bottom, seen) {
      const chains = new Set();
      for (let depth = first; depth < last; depth++) {
        for (const at of this.plan.byDepth[depth]) {
          const y = this.y(at);
          if (y < top - this.pitch || y > bottom + this.pitch) continue;
          const style = this.style(at);
          if (style === null) continue;
          if (!this.near) chains.add(this.plan.chainOf[at]);
          const whole = `${style}${at === this.app.node ? " chosen" : ""}`;
          this.keep(at, whole, seen, style === "best" || style === "standing" ? this.boxes : null);
          this.keep(`edge ${at}`, style, seen, style === "dropped" ? null : this.lines);
        }
      }
      for (const chain of chains) this.phrases(this.plan.chains[chain], first, last, seen);
    }

    // Makes what is not there as it should be: on top of its layer if that is given, else below all in it.
    keep(key, style, seen, top) {
      seen.add(key);
      const one = this.drawn.get(key);
      if (one && one.style === style) return;
      const edge = typeof key === "string";
      if (one && this.near) {
        // Its shape is the same; only what it is has changed.
        const at = edge ? Number(key.slice(5)) : key;
        one.group.setAttribute("class", `${edge ? "tie" : "node"} ${style} ${this.kind(at)}`);
        if (!edge) one.group.setAttribute("aria-selected", String(at === this.app.node));
        one.style = style;
        return;
      }
      if (one) one.group.remove();
      const group = edge ? this.tie(Number(key.slice(5)), style) : this.near ? this.box(key, style) : this.spot(key, style);
      if (!group) return;
      if (top) top.append(group);
      else (edge ? this.lines : this.boxes).prepend(group);
      this.drawn.set(key, { group, style });
    }

    group(at, style, ...children) {
      const { nodes } = this;
      const depth = nodes.depth[at];
      return svg("g", {
        id: `node-${at}`, class: `node ${style} ${this.kind(at)}`,
        transform: `translate(${this.x(depth).toFixed(1)} ${this.y(at).toFixed(1)})`,
        role: "treeitem", "aria-level": depth + 1, "aria-selected": String(at === this.app.node),
        "aria-label": this.side.spoken(at), "data-index": at, "data-node": nodes.number[at],
        "data-token": at ? nodes.token[at] : null, "data-state": nodes.state[at],
        "data-score": nodes.score[at], "data-processed": nodes.processed[at], "data-met": nodes.met[at],
      }, ...children);
    }

    kind(at) {
      return `group-${this.nodes.group[at] % 8}${this.request.groups > 1 ? " grouped" : ""}`;
    }

    // The line from the parent, which ends where the node begins.
    edge(at) {
      const parent = this.nodes.parent[at];
      if (parent < 0) return null;
      const depth = this.nodes.depth[at];
      const gap = this.plan.GAP * this.unit;
      const x = this.x(depth - 1) + this.plan.width[parent] * this.unit - this.x(depth);
      const y = this.y(parent) - this.y(at);
      if (this.of[depth] !== this.of[depth - 1]) {
        const out = this.plan.lane[at] === this.plan.lane[parent] ? `M${x.toFixed(1)} ${y.toFixed(1)}h${this.near ? 16 : 5}` : "";
        return svg("path", { class: "edge", d: `M${this.near ? 4 - this.indent : -6} 0H0${out}` });
      }
      const bend = -gap + 2;
      if (!y) return svg("path", { class: "edge", d: `M${x.toFixed(1)} 0H0` });
      const middle = (bend / 1.7).toFixed(1);
      return svg("path", {
        class: "edge",
        d: `M${x.toFixed(1)} ${y.toFixed(1)}H${Math.max(x, bend).toFixed(1)}C${middle} ${y.toFixed(1)} ${middle} 0 ${(-gap / 5).toFixed(1)} 0H0`,
      });
    }

    // A node on its own: its token, the log-probability of the step on its edge, its score under it.
    box(at, style) {
      const { nodes, plan, request } = this;
      const width = plan.width[at];
      const grouped = request.groups > 1 && at;
      const parts = [];
      if (at && nodes.look[at] >= 0) {
        const falls = this.of[nodes.depth[at]] === this.of[nodes.depth[at] - 1] && plan.lane[nodes.parent[at]] < plan.lane[at];
        parts.push(svg("text", { class: "step", x: -5, y: falls ? 13 : -5 }, number(nodes.processed[at])));
      }
      parts.push(svg("rect", { class: "body", x: 0, y: -BOX / 2, width, height: BOX, rx: at ? 7 : 13 }));
      if (grouped) parts.push(svg("text", { class: "letter", x: 8, y: 4.5 }, letterOf(nodes.group[at])));
      parts.push(this.token(at, 8 + (grouped ? 14 : 0)));
      if (nodes.guessed[at]) parts.push(svg("path", { class: "guess", d: `M${width - 1} ${-BOX / 2 - 3}l4 4-4 4-4-4z` }));
      if (nodes.reason[at] !== null) parts.push(svg("path", { class: "end", d: `M${width + 4} ${-BOX / 2 + 4}v${BOX - 8}` }));
      const under = descant.layout.caption(request, at);
      if (under) parts.push(svg("text", { class: "score", x: 3, y: BOX / 2 + 12 }, under));
      if (nodes.met[at] !== null && request.demands) parts.push(this.progress(at, width));
      parts.push(...this.ghosts(at));
      return this.group(at, style, parts);
    }

    token(at, x) {
      if (!at) return svg("text", { class: "token", x: 10, y: 4.5 }, "prompt");
      const pieces = descant.layout.cut(descant.dotted(this.run, this.nodes.token[at]));
      return svg("text", { class: "token", x, y: 4.5 }, pieces.map(([text, mark]) => svg("tspan", { class: mark ? "mark" : null }, text)));
    }

    // Constraint tokens that are met: as a bar along the lower edge, filled so far, and as numbers.
    progress(at, width) {
      const share = Math.min(1, this.nodes.met[at] / this.request.demands);
      return svg("g", { class: share >= 1 ? "met all" : "met" },
        svg("rect", { class: "track", x: 5, y: BOX / 2 - 4, width: width - 10, height: 2.5, rx: 1 }),
        share > 0 ? svg("rect", { class: "filled", x: 5, y: BOX / 2 - 4, width: (width - 10) * share, height: 2.5, rx: 1 }) : null,
        svg("text", { class: "of", x: width - 1, y: -BOX / 2 - 3 }, `${this.nodes.met[at]}/${this.request.demands}`));
    }

    ghosts(at) {
      const top = descant.layout.caption(this.request, at) ? 26 : 14;
      return descant.layout.others(this.request, at, this.plan.ghosts).map(([token, , processed], place) =>
        svg("text", { class: "ghost", "aria-hidden": "true", x: 9, y: BOX / 2 + top + 14 * place },
          descant.layout.cut(descant.dotted(this.run, token), 12).map(([text, mark]) => svg("tspan", { class: mark ? "mark" : null }, text)),
          svg("tspan", { class: "share", dx: 6 }, processed === null ? "cut" : prob(processed))));
    }

    // From afar a node is only where it can be pointed at; its chain says what it says.
    spot(at, style) {
      const width = Math.max(3, this.plan.width[at] * this.unit);
      return this.group(at, `afar ${style}`, svg("rect", { class: "spot", x: -1, y: -THIN / 2 + 2, width: width + 2, height: THIN - 4, rx: 3 }));
    }

    tie(at, style) {
      const [depth, parent] = [this.nodes.depth[at], this.nodes.parent[at]];
      const joined = parent >= 0 && this.plan.main[parent] === at && this.of[depth] === this.of[depth - 1];
      if (parent < 0 || (!this.near && joined && this.style(parent) === style)) return null;
      return svg("g", { class: `tie ${this.near ? "" : "afar "}${style} ${this.kind(at)}`, transform: `translate(${this.x(depth).toFixed(1)} ${this.y(at).toFixed(1)})`, "aria-hidden": "true" }, this.edge(at));
    }

    // What the nodes of a chain say together, in one box for each stretch of one kind.
    phrases(chain, first, last, seen) {
      const [from, to] = [Math.max(first - chain.first, 0), Math.min(last - chain.first, chain.members.length)];
      for (let start = from; start < to;) {
        const style = this.style(chain.members[start]);
        if (style === null) break;
        const plainly = (at) => (this.style(at) === "standing" ? "alive" : this.style(at));
        let end = start + 1;
        while (end < to && plainly(chain.members[end]) === plainly(chain.members[start])) end++;
        this.phrase(chain.members.slice(start, end), plainly(chain.members[start]), seen);
        start = end;
      }
    }

    phrase(members, style, seen) {
      const [start, end] = [members[0], members.at(-1)];
      const key = `${start} ${end} ${style}`;
      seen.add(key);
      if (this.drawn.has(key)) return;
      const [x, right] = [this.x(this.nodes.depth[start]), this.x(this.nodes.depth[end]) + this.plan.width[end] * this.unit];
      const width = Math.max(4, right - x);
      const room = Math.floor((width - 8) / LETTER);
      const pieces = [];
      for (let at = 0, used = 0; at < members.length && used < room; at++) {
        const said = members[at] ? descant.pieces(this.run, this.nodes.token[members[at]]) : [["prompt", 1]];
        pieces.push(...said);
        used += said.reduce((sum, piece) => sum + descant.layout.wide(piece[0]), 0);
      }
      const group = svg("g", { class: `phrase afar ${style} ${this.kind(end)}`, transform: `translate(${x.toFixed(1)} ${this.y(start).toFixed(1)})`, "aria-hidden": "true" },
        svg("rect", { x: 0, y: -THIN / 2 + 2, width: width.toFixed(1), height: THIN - 4, rx: 3 }),
        room < 2 ? null : svg("text", { x: 4, y: 3.5 }, descant.layout.cut(pieces, room).map(([text, mark]) => svg("tspan", { class: mark ? "mark" : null }, text))));
      this.words.append(group);
      this.drawn.set(key, { group, style });
    }

    // ---------------------------------------------------------------- moving
    // Brings a node into sight, or, while steps go by, where the rows now stand.
    reveal(at = null) {
      const places = at !== null ? [at] : [...this.standing];
      const { left, top, wide, high } = this.sight;
      if (!places.length || !wide) return;
      const zoom = this.near ? this.scale : 1;
      const x = Math.max(...places.map((one) => this.x(this.nodes.depth[one]))) * zoom;
      const y = Math.min(...places.map((one) => this.y(one))) * zoom;
      const aside = x < left + 8 || x > left + wide - Math.min(140, wide / 4);
      const away = y < top + 20 || y > top + high - 40;
      if (!aside && !away) return;
      if (aside) this.window.scrollLeft = x - wide * (at === null ? 0.7 : 0.5);
      if (away) this.window.scrollTop = y - high / 2;
      this.look();
    }
  }

  const letterOf = (group) => String.fromCharCode(65 + (group % 26));
  descant.letterOf = letterOf;

  descant.view({
    name: "tree", title: "Tree", uses: ["step"],
    wanted: (run, request) => request.nodes.number.length > 1,
    mount: (host, app) => new TreeView(host, app),
  });
}
