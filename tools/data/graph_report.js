"use strict";
/* The page around the graph: what is chosen, the lists, the panels. The choice is in the address: a link. */
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (name, attributes = {}, ...children) => {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) e.setAttribute(key, value === true ? "" : value);
  e.append(...children.filter(c => c !== null));
  return e;
};
const number = n => n.toLocaleString("en-US");
/* Names with places where a line may be broken. */
const named = text => text.split(/(?<=[._])/).flatMap((part, i) => i ? [make("wbr"), part] : [part]);
window.addEventListener("error", e => { document.body.dataset.error = e.message; });

/* graph: index; step: 0 for all passes, else that pass alone; scope: site, layer or whole; node: the picked one. */
const state = {
  graph: 0, step: 0, scope: "site", site: 0, layer: "", hops: 1, views: false, node: "", tab: "graph", find: "",
};
const view = new View($("canvas"), name => { state.node = name || ""; details(); view.pick(name); address(); });
let merged, names;

const graph = () => data.graphs[state.graph];
const sites = () => graph().sites.filter(s => !state.step || s.pass === graph().stages[state.step].after);
const entries = () => [...graph().sites, ...graph().left];
const currentSite = () => entries()[state.site];
const span = layers => layers.length === 1 ? layers[0] : `${layers[0]} … ${layers.at(-1).replace(/^model\./, "")}`;
const membersOf = entry => new Set(entry.removed ? [...entry.removed, ...entry.added] : [entry.node, ...entry.differs]);

function redraw(keepView) {
  if (!layersIn(graph()).includes(state.layer)) state.layer = layersIn(graph())[0] || "";
  merged = merge(graph(), state.step ? state.step - 1 : 0, state.step || graph().stages.length - 1, state.views);
  const marked = state.find ? new Set(matches().map(n => n.id)) : new Set();
  if (state.scope === "whole") names = new Set(merged.nodes.keys());
  else if (state.scope === "layer") names = layerNames(state.layer);
  else if (state.scope === "node") names = around(merged, [state.node], state.hops);
  else names = currentSite() ? around(merged, [...membersOf(currentSite())], state.hops) : new Set(merged.nodes.keys());
  view.draw(merged, names, marked);
  if (!keepView) view.home(focus());
  view.pick(state.node);
  controls();
  lists();
  details();
  address();
}

function focus() {
  if (state.scope === "node") return new Set([state.node]);
  if (state.scope === "site" && currentSite()) return membersOf(currentSite());
  const changed = [...names].filter(n => merged.nodes.get(n).state !== "kept");
  return new Set(state.scope === "whole" ? changed.slice(0, 12) : changed);
}

function layerNames(layer) {
  const inside = [...merged.nodes.values()].filter(n => n.op === "call" && layerOf(n) === layer).map(n => n.id);
  return around(merged, inside, 1);
}

function matches() {
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  return [...merged.nodes.values()].filter(n =>
    words.every(w => `${n.target} ${n.id} ${n.layer}`.toLowerCase().includes(w)));
}

function controls() {
  const pieces = g => g.pieces.length === 1 ? "1 piece" : `${g.pieces.length} pieces`;
  const range = g => data.totals.length > 1 ? `, ${g.tokens.join("–")} tokens` : "";
  fill($("graph"), data.graphs.map((g, i) => [i, `graph ${g.number}: ${pieces(g)}${range(g)}`]), state.graph);
  fill($("step"), graph().stages.map((s, i) => [i, i ? `${i}. ${s.after}` : "all passes"]), state.step);
  const layers = layersIn(graph());
  fill($("layer"), layers.map(l => [l, l]), state.layer);
  for (const scope of ["site", "layer", "whole"])
    $(`scope-${scope}`).setAttribute("aria-pressed", state.scope === scope);
  $("scope-site").disabled = !entries().length;
  $("scope-layer").disabled = !layers.length;
  $("layer").hidden = state.scope !== "layer";
  $("hops").hidden = !["site", "node"].includes(state.scope);
  $("hops-value").textContent = state.hops;
  $("views").checked = state.views;
  for (const tab of ["graph", "numbers", "run"]) {
    $(`tab-${tab}`).setAttribute("aria-selected", state.tab === tab);
    $(`panel-${tab}`).hidden = state.tab !== tab;
  }
}

function fill(select, options, chosen) {
  const option = ([value, text]) => make("option", { value, selected: String(value) === String(chosen) }, text);
  select.replaceChildren(...options.map(option));
}

