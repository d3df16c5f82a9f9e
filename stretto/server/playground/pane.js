// One pane: a size, its conversation, and the numbers and the map of its newest answer.

import { drawLegend, RouteMap, TurnView } from "./answer.js";
import { bytes, counted, make, params, percent, seconds, si, three } from "./dom.js";

export class Pane {
  /**
   * @param {string} name "A" or "B" @param {object} info of the server @param {import("./api.js").Api} api
   * @param {{card: import("./answer.js").TokenCard, say: (text: string) => void, changed: () => void,
   *   values: () => object, system: () => string, extend: (text: string) => void}} page what panes share
   */
  constructor(name, info, api, page) {
    Object.assign(this, { name, info, api, page, turns: [], views: [], abort: null });
    this.element = document.querySelector("#pane").content.cloneNode(true).querySelector(".pane");
    const find = (selector) => this.element.querySelector(selector);
    this.element.dataset.name = name;
    find(".badge").textContent = name;
    this.scroller = find(".transcript");
    this.scroller.setAttribute("aria-label", `Answers of pane ${name}`);
    find(".inspector").setAttribute("aria-label", `Size of pane ${name}`);
    find(".presets").setAttribute("aria-label", `Presets of pane ${name}`);
    this.list = find(".turns");
    this.welcome = find(".welcome");
    find(".lead").textContent = `${info.model} answers at ${info.presets.map((preset) => preset.name).join(", ")}, and at anything between.`;
    this.speed = new Speed(find(".live"));
    this.cost = new CostTable(find(".cost"), info.presets[0]);
    this.map = new RouteMap(find(".routes"), info);
    drawLegend(find(".legend"));
    this.control = new SizeControl(find(".presets"), find(".sliders"), info, (size) => this.#resized(size));
    this.inside = find(".inside");
    this.#watchTokens();
  }

  get busy() {
    return this.abort !== null;
  }

  /** Stream an answer to `prompt`. @param {"chat"|"completion"} mode @param {object} values sampling */
  async run(mode, prompt, values = this.page.values()) {
    const size = this.control.size;
    const label = `${this.control.preset ?? "own size"} · ${sizeText(size)}`;
    const answer = { tokens: [], text: "", size, label, summary: [], routes: null, error: null, state: "running" };
    const body = { model: this.info.model, elastic: size, ...values, ...this.#asked(mode, prompt) };
    const view = this.#add({ mode, prompt, answer });
    this.map.keep(size);
    this.speed.start();
    this.abort = new AbortController();
    this.page.changed();
    try {
      for await (const part of this.api.complete(mode, body, this.abort.signal)) this.#take(view, part);
      answer.state = "done";
    } catch (error) {
      answer.state = error.name === "AbortError" ? "stopped" : "failed";
      if (answer.state === "failed") answer.error = error;
    }
    this.abort = null;
    this.#finish(view, values.seed);
    this.page.changed();
  }

  stop() {
    this.abort?.abort();
  }

  /** Answer the newest prompt again, at the size that is chosen now. */
  async again(values = undefined) {
    const turn = this.turns.at(-1);
    if (!turn || this.busy) return;
    this.turns.pop();
    this.views.pop().element.remove();
    await this.run(turn.mode, turn.prompt, values);
  }

  /** Cost and routes: folded up where they stand under the answers, open where they stand beside them. */
  fold(up) {
    this.inside.open = !up;
  }

  clear() {
    this.stop();
    this.load([]);
  }

  /** Show these turns, of this pane or of the other one. @param {import("./answer.js").Turn[]} turns */
  load(turns) {
    this.page.card.hide();
    this.list.replaceChildren(this.welcome);
    [this.turns, this.views] = [[], []];
    for (const turn of turns) this.#add(turn);
    this.map.keep(this.control.size);
    this.speed.reset();
  }

  #asked(mode, prompt) {
    if (mode === "completion") return { prompt };
    const past = this.turns.filter((turn) => turn.mode === "chat" && turn.answer.state !== "failed").flatMap((turn) =>
      [{ role: "user", content: turn.prompt }, { role: "assistant", content: turn.answer.text }]);
    const system = this.page.system() ? [{ role: "system", content: this.page.system() }] : [];
    return { messages: [...system, ...past, { role: "user", content: prompt }] };
  }

  #add(turn) {
    const view = new TurnView(turn, { retry: () => this.again(), extend: this.page.extend });
    for (const earlier of this.views) earlier.element.classList.add("earlier");
    this.turns.push(turn);
    this.views.push(view);
    this.list.append(view.element);
    this.scroller.scrollTop = this.scroller.scrollHeight;
    return view;
  }

