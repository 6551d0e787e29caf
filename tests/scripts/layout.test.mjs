// The layouts of a tree, of the page of a trace and of the server's page, over random trees. Run: node --test tests/scripts
import assert from "node:assert/strict";
import { copyFileSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test, { after } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";
import vm from "node:vm";

const SOURCE = fileURLToPath(new URL("../../src/descant", import.meta.url));
const SEEDS = 200;

// A random generator with a seed, since a failure must come again.
function generator(seed) {
  let state = seed + 1;
  return (below) => {
    state = (Math.imul(state, 48271) >>> 0) % 2147483647;
    return state % below;
  };
}

// Nodes in the order of their birth; the first is the prompt, and each other one has an older parent.
function randomTree(seed) {
  const draw = generator(seed);
  const nodes = [{ parent: -1, depth: 0 }];
  const count = 1 + draw(40);
  for (let index = 1; index < count; index++) {
    const parent = Math.max(0, index - 1 - draw(6));
    nodes.push({ parent, depth: nodes[parent].depth + 1, rank: draw(3) ? null : draw(4), token: draw(50) });
  }
  return nodes;
}

// The script of the trace's page, which adds to the name `descant`.
const scope = { descant: { number: (value) => value.toFixed(2), dotted: (_, token) => [[`t${token}`, 0]] } };
vm.runInNewContext(readFileSync(join(SOURCE, "trace/pictures/assets/layout.js"), "utf8"), scope);
const layout = scope.descant.layout;

// The module of the server's page: in a folder of its own, where its files are modules.
const folder = mkdtempSync(join(tmpdir(), "layout-"));
after(() => rmSync(folder, { recursive: true }));
writeFileSync(join(folder, "package.json"), '{ "type": "module" }');
for (const name of ["tree_layout.js", "display.js"]) copyFileSync(join(SOURCE, "serve/page", name), join(folder, name));
const { BOX, LANE, layOut } = await import(pathToFileURL(join(folder, "tree_layout.js")));

test("the trace's page: a node has a place of its own, and a branch keeps its lane", () => {
  for (let seed = 0; seed < SEEDS; seed++) {
    const tree = randomTree(seed);
    const column = (name, otherwise) => tree.map((node) => node[name] ?? otherwise);
    const nodes = {
      parent: column("parent"), depth: column("depth"), rank: column("rank", null), token: column("token", 0),
      reason: column("reason", null), born: tree.map((_, index) => index), group: tree.map(() => 0),
      look: tree.map(() => -1), score: tree.map(() => null),
    };
    const made = layout({}, { nodes, groups: 1, looks: [] });
    const places = new Set(tree.map((node, index) => `${node.depth} ${made.lane[index]}`));
    assert.equal(places.size, tree.length, `seed ${seed}: two nodes have one place`);
    assert.equal(made.lanes, new Set(made.lane).size, `seed ${seed}: a lane is empty`);
    for (const [index, node] of tree.entries()) {
      const main = made.main[index];
      if (main >= 0) assert.equal(made.lane[main], made.lane[index], `seed ${seed}: node ${main} left its lane`);
      if (index) assert.ok(made.left[node.depth] >= made.left[node.depth - 1] + made.width[node.parent], `seed ${seed}`);
    }
    // Bands cover all columns in order, and none but a single column is wider than asked for.
    const { starts, of } = layout.bands(made, 300);
    assert.deepEqual([...of], [...of].sort((one, other) => one - other));
    starts.forEach((start, index) => {
      const end = (starts[index + 1] ?? made.column.length) - 1;
      assert.ok(end === start || made.left[end] + made.column[end] - made.left[start] <= 300, `seed ${seed}`);
    });
  }
});

test("the server's page: boxes do not meet, and every edge runs to the right", () => {
  for (let seed = 0; seed < SEEDS; seed++) {
    const nodes = randomTree(seed).map((node, number) => ({
      number, parent: node.parent, depth: node.depth, token: number ? node.token : null, group: 0,
      returned: node.rank ?? undefined,
    }));
    const { boxes, edges, width, height } = layOut({ texts: new Map() }, nodes);
    const places = [...boxes.values()];
    assert.equal(places.length, nodes.length);
    for (const [index, box] of places.entries()) {
      assert.ok(box.x >= 0 && box.x + box.width <= width && box.y >= 0 && box.y + BOX <= height, `seed ${seed}`);
      for (const other of places.slice(index + 1)) {
        const apart = box.x + box.width <= other.x || other.x + other.width <= box.x || Math.abs(box.y - other.y) >= LANE;
        assert.ok(apart, `seed ${seed}: boxes ${box.node.number} and ${other.node.number} meet`);
      }
    }
    assert.equal(edges.length, nodes.length - 1);
    for (const [from, to] of edges) assert.ok(from.x + from.width < to.x, `seed ${seed}: an edge runs back`);
  }
});

test("a token that is too long is cut to its room", () => {
  assert.deepEqual(JSON.parse(JSON.stringify(layout.cut([["abcdef", 0]], 4))), [["abcd", 0], ["…", 1]]);
  assert.deepEqual(JSON.parse(JSON.stringify(layout.cut([["漢字漢", 0]], 4))), [["漢字", 0], ["…", 1]]);
  assert.equal(layout.wide("a漢"), 3);
});
