// The page: one prompt and one form of sampling settings for one or two panes, the mode, the theme and the keys.

import { TokenCard } from "./answer.js";
import { Api } from "./api.js";
import { make } from "./dom.js";
import { Pane, sizeText } from "./pane.js";

const find = (selector) => document.querySelector(selector);
const THEMES = { auto: "auto", light: "light", dark: "dark" };

class Sampling {
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

class Page {
  constructor(info, api, sampling) {
    Object.assign(this, { info, api, sampling, panes: [], mode: "chat" });
    this.prompt = find("#prompt");
    this.shared = {
      card: new TokenCard(find("#card")),
      say: (text) => { find("#status").textContent = text; },
      changed: () => this.#show(),
      values: () => this.sampling.values(),
      system: () => this.sampling.system,
      extend: (text) => { this.#write(text); },
    };
    this.#addPane();
    find("#model-name").textContent = info.model;
    find("#model-shape").textContent = sizeText(info.limits);
    find("#max-tokens").max = info.max_len;
    this.#listen();
    this.#fold();
    this.setMode(info.is_chat_tuned ? "chat" : "completion");
    this.prompt.focus();
  }

  /** Panes that are on. The second one stays, with its conversation, when it is switched off. */
  get shown() {
    return this.panes.slice(0, Number(document.body.dataset.panes));
  }

  setMode(mode) {
    this.mode = document.body.dataset.mode = mode;
    find(`#mode [value=${mode}]`).checked = true;
    const chat = mode === "chat";
    find("#prompt-label").textContent = chat ? "Message" : "Text to continue";
    this.prompt.placeholder = chat ? "Ask anything" : "A text to continue";
    find("#system-field").hidden = !chat;
    this.#show();
  }

  setSideBySide(on) {
    document.body.dataset.panes = on ? 2 : 1;
    if (on && this.panes.length === 1) {
      this.#addPane();
      this.panes[1].control.set(this.info.presets.at(-1));
    }
    // The same past, so that the two answers differ by size alone.
    if (on && !this.panes[1].turns.length && !this.panes[0].busy) this.panes[1].load(this.panes[0].turns);
    find("#compare").setAttribute("aria-pressed", String(on));
    find("#which").hidden = !on;
    this.choose(0);
    this.#fold();
    this.#show();
  }

  /** The pane that a narrow screen shows, and whose size has the keyboard. */
  choose(place) {
    this.panes.forEach((pane, index) => pane.element.classList.toggle("chosen", index === place));
    find(`#which [value="${place}"]`).checked = true;
  }

  async send() {
    const text = this.prompt.value;
    if (!text.trim() || this.shown.some((pane) => pane.busy) || !this.sampling.check()) return;
    if (this.mode === "chat") this.#write("");
    const values = this.sampling.values();
    this.shared.say("Generating");
    await Promise.all(this.shown.map((pane) => pane.run(this.mode, text, values)));
  }

  async again() {
    if (this.shown.some((pane) => pane.busy) || !this.sampling.check()) return;
    const values = this.sampling.values();
    await Promise.all(this.shown.map((pane) => pane.again(values)));
  }

  stop() {
    for (const pane of this.panes) pane.stop();
  }

  /** The widths are those at which the style sheet puts the numbers under the answers. */
  #fold() {
    const up = matchMedia("(max-width: 48rem)").matches || (this.shown.length > 1 && matchMedia("(max-width: 75rem)").matches);
    for (const pane of this.panes) pane.fold(up);
  }

  #addPane() {
    const pane = new Pane("AB"[this.panes.length], this.info, this.api, this.shared);
    this.panes.push(pane);
    find("#panes").append(pane.element);
  }

  #write(text) {
    this.prompt.value = text;
    this.#grow();
    this.prompt.focus();
  }

  #grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  #show() {
    const busy = this.panes.some((pane) => pane.busy);
    const empty = this.shown.every((pane) => !pane.turns.length);
    const send = find("#send");
    send.textContent = busy ? "Stop" : this.mode === "chat" ? "Send" : "Continue";
    send.classList.toggle("stop", busy);
    find("#again").disabled = busy || empty;
    find("#again").textContent = this.shown.length > 1 ? "Regenerate both" : "Regenerate";
    find("#clear").disabled = empty;
  }

  #listen() {
    find("#composer").addEventListener("submit", () => {
      if (this.panes.some((pane) => pane.busy)) this.stop();
      else this.send();
    });
    this.prompt.addEventListener("input", () => this.#grow());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    find("#again").addEventListener("click", () => this.again());
    find("#clear").addEventListener("click", () => {
      for (const pane of this.shown) pane.clear();
      this.#show();
      this.prompt.focus();
    });
    find("#mode").addEventListener("change", (event) => this.setMode(event.target.value));
    find("#which").addEventListener("change", (event) => this.choose(Number(event.target.value)));
    find("#compare").addEventListener("click", () => this.setSideBySide(this.shown.length === 1));
    document.addEventListener("keydown", (event) => this.#key(event));
    for (const width of ["48rem", "75rem"]) matchMedia(`(max-width: ${width})`).addEventListener("change", () => this.#fold());
  }

  #key(event) {
    if (event.key === "Escape") {
      this.shared.card.hide();
      this.stop();
    }
    const place = ["1", "2"].indexOf(event.key);
    if (place < 0 || !(event.ctrlKey || event.metaKey || event.altKey)) return;
    event.preventDefault();
    if (place === 1 && this.shown.length === 1) this.setSideBySide(true);
    this.choose(place);
    const { element } = this.panes[place];
    (element.querySelector(".slider input:enabled") ?? element.querySelector(".preset")).focus();
  }
}

function startTheme() {
  const button = find("#theme");
  const show = () => {
    button.replaceChildren(make("span", { textContent: "Theme: " }), THEMES[document.documentElement.dataset.theme ?? "auto"]);
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % names.length];
    localStorage.setItem("stretto.theme", next);
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    show();
  });
  show();
}

/** Ask what is served, and say on the page itself when that fails: a missing key is the usual reason. */
async function start(api, sampling) {
  const info = await api.info().catch((error) => refused(error, () => start(api, sampling)));
  if (!info) return;
  find("#panes").replaceChildren();
  new Page(info, api, sampling);
}

function refused(error, retry) {
  const button = make("button", { type: "button", className: "primary", textContent: "Try again", onclick: retry });
  find("#panes").replaceChildren(make("div", { className: "error page-error", role: "alert" },
    make("strong", { textContent: error.message }), make("span", { textContent: error.remedy ?? "" }), button));
  if (error.status !== 401) return;
  find("#sampling").click();
  find("#key").focus();
}

find("#composer").addEventListener("submit", (event) => event.preventDefault());
startTheme();
const sampling = new Sampling(find("#settings"), find("#sampling"));
start(new Api(() => sampling.key), sampling);