  #take(view, part) {
    const { answer } = view.turn;
    if (!part.tokens) {
      Object.assign(answer, { routes: part.routes, finish: part.finish, usage: part.usage });
      const versions = part.versions.flatMap(([version, num_tokens]) => Array(num_tokens).fill(version));
      answer.tokens.forEach((token, place) => { token.version = versions[place] ?? null; });
      return;
    }
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    const atEnd = scrollHeight - scrollTop - clientHeight < 40;
    answer.tokens.push(...part.tokens);
    answer.text += part.tokens.map((token) => token.text).join("") + part.late;
    if (part.tokens.length) this.speed.add(part.tokens.length);
    if (part.late) view.addLate(part.late);
    view.update();
    if (atEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #finish(view, seed) {
    const { answer } = view.turn;
    this.speed.show();
    answer.summary = answer.error && !answer.tokens.length ? [] : [
      ...this.speed.summary(),
      answer.usage ? si(answer.usage.elastic.flops, "FLOPs") : "",
      { length: "token limit reached", stop: "ended by itself" }[answer.finish] ?? answer.state,
      `seed ${seed}`,
    ].filter(Boolean);
    view.update();
    if (answer.routes) this.map.show(answer.routes, answer.tokens.length);
    this.scroller.scrollTop = this.scroller.scrollHeight;
    const outcome = answer.error ? `failed: ${answer.error.message}` : `${answer.state}, ${counted(answer.tokens.length, "token")}. ${answer.text}`;
    this.page.say(`Pane ${this.name} ${outcome}`);
  }

  async #resized(size) {
    this.map.keep(size);
    const cost = await this.api.cost(size).catch((error) => this.page.say(`${error.message} ${error.remedy}`));
    const now = this.control?.size ?? size; // undefined while the control itself is being made
    if (cost && now.layers === size.layers && now.experts === size.experts && now.top_k === size.top_k) this.cost.show(cost);
  }

  #watchTokens() {
    const inspect = (event) => this.#inspect(event.target.closest(".token"));
    for (const type of ["pointerover", "focusin", "click"]) this.list.addEventListener(type, inspect);
    for (const type of ["pointerleave", "focusout"]) this.list.addEventListener(type, () => this.#inspect(null));
    this.scroller.addEventListener("scroll", () => this.#inspect(null));
    this.list.addEventListener("keydown", (event) => {
      const span = event.target.closest(".token");
      const to = { ArrowRight: span?.nextSibling, ArrowLeft: span?.previousSibling, Home: span?.parentElement.firstChild,
        End: span?.parentElement.lastChild }[event.key];
      if (!to) return;
      event.preventDefault();
      span.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    });
  }

  #inspect(span) {
    if (!span) {
      this.page.card.hide();
      this.map.highlight();
      return;
    }
    const view = span.parentElement.turn;
    const [from, to] = [Number(span.dataset.from), Number(span.dataset.to)];
    // The map shows the newest answer only; an older one has no route there.
    const route = view === this.views.at(-1) ? this.map.highlight(from, to) : this.map.highlight();
    this.page.card.show(span, view.turn.answer.tokens.slice(from, to + 1), route);
  }
}

const AXES = [["layers", "Layers"], ["experts", "Experts"], ["top_k", "Top-k"]];

/** "8 layers, 24 experts, top-6" */
export const sizeText = ({ layers, experts, top_k }) => `${layers} layers, ${experts} experts, top-${top_k}`;

