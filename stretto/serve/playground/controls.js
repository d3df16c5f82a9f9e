// The size of one pane: preset buttons and three sliders. The sampling settings: one form for all panes.

import { make } from "./dom.js";

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

export class Sampling {
  /** @param {Element} panel the fields @param {HTMLButtonElement} button opens and closes them, and sums them up */
  constructor(panel, button) {
    this.panel = panel;
    this.button = button;
    this.fields = Object.fromEntries([...panel.querySelectorAll("[id]")].map((element) => [element.id, element]));
    button.addEventListener("click", () => this.toggle(panel.hidden));
    panel.addEventListener("input", () => this.#show());
    this.#show();
  }

  toggle(open) {
    this.panel.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
  }

  get key() {
    return this.fields.key.value.trim();
  }

  get system() {
    return this.fields.system.value.trim();
  }

  /** Whether every field holds a number the server takes; if not, the first bad one is shown and focused. */
  check() {
    const bad = [...this.panel.querySelectorAll("input")].find((input) => !input.checkValidity());
    if (!bad) return true;
    this.toggle(true);
    bad.reportValidity();
    return false;
  }

  /** Body fields. A seed that was left empty is drawn here, so that all panes share it and the answer can tell it. */
  values() {
    const { temperature, seed } = this.fields;
    const drawn = crypto.getRandomValues(new Uint32Array(1))[0] % 1_000_000;
    return {
      temperature: temperature.valueAsNumber,
      top_p: this.fields["top-p"].valueAsNumber,
      max_tokens: this.fields["max-tokens"].valueAsNumber,
      seed: seed.value === "" ? drawn : seed.valueAsNumber,
    };
  }

  #show() {
    const { temperature, seed } = this.fields;
    const parts = [
      `temperature ${temperature.value}`, `top-p ${this.fields["top-p"].value}`, `${this.fields["max-tokens"].value} tokens`,
      ...(seed.value ? [`seed ${seed.value}`] : []), ...(this.system ? ["system prompt"] : []),
    ];
    this.button.replaceChildren(make("span", { textContent: "Sampling" }), make("span", { className: "sum", textContent: parts.join(" · ") }));
    document.body.classList.toggle("uncoloured", !this.fields.colours.checked);
  }
}
