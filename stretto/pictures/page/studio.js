// The page of the studio. It displays /state; its own state is only which version is compared.

const $ = id => document.getElementById(id);
let compared = null;

function node(tag, fields = {}, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
}

function figure(state, number) {
  const { prompt, lacks, unchecked, images } = state.versions[number];
  const caption = node("figcaption", {}, `Version ${number + 1}${number === state.shown ? ", now" : ""} (${images} painted): ${prompt}`);
  if (unchecked) caption.append(node("p", {}, unchecked));
  if (lacks.length) caption.append(node("p", { className: "lacks" }, `Lacks: ${lacks.join("; ")}`));
  return node("figure", {}, node("img", { src: `pictures/${number}.png`, alt: prompt }), caption);
}

function show(state) {
  $("turns").replaceChildren(...state.turns.map(turn => node("li", {},
    node("p", {}, turn.text), node("p", { className: turn.question ? "question" : "reply" }, turn.reply))));
  $("ledger").replaceChildren(...state.ledger.map(line => node("li", {}, line)));
  if (compared !== null && (compared >= state.versions.length || compared === state.shown)) compared = null;
  const pair = [compared, state.shown].filter(number => number !== null);
  $("pair").replaceChildren(...pair.map(number => figure(state, number)));
  $("versions").replaceChildren(...state.versions.map((version, number) => {
    const pick = node("button", { type: "button" }, node("img", { src: `pictures/${number}.png`, alt: `Version ${number + 1}` }));
    if (number === state.shown) {
      pick.disabled = true;
      pick.setAttribute("aria-current", "true");
    } else pick.setAttribute("aria-pressed", String(number === compared));
    pick.addEventListener("click", () => { compared = number === compared ? null : number; show(state); });
    return node("li", {}, pick);
  }));
  $("undo").disabled = state.undoable < 1;
}

async function say(text) {
  $("send").disabled = $("undo").disabled = true;
  $("status").className = "";
  $("status").textContent = "painting …";
  const poll = setInterval(async () => {
    const { done } = await (await fetch("state")).json();
    if (done !== null && $("send").disabled) $("status").textContent = `painting … ${Math.round(100 * done)} %`;
  }, 700);
  try {
    const reply = await fetch("turn", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ text }) });
    const state = await reply.json();
    if (!reply.ok) throw new Error(state.error);
    $("status").textContent = "";
    if (text === $("text").value) $("text").value = "";
    show(state);
  } catch (error) {
    $("status").className = "bad";
    $("status").textContent = error.message;
    show(await (await fetch("state")).json());
  } finally {
    clearInterval(poll);
    $("send").disabled = false;
  }
}

$("form").addEventListener("submit", event => { event.preventDefault(); say($("text").value); });
$("undo").addEventListener("click", () => say("undo"));
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("form").requestSubmit(); }
});
show(await (await fetch("state")).json());
