// The server's doors: what is served, what a size costs, and a completion as a stream of tokens.

/**
 * @typedef {{layers: number, experts: number, top_k: number}} Size
 * @typedef {{total_params: number, active_params: number, flops_per_token: number, weight_bytes: number, kv_bytes_per_token: number}} Cost
 * @typedef {{id: ?number, label: string, text: string, logprob: number, top: {label: string, logprob: number}[], version: ?number}} Token
 *   `label` is the token by itself, `text` what it added to the answer: nothing while half a character is held back.
 *   `version` is of the weights, known when the answer has ended.
 * @typedef {{num_rows: number, num_layers: number, num_slots: number, experts: Uint8Array|Uint16Array, none: number}} Routes
 *   Row-major [rows, MoE layers, slots]; `none` marks a slot without an expert.
 */

/** A refusal, with what to do about it. `status` is 0 when the server could not be reached. */
export class ApiError extends Error {
  constructor(status, message, retryAfter_s = null) {
    super(message);
    Object.assign(this, { status, retryAfter_s });
  }

  /** One sentence of advice. */
  get remedy() {
    if (this.status === 0) return "Check that stretto serve is still running, then try again.";
    if (this.status === 401) return "Type the server's API key under Sampling, then try again.";
    if (this.status === 413) return "Shorten the prompt.";
    if (this.status === 429) return `The server has as much as it can do. Try again ${this.retryAfter_s ? `in ${this.retryAfter_s} s` : "in a moment"}.`;
    if (this.status === 503) return "The server is stopping or its engine has failed. Its terminal says which.";
    if (this.status >= 500) return "This is the server's fault. Its terminal says more.";
    return "Change the request, then try again.";
  }
}

export class Api {
  /** @param {() => string} key the API key, or nothing */
  constructor(key) {
    this.key = key;
    this.costs = new Map();
  }

  /** What is served; presets as a list, largest first, each with its size and its cost. */
  async info() {
    const info = await this.#json("/api/info");
    const presets = Object.entries(info.presets).map(([name, preset]) => ({ name, ...preset }));
    return { ...info, presets: presets.sort((one, other) => other.weight_bytes - one.weight_bytes) };
  }

  /** Cost of a size; answers are kept. @param {Size} size @returns {Promise<Cost>} */
  cost({ layers, experts, top_k }) {
    const path = `/api/cost?layers=${layers}&experts=${experts}&top_k=${top_k}`;
    if (!this.costs.has(path)) {
      const pending = this.#json(path);
      pending.catch(() => this.costs.delete(path));
      this.costs.set(path, pending);
    }
    return this.costs.get(path);
  }

  /**
   * Stream one completion. Yields `{tokens, late}` as they come (`late`: text behind the last token), then one
   * `{finish, usage, routes, versions}`, where versions are pairs of a weight version and how many tokens it sampled.
   * @param {"chat"|"completion"} mode @param {object} body @param {AbortSignal} signal
   */
  async *complete(mode, body, signal) {
    const path = mode === "chat" ? "/v1/chat/completions" : "/v1/completions";
    const asked = mode === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 };
    const common = { stream: true, stream_options: { include_usage: true }, return_token_ids: true, return_routes: true };
    const response = await this.#fetch(path, {
      method: "POST", signal, body: JSON.stringify({ ...common, ...asked, ...body }),
    });
    const end = { finish: null, usage: null, routes: null, versions: [] };
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new ApiError(chunk.error.code === "aborted" ? 503 : 500, chunk.error.message);
      const choice = chunk.choices?.[0];
      if (choice) {
        end.finish = choice.finish_reason ?? end.finish;
        end.versions = choice.weight_versions ?? end.versions;
        if (choice.routed_experts) end.routes = readRoutes(choice.routed_experts);
        yield readTokens(choice);
      }
      end.usage = chunk.usage ?? end.usage;
    }
    yield end;
  }

  async #json(path) {
    return (await this.#fetch(path, {})).json();
  }

  async #fetch(path, options) {
    const headers = { "Content-Type": "application/json" };
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server cannot be reached.");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

async function refusal(response) {
  const text = await response.text();
  let message = text.slice(0, 300);
  if ((response.headers.get("Content-Type") ?? "").includes("json")) {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.message ?? message;
  }
  return new ApiError(response.status, message || `HTTP ${response.status}`, Number(response.headers.get("Retry-After")) || null);
}

/** Server-sent events as JSON, up to `[DONE]`. A stream that ends without it was cut off. */
async function* events(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) break;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
    throw new ApiError(0, "The connection ended in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {}); // already closed or aborted: nothing is left to give back
  }
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, "The connection broke in the middle of the answer.");
}

/** Tokens of one chunk, from either of OpenAI's two shapes of log-probabilities. @returns {{tokens: Token[], late: string}} */
function readTokens(choice) {
  const text = choice.delta?.content ?? choice.text ?? "";
  const entries = choice.logprobs?.content?.map(chatEntry) ?? legacyEntries(choice.logprobs) ?? [];
  if (!entries.length) return { tokens: [], late: text };
  const ids = choice.token_ids ?? [];
  const whole = entries.map((entry) => entry.label).join("") === text;
  const tokens = entries.map((entry, place) => ({
    ...entry,
    id: ids[place] ?? null,
    version: null,
    text: whole ? entry.label : place === entries.length - 1 ? text : "",
  }));
  return { tokens, late: "" };
}

const chatEntry = (entry) => ({
  label: entry.token,
  logprob: entry.logprob,
  top: (entry.top_logprobs ?? []).map(({ token, logprob }) => ({ label: token, logprob })),
});

const legacyEntries = (logprobs) => logprobs?.tokens?.map((label, place) => ({
  label,
  logprob: logprobs.token_logprobs[place],
  top: Object.entries(logprobs.top_logprobs?.[place] ?? {}).map(([other, logprob]) => ({ label: other, logprob })).sort((one, other) => other.logprob - one.logprob),
}));

/** @returns {Routes} */
function readRoutes({ dtype, shape, data }) {
  const raw = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const experts = dtype === "uint16" ? new Uint16Array(raw.buffer) : raw;
  const [num_rows, num_layers, num_slots] = shape;
  return { num_rows, num_layers, num_slots, experts, none: dtype === "uint16" ? 65535 : 255 };
}
