"use strict";
/* Layered layout, top down: longest-path layers, barycentre ordering, and x coordinates by least squares.

   layout(nodes, edges): nodes [{id, width, height, lean}], edges [{from, to}], both directions by id. Sets x, y (the
   centre) and layer of each node and `points` of each edge; returns {width, height}. An edge over several layers goes
   through a narrow place of its own in each, so that it runs around what is there; one over more than FAR is marked
   `far` and not routed, since it would only be a line beside everything. `lean` orders nodes that nothing else decides:
   smaller goes left. */
const LAYER_GAP = 28, NODE_GAP = 22, LANE_WIDTH = 10, FAR = 40;

function layout(nodes, edges) {
  const byId = new Map(nodes.map(n => [n.id, n]));
  for (const n of nodes) { n.up = []; n.down = []; }
  for (const e of edges) { byId.get(e.from).down.push(e); byId.get(e.to).up.push(e); }
  assignLayers(nodes, byId);
  const rows = [];
  for (const n of nodes) (rows[n.layer] ||= []).push(n);
  for (let i = 0; i < rows.length; i++) rows[i] ||= [];
  const cells = rows.map(row => row.map(n => cell(n, n.width, n.lean)));
  linkCells(cells, edges, byId);
  order(cells);
  place(cells);
  return finish(cells, edges);
}

function cell(node, width, lean) { return { node, width, lean, up: [], down: [], x: 0 }; }

function assignLayers(nodes, byId) {
  const waiting = new Map(nodes.map(n => [n.id, n.up.length]));
  const ready = nodes.filter(n => !n.up.length);
  for (const n of nodes) n.layer = 0;
  let done = 0;
  while (done < ready.length) {
    const n = ready[done++];
    for (const e of n.down) {
      const to = byId.get(e.to);
      to.layer = Math.max(to.layer, n.layer + 1);
      waiting.set(e.to, waiting.get(e.to) - 1);
      if (!waiting.get(e.to)) ready.push(to);
    }
  }
  // What nothing feeds goes just above its first reader instead of to the top.
  for (const n of ready.slice().reverse())
    if (!n.up.length && n.down.length) n.layer = Math.min(...n.down.map(e => byId.get(e.to).layer)) - 1;
  const lowest = Math.min(0, ...nodes.map(n => n.layer));
  for (const n of nodes) n.layer -= lowest;
}

function linkCells(cells, edges, byId) {
  const at = new Map();
  for (const row of cells) for (const c of row) at.set(c.node.id, c);
  for (const e of edges) {
    const from = at.get(e.from), to = at.get(e.to);
    const first = byId.get(e.from).layer, last = byId.get(e.to).layer;
    let previous = from;
    e.lanes = [];
    e.far = last - first > FAR;
    if (e.far) continue;
    for (let layer = first + 1; layer < last; layer++) {
      const lane = cell(null, LANE_WIDTH, (from.lean + to.lean) / 2);
      cells[layer].push(lane);
      e.lanes.push([lane, layer]);
      previous.down.push(lane); lane.up.push(previous);
      previous = lane;
    }
    previous.down.push(to); to.up.push(previous);
  }
}

function order(cells) {
  for (const row of cells) { row.sort((a, b) => a.lean - b.lean); seat(row); }
  const rounds = cells.length > 300 ? 4 : 12;
  for (let round = 0; round < rounds; round++) {
    const down = round % 2 === 0;
    const rows = down ? cells : cells.slice().reverse();
    for (const row of rows) {
      for (const c of row) {
        const near = down ? c.up : c.down;
        c.key = near.length ? near.reduce((sum, o) => sum + o.at / o.of, 0) / near.length * row.length : c.at;
        c.key += c.lean * 0.35;
      }
      row.sort((a, b) => a.key - b.key || a.at - b.at);
      seat(row);
    }
  }
}

function seat(row) { row.forEach((c, i) => { c.at = i + 0.5; c.of = row.length; }); }

function place(cells) {
  for (const row of cells) {
    let x = 0;
    for (const c of row) { c.x = x + c.width / 2; x += c.width + NODE_GAP; }
    for (const c of row) c.x -= (x - NODE_GAP) / 2;
  }
  const rounds = cells.length > 300 ? 8 : 24;
  for (let round = 0; round < rounds; round++)
    for (const row of round % 2 ? cells.slice().reverse() : cells) separate(row);
}

/* Each cell as near as can be (least squares) to the mean of its neighbours, in order and without touching: isotonic
   regression, pooling adjacent violators. Straight lanes weigh more. */
function separate(row) {
  let offset = 0;
  const blocks = [];
  row.forEach((c, i) => {
    if (i) offset += (row[i - 1].width + c.width) / 2 + NODE_GAP;
    c.offset = offset;
    const near = [...c.up, ...c.down];
    const wish = near.length ? near.reduce((sum, o) => sum + o.x, 0) / near.length : c.x;
    let block = { sum: (wish - offset) * (c.node ? 1 : 2), weight: c.node ? 1 : 2, from: i, to: i };
    while (blocks.length && blocks.at(-1).sum / blocks.at(-1).weight > block.sum / block.weight) {
      const left = blocks.pop();
      block = { sum: left.sum + block.sum, weight: left.weight + block.weight, from: left.from, to: block.to };
    }
    blocks.push(block);
  });
  for (const b of blocks) for (let i = b.from; i <= b.to; i++) row[i].x = b.sum / b.weight + row[i].offset;
}

function finish(cells, edges) {
  let y = 0, left = Infinity, right = -Infinity;
  const middle = [];
  cells.forEach((row, layer) => {
    const height = Math.max(20, ...row.filter(c => c.node).map(c => c.node.height));
    middle[layer] = y + height / 2;
    for (const c of row) {
      left = Math.min(left, c.x - c.width / 2);
      right = Math.max(right, c.x + c.width / 2);
      if (c.node) { c.node.x = c.x; c.node.y = middle[layer]; }
    }
    y += height + LAYER_GAP;
  });
  for (const row of cells) for (const c of row) if (c.node) c.node.x -= left;
  for (const e of edges) e.points = e.lanes.map(([lane, layer]) => [lane.x - left, middle[layer]]);
  return { width: right - left, height: y - LAYER_GAP };
}