export class SizeControl {
  /**
   * @param {Element} presets @param {Element} sliders where the buttons and the sliders go
   * @param {object} info of the server: its `limits` and `presets`
   * @param {(size: import("./api.js").Size) => void} changed
   */
  constructor(presets, sliders, info, changed) {
    this.info = info;
    this.changed = changed;
    this.buttons = info.presets.map((preset) =>
      make("button", { type: "button", className: "preset", "aria-pressed": "false", textContent: preset.name,
        title: sizeText(preset), onclick: () => this.set(preset) }));
    presets.append(...this.buttons);
    this.inputs = {};
    this.outputs = {};
    for (const [axis, label] of AXES) sliders.append(this.#slider(axis, label));
    this.set(info.presets.find((preset) => preset.name === info.default) ?? info.presets[0]);
  }

  #slider(axis, label) {
    const id = `slider-${axis}-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
    const input = make("input", { type: "range", id, min: this.#least(axis), max: this.info.limits[axis], step: 1, oninput: () => this.#moved(axis) });
    const output = make("output", { htmlFor: id });
    Object.assign(this.inputs, { [axis]: input });
    Object.assign(this.outputs, { [axis]: output });
    return make("div", { className: "slider" }, make("label", { for: id, textContent: label }), output, input);
  }

  /** @returns {import("./api.js").Size} */
  get size() {
    return Object.fromEntries(AXES.map(([axis]) => [axis, this.inputs[axis].valueAsNumber]));
  }

  /** Name of the preset that has this size, or null. */
  get preset() {
    const { layers, experts, top_k } = this.size;
    return this.info.presets.find((one) => one.layers === layers && one.experts === experts && one.top_k === top_k)?.name ?? null;
  }

  set({ layers, experts, top_k }) {
    for (const [axis, value] of Object.entries({ layers, experts, top_k })) this.inputs[axis].value = value;
    this.#show();
  }

  /** A network is not served with fewer layers than it was trained to run with. */
  #least(axis) {
    return axis === "layers" ? this.info.limits.min_layers : 1;
  }

  #moved(axis) {
    // A token cannot choose more experts than there are: the other slider gives way to the one that moves.
    const { experts, top_k } = this.size;
    if (top_k > experts) this.inputs[axis === "top_k" ? "experts" : "top_k"].value = axis === "top_k" ? top_k : experts;
    this.#show();
  }

  #show() {
    for (const [axis] of AXES) {
      const input = this.inputs[axis];
      const [value, least, most] = [input.valueAsNumber, this.#least(axis), this.info.limits[axis]];
      this.outputs[axis].replaceChildren(make("b", { textContent: value }), make("span", { textContent: ` of ${most}` }));
      input.style.setProperty("--filled", most > least ? (value - least) / (most - least) : 1);
      input.setAttribute("aria-valuetext", `${value} of ${most}`);
      input.disabled = most === least;
    }
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.textContent === this.preset));
    this.changed(this.size);
  }
}

export class Speed {
  /** @param {HTMLDListElement} list */
  constructor(list) {
    this.values = {};
    for (const [name, label, title] of [
      ["rate", "tokens/s", "Since the first token, as received here"],
      ["first", "to first token", "From sending the prompt, as received here"],
      ["tokens", "tokens", "Generated so far"],
    ]) {
      this.values[name] = make("dd", { textContent: "–" });
      list.append(make("div", { title }, make("dt", { textContent: label }), this.values[name]));
    }
    this.reset();
  }

  reset() {
    Object.assign(this, { started: null, first: null, last: null, num_tokens: 0, shown: 0 });
    for (const value of Object.values(this.values)) value.textContent = "–";
  }

  start() {
    this.reset();
    this.started = performance.now();
  }

  /** Count tokens that have just arrived. */
  add(num_tokens) {
    this.last = performance.now();
    this.first ??= this.last;
    this.num_tokens += num_tokens;
    if (this.last - this.shown > 100) this.show();
  }

  /** Tokens per second after the first one; null before there are two. */
  get rate() {
    return this.num_tokens > 1 && this.last > this.first ? (1000 * (this.num_tokens - 1)) / (this.last - this.first) : null;
  }

  get first_s() {
    return this.first === null ? null : (this.first - this.started) / 1000;
  }

  show() {
    this.shown = performance.now();
    this.values.rate.textContent = this.rate === null ? "–" : three(this.rate);
    this.values.first.textContent = this.first === null ? "–" : seconds(this.first_s);
    this.values.tokens.textContent = this.num_tokens;
  }

  /** One line for below the answer. */
  summary() {
    const parts = [counted(this.num_tokens, "token")];
    if (this.rate !== null) parts.push(`${three(this.rate)} a second`);
    if (this.first !== null) parts.push(`first after ${seconds(this.first_s)}`);
    return parts;
  }
}

const ROWS = [
  ["weight_bytes", "Weights", bytes, "Memory of this size when it is cut out and served alone"],
  ["kv_bytes_per_token", "Cache a token", bytes, "Memory for keys and values of the kept layers"],
  ["flops_per_token", "FLOPs a token", si, "Matrix products of a forward pass, one multiply-add is two"],
  ["active_params", "Active parameters", params, "Everything but the experts that it does not choose"],
];

export class CostTable {
  /** @param {HTMLDListElement} list @param {import("./api.js").Cost} full what the bars are held against */
  constructor(list, full) {
    this.full = full;
    this.rows = ROWS.map(([key, label, format, title]) => {
      const row = { key, format, value: make("dd"), bar: make("div", { className: "bar-row", title }) };
      row.bar.append(make("dt", { textContent: label }), row.value);
      list.append(row.bar);
      return row;
    });
  }

  /** @param {import("./api.js").Cost} cost */
  show(cost) {
    for (const { key, format, value, bar } of this.rows) {
      const share = cost[key] / this.full[key];
      value.replaceChildren(make("b", { textContent: format(cost[key]) }), make("span", { textContent: percent(share) }));
      bar.style.setProperty("--share", share);
    }
  }
}
