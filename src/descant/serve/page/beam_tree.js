// The tree of a search, made of the records of its trace as they come.
//
// A record of a step has the rows of the table; each run of a row is a branch below the row's node. Only the last
// levels are held: a search may be long, and what is shown is where it grows.

export const MAX_LEVELS = 60;
export const MAX_NODES = 400;

export class BeamTree {
  constructor() {
    this.nodes = new Map(); // number -> node
    this.texts = new Map(); // token -> text
    this.active = []; // numbers of the nodes that running rows stand at
    this.groups = 1;
    this.beams = 1;
    this.sequences = 1;
    this.numSteps = 0;
    this.numNodes = 0; // also those that are no longer held
    this.depth = 0;
  }

  add(records) {
    for (const record of records) {
      if (record.kind === "texts") for (const [token, text] of Object.entries(record.texts)) this.texts.set(Number(token), text);
      else if (record.kind === "request") this.addRequest(record);
      else if (record.kind === "step") this.addStep(record);
      else if (record.kind === "result") this.addResult(record);
    }
    this.prune();
  }

  addRequest({ root, beams = 1, groups = 1, sequences = 1 }) {
    Object.assign(this, { beams, groups, sequences });
    this.nodes.set(root, { number: root, parent: null, token: null, depth: 0, score: null, group: 0, logprob: null });
    this.active = [root];
  }

  addStep({ rows = [] }) {
    if (!rows.length) return;
    this.numSteps += 1;
    const active = [];
    for (const row of rows) {
      for (const run of row.runs ?? []) {
        const last = this.addRun(row, run);
        if (last !== null && run.reason === undefined) active.push(last);
      }
    }
    this.active = active;
  }

  addRun(row, { tokens, nodes, slot = 0, back = 0, score = null, reason = null }) {
    let parent = this.nodes.get(row.at);
    for (let level = 0; level < back && parent; level++) parent = this.nodes.get(parent.parent);
    if (!parent) return null;
    tokens.forEach((token, at) => {
      const candidate = row.looks?.[at]?.top?.find((one) => one[0] === token);
      const node = {
        number: nodes[at], parent: parent.number, token, depth: parent.depth + 1, score: null, reason: null,
        group: this.groups > 1 ? Math.floor((slot * this.groups) / this.beams) : 0,
        logprob: candidate ? candidate[candidate.length - 1] : null,
      };
      this.nodes.set(node.number, node);
      this.numNodes += 1;
      this.depth = Math.max(this.depth, node.depth);
      parent = node;
    });
    Object.assign(parent, { score, reason });
    return parent.number;
  }

  addResult({ sequences = [] }) {
    sequences.forEach(({ leaf, score = null }, rank) => {
      const node = this.nodes.get(leaf);
      if (!node) return;
      node.rank ??= rank;
      node.score = score ?? node.score;
      for (const one of this.path(leaf)) one.returned = Math.min(one.returned ?? rank, rank);
    });
    this.active = [];
  }

  // From a node up to the oldest that is held.
  *path(number) {
    for (let node = this.nodes.get(number); node; node = this.nodes.get(node.parent)) yield node;
  }

  prune() {
    const oldest = this.depth - MAX_LEVELS;
    if (oldest <= 0) return;
    for (const [number, node] of this.nodes) if (node.depth < oldest) this.nodes.delete(number);
  }

  // What each node is now: "running", "returned", "best", "ended" or "dropped".
  states() {
    const states = new Map();
    const mark = (numbers, state) => {
      for (const number of numbers) {
        for (const node of this.path(number)) {
          if (states.has(node.number)) break;
          states.set(node.number, state);
        }
      }
    };
    const all = [...this.nodes.values()];
    mark(all.filter((one) => one.returned === 0).map((one) => one.number), "best");
    mark(all.filter((one) => one.returned > 0).map((one) => one.number), "returned");
    mark(this.active, "running");
    mark(all.filter((one) => one.reason && !states.has(one.number)).map((one) => one.number), "ended");
    for (const one of all) if (!states.has(one.number)) states.set(one.number, "dropped");
    return states;
  }

  // The nodes to draw, by number: the last levels, and of those as many as there is room for.
  visible() {
    const all = [...this.nodes.values()].filter((one) => one.depth > this.depth - MAX_LEVELS || one.depth === 0 && this.depth < MAX_LEVELS);
    const sizes = new Map();
    for (const one of all) sizes.set(one.depth, (sizes.get(one.depth) ?? 0) + 1);
    let first = this.depth;
    let count = sizes.get(first) ?? 0;
    while (sizes.has(first - 1) && count + sizes.get(first - 1) <= MAX_NODES) count += sizes.get(--first);
    return all.filter((one) => one.depth >= first).sort((one, other) => one.number - other.number);
  }
}
