// A growing tree as SVG, in a window that can be panned by pointer, touch and keys.

import { BeamTree } from "./beam_tree.js";
import { counted, el, percent, score, svg } from "./display.js";
import { BOX, GAP, LANE, layOut } from "./tree_layout.js";

export class TreeView {
  constructor() {
    this.tree = new BeamTree();
    this.isFollowing = true; // the growing end is kept in sight, until somebody looks elsewhere
    this.facts = el("span", { class: "tree-facts" });
    this.isEnded = false;
    this.drawn = new Map(); // key -> { sign, layer, element }
    [this.under, this.over, this.top] = [svg("g"), svg("g"), svg("g")];
    this.canvas = svg("svg", { class: "tree-canvas", role: "img" }, this.under, this.over, this.top);
    this.window = el("div", { class: "tree-window", tabindex: 0, role: "group", "aria-label": "Tree of the search; arrow keys move it" }, this.canvas);
    const legend = el("span", { class: "tree-legend", "aria-hidden": "true" },
      ...["running", "best", "ended", "dropped"].map((state) => el("span", { class: `sample ${state}` }, state)));
    this.element = el("figure", { class: "tree" }, el("figcaption", {}, this.facts, legend), this.window);
    this.listen();
  }

  add(records) {
    this.tree.add(records);
    // Records may come faster than a screen shows them.
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  // The request has ended, by itself or because it was stopped.
  end() {
    this.isEnded = true;
    this.draw();
  }

  // Whether there is more to see than one chain of tokens.
  get isBranching() {
    return this.tree.beams > 1 || this.tree.sequences > 1;
  }

  draw() {
    const nodes = this.tree.visible();
    if (!nodes.length) return;
    const states = this.tree.states();
    const places = layOut(this.tree, nodes);
    const before = this.drawn;
    this.drawn = new Map();
    for (const [from, to] of places.edges) {
      const state = states.get(to.node.number);
      // Branches that go on are drawn over those that were dropped.
      this.put(before, state === "dropped" ? this.under : this.over, `edge ${to.node.number}`, this.edge(from, to, state));
    }
    for (const box of places.boxes.values()) {
      this.put(before, this.top, `box ${box.node.number}`, this.box(box, states.get(box.node.number)));
    }
    for (const { element } of before.values()) element.remove();
    this.canvas.setAttribute("width", places.width);
    this.canvas.setAttribute("height", places.height);
    this.describe(nodes);
    if (this.isFollowing) this.window.scrollLeft = this.window.scrollWidth;
  }

  // Draw an element, or move the one of before where it is the same: most of a tree does not change in a step.
  put(before, layer, key, { sign, place: [name, value], make }) {
    let one = before.get(key);
    if (one?.sign === sign && one.layer === layer) before.delete(key);
    else one = { sign, layer, element: layer.appendChild(make()) };
    if (one.value !== value) one.element.setAttribute(name, value);
    one.value = value;
    this.drawn.set(key, one);
  }

  describe(nodes) {
    const { tree } = this;
    const counts = [counted(tree.numSteps, "step"), counted(tree.numNodes, "node")];
    if (tree.active.length && !this.isEnded) counts.push(`${counted(tree.active.length, "beam")} running`);
    const first = Math.min(...nodes.map((one) => one.depth));
    if (first > 1) counts.push(`shown from token ${first} on`);
    this.facts.textContent = counts.join(", ");
    this.canvas.setAttribute("aria-label", `Tree of the search: ${counts.join(", ")}`);
  }

  edge(from, to, state) {
    const y = to.y + BOX / 2;
    const start = from ? from.x + from.width : to.x - 20;
    const fromY = from ? from.y + BOX / 2 : y;
    // It turns in the gap before its column, where no node is.
    const turn = to.x - GAP + 3;
    const path = fromY === y
      ? `M${start} ${y}H${to.x}`
      : `M${start} ${fromY}H${turn}C${turn + 16} ${fromY} ${to.x - 16} ${y} ${to.x} ${y}`;
    const kind = `tie ${state} group-${to.node.group % 8}${from ? "" : " cut"}`;
    return { sign: kind, place: ["d", path], make: () => svg("path", { class: kind }) };
  }

  box({ node, text, x, y, width }, state) {
    const isEnd = node.reason || node.rank !== undefined;
    const classes = ["node", state, `group-${node.group % 8}`];
    if (node.token === null) classes.push("root");
    if (isEnd) classes.push("end");
    const caption = [];
    if (node.rank !== undefined) caption.push(`#${node.rank + 1}`);
    if (node.score !== null && node.score !== undefined) caption.push(score(node.score));
    const isNoted = caption.length > 0 && (state !== "dropped" || isEnd);
    const known = [text];
    if (node.logprob !== null) known.push(percent(node.logprob));
    if (caption.length) known.push(`score ${caption.at(-1)}`);
    known.push(node.reason ? `${state} (${node.reason})` : state);
    return {
      sign: `${classes.join(" ")} ${caption.join(" ")}`,
      place: ["transform", `translate(${x} ${y})`],
      make: () => svg("g", { class: classes.join(" "), "data-node": node.number },
        svg("title", {}, known.join(", ")),
        svg("rect", { width, height: BOX, rx: 6 }),
        svg("text", { class: "token", x: 7, y: 15.5 }, text),
        isNoted ? svg("text", { class: "score", x: 2, y: LANE - 5 }, caption.join(" ")) : null),
    };
  }

  listen() {
    const stopFollowing = () => {
      const { scrollLeft, scrollWidth, clientWidth } = this.window;
      this.isFollowing = scrollLeft + clientWidth > scrollWidth - 24;
    };
    this.window.addEventListener("wheel", () => setTimeout(stopFollowing, 80), { passive: true });
    this.window.addEventListener("touchmove", stopFollowing, { passive: true });
    this.window.addEventListener("keyup", stopFollowing);
    let last = null;
    this.window.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0) return; // touch pans by itself
      last = event;
      this.window.setPointerCapture(event.pointerId);
    });
    this.window.addEventListener("pointermove", (event) => {
      if (!last) return;
      this.window.scrollBy(last.clientX - event.clientX, last.clientY - event.clientY);
      last = event;
      stopFollowing();
    });
    for (const name of ["pointerup", "pointercancel"]) this.window.addEventListener(name, () => { last = null; });
  }
}
