// The map of a network: a row a MoE layer, a column an expert. What a size keeps, and what an answer's tokens chose.

import { counted, draw, make } from "./dom.js";

const WIDTH = 320; // of the drawing, in its own units; the page scales it
const LEFT = 20;
const BOTTOM = 16;

export class RouteMap {
  /** @param {HTMLElement} figure @param {object} info of the server */
  constructor(figure, info) {
    figure.hidden = info.moe_layers.length === 0; // every layer is dense
    Object.assign(this, { info, routes: null, counts: null, num_tokens: 0, cursor: null });
    this.svg = draw("svg", { class: "map", role: "application", tabindex: 0, "aria-roledescription": "heat map" });
    this.readout = make("p", { className: "readout", role: "status" });
    this.cells = info.moe_layers.map(() => []);
    this.#lay();
    figure.append(make("figcaption", { textContent: "Expert routes" }), this.svg, this.readout);
    this.svg.addEventListener("pointerover", (event) => this.#point(event.target.dataset));
    this.svg.addEventListener("pointerleave", () => this.#point({}));
    this.svg.addEventListener("blur", () => this.#point({}));
    this.svg.addEventListener("keydown", (event) => this.#walk(event));
  }

  #lay() {
    const { moe_layers, expert_orders } = this.info;
    const num_experts = Math.max(1, ...expert_orders.map((order) => order.length));
    const width = (WIDTH - LEFT) / num_experts;
    const height = Math.max(4, Math.min(13, 320 / moe_layers.length));
    const gap = (side) => (side > 5 ? 1.5 : side > 3 ? 0.5 : 0);
    moe_layers.forEach((layer, row) => {
      if (row % Math.ceil(moe_layers.length / 12) === 0) {
        this.svg.append(draw("text", { x: LEFT - 5, y: (row + 0.5) * height, class: "row" }, String(layer)));
      }
      for (let expert = 0; expert < expert_orders[row].length; expert += 1) {
        const cell = draw("rect", { x: LEFT + expert * width, y: row * height, width: width - gap(width),
          height: height - gap(height), rx: width > 6 ? 1.5 : 0, "data-row": row, "data-expert": expert });
        this.cells[row].push(cell);
        this.svg.append(cell);
      }
    });
    const bottom = moe_layers.length * height;
    const step = [1, 2, 4, 8, 16, 32, 64, 128].find((each) => num_experts / each <= 8) ?? 256;
    for (let expert = 0; expert < num_experts; expert += step) {
      this.svg.append(draw("text", { x: LEFT + (expert + 0.5) * width, y: bottom + 10, class: "column" }, String(expert)));
    }
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${bottom + BOTTOM}`);
  }

  /** Draw which layers and experts a size keeps; the routes of an earlier answer go. */
  keep(size) {
    const { layer_ranking, moe_layers, expert_orders } = this.info;
    const layers = new Set(layer_ranking.slice(0, size.layers));
    this.routes = this.counts = null;
    this.cells.forEach((row, place) => {
      const kept = new Set(layers.has(moe_layers[place]) ? expert_orders[place].slice(0, size.experts) : []);
      row.forEach((cell, expert) => {
        cell.setAttribute("class", kept.has(expert) ? "kept" : "absent");
      });
    });
    this.#tell();
  }

  /** Draw how often each expert was chosen. @param {import("./api.js").Routes} routes @param {number} num_tokens of the answer */
  show(routes, num_tokens) {
    if (!this.cells.length) return;
    // The row that chose a token is that of the token before it; the rows before those belong to the prompt.
    this.first = routes.num_rows - num_tokens;
    Object.assign(this, { routes, num_tokens, counts: this.cells.map((row) => row.map(() => 0)) });
    for (let token = 0; token < num_tokens; token += 1) {
      for (const [row, expert] of this.#chosen(token)) this.counts[row][expert] += 1;
    }
    this.most = Math.max(1, ...this.counts.flat());
    this.cells.forEach((row, place) => row.forEach((cell, expert) => {
      const count = this.counts[place][expert];
      if (count === 0) return;
      cell.setAttribute("class", "chosen");
      // A square root, so that a rarely chosen expert is still told from one that was never chosen.
      cell.style.setProperty("--share", Math.sqrt(count / this.most).toFixed(3));
    }));
    this.#tell();
  }

  /** [row, expert] of every expert that took part in choosing token `token`. */
  *#chosen(token) {
    const { num_layers, num_slots, experts, none } = this.routes;
    const start = (this.first + token) * num_layers * num_slots;
    for (let slot = 0; slot < num_layers * num_slots; slot += 1) {
      const expert = experts[start + slot];
      if (expert !== none && expert !== undefined) yield [Math.floor(slot / num_slots), expert];
    }
  }

  /** Show the route of tokens `from` to `to` of the answer, or of none. @returns {?string} the route in words */
  highlight(from = null, to = from) {
    for (const cell of this.svg.querySelectorAll(".on")) cell.classList.remove("on");
    const shown = from !== null && this.routes !== null;
    this.svg.classList.toggle("dimmed", shown);
    if (!shown) return null;
    const words = new Map();
    for (let token = from; token <= to; token += 1) {
      for (const [row, expert] of this.#chosen(token)) {
        this.cells[row][expert].classList.add("on");
        if (token === to) words.set(row, [...(words.get(row) ?? []), expert]);
      }
    }
    if (words.size > 16) return null; // more than anyone listens to
    return [...words].map(([row, experts]) => `layer ${this.info.moe_layers[row]}: ${experts.sort((a, b) => a - b).join(", ")}`).join("; ");
  }

  #point({ row, expert }) {
    this.svg.querySelector(".cursor")?.classList.remove("cursor");
    if (row === undefined) return this.#tell();
    const cell = this.cells[row][expert];
    cell.classList.add("cursor");
    const what = cell.classList.contains("absent") ? "not in this size"
      : this.counts === null ? "kept" : `${this.counts[row][expert]} of ${counted(this.num_tokens, "token")}`;
    this.readout.textContent = `Layer ${this.info.moe_layers[row]}, expert ${expert}: ${what}`;
  }

  #walk(event) {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    const [row, expert] = this.cursor ?? [-down, -right];
    const next = Math.min(this.cells.length - 1, Math.max(0, row + down));
    this.cursor = [next, Math.min(this.cells[next].length - 1, Math.max(0, expert + right))];
    this.#point({ row: this.cursor[0], expert: this.cursor[1] });
  }

  #tell() {
    const num_kept = this.svg.querySelectorAll(".kept, .chosen").length;
    const text = this.counts === null
      ? `Keeps ${num_kept} of ${this.cells.flat().length} experts`
      : `Most chosen: ${this.#busiest()}`;
    this.readout.textContent = text;
    this.svg.setAttribute("aria-label", `Layers by experts. ${text}. Arrow keys read single experts.`);
  }

  #busiest() {
    const row = this.counts.findIndex((counts) => counts.includes(this.most));
    return `layer ${this.info.moe_layers[row]}, expert ${this.counts[row].indexOf(this.most)} (${this.most} of ${this.num_tokens})`;
  }
}
