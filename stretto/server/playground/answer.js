// One answer: turns as data, each answer as spans of tokens tinted by their surprise, and the map of the experts they took.

import { counted, draw, make, percent } from "./dom.js";

/** Lower ends of the tints, in nats of surprise (−log p). Tint 0 is none. */
export const TINTS = [0.25, 0.75, 1.5, 2.5, 4];

const tintOf = (logprob) => TINTS.filter((least) => -logprob >= least).length;

/** The key to the tints. @param {HTMLElement} figure */
export function drawLegend(figure) {
  const steps = [0, ...TINTS].map((least, tint) =>
    make("li", {}, make("i", { className: `tint-${tint}` }), make("b", { textContent: tint === TINTS.length ? `${least}+` : String(least) }),
      make("span", { textContent: Math.round(100 * Math.exp(-least)) })));
  figure.append(make("figcaption", {}, "Surprise", make("span", { textContent: "−log p in nats, and p in %" })),
    make("ol", { "aria-label": "Tints: surprise in nats, and the probability it stands for" }, ...steps));
}

/**
 * @typedef {{tokens: import("./api.js").Token[], text: string, size: import("./api.js").Size, label: string, summary: string[],
 *   routes: ?import("./api.js").Routes, error: ?Error, state: "running"|"done"|"stopped"|"failed"}} Answer
 * @typedef {{mode: "chat"|"completion", prompt: string, answer: Answer}} Turn
 */

/** One turn on the page. It only appends while an answer streams. */
export class TurnView {
  /** @param {Turn} turn @param {{retry: () => void, extend: (text: string) => void}} actions */
  constructor(turn, actions) {
    Object.assign(this, { turn, actions, num_shown: 0, pending: 0 });
    this.tokens = make("span", { className: "tokens", role: "group", "aria-label": "Answer; the arrow keys walk through its tokens" });
    this.facts = make("p", { className: "facts" });
    this.buttons = make("div", { className: "buttons" });
    const asked = make(turn.mode === "chat" ? "div" : "span", { className: "asked", textContent: turn.prompt });
    const answered = turn.mode === "chat" ? make("div", { className: "answered" }, this.tokens) : this.tokens;
    this.label = make("p", { className: "who", textContent: turn.answer.label });
    this.element = make("article", { className: `turn ${turn.mode}`, "aria-busy": "true" },
      ...(turn.mode === "chat" ? [make("p", { className: "who", textContent: "You" }), asked, this.label, answered]
        : [this.label, make("div", { className: "document" }, asked, answered)]),
      make("footer", {}, this.facts, this.buttons));
    this.tokens.turn = this;
    this.update();
  }

  /** Show what has come since. */
  update() {
    const { tokens, state } = this.turn.answer;
    for (; this.num_shown < tokens.length; this.num_shown += 1) {
      if (tokens[this.num_shown].text) this.#append(this.pending, this.num_shown);
    }
    if (state === "running") return;
    if (this.pending < tokens.length) this.#append(this.pending, tokens.length - 1); // the end token: it has no text
    this.#close();
  }

  /** Text that came after the last token: it was held back until it could no longer belong to a stop string. */
  addLate(text) {
    this.turn.answer.tokens.at(-1).text += text;
    if (this.pending === this.turn.answer.tokens.length) this.tokens.lastChild.textContent += text;
  }

