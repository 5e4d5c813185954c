"use strict";
/* Drawing a merged graph as SVG, and moving about in it. */
const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.3, SMALL = 6.1, READABLE = 1.35;

function element(name, attributes = {}, ...children) {
  const e = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}

function shortTarget(target) {
  const inner = /^auto_functionalized\w*\((.*)\)$/.exec(target);
  const [space, ...rest] = (inner ? inner[1] : target).split(".");
  return { space, name: rest.join(".") || space };
}

function shortLayer(layer) { return layer.replace(/^model\./, ""); }

function linesOf(node) {
  if (node.op === "output") return ["output", "", ""];
  if (node.op === "placeholder") return [shortLayer(node.target), node.value, "input"];
  return [shortTarget(node.target).name, node.value, shortLayer(node.layer)];
}

const cut = (text, length) => text.length > length ? `${text.slice(0, length - 1)}…` : text;

class View {
  constructor(svg, onPick) {
    this.svg = svg;
    this.onPick = onPick;
    this.box = [0, 0, 100, 100];
    this.moved = false;
    const wheel = e => { e.preventDefault(); this.zoom(Math.exp(e.deltaY * 0.0015), e); };
    svg.addEventListener("wheel", wheel, { passive: false });
    svg.addEventListener("pointerdown", e => {
      this.drag = [e.clientX, e.clientY, ...this.box];
      this.moved = false;
      svg.setPointerCapture(e.pointerId);
    });
    svg.addEventListener("pointermove", e => {
      if (!this.drag) return;
      const [x, y, left, top] = this.drag, scale = this.box[2] / svg.clientWidth;
      this.moved ||= Math.hypot(e.clientX - x, e.clientY - y) > 4;
      if (!this.moved) return;
      this.show([left - (e.clientX - x) * scale, top - (e.clientY - y) * scale, this.box[2], this.box[3]]);
    });
    svg.addEventListener("pointerup", e => {
      this.drag = null;
      if (this.moved) return;
      const hit = document.elementFromPoint(e.clientX, e.clientY)?.closest("[data-id]");
      this.onPick(hit ? hit.dataset.id : null);
    });
    new ResizeObserver(() => this.keepShape()).observe(svg);
  }

  /* Draws the part `names` of a merged graph; `marked` are outlined. */
  draw(merged, names, marked) {
    const lean = { removed: -1, added: 1, changed: 0, kept: 0 };
    this.nodes = [...names].map(name => {
      const node = merged.nodes.get(name), lines = linesOf(node);
      const weights = node.weights.length ? 24 : 0;
      const small = line => cut(line, 44).length * SMALL;
      const title = cut(lines[0], 46).length * CHARACTER + 12;
      const width = Math.max(title, small(lines[1]), small(lines[2]) + weights) + 28;
      const height = node.op === "output" ? 28 : lines[2] ? 52 : 40;
      return { id: name, node, lines, width: Math.max(width, 84), height, lean: lean[node.state] };
    });
    const edges = merged.edges.filter(e => names.has(e.from) && names.has(e.to)).map(e => ({ ...e }));
    this.size = layout(this.nodes, edges);
    const cutOff = this.beyond(merged, names);
    const byId = new Map(this.nodes.map(n => [n.id, n]));
    this.byId = byId;
    spread(edges, byId);
    const lines = element("g", { class: "edges" }), labels = element("g", { class: "labels" }), cards = element("g");
    for (const e of edges) this.edge(e, byId, lines, labels);
    for (const n of this.nodes) cards.append(this.card(n, cutOff.get(n.id), marked.has(n.id)));
    this.svg.replaceChildren(arrows(), lines, labels, cards);
    document.body.dataset.drawn = this.nodes.length;
    document.body.dataset.edges = edges.length;
  }

  /* For each node how many neighbours above and below are not drawn. */
  beyond(merged, names) {
    const found = new Map();
    for (const e of merged.edges)
      for (const [inside, outside, side] of [[e.to, e.from, 0], [e.from, e.to, 1]])
        if (names.has(inside) && !names.has(outside)) {
          if (!found.has(inside)) found.set(inside, [0, 0]);
          found.get(inside)[side]++;
        }
    return found;
  }

  edge(e, byId, lines, labels) {
    const a = byId.get(e.from), b = byId.get(e.to);
    if (e.far) {
      const name = linesOf(a.node)[0];
      const at = { x: r(b.x + e.in - 4), y: r(b.y - b.height / 2 - 5) };
      const attributes = { ...at, class: `label far-away ${e.state}`, "data-id": a.id };
      labels.append(element("text", attributes, `↑ ${cut(name, 24)}`));
      return;
    }
    const points = [[a.x + e.out, a.y + a.height / 2], ...e.points, [b.x + e.in, b.y - b.height / 2 - 5]];
    let path = `M${points[0].map(r)}`;
    for (let i = 1; i < points.length; i++) {
      const [x, y] = points[i - 1], [u, v] = points[i], middle = (y + v) / 2;
      path += `C${r(x)},${r(middle)} ${r(u)},${r(middle)} ${r(u)},${r(v)}`;
    }
    lines.append(element("path", { d: path, class: `edge ${e.state}`, "marker-end": `url(#tip-${e.state})` }));
    if (e.labels.size) {
      const [x, y] = points[0];
      const text = [...e.labels].sort().join(" ");
      labels.append(element("text", { x: r(x + 5), y: r(y + 12), class: `label ${e.state}` }, text));
    }
  }