function lists() {
  const rows = [];
  const passes = graph().passes;
  for (const pass of passes) {
    const of = graph().sites.filter(s => s.pass === pass.name);
    rows.push(make("h3", {}, pass.name, make("span", { class: "count" }, `${pass.matched} of ${pass.candidates}`)));
    const none = pass.candidates ? "no site matched" : "nothing to rewrite in this graph";
    if (!of.length) rows.push(make("p", { class: "quiet" }, none));
    rows.push(...of.map(row));
  }
  if (graph().left.length) {
    rows.push(make("h3", {}, "left as they are", make("span", { class: "count" }, String(graph().left.length))));
    rows.push(...graph().left.map(row));
  }
  $("sites").replaceChildren(...rows);
  const found = state.find ? matches() : [];
  $("found").hidden = !state.find;
  $("found").replaceChildren(
    make("h3", {}, "found", make("span", { class: "count" }, number(found.length))),
    ...found.slice(0, 200).map(n => make("button", { class: `row ${n.state}`, onclick: () => showAround(n.id) },
      make("b", {}, shortTarget(n.target).name), make("small", {}, shortLayer(n.layer) || n.id))),
    found.length > 200 ? make("p", { class: "quiet" }, `and ${number(found.length - 200)} more`) : null);
}

function row(entry) {
  const index = entries().indexOf(entry), kind = entry.removed ? "added" : "left";
  const button = make("button", { class: `row ${kind}`, "aria-current": state.scope === "site" && index === state.site,
    onclick: () => { Object.assign(state, { scope: "site", site: index, node: "" }); redraw(); } },
    make("b", {}, ...named(shortLayer(entry.layers[0]) || entry.node)),
    entry.layers.length > 1 ? make("span", { class: "times" }, `×${entry.layers.length}`) : null,
    make("small", {}, entry.removed ? shortTarget(entry.operator).name : entry.reason));
  return button;
}

function details() {
  const node = state.node && merged.all.get(state.node);
  const site = state.scope === "site" && currentSite();
  $("details").replaceChildren(...(node ? nodeDetails(node) : site ? siteDetails(site) : graphDetails()));
}

const pairs = rows => make("dl", {}, ...rows.filter(([, value]) => value).flatMap(
  ([key, value]) => [make("dt", {}, key), make("dd", {}, value)]));

function siteDetails(site) {
  if (!site.removed)
    return [make("h2", {}, "Left as it is"), make("p", {}, site.reason), pairs([["pass", site.pass || "none is for it"],
      ["quantiser", link(site.node)], ["differs", linksTo(site.differs)], ["where", whereList(site)]])];
  const of = side => site[side].map(n => merged.all.get(n)).filter(Boolean);
  const gone = of("removed").filter(n => n.bytes), made = of("added").filter(n => n.bytes);
  const added = site.added.map(n => merged.all.get(n));
  const changed = site.removed.length ? [] : added.filter(n => n && n.state === "changed");
  const kind = graph().symbolic ? "token" : "constant";
  const before = sumBytes(changed.length ? changed.map(n => n.before) : gone, kind), after = sumBytes(made, kind);
  const there = list => linksTo(list.filter(n => merged.nodes.has(n)));
  return [make("h2", {}, shortTarget(site.operator).name), make("p", { class: "quiet" }, `put in by ${site.pass}`),
    compare("operators", changed.length || gone.length, made.length),
    compare(graph().symbolic ? "bytes per token" : "bytes", before, after),
    pairs([["where", whereList(site)],
      ["read by", site.feeds.length && make("span", {}, ...named(site.feeds.join(", ")))],
      ["removed", there(site.removed)], ["added", there(site.added)]])];
}

function whereList(entry) {
  if (entry.layers.length < 2) return entry.layers[0] || "unknown";
  const summary = make("summary", {}, ...named(`${entry.layers.length} times: ${span(entry.layers)}`));
  return make("details", {}, summary, ...entry.layers.map(l => make("div", {}, ...named(l))));
}

function compare(what, before, after) {
  const most = Math.max(before, after, 1);
  const bar = (value, kind) => make("div", { class: `meter ${kind}` },
    make("i", { style: `width:${100 * value / most}%` }), make("span", {}, number(value)));
  return make("div", { class: "compare" }, make("h4", {}, what), bar(before, "removed"), bar(after, "added"));
}

const link = name => make("a", { href: "#", onclick: e => { e.preventDefault(); goTo(name); } }, ...named(name));
const linksTo = list => list.length ? make("span", {}, ...list.flatMap((n, i) => i ? [", ", link(n)] : [link(n)])) : "";

function showAround(name) {
  Object.assign(state, { scope: "node", node: name });
  redraw();
}

function goTo(name) {
  state.node = name;
  if (!merged.nodes.has(name)) { details(); return; }
  if (!names.has(name)) { state.scope = "node"; redraw(); return; }
  view.pick(name); details(); address();
}

