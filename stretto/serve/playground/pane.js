// One pane: a size, its conversation, and the numbers and the map of its newest answer.

import { SizeControl, sizeText } from "./controls.js";
import { drawLegend, TurnView } from "./chat.js";
import { CostTable, Speed } from "./meters.js";
import { RouteMap } from "./routes.js";
import { counted, si } from "./dom.js";

export class Pane {
  /**
   * @param {string} name "A" or "B" @param {object} info of the server @param {import("./api.js").Api} api
   * @param {{card: import("./chat.js").TokenCard, say: (text: string) => void, changed: () => void,
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

  /** Show these turns, of this pane or of the other one. @param {import("./chat.js").Turn[]} turns */
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