  card(n, beyond, marked) {
    const { node, lines } = n, left = n.x - n.width / 2, top = n.y - n.height / 2;
    const kind = node.op === "call" ? (node.bytes === null ? "view" : "operator") : node.op;
    const mark = marked ? " marked" : "";
    const group = element("g", { class: `node ${node.state} ${kind}${mark}`, "data-id": n.id, tabindex: -1 });
    const whole = { x: r(left), y: r(top), width: r(n.width), height: n.height, rx: node.op === "call" ? 7 : 14 };
    group.append(element("rect", { ...whole, class: "card" }));
    if (node.state !== "kept") {
      group.append(element("rect", { x: r(left), y: r(top), width: 5, height: n.height, rx: 2, class: "bar" }));
      const sign = { removed: "−", added: "+", changed: "~" }[node.state];
      group.append(element("text", { x: r(left + n.width - 14), y: r(top + 16), class: "sign" }, sign));
    }
    const text = (line, dy, name) =>
      group.append(element("text", { x: r(left + 14), y: r(top + dy), class: name }, cut(line, 46)));
    text(lines[0], 17, "title");
    if (lines[1]) text(cut(lines[1], 44), 31, "value");
    if (lines[2]) text(cut(lines[2], 44), 44, "layer");
    if (node.weights.length) {
      const corner = { x: r(left + n.width - 10), y: r(top + n.height - 9) };
      group.append(element("text", { ...corner, class: "weights" }, `▪${node.weights.length}`));
    }
    if (beyond?.[0]) group.append(element("text", { x: r(n.x), y: r(top - 4), class: "more" }, "⋯"));
    if (beyond?.[1]) group.append(element("text", { x: r(n.x), y: r(top + n.height + 11), class: "more" }, "⋯"));
    group.append(element("title", {}, `${node.target}\n${node.value}\n${node.layer}`));
    return group;
  }

  pick(name) {
    this.svg.querySelectorAll(".picked").forEach(e => e.classList.remove("picked"));
    if (name) this.svg.querySelector(`[data-id="${CSS.escape(name)}"]`)?.classList.add("picked");
  }

  fit(names) {
    const some = names ? this.nodes.filter(n => names.has(n.id)) : this.nodes;
    if (!some.length) return;
    const bound = (pick, best) => best(...some.map(pick));
    const left = bound(n => n.x - n.width / 2, Math.min) - 30, right = bound(n => n.x + n.width / 2, Math.max) + 30;
    const top = bound(n => n.y - n.height / 2, Math.min) - 30, bottom = bound(n => n.y + n.height / 2, Math.max) + 30;
    const scale = Math.max((right - left) / this.svg.clientWidth, (bottom - top) / this.svg.clientHeight, 0.75);
    const width = this.svg.clientWidth * scale, height = this.svg.clientHeight * scale;
    this.show([(left + right - width) / 2, (top + bottom - height) / 2, width, height]);
  }

  /* All of it where that can be read, else from the first of `names` on, at a size that can. */
  home(names) {
    this.fit();
    const some = this.nodes.filter(n => !names?.size || names.has(n.id));
    if (this.scale() <= READABLE || !some.length) return;
    this.zoom(READABLE / this.scale());
    const left = Math.min(...some.map(n => n.x - n.width / 2)), right = Math.max(...some.map(n => n.x + n.width / 2));
    const top = Math.min(...some.map(n => n.y - n.height / 2));
    const [, , width, height] = this.box;
    this.show([(left + right - width) / 2, Math.max(top - 140, -30), width, height]);
  }

  /* Units of the drawing per pixel. */
  scale() { return this.box[2] / this.svg.clientWidth; }

  zoom(factor, event) {
    const scale = Math.min(Math.max(this.scale() * factor, 0.2), 60) / this.scale();
    const rect = this.svg.getBoundingClientRect();
    const fx = event ? (event.clientX - rect.left) / rect.width : 0.5;
    const fy = event ? (event.clientY - rect.top) / rect.height : 0.5;
    const [x, y, w, h] = this.box;
    this.show([x + w * fx * (1 - scale), y + h * fy * (1 - scale), w * scale, h * scale]);
  }

  pan(dx, dy) { this.show([this.box[0] + dx * this.box[2], this.box[1] + dy * this.box[3], this.box[2], this.box[3]]); }

  show(box) {
    this.box = box;
    this.svg.setAttribute("viewBox", box.map(r).join(" "));
    this.svg.classList.toggle("far", box[2] / this.svg.clientWidth > 3);
  }

  keepShape() {
    if (!this.svg.clientWidth || !this.nodes) return;
    const [x, y, w] = this.box;
    this.show([x, y, w, w * this.svg.clientHeight / this.svg.clientWidth]);
  }
}

/* Where edges leave and meet a card: side by side in the order of where they come from and go to. */
function spread(edges, byId) {
  for (const [end, other, key] of [["from", "to", "out"], ["to", "from", "in"]]) {
    const groups = new Map();
    for (const e of edges) { if (!groups.has(e[end])) groups.set(e[end], []); groups.get(e[end]).push(e); }
    for (const [id, group] of groups) {
      const toward = e => (e.points.length ? e.points.at(end === "from" ? 0 : -1)[0] : byId.get(e[other]).x);
      group.sort((a, b) => toward(a) - toward(b));
      const gap = Math.min(48, (byId.get(id).width - 40) / group.length);
      group.forEach((e, i) => { e[key] = (i - (group.length - 1) / 2) * gap; });
    }
  }
}

const r = number => Math.round(number * 10) / 10;

function arrows() {
  const tips = ["kept", "removed", "added"].map(state => element("marker",
    { id: `tip-${state}`, viewBox: "0 0 8 8", refX: 4, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    element("path", { d: "M0,0.8 L7,4 L0,7.2 z", class: `tip ${state}` })));
  return element("defs", {}, ...tips);
}