  /** A span for tokens `from` to `to`: more than one where a character was put together from several. */
  #append(from, to) {
    const tokens = this.turn.answer.tokens.slice(from, to + 1);
    const text = tokens.map((token) => token.text).join("");
    const logprob = tokens.reduce((sum, token) => sum + token.logprob, 0);
    const span = make("span", { className: `token tint-${tintOf(logprob)}`, textContent: text, tabIndex: this.tokens.firstChild ? -1 : 0 });
    span.classList.toggle("silent", !text);
    span.classList.toggle("blank", Boolean(text) && !text.trim());
    Object.assign(span.dataset, { from, to });
    this.tokens.append(span);
    this.pending = to + 1;
  }

  #close() {
    const { text, summary, error } = this.turn.answer;
    this.element.setAttribute("aria-busy", "false");
    this.facts.textContent = summary.join(" · ");
    const copy = make("button", { type: "button", className: "plain", textContent: "Copy", onclick: () => this.#copy(copy) });
    const retry = make("button", { type: "button", className: "plain", textContent: error ? "Try again" : "Regenerate", onclick: this.actions.retry });
    retry.classList.add("retry");
    const extend = make("button", { type: "button", className: "plain", textContent: "Use as prompt",
      onclick: () => this.actions.extend(this.turn.prompt + text) });
    this.buttons.replaceChildren(...(text ? [copy] : []), ...(text && this.turn.mode === "completion" ? [extend] : []), retry);
    if (error) {
      this.buttons.before(make("div", { className: "error", role: "alert" },
        make("strong", { textContent: error.message }), make("span", { textContent: error.remedy ?? "" })));
    }
  }

  async #copy(button) {
    const { prompt, mode, answer } = this.turn;
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(mode === "completion" ? prompt + answer.text : answer.text);
      button.textContent = "Copied";
    } else { // a page that was not fetched from this machine or over HTTPS has no clipboard
      getSelection().selectAllChildren(mode === "completion" ? this.tokens.parentElement : this.tokens);
      button.textContent = "Selected: press Ctrl C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }
}

/** A token's text with its blanks made visible. */
export const visible = (label) => label.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

/** The card of one token, beside it. Pointer and keyboard both open it. */
export class TokenCard {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    this.span = null;
  }

  /** @param {HTMLElement} span @param {import("./api.js").Token[]} tokens those the span stands for @param {?string} route in words */
  show(span, tokens, route) {
    const token = tokens.at(-1);
    const rows = [
      ["Probability", percent(Math.exp(token.logprob))], ["Surprise", `${Math.abs(token.logprob).toFixed(2)} nats`],
      ...(token.version === null ? [] : [["Weight version", String(token.version)]]),
    ];
    this.element.replaceChildren(
      make("p", { className: "what" }, make("code", { textContent: visible(token.label) }), token.id === null ? "" : ` token ${token.id}`),
      ...(tokens.length > 1 ? [make("p", { className: "note", textContent: `Together with the ${tokens.length - 1} before it` })] : []),
      make("dl", {}, ...rows.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })))),
      ...(token.top.length ? [make("ol", { "aria-label": "Most probable tokens" }, ...token.top.map((one) => alternative(one, token)))] : []),
      ...(route ? [make("p", { className: "hidden", textContent: `Experts, ${route}` })] : []));
    this.hide();
    this.span = span;
    span.setAttribute("aria-describedby", this.element.id);
    this.element.hidden = false;
    this.#place(span.getClientRects()[0] ?? span.getBoundingClientRect(), span.closest(".transcript").getBoundingClientRect());
  }

  hide() {
    this.span?.removeAttribute("aria-describedby");
    this.span = null;
    this.element.hidden = true;
  }

  /** Above the token, or below where there is no room; not over the numbers beside the answer. */
  #place(beside, room) {
    const { offsetWidth: width, offsetHeight: height, style } = this.element;
    const above = beside.top - height - 8;
    style.left = `${Math.max(8, Math.min(beside.left, room.right - width - 8))}px`;
    style.top = `${above >= 8 ? above : Math.min(beside.bottom + 8, Math.max(8, innerHeight - height - 8))}px`;
  }
}

function alternative({ label, logprob }, token) {
  const row = make("li", { className: label === token.label ? "taken" : "" }, make("code", { textContent: visible(label) }),
    make("span", { textContent: percent(Math.exp(logprob)) }));
  row.style.setProperty("--share", Math.exp(logprob));
  return row;
}

// The map of a network: a row a MoE layer, a column an expert. What a size keeps, and what an answer's tokens chose.

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