function nodeDetails(node) {
  const both = node.state === "changed" ? [["was", `${node.before.target}(${node.before.args})`]] : [];
  const sums = b => `${number(b.token)} per token, ${number(b.constant)} constant`;
  const free = node.bytes === null || node.op !== "call";
  const bytes = free ? "none: it is free" : node.bytes.other || sums(node.bytes);
  const readers = [...merged.all.values()].filter(n => n.inputs.includes(node.id)).map(n => n.id);
  const weights = new Set(node.weights), called = node.op === "call";
  const text = called ? `${node.target}(${node.args})` : node.op === "output" ? `return ${node.args}` : node.target;
  return [make("h2", {}, called ? shortTarget(node.target).name : node.op),
    make("p", { class: `state ${node.state}` }, node.state),
    make("pre", {}, text),
    pairs([...both, ["name", node.id], ["gives", node.value], ["layer", node.layer], ["line", node.where],
      ["bytes", called ? bytes : ""], ["weights", linksTo(node.weights)],
      ["reads", linksTo(node.inputs.filter(n => !weights.has(n)))], ["read by", linksTo(readers)]]),
    make("button", { class: "plain", onclick: () => showAround(node.id) }, "Show what is around it")];
}

function graphDetails() {
  const first = graph().stages[0], last = graph().stages.at(-1);
  const pieces = graph().pieces.length;
  const shared = pieces > 1 ? `Shared by ${pieces} pieces of the model; names are those of the first.` : "";
  return [make("h2", {}, `Graph ${graph().number}`), make("p", { class: "quiet" }, shared),
    compare("operators", first.operators, last.operators),
    compare("bytes per token", first.bytes.token, last.bytes.token),
    pairs([["tokens", `${graph().tokens[0]} to ${graph().tokens[1]}${graph().symbolic ? ", left open: T" : ""}`],
      ["nodes", `${number(first.nodes.length)} → ${number(last.nodes.length)}`],
      ["constant", `${number(last.bytes.constant)} bytes`]])];
}

function address() {
  const { graph: g, step, scope, site, layer, node, tab, find } = state;
  const parts = {
    graph: g, step, scope,
    ...(scope === "site" ? { site } : {}), ...(scope === "layer" ? { layer } : {}), ...(node ? { node } : {}),
    tab, ...(find ? { find } : {}),
  };
  history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
}

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [key, value] of given) {
    if (key === "theme") document.documentElement.dataset.theme = value;
    else if (["graph", "step", "site", "hops"].includes(key)) state[key] = Number(value) || 0;
    else if (key in state) state[key] = key === "views" ? value === "true" : value;
  }
  if (!data.graphs[state.graph]) state.graph = 0;
  if (!graph().stages[state.step]) state.step = 0;
  if (!currentSite()) state.site = 0;
  if (state.scope === "site" && !entries().length) state.scope = "layer";
  $("find").value = state.find;
}

function start() {
  const another = choice => {
    Object.assign(state, { ...choice, node: "" });
    if (state.scope === "node") state.scope = "site";
    redraw();
  };
  $("graph").onchange = e => another({ graph: Number(e.target.value), step: 0, site: 0 });
  $("step").onchange = e => another({ step: Number(e.target.value) });
  $("layer").onchange = e => { state.layer = e.target.value; redraw(); };
  for (const scope of ["site", "layer", "whole"])
    $(`scope-${scope}`).onclick = () => { state.scope = scope; redraw(); };
  $("less").onclick = () => { state.hops = Math.max(0, state.hops - 1); redraw(); };
  $("more").onclick = () => { state.hops = Math.min(40, state.hops + 1); redraw(); };
  $("views").onchange = e => { state.views = e.target.checked; redraw(); };
  $("find").oninput = e => { state.find = e.target.value; redraw(true); };
  $("zoom-in").onclick = () => view.zoom(0.7);
  $("zoom-out").onclick = () => view.zoom(1.4);
  $("fit").onclick = () => view.fit();
  $("theme").onclick = () => {
    const root = document.documentElement;
    const asked = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const dark = (root.dataset.theme || asked) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
  };
  for (const tab of ["graph", "numbers", "run"])
    $(`tab-${tab}`).onclick = () => {
      state.tab = tab;
      controls();
      address();
      if (tab === "graph") view.home(focus());
    };
  document.addEventListener("keydown", e => {
    if (e.target.matches("input, select")) { if (e.key === "Escape") e.target.blur(); return; }
    const keys = {
      "+": () => view.zoom(0.8), "=": () => view.zoom(0.8), "-": () => view.zoom(1.25), "0": () => view.fit(),
      "/": () => { e.preventDefault(); $("find").focus(); },
      ArrowLeft: () => view.pan(-0.1, 0), ArrowRight: () => view.pan(0.1, 0),
      ArrowUp: () => view.pan(0, -0.1), ArrowDown: () => view.pan(0, 0.1),
    };
    if (!e.ctrlKey && !e.metaKey) keys[e.key]?.();
  });
  fromAddress();
  redraw();
  document.body.dataset.ready = "yes";
}

if (data.graphs.length) start();
