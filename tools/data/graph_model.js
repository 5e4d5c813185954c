"use strict";
/* From a document's graph to what is drawn: the graphs before and after a step laid over each other, and a part of it.

   merge(graph, from, to) -> {nodes: Map name -> node, edges}: a node's `state` is kept, removed, added or changed, the
   same of an edge's. Elements of tuples become labels of edges. Parameters go into the node that reads them
   (`weights`), views into edges unless they changed or `views` is set. */
function merge(graph, from, to, views) {
  const old = stageNodes(graph, from), now = stageNodes(graph, to);
  const all = new Map();
  for (const name of interleaved(graph, from, to)) {
    const before = old.get(name), after = now.get(name);
    const state = !after ? "removed" : !before ? "added" : before.target !== after.target ? "changed" : "kept";
    all.set(name, { ...(after || before), id: name, state, before, after, weights: [] });
  }
  const hidden = node => node.op === "call" && (node.target === "getitem" || node.target.includes("sym_size")
    || (node.bytes === null && !views && node.state === "kept"));
  const drawn = new Map();
  for (const node of all.values())
    if (!hidden(node) && !isWeight(node, graph) && !isSize(node)) drawn.set(node.id, node);
  const edges = new Map();
  for (const [stage, when] of [[old, "removed"], [now, "added"]]) {
    for (const node of stage.values()) {
      if (!drawn.has(node.name)) continue;
      const target = drawn.get(node.name);
      for (const [source, label] of sources(node, stage, drawn)) {
        const origin = all.get(source);
        if (isWeight(origin, graph)) { if (!target.weights.includes(source)) target.weights.push(source); continue; }
        if (!drawn.has(source)) continue;
        const key = `${source}>${target.id}`;
        if (!edges.has(key)) edges.set(key, { from: source, to: target.id, state: when, labels: new Set() });
        const edge = edges.get(key);
        if (edge.state !== when) edge.state = "kept";
        if (label) edge.labels.add(label);
      }
    }
  }
  return { all, nodes: drawn, edges: [...edges.values()] };
}

function stageNodes(graph, stage) {
  return new Map(graph.stages[stage].nodes.map(i => [graph.nodes[i].name, graph.nodes[i]]));
}

/* All names in the order of the graph after, those that are gone where they were. */
function interleaved(graph, from, to) {
  const names = stage => graph.stages[stage].nodes.map(i => graph.nodes[i].name);
  const before = names(from), after = names(to), there = new Set(after), was = new Set(before);
  const out = [];
  let i = 0;
  for (const name of after) {
    if (was.has(name)) {
      while (i < before.length && before[i] !== name) { if (!there.has(before[i])) out.push(before[i]); i++; }
      i++;
    }
    out.push(name);
  }
  return [...out, ...before.slice(i).filter(name => !there.has(name))];
}

const isSize = node => node.op === "placeholder" && !node.value.includes("[");
/* A parameter or buffer of a layer; or of unknown name, with a size that does not depend on the number of tokens. */
const isWeight = (node, graph) => node.op === "placeholder" && node.value.includes("[")
  && (node.layer !== "" || (graph.symbolic && !/\bT\b/.test(node.value)));

/* [name, label] of what a node reads, through nodes that are not drawn. */
function sources(node, stage, drawn) {
  const found = [];
  const walk = (name, label) => {
    const source = stage.get(name);
    if (drawn.has(name) || source.op === "placeholder") { found.push([name, label]); return; }
    const ofDrawn = source.target === "getitem" && drawn.has(source.inputs[0]);
    for (const input of source.inputs) walk(input, ofDrawn ? `[${source.args.split(", ").at(-1)}]` : label);
  };
  for (const input of new Set(node.inputs)) walk(input, "");
  return found;
}

/* The nodes at most `hops` edges from `start`, in either direction. */
function around(merged, start, hops) {
  const near = neighbours(merged);
  const seen = new Set(start.filter(name => merged.nodes.has(name)));
  let edge = [...seen];
  for (let i = 0; i < hops; i++) {
    const next = [];
    for (const name of edge) for (const other of near.get(name) || [])
      if (!seen.has(other)) { seen.add(other); next.push(other); }
    edge = next;
  }
  return seen;
}

function neighbours(merged) {
  const near = new Map();
  for (const e of merged.edges)
    for (const [a, b] of [[e.from, e.to], [e.to, e.from]]) { if (!near.has(a)) near.set(a, []); near.get(a).push(b); }
  return near;
}

/* Layers of the model in a graph: what is in front of the first number and the number itself. */
function layerOf(node) { const found = /^(.*?\.\d+)(\.|$)/.exec(node.layer || ""); return found ? found[1] : ""; }

function layersIn(graph) {
  const found = new Set();
  for (const node of graph.nodes) if (node.op === "call" && layerOf(node)) found.add(layerOf(node));
  return [...found];
}

/* `kind`: "token" or "constant". */
function sumBytes(nodes, kind) {
  return nodes.reduce((sum, n) => sum + ((n && n.bytes && n.bytes[kind]) || 0), 0);
}
