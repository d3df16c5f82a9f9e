// What was asked and what came back: turns as data, and each answer as spans of tokens tinted by their surprise.

import { make, percent } from "./dom.js";

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
