// Numbers beside an answer: how fast it comes, and what its size costs next to the full network.

import { bytes, counted, make, params, percent, seconds, si, three } from "./dom.js";

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
