// Where the nodes of a tree are: depth runs to the right, and a branch keeps its lane for as long as it goes on.
// A lane is free again where a branch has ended, so a search of n beams needs little more than n lanes.

import { label } from "./display.js";

const LETTER = 7.3;
export const GAP = 30;
export const LANE = 38;
export const BOX = 22;
const MARGIN = 14;
const LONGEST = 14;

const width = (text) => [...text].reduce((sum, one) => sum + (one.codePointAt(0) >= 0x1100 ? 2 : 1), 0);

// Which child goes on in the lane of its parent: of the returned ones the best, else the one with the deepest
// branch, else the first.
function mainChildren(nodes, children) {
  const deepest = new Map();
  const main = new Map();
  for (const node of [...nodes].sort((one, other) => other.depth - one.depth)) {
    let best = null;
    for (const child of children.get(node.number)) {
      const order = best === null ? -1
        : (child.returned ?? Infinity) - (best.returned ?? Infinity) || deepest.get(best.number) - deepest.get(child.number);
      if (best === null || order < 0) best = child;
    }
    main.set(node.number, best);
    deepest.set(node.number, best === null ? node.depth : deepest.get(best.number));
  }
  return { main, deepest };
}

function assignLanes(nodes, children) {
  const byNumber = new Map(nodes.map((one) => [one.number, one]));
  const { main, deepest } = mainChildren(nodes, children);
  const heads = nodes.filter((one) => !byNumber.has(one.parent) || main.get(one.parent) !== one);
  heads.sort((one, other) =>
    one.group - other.group || (one.returned ?? Infinity) - (other.returned ?? Infinity) || 0
    || deepest.get(other.number) - deepest.get(one.number) || one.depth - other.depth || one.number - other.number);
  const lane = new Map();
  const taken = []; // by lane: the depths that are in use
  const isFree = (at, first, last) => {
    taken[at] ??= new Set();
    for (let depth = first; depth <= last; depth++) if (taken[at].has(depth)) return false;
    return true;
  };
  const waiting = [...heads];
  while (waiting.length) {
    // A branch comes after the one that it leaves.
    const at = waiting.findIndex((one) => !byNumber.has(one.parent) || lane.has(one.parent));
    const [head] = waiting.splice(at, 1);
    const last = deepest.get(head.number);
    const from = lane.get(head.parent) ?? 0;
    let found = -1;
    for (let by = lane.has(head.parent) ? 1 : 0; found < 0; by++) {
      if (isFree(from + by, head.depth, last)) found = from + by;
      else if (by && from - by >= 0 && isFree(from - by, head.depth, last)) found = from - by;
    }
    for (let node = head; node; node = main.get(node.number)) {
      lane.set(node.number, found);
      taken[found].add(node.depth);
    }
  }
  return { lane, numLanes: taken.length };
}

// The places of nodes: { boxes: Map(number -> box), edges: [[from, to]], width, height }.
export function layOut(tree, nodes) {
  const children = new Map(nodes.map((one) => [one.number, []]));
  for (const node of nodes) children.get(node.parent)?.push(node);
  const { lane, numLanes } = assignLanes(nodes, children);
  const texts = new Map(nodes.map((one) => [one.number, one.token === null ? "prompt" : label(tree.texts.get(one.token) ?? `${one.token}`, LONGEST)]));
  const columns = new Map();
  for (const node of nodes) {
    const needed = Math.max(34, width(texts.get(node.number)) * LETTER + 14);
    columns.set(node.depth, Math.max(columns.get(node.depth) ?? 0, needed));
  }
  const left = new Map();
  let x = MARGIN + (nodes.some((one) => one.depth > 0 && !children.has(one.parent)) ? 22 : 0);
  for (const depth of [...columns.keys()].sort((one, other) => one - other)) {
    left.set(depth, x);
    x += columns.get(depth) + GAP;
  }
  const boxes = new Map();
  for (const node of nodes) {
    const text = texts.get(node.number);
    boxes.set(node.number, {
      node, text, x: left.get(node.depth), y: MARGIN + lane.get(node.number) * LANE,
      width: Math.max(34, width(text) * LETTER + 14),
    });
  }
  const edges = nodes.map((one) => [boxes.get(one.parent) ?? null, boxes.get(one.number)]).filter(([from, to]) => from || to.node.depth > 0);
  return { boxes, edges, width: x + MARGIN, height: 2 * MARGIN + numLanes * LANE };
}
