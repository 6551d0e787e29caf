// Where the nodes of a tree go: depth runs to the right, and every hypothesis keeps to a lane of its own for as long as
// it lives. A lane is free again where a hypothesis has ended, so a search of n beams needs little more than n of them.
descant.layout = (() => {
  const LETTER = 7.55; // of the nodes' font
  const SMALL = 6.1; // of their captions
  const LONGEST = 16; // letters of a token that are shown
  const GAP = 48; // between columns, where the edges and their numbers are

  const wide = (text) => {
    let count = 0;
    for (const one of text) count += one.codePointAt(0) >= 0x1100 ? 2 : 1;
    return count;
  };

  // A token's pieces, cut to what a node has room for.
  function cut(pieces, most = LONGEST) {
    const kept = [];
    let left = most;
    for (const [text, mark] of pieces) {
      let part = "";
      for (const one of text) {
        left -= wide(one);
        if (left < 0) return [...kept, [part, mark], ["…", 1]];
        part += one;
      }
      kept.push([part, mark]);
    }
    return kept;
  }
  const widthOf = (pieces) => pieces.reduce((sum, piece) => sum + wide(piece[0]), 0);

  // ------------------------------------------------------------------ the shape
  function shape(nodes) {
    const count = nodes.parent.length;
    const children = Array.from({ length: count }, () => []);
    const byDepth = [];
    for (let at = 0; at < count; at++) {
      (byDepth[nodes.depth[at]] ||= []).push(at);
      if (nodes.parent[at] >= 0) children[nodes.parent[at]].push(at);
    }
    const deepest = nodes.depth.slice();
    const rank = nodes.rank.map((one) => one ?? Infinity);
    const ended = nodes.reason.map((one, at) => (one === null ? Infinity : nodes.born[at])); // at or below it, first
    const main = new Array(count).fill(-1);
    for (let depth = byDepth.length - 1; depth >= 0; depth--) {
      for (const at of byDepth[depth]) {
        for (const child of children[at]) {
          const chosen = main[at];
          const order = chosen < 0 ? -1 : rank[child] - rank[chosen] || deepest[chosen] - deepest[child];
          if (chosen < 0 || order < 0) main[at] = child;
          deepest[at] = Math.max(deepest[at], deepest[child]);
          ended[at] = Math.min(ended[at], ended[child]);
        }
        if (main[at] >= 0) rank[at] = Math.min(rank[at], rank[main[at]]);
      }
    }
    return { count, children, byDepth, main, rank, ended };
  }

  // ------------------------------------------------------------------ lanes
  function chainsOf(nodes, { byDepth, main, rank }) {
    const chains = [];
    for (const level of byDepth) {
      for (const at of level) {
        const parent = nodes.parent[at];
        if (parent >= 0 && main[parent] === at) continue;
        const members = [];
        for (let one = at; one >= 0; one = main[one]) members.push(one);
        const first = parent < 0 && members.length > 1 ? members[1] : at;
        chains.push({ members, parent, rank: rank[at], group: nodes.group[first], first: nodes.depth[at] });
      }
    }
    const leading = chains[0].group;
    const place = (chain) => (chain.group === leading ? -1 : chain.group);
    // A chain always comes after the one that it branches from: that one has a better rank, or goes on for longer.
    return chains.sort((one, other) =>
      place(one) - place(other) || (one.rank === other.rank ? 0 : one.rank - other.rank)
      || other.first + other.members.length - one.first - one.members.length || one.first - other.first);
  }

  function lanes(nodes, made) {
    const lane = new Int32Array(made.count);
    const chainOf = new Int32Array(made.count);
    const chains = chainsOf(nodes, made);
    const taken = []; // by lane and depth
    let floor = 0;
    let group = chains[0].group;
    const free = (at, first, last) => {
      const row = (taken[at] ||= new Uint8Array(made.byDepth.length));
      for (let depth = first; depth <= last; depth++) if (row[depth]) return false;
      return true;
    };
    chains.forEach((chain, index) => {
      if (chain.group !== group) [group, floor] = [chain.group, taken.length];
      const last = chain.first + chain.members.length - 1;
      const from = chain.parent < 0 ? 0 : lane[chain.parent];
      let found = -1;
      for (let by = chain.parent < 0 ? 0 : 1; found < 0; by++) {
        if (from + by >= floor && free(from + by, chain.first, last)) found = from + by;
        else if (by && from - by >= floor && free(from - by, chain.first, last)) found = from - by;
      }
      taken[found].fill(1, chain.first, last + 1);
      chain.lane = found;
      for (const one of chain.members) [lane[one], chainOf[one]] = [found, index];
    });
    return { lane, chainOf, chains, lanes: taken.length };
  }

  // ------------------------------------------------------------------ columns
  // What stands under a node: how it ended, and its score.
  function caption(request, at) {
    const nodes = request.nodes;
    const parts = [];
    if (nodes.rank[at] !== null) parts.push(`#${nodes.rank[at] + 1}`);
    if (nodes.reason[at] !== null) parts.push(nodes.reason[at]);
    if (nodes.score[at] !== null) parts.push(descant.number(nodes.score[at]));
    return parts.join(" ");
  }

  // Choices that were not made, under a node, where there is room because few sequences are drawn.
  function others(request, at, most) {
    const look = request.nodes.look[at];
    if (look < 0 || !most) return [];
    return request.looks[look].top.filter((one) => one[0] !== request.nodes.token[at]).slice(0, most);
  }

  function layout(run, request) {
    const nodes = request.nodes;
    const made = shape(nodes);
    Object.assign(made, lanes(nodes, made));
    const ghosts = made.lanes <= 2 ? 3 : 0;
    const width = new Float32Array(made.count);
    const column = new Float32Array(made.byDepth.length);
    for (let at = 0; at < made.count; at++) {
      const letters = at ? widthOf(cut(descant.dotted(run, nodes.token[at]))) : 6;
      const badge = request.groups > 1 && at ? 14 : 0;
      width[at] = Math.max(26, letters * LETTER + 16 + badge);
      let need = width[at];
      if (nodes.reason[at] !== null) need = Math.max(need, wide(caption(request, at)) * SMALL - GAP + 16);
      for (const [token] of others(request, at, ghosts)) {
        need = Math.max(need, (widthOf(cut(descant.dotted(run, token), 12)) + 8) * SMALL - GAP + 14);
      }
      column[nodes.depth[at]] = Math.max(column[nodes.depth[at]], need);
    }
    const left = new Float32Array(column.length + 1);
    for (let depth = 0; depth < column.length; depth++) left[depth + 1] = left[depth] + column[depth] + GAP;
    const scored = nodes.score.some((one, at) => one !== null && nodes.reason[at] === null);
    return { ...made, width, column, left, ghosts, scored, GAP };
  }

  // Columns in lines of at most that width, so that a long sequence is read like a text; one line where it is Infinity.
  function bands({ column, left }, most) {
    const starts = [0];
    for (let depth = 1; depth < column.length; depth++) {
      if (left[depth] + column[depth] - left[starts.at(-1)] > most) starts.push(depth);
    }
    const of = new Int32Array(column.length);
    starts.forEach((start, at) => of.fill(at, start, starts[at + 1] ?? column.length));
    return { starts, of };
  }

  return Object.assign(layout, { bands, cut, wide, caption, others, GAP });
})();
